"""Translates GBNF to Lark for a compiler with a lexer, without changing what matches.

GBNF knows only characters. The compiler first cuts a text into lexemes, each as long as possible, and is fast
only if they are long. So each part that does not call itself becomes one lexeme, a regular expression, if the
longest match is certainly the right one: no character that may follow a lexeme may also continue one that has
begun. Otherwise the lexeme is taken apart, if necessary down to single characters."""

from collections.abc import Callable, Iterator

from hotcold.grammar.error import GrammarError
from hotcold.grammar.gbnf import Chars, Choice, Node, Ref, Repeat, Rules, Sequence, Token, parse
from hotcold.grammar.lexeme_conflicts import Lexeme, TooManySteps, Tree, conflicts, leaves
from hotcold.values import shown

_MOST_PLACES = 2000  # limit of one lexeme
_MOST_STEPS = 100_000  # limit of the search for conflicts: some tenths of a second


def lark_of_gbnf(text: str, token_id: Callable[[str], int | None] = lambda name: None) -> str:
    """Translates a grammar in GBNF to Lark; ``token_id`` finds control tokens by name. GrammarError: it is
    broken, nothing finite matches it, or it names an unknown token."""
    rules = parse(text)
    try:
        if "root" not in _rules_that_end(rules):
            raise GrammarError("nothing finite matches the grammar: its rule 'root' needs itself to end")
        return _Translation(rules, token_id).lark()
    except RecursionError:
        raise GrammarError("the rules of the grammar lie too deep within each other") from None


def _rules_that_end(rules: Rules) -> set[str]:
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        match node:
            case Ref(name):
                return name in ending
            case Sequence(parts):
                return all(map(ends, parts))
            case Choice(options):
                return any(map(ends, options))
            case Repeat(part, least, _):
                return least == 0 or ends(part)
        return True

    names = list(rules)
    before = -1
    while before < len(ending):
        before = len(ending)
        names.reverse()  # a rule mostly comes before those that it needs; if not, the next round finds it
        for name in names:
            if name not in ending and ends(rules[name]):
                ending.add(name)
    return ending


