"""Facts about the model that the web page needs before it shows anything."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from hotcold.server.protocol.ollama_models import quantisation
from hotcold.server.replies import JSONReply
from hotcold.server.service import Service


def picture_routes(service: Service) -> list[BaseRoute]:
    """Returns the route ``/picture/info``, which needs a key."""

    async def info(request: Request) -> Response:
        return JSONReply(picture_info(service))

    return [Route("/picture/info", info, methods=["GET"])]


def picture_info(service: Service) -> dict[str, Any]:
    """Returns the model's name, whether it has a chat template, its context, and the meaning of the cells.
    Raises APIError if the model is not ready."""
    facts, info = service.facts, service.llm.info
    return {
        "model": facts.name,
        "chat": info.template is not None,
        "context": facts.context,
        "title": info.title,
        "family": info.family,
        "params": info.params,
        "size_bytes": info.size_bytes,
        "quantisation": quantisation(service.llm.metadata),
        "sparsity": info.sparsity,
        "threads": info.threads,
        "picture": None if info.picture is None else asdict(info.picture),
    }
