"""Pooling: how the vectors of a text's tokens become one vector, by the model's file or the user's choice."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from hotcold.errors import UserError
from hotcold.values import shown

#: The sum of all tokens' vectors, or the vector of the last or first token. The result has length 1.
Pooling: TypeAlias = Literal["mean", "last", "cls"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_NONE = "the model generates text and gives no embeddings: its file has no pooling type"
_FIX = "models such as Qwen3-Embedding have one; `pooling` sets it for their older files"
_ALLOWED = "allowed are 1 (mean) and 3 (last)"
_REFUSED = {
    0: f"{_NONE} ({{key}} is 0); {_FIX}",
    2: "the file pools the first token ({key} is 2, cls), which in a causal model attends to no other token: "
    f"{_ALLOWED}",
    4: f"the file ranks pairs of texts ({{key}} is 4, rank): {_ALLOWED}",
}


def names_pooling(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a file's metadata name a pooling."""
    return f"{metadata.get('general.architecture')}.pooling_type" in metadata


def pooling_of(metadata: Mapping[str, Any], chosen: Pooling | None = None) -> Pooling:
    """Returns the user's pooling, else the file's, whose numbers are llama.cpp's. UserError: the file names
    none that is supported."""
    if chosen is not None:
        return chosen
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key)
    if kind is None:
        raise UserError(f"{_NONE} ({key}); {_FIX}")
    number = kind if isinstance(kind, int) and not isinstance(kind, bool) else -1
    if number in (1, 3):
        return "mean" if number == 1 else "last"
    reason = _REFUSED.get(number)
    if reason is None:
        raise UserError(f"{key} is {shown(kind)}: {_ALLOWED}")
    raise UserError(reason.format(key=key))
