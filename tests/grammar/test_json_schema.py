"""Schemas as grammars: random answers against jsonschema-rs, what is refused, and limits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabulary_of_bytes import check, matches, random_answer

from hotcold.grammar import json_schema, schema_rewriting
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import lark_of_schema, read, schemas_in_lark
from hotcold.grammar.schema_keywords import FORMATS, MOST_ENUM


def lark(schema: object) -> str:
    return lark_of_schema(json.dumps(schema))


def answer(schema: object, draw: random.Random) -> str | None:
    """A random answer that the grammar of a schema allows; None where it found no end."""
    return random_answer(lark(schema), draw)


def sized(*names: str) -> st.SearchStrategy[dict[str, int]]:
    """Two of them in order, or one, or none."""
    least, most = names
    return st.tuples(st.integers(0, 3), st.integers(0, 3)).flatmap(
        lambda two: st.sampled_from(
            [{}, {least: two[0]}, {most: two[1] + 1}, {least: two[0], most: sum(two)}]
        )
    )


names = st.sampled_from(["a", "b", "ä ö", 'q"\\', "long name"])
scalars = st.sampled_from([None, True, 0, -7, 1.5, "", "x", 'é"\n', [1, {"k": None}], {"z": [], "é": "y"}])
strings = st.builds(
    lambda size, more: {"type": "string", **size, **more},
    sized("minLength", "maxLength"),
    st.sampled_from([{}, {}, {"pattern": "^[a-c]+$"}, {"pattern": "\\d"}]),
).filter(lambda schema: schema.get("maxLength", 9) > 0 or "pattern" not in schema)
numbers = st.sampled_from(
    [
        {"type": "integer"}, {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "number", "minimum": 0.5},
        {"type": "number", "exclusiveMaximum": 3}, {"type": "integer", "multipleOf": 3},
        {"type": "number", "multipleOf": 0.25, "maximum": 100}, {"type": ["integer", "null"]},
    ]
)  # fmt: skip
others = st.sampled_from(
    [{}, True, {"type": "boolean"}, {"type": "null"}, {"const": "c"}, {"const": {"a": [1, 2]}}]
)
formats = st.sampled_from([{"type": "string", "format": name} for name in FORMATS])
enums = st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values})


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda size, items, prefix: {"type": "array", "items": items, **size, **prefix},
        sized("minItems", "maxItems"),
        items,
        st.one_of(
            st.just({}), st.lists(items, min_size=1, max_size=2).map(lambda each: {"prefixItems": each})
        ),
    )


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: list[bool], rest: Any, draw: bool) -> dict[str, Any]:
        wanted = [name for name, want in zip(properties, required, strict=False) if want]
        schema = {
            "type": "object",
            "properties": properties,
            "required": wanted,
            "additionalProperties": rest,
        }
        return schema if draw else dict(reversed(schema.items()))

    rest = st.one_of(st.just(False), st.just(False), values)
    return st.builds(
        build,
        st.dictionaries(names, values, max_size=3),
        st.lists(st.booleans(), min_size=3),
        rest,
        st.booleans(),
    )


schemas = st.recursive(
    st.one_of(strings, numbers, others, enums, formats),
    lambda inner: st.one_of(
        arrays(inner),
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=6,
)


@given(schema=schemas, seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_every_answer_is_valid_by_another_validator(schema: Any, seed: int) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(schema, validate_formats=True)
    draw = random.Random(seed)
    for _ in range(3):
        text = answer(schema, draw)
        if text is not None:
            value = json.loads(text, parse_constant=pytest.fail)
            validator.validate(value)


FIXED: list[Any] = [
    {"$ref": "#/$defs/tree", "$defs": {"tree": {
        "type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {
            "$ref": "#/$defs/tree"}}}, "required": ["v"], "additionalProperties": False}}},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
     "required": ["next"]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
               {"type": "object", "properties": {"k": {"const": "b"}, "n": {"type": "integer"}},
                "required": ["k"]}]},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": {}}, "required": ["z", "a"]},
    {"minimum": 5}, {"minLength": 2}, {"required": ["a"]}, {"minItems": 1, "maxItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 2,
     "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
     "exclusiveMinimum": True},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", FIXED, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_to_schemas_of_each_feature_are_valid(schema: Any) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(schema)
    draw = random.Random(1)
    found = [text for _ in range(15) if (text := answer(schema, draw)) is not None]
    assert len(found) > 3
    for text in found:
        validator.validate(json.loads(text))


def test_properties_come_in_the_order_of_the_schema_and_spaces_are_few() -> None:
    properties = {name: {"type": "integer"} for name in ("b", "a", "c")}
    grammar = lark({"type": "object", "properties": properties, "required": ["c", "b"]})
    right = [
        '{"b":1,"c":2}',
        '{"b": 1, "a": 5, "c": 2}',
        '{\n  "b": 1,\n  "c": 2\n}',
        '{\r\n\t"b": 1, "c": 2}',
        '{\n            "b": 1,\n\t\t\t"c": 2\n}',
    ]
    wrong = [
        '{"c":2,"b":1}',
        '{"b":1}',
        '{"b":  1,"c":2}',
        ' {"b":1,"c":2}',
        '{"b":1,"c":2} ',
        '{\n\n"b":1,"c":2}',
        '{\n "b":1,"c":2}',
        '{\n              "b":1,"c":2}',
        '{\n \t"b":1,"c":2}',
        '{\t"b":1,"c":2}',
        '{"b": \n1,"c":2}',
    ]
    check(grammar, right, wrong)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"uniqueItems": "yes"}, "uniqueItems at the top is 'yes': true or false is needed"),
        ({"format": 5}, "format at the top is 5: a text is needed"),
        ({"$ref": "https://example.com/schema"}, "only references within the schema"),
        ({"$ref": "other.json#/a"}, "only references within the schema"),
        ({"$ref": "#/$defs/nothing"}, "does not exist in the schema"),
        ({"$ref": "#name"}, "'#name' does not exist in the schema"),
        ({"$ref": 5}, r"\$ref at the top is 5: a text is needed"),
        ({"$ref": "#/$defs/a/b", "$defs": {"a/b": {}}}, "does not exist in the schema"),
        ({"type": "text"}, "type at the top is 'text': allowed are null"),
        ({"type": []}, "type at the top"),
        ({"properties": {"a b": {"items": [{"type": 5}]}}}, r"type at properties\['a b'\].items\[0\] is 5"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{}, {"type": ""}]}}}, r"at \$defs\.a\.anyOf\[1\]"),
        ({"enum": []}, "a list of values is needed"),
        ({"enum": [str(i) for i in range(MOST_ENUM + 1)]}, "a list of values is needed, at most 4096"),
        ({"minimum": "1"}, "a number is needed"),
        ({"minLength": -1}, "minLength at the top is -1: a whole number from 0"),
        ({"maxLength": 1.5}, "a whole number from 0"),
        ({"minItems": 10**9}, "a whole number from 0 to 100000"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"required": "a"}, "a list of names"),
        ({"oneOf": [{"$ref": "#/x/a"}, {}], "x": {"a": {"enum": 5}}}, r"enum at x\.a is 5: a list of values"),
        ({"properties": []}, "an object of schemas"),
        ({"anyOf": []}, "a list of schemas"),
        ({"items": 5}, "items is 5: a schema is an object, true or false"),
        ({"pattern": ["a"]}, "pattern at the top is .*: a text is needed"),
        (False, "nothing finite matches the schema: it is false"),
        (5, "a schema is an object"),
        ({"$ref": "#"}, "nothing finite matches"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "nothing finite"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "nothing finite"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "finite"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_schemas_that_are_wrong_are_refused_in_one_line(schema: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        lark(schema)
    assert "\n" not in str(caught.value) and caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("NaN", "NaN is not a number of JSON"),
        ('{"minimum": Infinity}', "Infinity is not a number of JSON"),
        ("[" * 60_000, "too deep"),
        ('{"items":' * 1000 + "{}" + "}" * 1000, "nested too deeply: 64 levels"),
        ('{"items":' * 40 + "{}" + "}" * 40, "nested too deeply: 32 levels are allowed"),
        ('{"description": "' + "x" * 70_000 + '"}', "bytes: allowed are 65536"),
        ("1" * 5000, "not JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_texts_that_are_no_schema_are_refused(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lark_of_schema(text)


def test_each_schema_is_looked_at_once_however_many_refer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a check must not double with each definition: these would take 2^14 looks, or 9!."""
    doubled: Any = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(14)}
    doubled["d14"] = {"anyOf": [False]}
    mutual: Any = {
        f"d{i}": {
            "anyOf": [
                {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{j}"}}, "required": ["x"]}
                for j in range(9)
                if j != i
            ]
        }
        for i in range(9)
    }
    found = json_schema._target
    references: list[str] = []
    monkeypatch.setattr(json_schema, "_target", lambda *each: references.append(each[1]) or found(*each))
    looked = schema_rewriting._Rewriting._schema
    looks: list[str] = []
    monkeypatch.setattr(
        schema_rewriting._Rewriting, "_schema", lambda *each: looks.append(each[2].path) or looked(*each)
    )
    for definitions in (doubled, mutual):
        schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
        references.clear()
        looks.clear()
        with pytest.raises(GrammarError, match="nothing finite matches"):
            read(schema)
        assert 0 < len(references) <= 2 * json.dumps(schema).count("$ref")
        assert 0 < len(looks) <= 3 * json.dumps(schema).count("{")


@pytest.mark.parametrize(("last", "ends"), [({"type": "string"}, True), ({"$ref": "#/$defs/d0"}, False)])
def test_a_long_chain_of_references(last: Any, ends: bool) -> None:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)} | {"d1500": last}
    schema = {"$defs": definitions, "$ref": "#/$defs/d0"}
    if ends:
        assert read(schema).schema == schema
    else:
        with pytest.raises(GrammarError, match="nothing finite matches"):
            read(schema)


