"""Reads the grammar of an answer: OpenAI's ``response_format``, llama.cpp's fields, a regular expression."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hotcold.engine.request import Grammar, Job
from hotcold.grammar.constraint import schema_grammar
from hotcold.grammar.error import GrammarError
from hotcold.server.protocol.errors import APIError, from_job
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Anything,
    Either,
    Field,
    Fields,
    Flag,
    Neutral,
    Schema,
    Shape,
    Tagged,
    Text,
)
from hotcold.server.protocol.limits import MAX_GRAMMAR


class AnySchema:
    """A JSON Schema: an object, or ``true`` for anything."""

    def read(self, value: Any, param: str) -> Any:
        return Either({dict: Anything(), bool: Flag()}, "a JSON Schema, an object,").read(value, param)

    def schema(self) -> Schema:
        return {"type": ["object", "boolean"]}


_NAMED = Shape(
    {
        "name": Field(Text(0, 256)),
        "description": Field(Text()),
        "schema": Field(AnySchema()),
        "strict": Field(Flag(), note="A schema that cannot be enforced is an error."),
    }
)
_FORMAT = Tagged(
    "type",
    {
        "text": Shape({}),
        "json_object": Shape({"schema": Field(AnySchema(), note="As in llama.cpp.")}),
        "json_schema": Shape(
            {
                "json_schema": Field(_NAMED),
                "schema": Field(AnySchema(), note="Another place for the schema, as in llama.cpp."),
            }
        ),
    },
)

FIELDS: Fields = {
    "response_format": Field(_FORMAT, note="Text, any JSON object, or JSON that matches a schema."),
    "json_schema": Field(AnySchema(), note="A schema for the whole answer, as in llama.cpp."),
    "grammar": Field(Text(0, MAX_GRAMMAR), note="A grammar in llama.cpp's GBNF for the whole answer."),
    "regex": Field(Text(0, MAX_GRAMMAR), note="A regular expression for the whole answer."),
}  # fmt: skip

#: Other programs' names for these fields.
UNSUPPORTED: Fields = {
    name: Field(Neutral(), note="Use response_format, grammar or regex.")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
} | {"grammar_lazy": Field(Neutral((False,))), "grammar_triggers": Field(Neutral(([],)))}


def grammar(values: Mapping[str, Any], facts: Facts) -> Grammar | None:
    """Makes a grammar of :data:`FIELDS`. Raises APIError for an invalid schema, or if fields disagree."""
    format, schema = values["response_format"], values["json_schema"]
    if format is not None and format["type"] == "text":
        format = None
    if format is not None and schema is not None:  # clients of llama.cpp send both for one schema
        format_schema = _schema(format)
        if schema in _ANYTHING or _sorted(format_schema) == _sorted(schema):
            schema = None
        elif format_schema is None or format_schema in _ANYTHING:
            format = None
    grammars: dict[str, Grammar] = {}
    if format is not None:
        grammars["response_format"] = _of_format(format, facts)
    if schema is not None:
        grammars["json_schema"] = _of_schema(schema, "json_schema", facts)
    if values["grammar"]:
        grammars["grammar"] = Grammar("gbnf", values["grammar"])
    if values["regex"]:
        grammars["regex"] = Grammar("regex", values["regex"])
    if len(grammars) > 1:
        names = " and ".join(grammars)
        raise APIError(
            f"{names} are both given: give one of them", param=[*grammars][1], code="invalid_value"
        )
    return next((replace(each, param=name) for name, each in grammars.items()), None)


def grammar_param(jobs: Sequence[Job]) -> str | None:
    """Returns the field of a request that had its grammar."""
    return next((job.grammar.param for job in jobs if job.grammar is not None), None)


_ANYTHING: tuple[object, ...] = ({}, True)  # schemas without constraints


def _sorted(schema: object) -> str:
    return json.dumps(schema, sort_keys=True)


def _schema(format: Mapping[str, Any]) -> Any:
    """Returns the schema of a ``response_format``; None: any object."""
    if format["type"] == "json_object":
        return None if format["schema"] in _ANYTHING else format["schema"]
    named = (format["json_schema"] or {}).get("schema")
    schema = format["schema"] if named is None else named
    if schema is None:
        raise APIError(
            "response_format.json_schema.schema is missing: it is required",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return schema


def _of_format(format: Mapping[str, Any], facts: Facts) -> Grammar:
    schema = _schema(format)
    if schema is None:
        return Grammar("json_object")
    strict = bool((format.get("json_schema") or {}).get("strict"))
    return _of_schema(schema, "response_format", facts, strict=strict)


def _of_schema(schema: object, param: str, facts: Facts, *, strict: bool = False) -> Grammar:
    try:
        grammar = schema_grammar(schema, strict=strict, open=facts.open_schemas)
    except GrammarError as error:
        raise from_job(error, grammar=param) from None
    return replace(grammar, notes=tuple(f"{param}: {note}" for note in grammar.notes))
