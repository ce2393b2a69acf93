"""Patterns of property names that match listed names, or the same names as other patterns."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.vocabulary_of_bytes import check, compiler, random_answer, tokens_of

from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import lark_of_schema, read
from hotcold.grammar.schema_keywords import MOST_NAMES, compiled_pattern, few_names

ALPHABET = "abé."
parts = st.sampled_from(["a", "b", "é", "[ab]", "[a-b]", r"\.", "", "a?", "[é.]?", "b??"])
patterns = st.recursive(
    parts,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.builds(
            lambda open, options, end: f"{open}{'|'.join(options)}){end}",
            st.sampled_from(["(", "(?:"]),
            st.lists(inner, min_size=1, max_size=3),
            st.sampled_from(["", "?"]),
        ),
    ),
    max_leaves=6,
)


@given(pattern=patterns)
@settings(max_examples=150, deadline=None)
def test_the_few_names_of_a_pattern_are_all_that_match(pattern: str) -> None:
    names = few_names(compiled_pattern(f"^{pattern}$") or "")
    texts = ["".join(text) for n in range(4) for text in itertools.product(ALPHABET, repeat=n)]
    short = {text for text in texts if re.fullmatch(pattern, text)}
    if names is None:
        assert len(short) > MOST_NAMES // 2
    else:
        assert len(names) == len({*names}) <= MOST_NAMES
        assert all(re.fullmatch(pattern, name) for name in names)
        assert {name for name in names if len(name) < 4} == short


@pytest.mark.parametrize(
    "pattern",
    ["a", "^a", "a$", "^a|b$", "^a$|^b$", "^a+$", "^a*$", "^.$", "^[^a]$", r"^\d$", r"^\x41$", "^a{2}$",
     "^(?i)a$", "^(?<n>a)$", "^(a$", "^a)$", r"^a\$", "^(^a)$", "^[a-z][a-z]$", f"^{'(' * 999}a{')' * 999}$",
     "^(a|b)(a|b)(a|b)(a|b)(a|b)(a|b)(a|b)$", "^[a-\U0010ffff]$"],
)  # fmt: skip
def test_patterns_that_are_no_list_of_names(pattern: str) -> None:
    assert few_names(pattern) is None


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def closed(**more: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **more}


#: A schema, what it allows, and what it does not.
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (  # all names of the pattern are listed
        closed(properties={"abc": INTEGER}, patternProperties={"^abc$": {"minimum": 3}}),
        ["{}", '{"abc":3}'],
        ['{"abc":2}', '{"abc":3,', '{"abc":3,"abc":3}', '{"abcd":3}'],
    ),
    (  # some are
        closed(properties={"a": INTEGER}, patternProperties={"^[ab]$": {"minimum": 3}}),
        ["{}", '{"a":3}', '{"a":3,"b":null}', '{"b":4}'],
        ['{"a":"x"}', '{"a":2}', '{"b":2}', '{"c":3}'],
    ),
    (  # a pattern of many names and a listed one
        closed(properties={"abc": INTEGER}, patternProperties={"^a": {"minimum": 3}}),
        ["{}", '{"abc":3}', '{"ax":"x"}', '{"abc":3,"ax":4}'],
        ['{"abc":"x"}', '{"abc":2}', '{"ax":2}', '{"x":3}'],
    ),
    (  # two patterns, one of few names
        closed(patternProperties={"^(a|ab)$": INTEGER, "^a": {"minimum": 3}}),
        ['{"a":3}', '{"ab":4,"ax":"x"}'],
        ['{"a":2}', '{"a":"x"}', '{"ax":2}', '{"b":3}'],
    ),
    (  # a required name that only a pattern speaks of
        closed(patternProperties={"^a$": INTEGER}, required=["a"]),
        ['{"a":3}'],
        ["{}", '{"a":"x"}', '{"a":3,'],
    ),
    (
        closed(patternProperties={"^a": INTEGER}, required=["ab"]),
        ['{"ab":3}', '{"ab":3,"ax":4}'],
        ["{}", '{"ab":"x"}', '{"ax":3}'],
    ),
    (  # names of propertyNames
        {"type": "object", "propertyNames": {"pattern": "^(a|b)$"}, "required": ["a", "b"]},
        ['{"a":1,"b":2}'],
        ["{}", '{"a":1}', '{"a":1,"b":2,'],
    ),
    (  # schemas of the same value
        {"allOf": [closed(properties={"a": INTEGER}), {"patternProperties": {"^a$": {"minimum": 3}}}]},
        ["{}", '{"a":3}'],
        ['{"a":2}', '{"a":3,', '{"b":3}'],
    ),
    (  # a name that no value may have
        closed(properties={"a": INTEGER, "b": TEXT}, patternProperties={"^a$": False}),
        ["{}", '{"b":""}'],
        ['{"a":3}', '{"b":"",'],
    ),
    (  # objects that name properties of their own: neither closes what the other opens
        {
            "type": "object",
            "properties": {"ab": {"properties": {"x": INTEGER}, "required": ["x"]}},
            "patternProperties": {"^a": {"properties": {"y": TEXT}, "required": ["y"]}},
        },
        ['{"ab":{"x":1,"y":"z"}}'],
        ['{"ab":{"x":1}}', '{"ab":{"y":"z"}}', '{"ab":{"x":1,"y":"z","z":1}}'],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_every_schema_of_a_name_applies(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert read(schema).notes == () and read(read(schema).schema).schema == read(schema).schema
    grammar = lark_of_schema(json.dumps(schema))
    check(grammar, right, wrong)
    for text in wrong:
        if text.endswith(","):  # which would begin a name that cannot come
            matcher = compiler().compile(grammar)
            assert matcher.consume(tokens_of(text[:-1])) and not matcher.possible(tokens_of(","))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("^a", "b$"), "/^a/ and /b$/"),
        (("[0-9]", "^x-"), "/[0-9]/ and /^x-/"),
        (("", "^a.*"), "// and /^a.*/"),
    ],
)
def test_patterns_that_overlap_are_refused_by_name(patterns: tuple[str, ...], message: str) -> None:
    schemas = dict(zip(patterns, (INTEGER, TEXT), strict=True))
    for schema in (closed(patternProperties=schemas), {"items": {"patternProperties": schemas}}):
        with pytest.raises(GrammarError) as caught:
            compiler().compile(lark_of_schema(json.dumps(schema)))
        assert f"the patternProperties {message} match some of the same names" in str(caught.value)
    both = {"allOf": [closed(patternProperties={name: schemas[name]}) for name in patterns]}
    with pytest.raises(GrammarError, match="match some of the same names"):
        compiler().compile(lark_of_schema(json.dumps(both)))


NAMES = ["", "a", "ab", "abc", "b", "x", "ax"]
VALUES: list[Any] = [1, 5, "a", "abc", None, {"a": 1}, {"b": "c"}, [1]]
schemas = st.sampled_from(
    [INTEGER, TEXT, {"minimum": 3}, {"maxLength": 2}, {"enum": [1, "a"]}, {"const": 5}, True, False,
     {"type": ["integer", "null"]}, {"type": "object", "properties": {"a": INTEGER}},
     {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}, {"type": "array", "items": INTEGER}]
)  # fmt: skip
name_patterns = st.sampled_from(
    ["^a", "b$", "x", "^abc$", "^(a|ab)$", "^[ab]$", "^x?$", "^$", "^c", "^[^abx]", "^[b-c]"]
)
objects = st.builds(
    lambda rest, **more: {
        "type": "object",
        **more,
        **({} if rest is None else {"additionalProperties": rest}),
    },
    rest=st.sampled_from([None, True, False, INTEGER, TEXT]),
    properties=st.dictionaries(st.sampled_from(NAMES), schemas, max_size=3),
    patternProperties=st.dictionaries(name_patterns, schemas, min_size=1, max_size=2),
    required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
)
overlapping = st.one_of(
    objects, st.lists(objects, min_size=2, max_size=2).map(lambda each: {"allOf": each}),
    st.lists(objects, min_size=2, max_size=2).map(lambda each: {"anyOf": each}),
)  # fmt: skip


@given(schema=overlapping, closing=st.booleans(), seed=st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_names_and_patterns_against_another_validator(schema: Any, closing: bool, seed: int) -> None:
    """Every answer is valid, no answer comes to a dead end, and what is valid is allowed in some order. Or
    the schema is refused at once: where nothing is valid, or where patterns overlap."""
    valid = pytest.importorskip("jsonschema_rs").validator_for(schema).is_valid
    draw = random.Random(seed)
    drawn = [{name: draw.choice(VALUES) for name in draw.sample(NAMES, n)} for n in (0, 1, 1, 1, 2, 2, 2, 3)]
    instances = [each for each in drawn if valid(each)]
    try:
        found = read(schema, open=not closing)
        grammar = lark_of_schema(json.dumps(found.schema))
        compiler().compile(grammar)
    except GrammarError as error:
        assert "match some of the same names" in str(error) or not instances, error
        return
    assume(not found.notes)
    for _ in range(3):
        text = random_answer(grammar, draw, 80)
        assert text is None or valid(json.loads(text)), text
    for value in instances if not closing else ():
        assert any(accepts(grammar, dict(order)) for order in itertools.permutations(value.items())), value


def accepts(grammar: str, value: Any) -> bool:
    """As ``matches``, without a mask for each byte."""
    matcher = compiler().compile(grammar)
    return matcher.consume(tokens_of(json.dumps(value))) and matcher.complete()
