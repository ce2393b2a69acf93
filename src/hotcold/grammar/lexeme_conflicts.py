"""Finds lexemes for which a longest-match lexer would take too many characters.

Lexemes become automata by Glushkov's construction (a state is a place in the expression), which run together.
If one lexeme is complete, and a character that may follow it also continues a lexeme, the lexer would
continue that lexeme: it is in conflict. Counted repetitions are treated as uncounted, which finds every
conflict and possibly false ones. The same construction over the rules finds the lexemes after a lexeme.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hotcold.grammar.gbnf import Chars, Choice, Lexeme, Node, Ref, Repeat, Rules, Sequence, inner


class TooManySteps(Exception):
    """Raised if the automata are too large to search."""


class _Part(NamedTuple):
    """The places where an expression may begin and end, as bits, and whether it may be empty."""

    first: int = 0
    last: int = 0
    empty: bool = False


def _part(node: Node, leaf: Callable[[Node], _Part], following: list[int]) -> _Part:
    """The :class:`_Part` of an expression. ``leaf`` returns the parts of its leaves; ``following`` gets, for
    each place, the places that may follow."""

    def link(last: int, first: int) -> None:
        for place in bits(last):
            following[place] |= first

    parts = [_part(each, leaf, following) for each in inner(node)]
    match node:
        case Sequence():
            whole = _Part(empty=True)
            for part in parts:
                link(whole.last, part.first)
                first = whole.first | (part.first if whole.empty else 0)
                last = part.last | (whole.last if part.empty else 0)
                whole = _Part(first, last, whole.empty and part.empty)
            return whole
        case Choice():
            firsts, lasts, empties = zip(*parts, strict=True)
            return _Part(_union(firsts), _union(lasts), any(empties))
        case Repeat(_, least, most):
            if most != 1:
                link(parts[0].last, parts[0].first)
            return parts[0]._replace(empty=parts[0].empty or least == 0)
    return leaf(node)


class _Automata:
    """All lexemes of a grammar with one numbering of places; sets of places are bits of an integer."""

    def __init__(self, lexemes: Iterable[Lexeme]) -> None:
        self.owner: list[int] = []  # place -> index of its lexeme
        self._ranges: list[tuple[tuple[int, int], ...]] = []
        self.next: list[int] = []  # place -> places that may follow
        self.parts: list[_Part] = []
        for index, lexeme in enumerate(lexemes):
            self.parts.append(_part(lexeme.node, self._place, self.next))
            self.owner += [index] * (len(self.next) - len(self.owner))
        cuts = sorted({cut for ranges in self._ranges for low, high in ranges for cut in (low, high + 1)})
        number = {cut: i for i, cut in enumerate(cuts)}
        #: place -> its characters, as bits of intervals between cuts
        self.chars = [
            sum((1 << number[high + 1]) - (1 << number[low]) for low, high in ranges)
            for ranges in self._ranges
        ]

    def _place(self, node: Node) -> _Part:
        assert isinstance(node, Chars)
        place = 1 << len(self.next)
        self._ranges.append(node.ranges)
        self.next.append(0)
        return _Part(place, place)

    def characters(self, places: int) -> int:
        return _union(self.chars[place] for place in bits(places))

    def reached(self, places: int) -> set[int]:
        """The sets of places that one character may reach, one set for each group of equal characters."""
        groups = [(self.characters(places), 0)]  # characters, and the places that all of them reach
        for place in bits(places):
            split = []
            for characters, reached in groups:
                inside, outside = characters & self.chars[place], characters & ~self.chars[place]
                if inside:
                    split.append((inside, reached | 1 << place))
                if outside:
                    split.append((outside, reached))
            groups = split
        return {reached for _, reached in groups}

    def begin(self, lexemes: int) -> int:
        """The places where lexemes may begin."""
        return _union(self.parts[lexeme].first for lexeme in bits(lexemes))


def conflicts(trees: Rules, most_steps: int) -> tuple[set[Node], int]:
    """The expressions of lexemes that would take characters of a lexeme that follows them or another lexeme,
    and the number of steps of the search. ``trees`` are the rules by name, ``root`` first. TooManySteps."""
    all_leaves = (leaf for tree in trees.values() for leaf in leaves(tree))
    lexemes = list(dict.fromkeys(leaf for leaf in all_leaves if isinstance(leaf, Lexeme)))
    automata = _Automata(lexemes)
    start, follow = _follow(trees, {lexeme: i for i, lexeme in enumerate(lexemes)}, automata.parts)
    after = [automata.characters(automata.begin(coming)) for coming in follow]  # lexeme -> next characters
    ends = _union(part.last for part in automata.parts)
    swallowing: set[int] = set()
    starts = {start}  # sets of lexemes that may begin at the same place
    states: set[int] = set()  # sets of places that the same characters reach
    todo = [*automata.reached(automata.begin(start))]
    steps = len(automata.owner)
    while todo:
        state = todo.pop()
        if state in states:
            continue
        states.add(state)
        complete = {automata.owner[place] for place in bits(state & ends)}
        start = _union(follow[lexeme] for lexeme in complete)
        if start not in starts:
            starts.add(start)
            steps += start.bit_count()
            todo += automata.reached(automata.begin(start))
        coming = _union(automata.next[place] for place in bits(state))
        steps += 1 + coming.bit_count()
        if steps > most_steps:
            raise TooManySteps
        next_lexeme = _union(after[lexeme] for lexeme in complete)
        swallowing |= {automata.owner[place] for place in bits(coming) if automata.chars[place] & next_lexeme}
        todo += automata.reached(coming)
    return {lexemes[index].node for index in swallowing}, steps


def _follow(trees: Rules, index: dict[Lexeme, int], lexemes: list[_Part]) -> tuple[int, list[int]]:
    """The lexemes that may come first, and the lexemes that may follow each one; sets of lexemes are bits."""
    follow = [0] * len(lexemes)
    rules = dict.fromkeys(trees, _Part())

    def leaf(node: Node) -> _Part:
        match node:
            case Lexeme():
                return _Part(1 << index[node], 1 << index[node], lexemes[index[node]].empty)
            case Ref(name):
                return rules[name]
        return _Part()  # a token, which has no characters

    before: object = None
    while before != (now := (dict(rules), follow[:])):
        before = now
        for name, tree in trees.items():
            rules[name] = _part(tree, leaf, follow)
    return next(iter(rules.values())).first, follow


def leaves(tree: Node) -> Iterator[Node]:
    if isinstance(tree, Sequence | Choice | Repeat):
        for part in inner(tree):
            yield from leaves(part)
    else:
        yield tree


def bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _union(numbers: Iterable[int]) -> int:
    union = 0
    for number in numbers:
        union |= number
    return union
