"""``/v1/models``: the one model that is served."""

from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import seen


def check_model(name: str | None, facts: Facts) -> None:
    """APIError where a request names another model. It may name none, as many local clients do."""
    if name and name not in facts.names:
        raise _unknown(name, facts)


def listing(facts: Facts) -> dict[str, Any]:
    return {"object": "list", "data": [_entry(facts)]}


def one(facts: Facts, name: str) -> dict[str, Any]:
    """Under its name or an alias; APIError for any other."""
    if name not in facts.names:
        raise _unknown(name, facts)
    return _entry(facts)


def _unknown(name: str, facts: Facts) -> APIError:
    served = ", ".join(facts.names)
    message = f"model is {seen(name)}: this server has {served[:300]}"
    return APIError(message, status=404, param="model", code="model_not_found")


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
