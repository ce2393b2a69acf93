"""Chooses which copy of a state makes way for another.

The copies that the latest request of a conversation begins with form a *path*. A branch that the conversation
has left, because a template dropped earlier thoughts for instance, becomes a path of its own.

Copies are given up in this order: first those inside a path, then those at message borders, at last the end
of a path, from which its conversation goes on. Of paths that have not been used for long, all copies come
first. The path gives one up that has the most copies of the first kind; a path that was used earlier counts
one more for each path that was used since. Within a path copies become sparse with the distance from its end,
as later prompts most likely differ near the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_INNER, _BORDER, _END = range(3)  # kinds of copies, in the order in which they are given up


@dataclass(slots=True)
class Copy:
    """A state that is kept for later requests."""

    pages: int  #: full pages of tokens before the state
    used: int  #: arrival of the latest request that begins with these tokens
    border: bool  #: whether that request has a message border in the page after them


def least_useful(copies: Mapping[bytes, Copy], arrival: int, end: int) -> bytes:
    """Returns the key of the copy to give up for a request that needs a slot.

    ``arrival`` is the request's, ``end`` the full pages of its tokens so far. At least one copy is needed."""
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
        choices += [(kind, -len(each) - age, -age, min(each)[1]) for kind, each in gaps.items()]
    return min(choices)[-1]


def _gap(ends: Sequence[int], i: int) -> float:
    """Returns how many times farther from the path's end the copy before is than the copy after: the size of
    the gap that giving up the copy between them leaves."""
    beyond = ends[-1] + 1
    before, after = [0, *ends][i], [*ends, beyond][i + 1]
    return (beyond - before) / max(beyond - after, 1)