def test_references_of_what_is_referred_to_are_checked_too() -> None:
    hidden = {"a": {"$ref": "#/x-more/b"}, "b": {"type": "text"}}
    with pytest.raises(GrammarError, match=r"type at x-more\.b is 'text'"):
        read({"x-more": hidden, "$ref": "#/x-more/a"})


def test_what_is_for_readers_is_left_out() -> None:
    annotations = {
        "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True,
        "readOnly": True, "writeOnly": False, "x-order": 3, "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/it", "contentEncoding": "base64", "unevaluatedProperties": True,
    }  # fmt: skip
    assert read({"type": "string", **annotations}).schema == {"type": "string"}
    # Where such a word is the name of a property it is one.
    named = {"type": "object", "properties": {"title": {"type": "string", "title": "T"}}}
    assert read(named).schema == {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "additionalProperties": False,
    }


def test_schemas_within_a_grammar_are_checked_too() -> None:
    grammar = schemas_in_lark(
        'start: "x" a | %json {"type": "integer", "title": "n"}\na: %json {"const": "}"} "y"',
        notes := [],
    )
    assert "title" not in grammar
    assert matches(grammar, "42") and matches(grammar, 'x"}"y') and not matches(grammar, "x")
    assert notes == []
    assert "lenient" not in schemas_in_lark(
        'start: %json {"x-guidance": {"lenient": true}, "not": {}}', notes
    )
    assert notes == ["not at the top"]
    for text in ('start: %json {"type": "text"}', "start: %json x"):
        with pytest.raises(GrammarError):
            schemas_in_lark(text)
