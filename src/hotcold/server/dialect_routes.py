"""The routes of Anthropic's, llama.cpp's and Ollama's dialects. They run the same jobs as OpenAI's routes."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotcold.server.framing import FRAMES
from hotcold.server.protocol import (
    anthropic,
    infill,
    native,
    ollama,
    ollama_embeddings,
    ollama_models,
    props,
)
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.ollama import LoadCall
from hotcold.server.reading import Reader
from hotcold.server.replies import JSONReply
from hotcold.server.service import Call, Prepared


class AnthropicRoutes(Reader):
    """Anthropic's Messages routes."""

    async def messages(self, request: Request) -> Any:
        return await self._generated(request, anthropic.parse, "messages")

    async def count_tokens(self, request: Request) -> Response:
        def count(body: Any, facts: Facts) -> int:
            return self._service.count(anthropic.parse_count(body, facts))

        return JSONReply({"input_tokens": await self._prepared(request, count)})


class LlamaCppRoutes(Reader):
    """Routes that only llama.cpp's server has."""

    async def completion(self, request: Request) -> Any:
        return await self._generated(request, native.parse, "prompt")

    async def infill(self, request: Request) -> Any:
        return await self._generated(request, infill.parse, "prompt")

    async def apply_template(self, request: Request) -> Any:
        def render(body: Any, facts: Facts) -> str:
            return self._service.prompt_text(props.parse_template(body, facts))

        return self._large({"prompt": await self._prepared(request, render)})

    async def props(self, request: Request) -> Response:
        facts = self._service.facts
        template = await self._service.in_thread(self._service.template_facts)
        return JSONReply(props.props(facts, template))

    async def slots(self, request: Request) -> Response:
        fail = request.query_params.get("fail_on_no_slot", "") not in ("", "0")
        return JSONReply(props.slots(self._service.facts, self._service.busy, fail_if_none=fail))


class OllamaRoutes(Reader):
    """Routes that only Ollama has."""

    async def chat(self, request: Request) -> Any:
        return await self._loaded_or_generated(request, ollama.parse_chat, "messages")

    async def generate(self, request: Request) -> Any:
        return await self._loaded_or_generated(request, ollama.parse_generate, "prompt")

    async def embed(self, request: Request) -> Any:
        return await self._generated(request, ollama_embeddings.parse_embed, "input")

    async def embeddings(self, request: Request) -> Any:
        return await self._generated(request, ollama_embeddings.parse_embeddings, "prompt")

    async def pull(self, request: Request) -> Response:
        lines, stream = await self._prepared(request, ollama.parse_pull)
        if not stream:
            return JSONReply(lines[-1])
        frames = FRAMES["ollama"]
        return Response(frames.lines(lines), media_type=frames.content_type.decode())

    async def tags(self, request: Request) -> Response:
        return JSONReply(ollama_models.tags(self._service.facts, self._service.llm.metadata))

    async def running(self, request: Request) -> Response:
        return JSONReply(ollama_models.running(self._service.facts, self._service.llm.metadata))

    async def show(self, request: Request) -> Response:
        facts = await self._prepared(request, ollama.parse_show)
        llm = self._service.llm
        template = llm.info.template or ""
        return JSONReply(ollama_models.show(facts, llm.metadata, template, self._service.thinks))

    async def _loaded_or_generated(
        self, request: Request, read: Callable[[Any, Facts], Call | LoadCall], field: str
    ) -> Any:
        """Answers a request at once if it has no text: it only asks the server to load the model."""

        def prepare(body: Any, facts: Facts) -> Prepared | LoadCall:
            call = read(body, facts)
            return call if isinstance(call, LoadCall) else self._service.prepare(call)

        prepared = await self._prepared(request, prepare, field)
        if isinstance(prepared, LoadCall):
            return JSONReply(prepared.answer())
        return await self._answer(request, prepared, field)

    async def version(self, request: Request) -> Response:
        return JSONReply(ollama_models.version())
