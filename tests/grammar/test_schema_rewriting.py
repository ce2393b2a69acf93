"""Schemas are rewritten before they are compiled: closing, references, patterns, and what is left out."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.vocabulary_of_bytes import check, compiler, matches, random_answer, tokens_of

from hotcold.grammar.compiler import Matcher
from hotcold.grammar.constraint import schema_grammar
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import lark_of_schema, read
from hotcold.grammar.schema_keywords import compiled_pattern
from hotcold.grammar.schema_overlap import exclude_each_other
from hotcold.grammar.schema_rewriting import rewritten


def lark(schema: object) -> str:
    return lark_of_schema(json.dumps(schema))


def validates(schema: object, value: object) -> bool:
    found: bool = pytest.importorskip("jsonschema_rs").validator_for(schema).is_valid(value)
    return found


# --- what cannot be enforced --------------------------------------------------------------------------

LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    ({"contains": {"type": "string"}}, "contains"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"propertyNames": {"minLength": 2}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"unevaluatedProperties": {"type": "string"}}, "unevaluatedProperties"),
    ({"pattern": "(?<!a)b"}, "pattern"),
    ({"pattern": r"(a)\1"}, "pattern"),
    ({"pattern": r"\bx"}, "pattern"),
    ({"const": 2**60}, "const"),
    ({"enum": ["a", "b\x01"]}, "enum"),
    ({"multipleOf": 1e-9}, "multipleOf"),
    ({"type": "number", "maximum": 1e19}, "maximum"),
    ({"type": "integer", "minimum": 1e30}, "minimum"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
]


@pytest.mark.parametrize(("schema", "keyword"), LEFT_OUT, ids=lambda value: json.dumps(value)[:50])
def test_a_constraint_that_cannot_be_enforced_is_left_out_and_named(
    schema: dict[str, Any], keyword: str
) -> None:
    places: list[tuple[dict[str, Any], str]] = [
        (schema, "the top"),
        ({"properties": {"p": {"items": schema}}}, "properties.p.items"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d e"}], "$defs": {"d e": schema}}, "$defs['d e']"),
    ]
    for whole, place in places:
        assert read(whole).notes == (f"{keyword} at {place}",)
        assert matches(lark(whole), "null") or "properties" in whole or place == "the top"
        with pytest.raises(GrammarError) as caught:
            read(whole, strict=True)
        assert str(caught.value).startswith(f"{keyword} at {place} cannot be enforced: remove it, or")


ASKS_NOTHING: list[Any] = [
    {"title": "t", "nullable": True, "discriminator": {"propertyName": "x"}, "enumDescriptions": ["a"]},
    {"format": "uint32", "maxLenght": 3, "x-order": 1, "$schema": "https://example.com/mine", "$id": "urn:a"},
    {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True, "dependentRequired": {}},
    {"uniqueItems": True, "maxItems": 1},
    {"propertyNames": {"type": "string", "title": "Key"}},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}, "minContains": 2, "additionalItems": False},
    {"type": "string", "maxLength": 2147483647, "format": "password"},
    {"type": "number", "maximum": 1.7976931348623157e308},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1, "maxProperties": 9},
]


@pytest.mark.parametrize("schema", ASKS_NOTHING, ids=lambda value: json.dumps(value)[:50])
def test_annotations_and_what_asks_for_nothing_are_no_note(schema: Any) -> None:
    assert read(schema, strict=True).notes == ()
    lark(schema)


def test_numbers_of_64_bits() -> None:
    unsigned = lark({"type": "integer", "minimum": 0, "maximum": 2**64 - 1})
    assert matches(unsigned, str(2**63 - 1)) and not matches(unsigned, "-1")
    plain = lark({"type": ["integer", "null"]})
    assert matches(plain, "-9007199254740993") and matches(plain, "null")
    assert not matches(plain, "1" * 20)  # a model could go on with digits
    assert matches(lark({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}), "4")
    assert not matches(lark({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}), "3")


def test_nullable_adds_null_to_the_type() -> None:
    grammar = lark({"properties": {"n": {"type": "string", "nullable": True}}})
    assert matches(grammar, '{"n": null}') and matches(grammar, '{"n": "x"}')
    assert not matches(lark({"type": "string", "nullable": False}), "null")


# --- references ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "rest"),
    [
        ("#/$defs/Foo%5Bint%5D", {"$defs": {"Foo[int]": {"type": "integer"}}}),
        ("#/$defs/a~1b~0c", {"$defs": {"a/b~c": {"type": "integer"}}}),
        ("#/$defs/%C3%A4%20b", {"$defs": {"ä b": {"type": "integer"}}}),
        ("#/definitions/a/anyOf/1", {"definitions": {"a": {"anyOf": [{}, {"type": "integer"}]}}}),
        ("#name", {"$defs": {"x": {"$anchor": "name", "type": "integer"}}}),
        ("https://x.org/it#/$defs/x", {"$id": "https://x.org/it", "$defs": {"x": {"type": "integer"}}}),
        ("#/components/schemas/x", {"components": {"schemas": {"x": {"type": "integer"}}}}),
    ],
)  # fmt: skip
def test_references_of_all_forms(reference: str, rest: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"$ref": reference}, **rest}
    for value in ([1], ["x"], []):
        assert matches(lark(schema), json.dumps(value)) == validates(schema, value)


def test_a_definition_has_one_name_however_often_it_is_referred_to() -> None:
    schema = {"items": {"$ref": "#/$defs/a"}, "prefixItems": [{"$ref": "#/$defs/a"}, {"$ref": "#/x/a"}],
              "$defs": {"a": {"type": "string"}}, "x": {"a": {"type": "null"}}}  # fmt: skip
    found = read(schema).schema
    assert found["$defs"] == {"a": {"type": "string"}, "a-2": {"type": "null"}}


# --- names of properties ------------------------------------------------------------------------------

NAMED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": True},
    {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": {"type": "string"},
     "required": ["age"]},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {}},
    {"type": "object", "properties": {"q\"\\\n/": {"type": "integer"}}, "additionalProperties": {}},
]  # fmt: skip


@pytest.mark.parametrize("schema", NAMED, ids=lambda value: json.dumps(value)[:60])
def test_no_spelling_of_a_name_passes_for_another_one(schema: dict[str, Any]) -> None:
    """Every way to write one character of a name, before and after the name as it is, by brute force."""
    grammar = lark(schema)
    name = next(iter(schema.get("properties", {"age": 0})))
    plain = json.dumps(name)
    spellings = {plain}
    for i, char in enumerate(name):
        head, tail = json.dumps(name[:i])[:-1], json.dumps(name[i + 1 :])[1:]
        for written in (f"\\u{ord(char):04x}", f"\\u{ord(char):04X}", f"\\{char}", char):
            spellings.add(head + written + tail)
    accepted = 0
    for spelling, value in itertools.product(spellings, ("1", '"x"')):
        for text in (f"{{{spelling}: {value}}}", f"{{{plain}: 1, {spelling}: {value}}}"):
            if matches(grammar, text):
                accepted += 1
                pairs = json.loads(text, object_pairs_hook=list)
                assert [key for key, _ in pairs].count(name) < 2 or "properties" not in schema
                assert validates(schema, dict(pairs)), text
    assert accepted


@given(schema=st.sampled_from(NAMED), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_name_that_is_given_comes_once(schema: dict[str, Any], seed: int) -> None:
    text = random_answer(lark(schema), random.Random(seed))
    assume(text is not None)
    pairs = json.loads(str(text), object_pairs_hook=list)
    assert all([key for key, _ in pairs].count(name) < 2 for name in schema.get("properties", ()))
    assert validates(schema, json.loads(str(text)))


def test_names_that_are_listed_or_match_a_pattern() -> None:
    listed = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a"],
              "additionalProperties": {"type": "integer"}}  # fmt: skip
    pattern = {"type": "object", "propertyNames": {"pattern": "^[a-b]$"}}
    for schema in (listed, pattern):
        assert read(schema).notes == ()
        for value in ({"a": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": 1, "c": 1}, {"A": 1}):
            assert matches(lark(schema), json.dumps(value)) == validates(schema, value)


# --- closing ------------------------------------------------------------------------------------------

CLOSED: list[tuple[Any, list[str], list[str]]] = [
    ({"properties": {"a": {}}}, ["{}", '{"a": 1}', "5"], ['{"b": 1}', '{"a": 1, "b": 1}']),
    ({"type": "object", "properties": {}}, ["{}"], ['{"b": 1}']),
    ({"type": "object"}, ["{}", '{"b": 1}'], []),
    ({"properties": {"a": {}}, "additionalProperties": True}, ['{"a": 1, "b": 1}', '{"b": 1}'], []),
    ({"properties": {"a": {}}, "unevaluatedProperties": True}, ['{"a": 1, "b": 1}'], []),
    ({"properties": {"a": {}}, "required": ["b"]}, ['{"b": 1}', '{"a": 1, "b": 1}'], ['{"c": 1}', "{}"]),
    ({"patternProperties": {"^x": {}}}, ['{"x1": 1}'], ['{"y": 1}']),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ['{"a": 1, "b": 1}'], ['{"c": 1}']),
    ({"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}, "required": ["b"]}],
      "$defs": {"A": {"properties": {"a": {}}, "required": ["a"]}}},
     ['{"a": 1, "b": 1}'], ['{"a": 1, "b": 1, "c": 1}']),
    ({"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": {"properties": {"a": {}}}}},
     ['{"a": 1, "b": 1}'], ['{"c": 1}']),
    ({"properties": {"k": {}}, "anyOf": [{"properties": {"a": {}}, "required": ["a"]},
                                         {"properties": {"b": {}}, "required": ["b"]}]},
     ['{"k": 1, "a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', '{"k": 1}', '{"a": 1, "c": 1}']),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "additionalProperties": True}]},
     ['{"a": 1, "b": 1, "c": 1}'], []),
    ({"properties": {"a": {"const": 1}}, "if": {"required": ["a"]}, "then": {"properties": {"b": {}}}},
     ['{"a": 1, "b": 1}'], ['{"c": 1}']),
    ({"properties": {"next": {"$ref": "#"}}}, ['{"next": {"next": {}}}'], ['{"next": {"x": 1}}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), CLOSED, ids=lambda value: json.dumps(value)[:60])
def test_an_object_that_names_its_properties_has_no_others(
    schema: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = lark(schema)
    check(grammar, right, wrong)
    standard = lark(schema_of_text(schema_grammar(schema, open=True).source))
    for text in right + wrong:  # the letter of the standard, on request
        value = json.loads(text)
        if "if" not in schema and "anyOf" not in schema:
            assert matches(standard, text) == validates(schema, value), text


def schema_of_text(text: str) -> Any:
    return json.loads(text)


def test_what_is_closed_over_all_schemas_stays_so_by_the_letter_of_the_standard() -> None:
    schema = {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False}
    grammar = lark(schema_of_text(schema_grammar(schema, open=True).source))
    for value in ({"a": 1}, {"b": 1}, {"c": 1}):
        assert matches(grammar, json.dumps(value)) == validates(schema, value)


one_or_any = st.sampled_from([True, {"const": 1}])
parts = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(
            st.sampled_from("abc"), st.sampled_from([True, {"const": 1}]), max_size=2
        ),
        "required": st.lists(st.sampled_from("abc"), max_size=1),
        "additionalProperties": st.sampled_from([True, False]),
        "type": st.just("object"),
        "$ref": st.sampled_from(["#/$defs/A", "#/$defs/B"]),
    },
)
composed = st.recursive(
    parts,
    lambda inner: st.builds(
        lambda own, more: {**own, **more},
        parts,
        st.dictionaries(
            st.sampled_from(["allOf", "anyOf"]), st.lists(inner, min_size=1, max_size=2), max_size=2
        ),
    ),
    max_leaves=5,
)


def accepts(start: Matcher, text: str) -> bool:
    """As ``matches``, without a mask for each byte."""
    matcher = start.copy()
    return matcher.consume(tokens_of(text)) and matcher.complete()


@given(schema=composed, first=parts, second=parts)
@settings(max_examples=100, deadline=None)
def test_closing_makes_nothing_impossible_and_nothing_wrong_possible(
    schema: dict[str, Any], first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Against another validator, of all small objects: what is allowed is valid, and something is allowed
    where something is valid."""
    second.pop("$ref", None)
    whole = {**schema, "$defs": {"A": {**first, "$ref": "#/$defs/B"}, "B": second}}
    values = [
        {name: value for name, value in zip("abc", row, strict=True) if value is not None}
        for row in itertools.product((None, 0, 1), repeat=3)
    ]
    valid = [value for value in values if validates(whole, value)]
    assert rewritten(rewritten(whole).schema).schema == rewritten(whole).schema
    try:
        start = compiler().compile(lark(whole))
        orders = [dict(order) for value in values for order in itertools.permutations(value.items())]
        allowed = [value for value in orders if accepts(start, json.dumps(value))]
    except GrammarError:
        allowed = []
    assert [value for value in allowed if value not in valid] == []
    assert bool(allowed) == bool(valid)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_rewriting_twice_changes_nothing_more(seed: int) -> None:
    draw = random.Random(seed)
    chosen = [draw.choice([schema for schema, _ in LEFT_OUT] + ASKS_NOTHING + NAMED) for _ in range(4)]
    schema = {"properties": {"a": chosen[0]}, "items": {"anyOf": chosen[1:3]}, "$ref": "#/$defs/d",
              "$defs": {"d": {"allOf": [chosen[3]], "properties": {"z": {"$ref": "#"}}}}}  # fmt: skip
    once = rewritten(schema)
    again = rewritten(once.schema)
    assert again.schema == once.schema and again.notes == ()