class _Translation:
    def __init__(self, rules: Rules, token_id: Callable[[str], int | None]) -> None:
        self._rules = rules
        self._token_id = token_id
        self._apart: set[Node] = set()  # expressions that must not be one lexeme
        self._single = False  # true if every lexeme is one character
        self._expanded: dict[str, Node | None] = {}

    def lark(self) -> str:
        left = _MOST_STEPS
        while not self._single:
            trees = self._trees()
            try:
                found, steps = conflicts(trees, left)
            except TooManySteps:
                self._single = True
                break
            if not found:
                return self._written(trees)
            self._apart |= found
            left -= steps
        return self._written(self._trees())

    def _trees(self) -> dict[str, Tree]:
        """The rules that ``root`` needs, cut into lexemes."""
        trees: dict[str, Tree] = {}
        missing = ["root"]
        while missing:
            name = missing.pop()
            if name not in trees:
                trees[name] = self._tree(self._rules[name])
                missing += [leaf.name for leaf in leaves(trees[name]) if isinstance(leaf, Ref)]
        return trees

    def _tree(self, node: Node) -> Tree:
        expanded = self._expand(node)
        if expanded is not None:
            return self._cut(expanded)
        match node:
            case Sequence(parts):
                return Sequence(tuple(self._neighbours(parts)))  # type: ignore[arg-type]
            case Choice(options):
                return Choice(tuple(map(self._tree, options)))  # type: ignore[arg-type]
            case Repeat(part, least, most):
                return Repeat(self._tree(part), least, most)  # type: ignore[arg-type]
        return node

    def _neighbours(self, parts: tuple[Node, ...]) -> Iterator[Tree]:
        """The parts of a sequence; neighbours that may be one lexeme are joined."""
        together: list[Node] = []
        for part in parts:
            expanded = self._expand(part)
            if expanded is not None:
                together.append(expanded)
                continue
            if together:
                yield self._cut(together[0] if len(together) == 1 else Sequence(tuple(together)))
                together = []
            yield self._tree(part)
        if together:
            yield self._cut(together[0] if len(together) == 1 else Sequence(tuple(together)))

    def _cut(self, node: Node) -> Tree:
        """An expression as one lexeme, or its parts if it had to be taken apart."""
        if node not in self._apart and not self._single:
            return Lexeme(node)
        match node:
            case Sequence(parts):
                return Sequence(tuple(map(self._cut, parts)))  # type: ignore[arg-type]
            case Choice(options):
                return Choice(tuple(map(self._cut, options)))  # type: ignore[arg-type]
            case Repeat(part, least, most):
                return Repeat(self._cut(part), least, most)  # type: ignore[arg-type]
        return Lexeme(node)

    def _expand(self, node: Node) -> Node | None:
        """A node with its rules inserted; None: it calls itself, has tokens, or is too long."""
        match node:
            case Ref(name):
                if name not in self._expanded:
                    self._expanded[name] = None  # if it is met again, it calls itself
                    self._expanded[name] = self._expand(self._rules[name])
                return self._expanded[name]
            case Sequence(parts) | Choice(parts):
                found = [self._expand(part) for part in parts]
                known = tuple(part for part in found if part is not None)
                if len(known) < len(found):
                    return None
                whole = Sequence(known) if isinstance(node, Sequence) else Choice(known)
                return whole if _size(whole) <= _MOST_PLACES else None
            case Repeat(part, least, most):
                inner = self._expand(part)
                return None if inner is None else Repeat(inner, least, most)
            case Token():
                return None
        return node

    def _written(self, trees: dict[str, Tree]) -> str:
        self._names = {name: f"r{i}" for i, name in enumerate(trees)}
        self._terminals: dict[Lexeme, str] = {}
        rules = [f"{self._names[name]}: {self._term(tree)}" for name, tree in trees.items()]
        terminals = []
        for lexeme, name in self._terminals.items():
            nonempty = " & /(?s:.+)/" if may_be_empty(lexeme.node) else ""
            terminals.append(f"{name}: /{_expression(lexeme.node)}/{nonempty}")
        return "\n".join(["start: r0", *rules, *terminals, ""])

    def _term(self, tree: Tree) -> str:
        match tree:
            case Lexeme(node):
                if isinstance(node, Sequence) and not node.parts:
                    return '""'
                name = self._terminals.setdefault(tree, f"T{len(self._terminals)}")
                return f"{name}?" if may_be_empty(node) else name
            case Ref(name):
                return self._names[name]
            case Token():
                return self._token(tree)
            case Sequence(parts):
                return " ".join(map(self._term, parts)) if parts else '""'
            case Choice(options):
                return f"({' | '.join(map(self._term, options))})"
            case Repeat(part, least, most):
                return f"({self._term(part)}){_times(least, most)}"
        raise AssertionError(tree)

    def _token(self, token: Token) -> str:
        if token.name.startswith("["):
            id: int | None = int(token.name[1:-1])
        else:
            id = self._token_id(f"<{token.name}>")
        if id is None:
            raise GrammarError(
                f"the grammar names the token {shown(f'<{token.name}>')}, which this model has not"
            )
        return f"<[^{id}]>" if token.negated else f"<[{id}]>"


def _size(node: Node) -> int:
    """The size of an expression: places at which a character is matched, and levels."""
    match node:
        case Sequence(parts) | Choice(parts):
            return 1 + sum(map(_size, parts))
        case Repeat(part):
            return 1 + _size(part)
    return 1


def may_be_empty(node: Node) -> bool:
    match node:
        case Sequence(parts):
            return all(map(may_be_empty, parts))
        case Choice(options):
            return any(map(may_be_empty, options))
        case Repeat(part, least, _):
            return least == 0 or may_be_empty(part)
    return False


def _expression(node: Node) -> str:
    """A node as a regular expression that can be joined with others and repeated."""
    match node:
        case Chars(ranges):
            return f"[{''.join(map(_range, ranges))}]"
        case Sequence(parts):
            return "".join(map(_expression, parts))
        case Choice(options):
            return f"(?:{'|'.join(map(_expression, options))})"
        case Repeat(part, least, most):
            return f"(?:{_expression(part)}){_times(least, most)}"
    raise AssertionError(node)


def _range(ends: tuple[int, int]) -> str:
    first, last = (f"\\x{{{end:x}}}" for end in ends)
    return first if first == last else f"{first}-{last}"


def _times(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
