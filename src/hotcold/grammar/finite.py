"""Checks that some finite text matches a grammar: no expression may require itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Conditions under which an expression ends; all must hold. A condition is a list of alternatives, and one
#: must hold. An alternative holds if all of its expressions end.
Needs = Iterable[Sequence[Sequence[Any]]]


def ends(root: Any, needs: Callable[[Any], Needs]) -> bool:
    """True if some finite text matches ``root``. Visits each expression once, by its identity, without
    recursion: clients write the grammars, and this also runs in the server's own process."""
    missing: list[int] = []  # conditions that must still become true before this one does
    needed_by: list[list[int]] = []
    conditions: dict[int, int] = {}  # identity of an expression -> the condition that it ends
    unread: list[Any] = []

    def condition(count: int, parts: list[int]) -> int:
        missing.append(count)
        needed_by.append([])
        for part in parts:
            needed_by[part].append(len(missing) - 1)
        return len(missing) - 1

    def of(expression: Any) -> int:
        if id(expression) not in conditions:
            conditions[id(expression)] = condition(0, [])
            unread.append(expression)
        return conditions[id(expression)]

    whole = of(root)
    while unread:
        expression = unread.pop()
        for ways in needs(expression):
            one_way = condition(1, [condition(len(way), [*map(of, way)]) for way in ways])
            needed_by[one_way].append(of(expression))
            missing[of(expression)] += 1
    true = [index for index, count in enumerate(missing) if not count]
    for index in true:  # the loop appends to it
        for other in needed_by[index]:
            missing[other] -= 1
            if not missing[other]:
                true.append(other)
    return missing[whole] <= 0
