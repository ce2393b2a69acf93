"""The choice of the least useful state copy, which is dropped when a slot is needed.

The copies at the beginning of a conversation's latest request form a *path*. A branch that the conversation
has left, for example because a template dropped earlier thoughts, becomes a separate path.

Copies are dropped in this order: first copies inside a path, then copies at message borders, at last the end
of a path, where its conversation continues. All copies of paths that were not used recently are of the first
kind. The path with the most copies of the first kind drops one; each path used since then counts as one more
copy. Within a path, copies become sparse with the distance from its end, as later prompts most likely differ
near the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_INNER, _BORDER, _END = range(3)  # kinds of copies, in the order in which they are dropped


@dataclass(slots=True)
class Copy:
    """A state kept for later requests."""

    pages: int  #: full pages of tokens before the state
    used: int  #: arrival number of the latest request that begins with these tokens
    border: bool  #: whether that request has a message border in the next page


def least_useful(copies: Mapping[bytes, Copy], arrival: int, end: int) -> bytes:
    """Returns the key of the copy to drop for a request that needs a slot. ``arrival``: the request's number;
    ``end``: full pages of its tokens so far. ``copies`` must not be empty."""
    paths: dict[int, list[bytes]] = {}
    for key in sorted(copies, key=lambda key: copies[key].pages):
        paths.setdefault(copies[key].used, []).append(key)
    recent = max(len(copies) // 2, 1)
    choices = []
    for age, used in enumerate(sorted(paths, reverse=True)):
        keys = paths[used]
        ends = [copies[key].pages for key in keys]
        last = None if used == arrival else keys[-1]
        if used == arrival:
            ends.append(end)
        gaps: dict[int, list[tuple[float, bytes]]] = {}
        for i, key in enumerate(keys):
            kind = _INNER
            if age < recent and (key == last or copies[key].border):
                kind = _END if key == last else _BORDER
            gaps.setdefault(kind, []).append((_gap(ends, i), key))
        choices += [(kind, -len(keyed) - age, -age, min(keyed)[1]) for kind, keyed in gaps.items()]
    return min(choices)[-1]


def _gap(ends: Sequence[int], i: int) -> float:
    """Returns how many times farther from the path's end the previous copy is than the next one: a measure of
    the gap that dropping the copy between them leaves."""
    beyond = ends[-1] + 1
    before, after = [0, *ends][i], [*ends, beyond][i + 1]
    return (beyond - before) / max(beyond - after, 1)
