"""Translates GBNF to Lark for a compiler with a lexer, without changing what matches.

GBNF knows only characters. The compiler first cuts a text into lexemes, each as long as possible, and is fast
only if they are long. So each part without recursion becomes one lexeme, a regular expression, if the longest
match is always correct: no character that may follow a lexeme may also continue a lexeme. Otherwise the
lexeme is split into parts, if necessary down to single characters."""

from collections.abc import Callable
from itertools import groupby

from hotcold.grammar.error import GrammarError
from hotcold.grammar.gbnf import (
    Chars,
    Choice,
    Lexeme,
    Node,
    Ref,
    Repeat,
    Rules,
    Sequence,
    Token,
    inner,
    mapped,
    may_be_empty,
    parse,
)
from hotcold.grammar.lexeme_conflicts import TooManySteps, conflicts, leaves
from hotcold.values import shown

_MOST_PLACES = 2000  # limit of one lexeme
_MOST_STEPS = 100_000  # limit of the search for conflicts: some tenths of a second


def lark_of_gbnf(text: str, token_id: Callable[[str], int | None] = lambda name: None) -> str:
    """Translates a grammar in GBNF to Lark; ``token_id`` finds control tokens by name. GrammarError: it is
    broken, nothing finite matches it, or it names an unknown token."""
    try:
        return _Translation(parse(text), token_id).lark()
    except RecursionError:
        raise GrammarError("the rules of the grammar are nested too deeply") from None


class _Translation:
    def __init__(self, rules: Rules, token_id: Callable[[str], int | None]) -> None:
        self._rules = rules
        self._token_id = token_id
        self._apart: set[Node] = set()  # expressions that must be split
        self._single = False  # true if every lexeme is one character
        self._expanded: dict[str, Node | None] = {}

    def lark(self) -> str:
        left = _MOST_STEPS
        while True:
            trees = self._trees()
            try:
                split, steps = (set[Node](), 0) if self._single else conflicts(trees, left)
            except TooManySteps:
                self._single = True
                continue
            if not split:
                return self._written(trees)
            self._apart |= split
            left -= steps

    def _trees(self) -> Rules:
        """The rules that ``root`` needs, divided into lexemes."""
        trees: Rules = {}
        missing = ["root"]
        while missing:
            name = missing.pop()
            if name not in trees:
                trees[name] = self._tree(self._rules[name])
                missing += [leaf.name for leaf in leaves(trees[name]) if isinstance(leaf, Ref)]
        return trees

    def _tree(self, node: Node) -> Node:
        expanded = self._expand(node)
        if expanded is not None:
            return self._cut(expanded)
        if not isinstance(node, Sequence):
            return mapped(node, self._tree)
        parts: list[Node] = []
        expanded_parts = [(self._expand(part), part) for part in node.parts]
        for is_lexeme, group in groupby(expanded_parts, lambda pair: pair[0] is not None):
            if is_lexeme:  # neighbours that may be one lexeme are joined
                neighbours = tuple(expanded for expanded, _ in group if expanded is not None)
                parts.append(self._cut(neighbours[0] if len(neighbours) == 1 else Sequence(neighbours)))
            else:
                parts += [self._tree(part) for _, part in group]
        return Sequence(tuple(parts))

    def _cut(self, node: Node) -> Node:
        """An expression as one lexeme, or as its parts if it must be split."""
        if isinstance(node, Chars) or (node not in self._apart and not self._single):
            return Lexeme(node)
        return mapped(node, self._cut)

    def _expand(self, node: Node) -> Node | None:
        """A node with its rules inserted; None: it is recursive, has tokens, or is too long."""
        match node:
            case Token():
                return None
            case Ref(name):
                if name not in self._expanded:
                    self._expanded[name] = None  # if it occurs again below, it is recursive
                    self._expanded[name] = self._expand(self._rules[name])
                return self._expanded[name]
        whole = mapped(node, self._expand)
        known = all(part is not None for part in inner(whole))
        return whole if known and _size(whole) <= _MOST_PLACES else None

    def _written(self, trees: Rules) -> str:
        names = {name: f"r{i}" for i, name in enumerate(trees)}
        terminals: dict[Lexeme, str] = {}

        def leaf(node: Node) -> str:
            match node:
                case Ref(name):
                    return names[name]
                case Token():
                    return self._token(node)
                case Lexeme(Sequence(())):
                    return '""'
                case Lexeme():
                    name = terminals.setdefault(node, f"T{len(terminals)}")
                    return f"{name}?" if may_be_empty(node) else name
            raise AssertionError(node)

        rules = [f"{names[name]}: {_joined(tree, leaf, *_RULE)}" for name, tree in trees.items()]
        for lexeme, name in terminals.items():
            nonempty = " & /(?s:.+)/" if may_be_empty(lexeme) else ""
            rules.append(f"{name}: /{_joined(lexeme.node, _characters)}/{nonempty}")
        return "\n".join(["start: r0", *rules, ""])

    def _token(self, token: Token) -> str:
        if token.name.startswith("["):
            id: int | None = int(token.name[1:-1])
        else:
            id = self._token_id(f"<{token.name}>")
        if id is None:
            name = shown(f"<{token.name}>")
            raise GrammarError(f"the grammar names the token {name}, which this model does not have")
        return f"<[^{id}]>" if token.negated else f"<[{id}]>"


def _size(node: Node) -> int:
    """The size of an expression: its character positions and its levels."""
    return 1 + sum(map(_size, inner(node)))


_RULE = ("(", " ", '""')  # the arguments of _joined for Lark


def _joined(
    node: Node, leaf: Callable[[Node], str], group: str = "(?:", space: str = "", empty: str = ""
) -> str:
    """Writes an expression: as a regular expression that can be joined with others, or as :data:`_RULE`."""
    parts = [_joined(part, leaf, group, space, empty) for part in inner(node)]
    match node:
        case Sequence():
            return space.join(parts) or empty
        case Choice():
            return f"{group}{'|'.join(parts)})"
        case Repeat(_, least, most):
            signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            times = signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
            return f"{group}{parts[0]}){times}"
    return leaf(node)


def _characters(node: Node) -> str:
    assert isinstance(node, Chars)
    codes = ((f"\\x{{{first:x}}}", f"\\x{{{last:x}}}") for first, last in node.ranges)
    return f"[{''.join(first if first == last else f'{first}-{last}' for first, last in codes)}]"
