"""The route ``/v1/models``: the one model of the server, which answers to any name."""

from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import seen


def listing(facts: Facts) -> dict[str, Any]:
    return {"object": "list", "data": [_entry(facts)]}


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
        "aliases": list(facts.aliases),
        "meta": {
            "n_vocab": facts.vocab,
            "n_ctx": facts.context,
            "n_params": facts.params,
            "size": facts.size_bytes,
            **facts.meta,
        },
    }
