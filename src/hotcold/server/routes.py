"""The routes. Each one reads a body, translates it, and returns the model's answer."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from hotcold.server import openapi
from hotcold.server.dialect_routes import AnthropicRoutes, LlamaCppRoutes, OllamaRoutes
from hotcold.server.metrics import CONTENT_TYPE
from hotcold.server.protocol import chat, completion, embeddings, models, responses, tokens
from hotcold.server.protocol.errors import APIError, invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.reading import Reader, note_left_out
from hotcold.server.replies import JSONReply
from hotcold.server.service import Service
from hotcold.values import shown

Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


def api_routes(service: Service) -> list[BaseRoute]:
    """Returns all routes except the page's, each with and without ``/v1`` before its path."""
    routes, messages, ollama = _Routes(service), AnthropicRoutes(service), OllamaRoutes(service)
    llama_cpp = LlamaCppRoutes(service)
    table: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/models", routes.models),
        ("GET", "/models/{name:path}", routes.model),
        ("POST", "/chat/completions", routes.chat),
        ("POST", "/completions", routes.completions),
        ("POST", "/completion", llama_cpp.completion),
        ("POST", "/infill", llama_cpp.infill),
        ("POST", "/apply-template", llama_cpp.apply_template),
        ("POST", "/responses", routes.responses),
        ("GET", "/responses/{id}", routes.response),
        ("DELETE", "/responses/{id}", routes.delete_response),
        ("POST", "/embeddings", routes.embeddings),
        ("POST", "/messages", messages.messages),
        ("POST", "/messages/count_tokens", messages.count_tokens),
        ("POST", "/api/chat", ollama.chat),
        ("POST", "/api/generate", ollama.generate),
        ("POST", "/api/embed", ollama.embed),
        ("POST", "/api/embeddings", ollama.embeddings),
        ("POST", "/api/pull", ollama.pull),
        ("GET", "/api/tags", ollama.tags),
        ("GET", "/api/ps", ollama.running),
        ("POST", "/api/show", ollama.show),
        ("GET", "/api/version", ollama.version),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/props", llama_cpp.props),
        ("GET", "/slots", llama_cpp.slots),
        ("GET", "/openapi.json", routes.openapi),
    ]
    return [
        Route(prefix + path, endpoint, methods=[method])
        for method, path, endpoint in table
        for prefix in ("/v1", "")
    ]


class _Routes(Reader):
    async def health(self, request: Request) -> Response:
        """Returns whether the server accepts requests, and nothing else, since it needs no key."""
        state, loaded = self._service.state, self._service.llm.loaded
        if state == "ready":
            return JSONReply({"status": "ok"})
        error = self._service.unavailable()
        progress = {"loaded": round(loaded, 3)} if state == "loading" else {}
        headers = {"Retry-After": str(error.retry_after)}
        return JSONReply({"status": state, **progress, **error.body()}, error.status, headers)

    async def metrics(self, request: Request) -> Response:
        stats = await self._service.stats()
        text = self._service.metrics.text(self._service.llm.loaded, stats)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return JSONReply(models.listing(self._service.facts))

    async def model(self, request: Request) -> Response:
        return JSONReply(models.one(self._service.facts, request.path_params["name"]))

    async def openapi(self, request: Request) -> Response:
        return JSONReply(openapi.document())

    async def chat(self, request: Request) -> Any:
        return await self._generated(request, chat.parse, "messages")

    async def responses(self, request: Request) -> Any:
        return await self._generated(request, responses.parse, "input")

    async def response(self, request: Request) -> Any:
        """Returns a stored response. Raises APIError if it is not stored, or for a request of a stream."""
        id = request.path_params["id"]
        if request.query_params.get("stream", "false") != "false":
            raise invalid("stream: a stored response is sent as a whole: leave it out", "stream")
        response = await self._service.in_thread(self._service.facts.kept_responses.response, id)
        if response is None:
            raise _no_response(id)
        return self._large(response)

    async def delete_response(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not self._service.facts.kept_responses.remove(id):
            raise _no_response(id)
        return JSONReply({"id": id, "object": "response", "deleted": True})

    async def completions(self, request: Request) -> Any:
        return await self._generated(request, completion.parse, "prompt")

    async def embeddings(self, request: Request) -> Any:
        return await self._generated(request, embeddings.parse, "input")

    async def tokenize(self, request: Request) -> Any:
        def prepare(body: Any, facts: Facts) -> tuple[dict[str, Any], str]:
            call = tokens.parse_tokenize(body, facts)
            return call.answer(), facts.tokenizer.left_out([call.content])

        answer, left_out = await self._prepared(request, prepare)
        note_left_out(request, left_out)
        return self._large(answer)

    async def detokenize(self, request: Request) -> Any:
        call = await self._prepared(request, tokens.parse_detokenize)
        return self._large(call.answer())


def _no_response(id: str) -> APIError:
    got = f"response with id {shown(id)} not found"
    return APIError(
        f"{got}: the server keeps only the last responses, in memory", status=404, code="not_found"
    )
