"""Limits of grammars: what works within them, what is refused before an answer, and what an answer says."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.built_in import tokenizer
from support.vocabulary_of_bytes import check, compiler, ids_in, tokens_of

from hotcold.engine.request import Grammar
from hotcold.grammar import checking
from hotcold.grammar import compiler as grammar_compiler
from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary, Matcher
from hotcold.grammar.constraint import GrammarError, Grammars, schema_grammar
from hotcold.grammar.json_schema import lark_of_schema
from hotcold.grammar.matching import GrammarConstraint
from hotcold.grammar.notations import lark_of

TEXT = {"type": "string"}


def of(required: bool = True, /, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": [*properties]} if required else found


def options(count: int, properties: int, kind: Any = TEXT) -> dict[str, Any]:
    """A choice of objects, as an agent's schema of actions has it: their properties may be left out."""
    names = [[f"o{i}_p{j}" for j in range(properties)] for i in range(count)]
    return {"anyOf": [of(False, **dict.fromkeys(each, kind)) for each in names]}


# --- what works ---------------------------------------------------------------------------------------

MANY = {f"p{i}": TEXT for i in range(400)}
#: A schema, a value that it allows, and one that it does not.
LARGE: list[tuple[Any, Any, Any]] = [
    (options(20, 20), {"o7_p3": "x", "o7_p19": ""},
     {"o7_p3": "x", "o8_p3": "x"}),
    (options(20, 20, {"type": ["string", "null"]}), {"o0_p0": None}, {"o0_p0": 1}),
    (of(action=options(20, 20)), {"action": {"o19_p19": "x"}}, {"action": {"o20_p0": ""}}),
    ({"type": "array", "items": options(20, 20)}, [{"o1_p1": "x"}, {}], [{"o1_p1": 1}]),
    (options(60, 20), {"o59_p0": "x"}, {"o59_p0": {}}),
    (of(False, **MANY), {"p0": "x", "p200": "y", "p399": "z"}, {"p0": "x", "p400": "y"}),
    ({"type": "object", "properties": MANY, "additionalProperties": True}, {"p5": "", "other": 1}, {"p5": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), LARGE, ids=lambda value: json.dumps(value)[:40])
def test_large_schemas_work(schema: Any, right: Any, wrong: Any) -> None:
    grammar = lark_of_schema(json.dumps(schema))
    checking.walk(compiler(), grammar)
    check(grammar, [json.dumps(right)], [json.dumps(wrong)])


EXPRESSIONS = [
    (r"\w{1,1000}", "Lily_and_Tom" * 20),
    (r"(\p{L}+\s?){5,50}", "the cat sat on the mat and " * 5),
    (r"(\w{1,50}(-|\s)){1,30}", "one-two three-four " * 7),
    ("(((a{1000}){1000}){1000})", "a" * 200),
]


@pytest.mark.parametrize(("expression", "begun"), EXPRESSIONS)
def test_large_expressions_work_for_a_whole_answer(expression: str, begun: str) -> None:
    lark = lark_of(Grammar("regex", expression), {})
    checking.walk(compiler(), lark)
    constraint = GrammarConstraint(lambda: compiler().compile(lark), ThreadPoolExecutor(1))
    tokens = tokens_of(begun)
    for length in range(0, len(tokens), 7):
        mask = constraint(tokens[:length]).mask
        assert mask is not None and tokens[length] in ids_in(mask)


def test_states_that_an_answer_has_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks are the same as those without a limit, also where tokens are taken back."""
    lark = lark_of(Grammar("regex", r"\w{1,400}"), {})
    unlimited = GrammarConstraint(lambda: compiler().compile(lark), ThreadPoolExecutor(1))
    monkeypatch.setitem(grammar_compiler._LIMITS, "max_lexer_states", 2000)
    small, made = GrammarCompiler(GrammarVocabulary.from_tokenizer(tokenizer())), []

    def start() -> Any:
        made.append(small.compile(lark))
        return made[-1]

    limited = GrammarConstraint(start, ThreadPoolExecutor(1))
    tokens = tokens_of("Lilyé" * 40)
    draw = random.Random(0)
    for length in [*range(0, len(tokens), 4), *(draw.randrange(len(tokens)) for _ in range(10))]:
        ours, theirs = limited(tokens[:length]).mask, unlimited(tokens[:length]).mask
        assert ours is not None and theirs is not None and ids_in(ours) == ids_in(theirs)
    assert len(made) > 1


@pytest.mark.parametrize("expression", ["(((a{1000}){1000}){1000})", "(b|c)(((a{1000}){1000}){1000})b"])
@pytest.mark.parametrize("first", ["mask", "forced"])
def test_what_is_forced_has_a_limit_too(expression: str, first: str) -> None:
    """Else the engine would look for 10^9 characters that nothing but the expression decides."""
    lark = lark_of(Grammar("regex", expression), {})
    matcher = compiler().compile(lark)
    if first == "mask":
        matcher.mask()
    begun = b"" if expression.startswith("(((") else b"b"
    assert matcher.consume(tokens_of(begun))
    assert len(matcher.forced()) <= grammar_compiler._LIMITS["max_lexer_states"]
    constraint = GrammarConstraint(
        lambda: compiler().compile(lark), ThreadPoolExecutor(1), compiler().spelled
    )
    output = tokens_of(begun)
    for n in range(20):
        forced = constraint.forced(output)
        assert b"".join(map(tokenizer().piece, forced)) == b"a" * (256 if n == 0 else 0)
        mask = constraint(output).mask
        assert mask is not None and tokens_of("a")[0] in ids_in(mask)
        output = [*output, *tokens_of("a")]


# --- what is refused before an answer -----------------------------------------------------------------

STEPS = "too many steps of an expression for one token: the limit is 1000000"
ITEMS = "too many items at one place, 10399: the limit is 10000"
DEAD = "no token can come next"
WIDE = of(False, **{f"p{i}": {} for i in range(2600)})
COUNTS = r"((\w{1,1000}){1,1000}){1,1000}"
PATTERN = {"type": "string", "pattern": f"^{COUNTS}$"}
NO_NAME = of(x={"type": "integer"}) | {"patternProperties": {"^\\x01+$": TEXT}}
REFUSED: list[tuple[Grammar, str]] = [
    (schema_grammar(of(a=of(b=TEXT, c=WIDE))), ITEMS),
    (Grammar("regex", COUNTS), STEPS),
    (Grammar("regex", f"x{{5}}{COUNTS}"), STEPS),
    (Grammar("gbnf", "root ::= " + COUNTS.replace(r"\w", "[a-zé]")), STEPS),
    (schema_grammar(PATTERN), STEPS),
    (schema_grammar(of(name=TEXT, n={"type": "integer"}, v=PATTERN, z=TEXT)), STEPS),
    (schema_grammar(of(False, name=TEXT, v=of(False, n=TEXT, v=of(False, n=TEXT, v=PATTERN)))), STEPS),
    (schema_grammar({"anyOf": [TEXT, {"type": "array", "items": of(a=TEXT, b=PATTERN)}]}), STEPS),
    (Grammar("lark", f'start: "call" args\nargs: %json {json.dumps(of(a=TEXT, b=PATTERN))}\n'), STEPS),
    (schema_grammar(NO_NAME), DEAD),
    (schema_grammar(of(a=TEXT, b={"type": "array", "items": NO_NAME, "minItems": 2})), DEAD),
    (schema_grammar(of(**{f"p{i}": TEXT for i in range(15)}, last=NO_NAME)), DEAD),
]


@pytest.mark.parametrize(("grammar", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_walk_names_the_limit_that_an_answer_would_reach(
    grammar: Grammar, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_WALK_S", 60)  # whatever the machine
    with pytest.raises(GrammarError) as caught:
        checking.walk(compiler(), lark_of(grammar, {}))
    message = str(caught.value)
    assert reason in message and message.isprintable() and len(message) < 200, message


@pytest.mark.parametrize(("grammar", "reason"), [REFUSED[2], REFUSED[11]], ids=lambda value: str(value)[:60])
def test_a_limit_is_named_before_the_answer(grammars: Grammars, grammar: Grammar, reason: str) -> None:
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(GrammarError, match=reason):
            grammars.check(grammar)


#: A limit of the library, a small value of it, a grammar that reaches it, and what it is called.
NAMED = [
    ("max_items_in_row", 50, options(4, 10), "too many items at one place, {}: the limit is 50"),
    ("step_max_items", 20, options(4, 10), "too many items for one token: the limit is 20"),
    ("step_lexer_fuel", 99, PATTERN, "too many steps of an expression for one token: the limit is 99"),
    ("max_lexer_states", 20, {**TEXT, "maxLength": 9}, "too many states of its expressions: the limit is 20"),
    ("initial_lexer_fuel", 9, options(4, 10), "too many steps to compile its expressions: the limit is 9"),
    ("max_grammar_size", 100, options(4, 10), "too many symbols: the limit is 100"),
]


@pytest.mark.parametrize(("limit", "value", "schema", "reason"), NAMED)
def test_each_limit_has_a_name(
    limit: str, value: int, schema: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_compiler._LIMITS, limit, value)
    made = GrammarCompiler(GrammarVocabulary.from_tokenizer(tokenizer()))
    with pytest.raises(GrammarError) as caught:
        checking.walk(made, lark_of_schema(json.dumps(schema)))
    assert re.search(re.escape(reason).replace(r"\{\}", "[0-9]+") + "$", str(caught.value))


class Failed:
    """In place of the library's matcher: it has failed in its own words."""

    def __init__(self, words: str) -> None:
        self.words = words

    def is_error(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return True

    def get_error(self) -> str:
        return self.words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "panic: called `Option::unwrap()` on a `None` value\n<backtrace>\n 0: <unknown>",
            "the grammar compiler fails",
        ),
        ("Unable to determine if regex is empty: (And (And", "takes too long to find whether a text matches"),
        ("at 5(8): failed\n   4 | calls: call\n   5 | call: %json {}", "cannot continue: line 4: failed"),
        ("something\x1b[1m {new}\n<non-verbose/>", "cannot continue: something\\x1b[1m {new}"),
    ],
)
def test_what_the_library_says_reaches_clients_in_one_line(words: str, message: str) -> None:
    matcher = Matcher(Failed(words), 10)  # type: ignore[arg-type]
    with pytest.raises(GrammarError) as caught:
        matcher.consume([1])
    assert message in str(caught.value) and str(caught.value).isprintable() and "|" not in str(caught.value)


# --- what only an answer finds ------------------------------------------------------------------------


def test_a_limit_that_an_answer_reaches_is_named(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of its tokens, and the text before it is still allowed."""
    schema = of(a=TEXT, b=options(8, 10))
    monkeypatch.setitem(grammar_compiler._LIMITS, "max_items_in_row", 100)
    made = GrammarCompiler(GrammarVocabulary.from_tokenizer(tokenizer()))
    constraint = GrammarConstraint(
        lambda: made.compile(lark_of_schema(json.dumps(schema))), ThreadPoolExecutor(1)
    )
    begun = tokens_of('{"a": "x", "b": ')
    assert constraint(begun).mask is not None
    for _ in range(2):
        with pytest.raises(
            GrammarError, match="cannot continue: too many items at one place, 312: the limit is 100"
        ):
            constraint([*begun, *tokens_of("{")])
    with pytest.raises(GrammarError, match="these tokens do not match the grammar"):
        constraint([*begun, *tokens_of("[")])
    assert constraint(begun).mask is not None
