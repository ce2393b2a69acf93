"""The route ``/v1/models``: the one model of the server, which accepts any name in other requests.

One reply serves all clients (OpenAI, Anthropic, llama.cpp, vLLM, OpenRouter): each ignores unknown fields."""

from datetime import UTC, datetime
from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import shown_value


def listing(facts: Facts) -> dict[str, Any]:
    page = {"has_more": False, "first_id": facts.name, "last_id": facts.name}  # fields of Anthropic
    # fields of llama.cpp
    named = {"name": facts.name, "model": facts.name, "capabilities": facts.capabilities}
    return {"object": "list", "data": [_entry(facts)], "models": [named], **page}


def one(facts: Facts, name: str) -> dict[str, Any]:
    """Returns the model for its name or an alias. Raises APIError for another name."""
    if name not in facts.names:
        served = ", ".join(facts.names)
        message = f"model is {shown_value(name)}: this server has {served[:300]}"
        raise APIError(message, status=404, param="model", code="model_not_found")
    return _entry(facts)


def _entry(facts: Facts) -> dict[str, Any]:
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "hotcold",
        # Fields of Anthropic.
        "type": "model",
        "display_name": facts.name,
        "created_at": datetime.fromtimestamp(facts.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": facts.context,
        "max_tokens": facts.context,
        # Fields of vLLM and OpenRouter.
        "max_model_len": facts.context,
        "context_length": facts.context,
        # Fields of llama.cpp.
        "aliases": list(facts.aliases),
        "meta": {
            "n_vocab": facts.vocab,
            "n_ctx": facts.context,
            "n_params": facts.params,
            "size": facts.size_bytes,
            **facts.meta,
        },
    }
