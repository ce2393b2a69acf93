"""The route ``/v1/models``: the one model of the server, which answers to any name.

One reply serves the clients of OpenAI, Anthropic, llama.cpp, vLLM and OpenRouter, since each ignores fields
that it does not know."""

from datetime import UTC, datetime
from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import seen


def listing(facts: Facts) -> dict[str, Any]:
    page = {"has_more": False, "first_id": facts.name, "last_id": facts.name}  # Anthropic's
    named = {"name": facts.name, "model": facts.name, "capabilities": facts.capabilities}  # llama.cpp's
    return {"object": "list", "data": [_entry(facts)], "models": [named], **page}


def one(facts: Facts, name: str) -> dict[str, Any]:
    """The model under its name or an alias; APIError for another name, which the list does not have."""
    if name not in facts.names:
        served = ", ".join(facts.names)
        message = f"model is {seen(name)}: this server has {served[:300]}"
        raise APIError(message, status=404, param="model", code="model_not_found")
    return _entry(facts)


def _entry(facts: Facts) -> dict[str, Any]:
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "hotcold",
        # Anthropic's names.
        "type": "model",
        "display_name": facts.name,
        "created_at": datetime.fromtimestamp(facts.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": facts.context,
        "max_tokens": facts.context,
        # vLLM's and OpenRouter's.
        "max_model_len": facts.context,
        "context_length": facts.context,
        # llama.cpp's.
        "aliases": list(facts.aliases),
        "meta": {
            "n_vocab": facts.vocab,
            "n_ctx": facts.context,
            "n_params": facts.params,
            "size": facts.size_bytes,
            **facts.meta,
        },
    }
