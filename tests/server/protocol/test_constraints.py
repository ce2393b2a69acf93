"""The grammar that a request asks for: in several fields at once, and by each of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_pieces import facts

from hotcold.engine.request import Grammar
from hotcold.server.protocol import chat, completion, native
from hotcold.server.protocol.errors import APIError

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "array", "items": {"type": "integer"}}
REORDERED = dict(reversed(OBJECT.items()))
ANY_OBJECT: dict[str, Any] = {"type": "json_object"}


def in_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def grammars(**fields: Any) -> list[Grammar]:
    """The grammar by each route that takes these fields."""
    calls = [
        chat.parse({"messages": [{"role": "user", "content": "Hi"}], **fields}, facts()),
        completion.parse({"prompt": "Hi", **fields}, facts()),
        native.parse({"prompt": "Hi", **fields}, facts()),
    ]
    found = [call.job.grammar for call in calls]
    assert found[0] == found[1] == found[2] and found[0] is not None
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("fields", "schema", "param"),
    [
        ({"response_format": ANY_OBJECT, "json_schema": OBJECT}, OBJECT, "json_schema"),
        ({"response_format": ANY_OBJECT, "json_schema": OTHER}, OTHER, "json_schema"),
        ({"response_format": ANY_OBJECT, "json_schema": OBJECT, "grammar": ""}, OBJECT, "json_schema"),
        ({"response_format": {"type": "text"}, "json_schema": OBJECT}, OBJECT, "json_schema"),
        ({"response_format": None, "json_schema": OBJECT, "regex": ""}, OBJECT, "json_schema"),
        ({"response_format": ANY_OBJECT, "json_schema": None}, None, "response_format"),
        ({"response_format": ANY_OBJECT, "json_schema": {}}, None, "response_format"),
        ({"response_format": ANY_OBJECT, "json_schema": True}, None, "response_format"),
        ({"response_format": in_format({}), "json_schema": OBJECT}, OBJECT, "json_schema"),
        ({"response_format": in_format(OBJECT), "json_schema": {}}, OBJECT, "response_format"),
        ({"response_format": {**ANY_OBJECT, "schema": {}}}, None, "response_format"),
        ({"response_format": {**ANY_OBJECT, "schema": {}}, "json_schema": OBJECT}, OBJECT, "json_schema"),
        ({"response_format": {**ANY_OBJECT, "schema": OBJECT}, "json_schema": OBJECT}, OBJECT,
         "response_format"),
        ({"response_format": in_format(OBJECT), "json_schema": OBJECT}, OBJECT, "response_format"),
        ({"response_format": in_format(OBJECT), "json_schema": REORDERED}, OBJECT, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": OBJECT}, "json_schema": OBJECT}, OBJECT,
         "response_format"),
    ],
)  # fmt: skip
def test_fields_that_agree_are_one_wish(fields: dict[str, Any], schema: Any, param: str) -> None:
    for found in grammars(**fields):
        assert found.param == param
        if schema is None:
            assert found == Grammar("json_object")
        else:
            assert found == grammars(json_schema=schema)[0]
            assert json.loads(found.source)["type"] == schema["type"]


def test_a_strict_format_stays_strict_beside_the_same_schema() -> None:
    loose = {"type": "array", "uniqueItems": True}
    assert grammars(response_format=in_format(loose), json_schema=loose)[0].notes
    with pytest.raises(APIError, match="uniqueItems at the top cannot be enforced"):
        grammars(response_format=in_format(loose, strict=True), json_schema=loose)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"response_format": in_format(OBJECT), "json_schema": OTHER}, ["response_format", "json_schema"]),
        ({"response_format": in_format({"const": 1}), "json_schema": {"const": True}},
         ["response_format", "json_schema"]),
        ({"response_format": {**ANY_OBJECT, "schema": OBJECT}, "json_schema": OTHER},
         ["response_format", "json_schema"]),
        ({"response_format": ANY_OBJECT, "grammar": 'root ::= "a"'}, ["response_format", "grammar"]),
        ({"json_schema": OBJECT, "grammar": 'root ::= "a"'}, ["json_schema", "grammar"]),
        ({"json_schema": OBJECT, "regex": "a"}, ["json_schema", "regex"]),
        ({"response_format": ANY_OBJECT, "json_schema": OBJECT, "regex": "a"}, ["json_schema", "regex"]),
    ],
)  # fmt: skip
def test_fields_that_differ_are_refused_by_name(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(APIError) as caught:
        grammars(**fields)
    assert caught.value.message == f"{' and '.join(names)} are both given: give one of them"
    assert (caught.value.param, caught.value.code) == (names[1], "invalid_value")
