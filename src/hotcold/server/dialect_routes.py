"""The routes of other dialects, which ask the same jobs as OpenAI's."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hotcold.server.protocol import anthropic, infill, native, ollama, ollama_models, props
from hotcold.server.protocol.ollama import LoadCall, RawCall
from hotcold.server.reading import Reader
from hotcold.server.replies import JSONReply


class AnthropicRoutes(Reader):
    """Anthropic's Messages."""

    async def messages(self, request: Request) -> Any:
        call = await self._read(request, anthropic.parse)
        return await self._answered(request, call, "messages")

    async def count_tokens(self, request: Request) -> Response:
        call = await self._read(request, anthropic.parse_count)
        (job,), _ = await self._service.in_thread(self._service.chat_jobs, call)
        return JSONReply({"input_tokens": len(job.prompt)})


class LlamaCppRoutes(Reader):
    """llama.cpp's own routes."""

    async def completion(self, request: Request) -> Any:
        call = await self._read(request, native.parse)
        return await self._continued(request, call, call.prompt)

    async def infill(self, request: Request) -> Any:
        call = await self._read(request, infill.parse)
        return await self._continued(request, call, call.texts)

    async def apply_template(self, request: Request) -> Response:
        call = await self._read(request, props.parse_template)
        return JSONReply({"prompt": await self._service.in_thread(self._service.prompt_text, call)})

    async def props(self, request: Request) -> Response:
        facts = self._service.facts
        template = await self._service.in_thread(self._service.template_facts)
        return JSONReply(props.props(facts, template))

    async def slots(self, request: Request) -> Response:
        fail = request.query_params.get("fail_on_no_slot", "") not in ("", "0")
        return JSONReply(props.slots(self._service.facts, self._service.busy, fail_if_none=fail))


class OllamaRoutes(Reader):
    """Ollama's own routes."""

    async def chat(self, request: Request) -> Any:
        call = await self._read(request, ollama.parse_chat)
        if isinstance(call, LoadCall):
            return JSONReply(call.answer())
        return await self._answered(request, call, "messages")

    async def generate(self, request: Request) -> Any:
        call = await self._read(request, ollama.parse_generate)
        if isinstance(call, LoadCall):
            return JSONReply(call.answer())
        if isinstance(call, RawCall):
            return await self._continued(request, call, call.prompt)
        return await self._answered(request, call, "prompt")

    async def tags(self, request: Request) -> Response:
        return JSONReply(ollama_models.tags(self._service.facts, self._service.llm.metadata))

    async def running(self, request: Request) -> Response:
        return JSONReply(ollama_models.running(self._service.facts, self._service.llm.metadata))

    async def show(self, request: Request) -> Response:
        facts = await self._read(request, ollama.parse_show)
        llm = self._service.llm
        template = llm.info.template or ""
        return JSONReply(ollama_models.show(facts, llm.metadata, template, self._service.thinks))

    async def version(self, request: Request) -> Response:
        return JSONReply(ollama_models.version())
