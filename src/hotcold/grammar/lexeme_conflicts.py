"""Finds lexemes of which a lexer that takes the longest match would take too much.

Lexemes become automata by Glushkov's construction (a state is a place in the expression), which run together.
If one lexeme is complete, and a character that may follow it also continues some lexeme, the lexer would
continue that one: it is in conflict. Counted repetitions are treated as uncounted ones, which finds every
conflict and maybe some more."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hotcold.grammar.gbnf import Chars, Choice, Node, Ref, Repeat, Sequence


class TooManySteps(Exception):
    """Raised if the automata are too large to search."""


@dataclass(frozen=True)
class Lexeme:
    """An expression without rules or tokens, which the lexer should take as one."""

    node: Node


Tree = Lexeme | Node  #: below a Sequence, Choice or Repeat, too


@dataclass
class _Part:
    """The bits of places where an expression may begin and end, and whether it may be empty."""

    first: int
    last: int
    empty: bool


class _Automata:
    """All lexemes of a grammar, their places numbered together; sets of places are bits of an integer."""

    def __init__(self, lexemes: Iterable[Lexeme]) -> None:
        self.lexemes = list(lexemes)
        self.owner: list[int] = []  # place -> index of its lexeme
        self._ranges: list[tuple[tuple[int, int], ...]] = []
        self.next: list[int] = []  # place -> places that may follow
        self.parts: list[_Part] = []
        for index, lexeme in enumerate(self.lexemes):
            self.parts.append(self._part(lexeme.node, index))
        cuts = sorted({cut for ranges in self._ranges for low, high in ranges for cut in (low, high + 1)})
        number = {cut: i for i, cut in enumerate(cuts)}
        #: place -> its characters, as bits of intervals between cuts
        self.chars = [
            sum((1 << number[high + 1]) - (1 << number[low]) for low, high in ranges)
            for ranges in self._ranges
        ]

    def _part(self, node: Node, owner: int) -> _Part:
        match node:
            case Chars(ranges):
                place = 1 << len(self.owner)
                self.owner.append(owner)
                self._ranges.append(ranges)
                self.next.append(0)
                return _Part(place, place, False)
            case Sequence(parts):
                whole = _Part(0, 0, True)
                for each in parts:
                    part = self._part(each, owner)
                    self._link(whole.last, part.first)
                    whole = _Part(
                        whole.first | (part.first if whole.empty else 0),
                        part.last | (whole.last if part.empty else 0),
                        whole.empty and part.empty,
                    )
                return whole
            case Choice(options):
                found = [self._part(each, owner) for each in options]
                return _Part(
                    _union(part.first for part in found),
                    _union(part.last for part in found),
                    any(part.empty for part in found),
                )
            case Repeat(inner, least, most):
                part = self._part(inner, owner)
                if most != 1:
                    self._link(part.last, part.first)
                return _Part(part.first, part.last, part.empty or least == 0)
        raise AssertionError(node)

    def _link(self, last: int, first: int) -> None:
        for place in bits(last):
            self.next[place] |= first

    def characters(self, places: int) -> int:
        return _union(self.chars[place] for place in bits(places))

    def followers(self, places: int) -> int:
        return _union(self.next[place] for place in bits(places))


def conflicts(trees: Mapping[str, Tree], most_steps: int) -> tuple[set[Node], int]:
    """The expressions of lexemes that would swallow characters of what follows another lexeme or themselves,
    and the number of steps of the search. ``trees`` are the rules by name, ``root`` the first.
    TooManySteps."""
    automata = _Automata(_lexemes(trees))
    follow = _Follow(trees, automata)
    after = [_union(automata.parts[i].first for i in bits(coming)) for coming in follow.after]
    after = [automata.characters(first) for first in after]  # lexeme -> what may come after it
    ends = _union(part.last for part in automata.parts)
    found: set[int] = set()
    starts = {follow.start}  # sets of lexemes that may come at the same place
    states: set[int] = set()  # sets of places that the same characters lead to
    todo = list(_reached(automata, _union(automata.parts[i].first for i in bits(follow.start))))
    steps = len(automata.owner)
    while todo:
        state = todo.pop()
        if state in states:
            continue
        states.add(state)
        complete = {automata.owner[place] for place in bits(state & ends)}
        start = _union(follow.after[lexeme] for lexeme in complete)
        if start not in starts:
            starts.add(start)
            steps += start.bit_count()
            todo += _reached(automata, _union(automata.parts[i].first for i in bits(start)))
        coming = automata.followers(state)
        steps += 1 + coming.bit_count()
        if steps > most_steps:
            raise TooManySteps
        next_lexeme = _union(after[lexeme] for lexeme in complete)
        found |= {automata.owner[place] for place in bits(coming) if automata.chars[place] & next_lexeme}
        todo += _reached(automata, coming)
    return {automata.lexemes[index].node for index in found}, steps


def _lexemes(trees: Mapping[str, Tree]) -> list[Lexeme]:
    """All lexemes, each once."""
    all_leaves = (leaf for tree in trees.values() for leaf in leaves(tree))
    return list(dict.fromkeys(leaf for leaf in all_leaves if isinstance(leaf, Lexeme)))


def _reached(automata: _Automata, places: int) -> Iterator[int]:
    """The sets of places to which one character may lead, from the places that may come."""
    groups = [(automata.characters(places), 0)]  # characters, and the places that all of them lead to
    for place in bits(places):
        split = []
        for characters, reached in groups:
            inside, outside = characters & automata.chars[place], characters & ~automata.chars[place]
            if inside:
                split.append((inside, reached | 1 << place))
            if outside:
                split.append((outside, reached))
        groups = split
    yield from {reached for _, reached in groups}


class _Follow:
    """Finds the lexemes that may follow each lexeme; sets of lexemes are bits."""

    def __init__(self, trees: Mapping[str, Tree], automata: _Automata) -> None:
        self._automata = automata
        self._index = {lexeme: i for i, lexeme in enumerate(automata.lexemes)}
        self._first = dict.fromkeys(trees, 0)
        self._empty = dict.fromkeys(trees, False)
        self._after_rule = dict.fromkeys(trees, 0)
        self.after = [0] * len(automata.lexemes)  #: lexeme -> lexemes
        before: object = None
        while before != (
            now := (dict(self._first), dict(self._empty), dict(self._after_rule), self.after[:])
        ):
            before = now
            for name, tree in trees.items():
                self._first[name], self._empty[name] = self._visit(tree, self._after_rule[name])
        self.start = next(iter(self._first.values()))  #: lexemes that may come first

    def _visit(self, tree: Tree, after: int) -> tuple[int, bool]:
        """Notes what may come after the leaves, given what may come after the whole: what the whole may begin
        with, and whether it may be empty."""
        match tree:
            case Lexeme():
                index = self._index[tree]
                self.after[index] |= after
                return 1 << index, self._automata.parts[index].empty
            case Ref(name):
                self._after_rule[name] |= after
                return self._first[name], self._empty[name]
            case Sequence(parts):
                first, empty = 0, True
                for part in reversed(parts):
                    its_first, its_empty = self._visit(part, first | (after if empty else 0))
                    first = its_first | (first if its_empty else 0)
                    empty = empty and its_empty
                return first, empty
            case Choice(options):
                found = [self._visit(option, after) for option in options]
                return _union(first for first, _ in found), any(empty for _, empty in found)
            case Repeat(part, least, most):
                first, empty = self._visit(part, after)
                if most != 1:
                    self._visit(part, after | first)
                return first, empty or least == 0
        return 0, False  # a token, which no character belongs to


def leaves(tree: Tree) -> Iterator[Tree]:
    match tree:
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from leaves(part)
        case Repeat(part):
            yield from leaves(part)
        case _:
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
