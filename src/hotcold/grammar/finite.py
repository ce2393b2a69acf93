"""Finds whether something finite matches a grammar: what an expression needs must not need itself."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Conditions under which an expression ends. All must hold. A condition is a list of ways, and one way must
#: hold. A way holds where all of its expressions end.
Needs = Iterable[Sequence[Sequence[Any]]]


def ends(root: Any, needs: Callable[[Any], Needs]) -> bool:
    """Whether something finite matches ``root``. Looks at each expression once, by its identity, and does not
    recurse: clients write the grammars, and this also runs in the server's own process."""
    missing: list[int] = []  # how many others each condition needs before it is true
    needed_by: list[list[int]] = []
    conditions: dict[int, int] = {}  # by the identity of an expression: that it ends
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
    true = [each for each, count in enumerate(missing) if not count]
    for each in true:  # the loop adds more
        for other in needed_by[each]:
            missing[other] -= 1
            if not missing[other]:
                true.append(other)
    return missing[whole] <= 0