# --- patterns, and options that exclude each other ----------------------------------------------------

PATTERNS = [
    r"^[[]$", r"^[+--]$", r"^[a&&b]+$", r"^[~~-]+$", r"^a{2}$", r"^a{2,}b{1,2}$", r"^\/a\-[\w-]+\.$",
    r"^(?<n>b)$", r"^(?:a|b)+$", r"^[^\]]$", r"^\$[a-]$", r"^\u00e9$", r"^[-a]+$", r"\d",
]  # fmt: skip
TEXTS = ["[", ",", "-", "+", "&", "a&b", "~", "{a}", "aa", "aab", "aaabbb", "/a-b.", "x", "b", "ab", "]",
         "$a", "$-", "é", "-a", "1", "<a>", "", "a"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_elsewhere(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    grammar = lark(schema)
    found = [text for text in TEXTS if matches(grammar, json.dumps(text, ensure_ascii=False))]
    assert found == [text for text in TEXTS if validates(schema, text)] and found
    again = compiled_pattern(str(compiled_pattern(pattern)))
    assert again == compiled_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"(?=a)", r"a(?!b)", r"(?<=a)b", r"(.)\1", r"\B", r"\k<n>", r"[]", r"[^]", r"\ud83d"]
)
def test_patterns_that_no_automaton_has(pattern: str) -> None:
    assert compiled_pattern(pattern) is None


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ([{"const": i} for i in range(300)], True),
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string"}, {"type": ["null", "integer"]}], True),
        ([{"type": "string"}, {}], False),
        (
            [{"type": "object", "properties": {"k": {"const": each}}, "required": ["k"]} for each in "ab"],
            True,
        ),
        ([{"type": "object", "properties": {"k": {"const": each}}} for each in "ab"], False),
        ([{"properties": {"k": {"const": each}}, "required": ["k"]} for each in "ab"], False),
        ([{"type": "object", "properties": {"k": {"type": each}}, "required": ["k"]}
          for each in ("null", "array")], True),
        ([{"enum": [True, "x"]}, {"const": 1}], True),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_options_that_exclude_each_other(options: list[Any], apart: bool) -> None:
    assert exclude_each_other(options, lambda schema: schema) is apart
    schema = {"oneOf": options}
    assert (read(schema).notes == ()) is apart


def test_a_schema_that_asks_for_very_many_looks_is_refused() -> None:
    members = [{"properties": {f"p{i}": {}}} for i in range(400)]
    with pytest.raises(GrammarError, match="too many schemas refer to each other"):
        read({"$defs": {f"d{i}": {"allOf": [*members[:100], {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(9)}
              | {"d9": {}}, "allOf": members + [{"$ref": "#/$defs/d0"}]})  # fmt: skip
