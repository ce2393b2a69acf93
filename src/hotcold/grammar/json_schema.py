"""JSON schemas as grammars: checks their size and that a finite value matches, and makes a term of Lark."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.grammar.finite import Needs, ends
from hotcold.grammar.schema_keywords import type_list
from hotcold.grammar.schema_rewriting import Rewritten, rewritten
from hotcold.values import shown

MOST_BYTES = 1 << 16
MOST_DEPTH = 64  #: of nested JSON values, including names of properties and constants

#: The white space of answers: a space, or a line break and a bounded indent, since unbounded white space
#: would let a model write nothing else. Escapes by code point are excluded: they would allow a second
#: spelling of a name.
WHITESPACE = r" |\r?\n((  ){0,6}|\t{0,3})"
_WRITTEN = {
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrbtf\\"',
}


def lark_of_schema(text: str, notes: list[str] | None = None) -> str:
    """The grammar of a schema in JSON; ``notes`` gets the parts that are not enforced. GrammarError: the
    schema is broken, or beyond the limits."""
    _check_bytes(len(text.encode(errors="replace")))
    schema, end = _parsed(text, 0)
    if text[end:].strip():
        raise GrammarError(f"the schema is not JSON: more follows at character {end}")
    return f"start: {_lark_term(schema, notes)}\n"


def schemas_in_lark(text: str, notes: list[str] | None = None) -> str:
    """A grammar in Lark with each schema rewritten as :func:`lark_of_schema` does."""
    parts = []
    while (at := text.find("%json")) >= 0:
        schema, end = _parsed(text, at + len("%json"))
        parts += [text[:at], _lark_term(schema, notes)]
        text = text[end:]
    return "".join([*parts, text])


def patterns_in_lark(text: str) -> Iterator[str]:
    """Yields a grammar for each string with a pattern in the schemas of a grammar."""
    end = 0
    while (at := text.find("%json", end)) >= 0:
        schema, end = _parsed(text, at + len("%json"))
        values = [schema]
        for value in values:  # the loop appends to it
            if isinstance(value, dict):
                if isinstance(value.get("pattern"), str):
                    kept = {key: value[key] for key in ("pattern", "minLength", "maxLength") if key in value}
                    yield f"start: {_json_term({'type': 'string', **kept})}\n"
                values += [each for key, each in value.items() if key not in ("enum", "const")]
            elif isinstance(value, list):
                values += value


def read(schema: object, *, strict: bool = False, open: bool = False) -> Rewritten:
    """The enforced schema, with notes on the parts that are not enforced; ``strict``: they are an error.
    ``open``: see :func:`~hotcold.grammar.schema_rewriting.rewritten`. GrammarError: see
    :func:`lark_of_schema`."""
    _check_depth(schema)
    _check_bytes(len(json.dumps(schema)))
    result = _read(schema, open)
    if strict and result.notes:
        raise GrammarError(told_of_strict(result.notes[0]))
    return result


def told_of_strict(note: str) -> str:
    """The error message for a part of a strict schema that cannot be enforced."""
    return f"{note} cannot be enforced: remove it, or remove strict (then it is not enforced)"


def _lark_term(schema: object, notes: list[str] | None) -> str:
    _check_depth(schema)
    result = _read(schema)
    if notes is not None:
        notes += result.notes
    return _json_term({} if result.schema is True else result.schema)


def _json_term(schema: dict[str, Any]) -> str:
    # The added key must be last: the compiler removes it by moving the last key to its place.
    return "%json " + json.dumps({**schema, "x-guidance": _WRITTEN})


def _read(schema: object, open: bool = False) -> Rewritten:
    result = rewritten(schema, open=open)
    if not ends(result.schema, partial(_needs, result.schema)):
        reason = "it is false, or a required value contains itself"
        raise GrammarError(f"nothing finite matches the schema: {reason}")
    return result


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise GrammarError(f"the schema has {size} bytes: allowed are {MOST_BYTES}")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        if not level:
            return
        inner: list[object] = []
        for part in level:
            inner += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        level = inner
    raise GrammarError(_TOO_DEEP)


def _parsed(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins at ``start``, and its end."""
    try:
        return _DECODER.raw_decode(text, len(text) - len(text[start:].lstrip()))
    except RecursionError:
        raise GrammarError(_TOO_DEEP) from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {shown(str(error), 100)}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_TOO_DEEP = f"the schema is nested too deeply: {MOST_DEPTH} levels are allowed"


def _needs(root: Any, schema: Any) -> Needs:
    """Yields the conditions under which a finite value matches a rewritten schema."""
    if not isinstance(schema, dict):
        if schema is False:
            yield []
        return
    yield from ([[each]] for each in schema.get("allOf", ()))
    if "$ref" in schema:
        yield [[_target(root, schema["$ref"])]]
    if "anyOf" in schema:
        yield [[each] for each in schema["anyOf"]]
    types = set(type_list(schema))
    if types <= {"object", "array"} and "enum" not in schema and "const" not in schema:
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            rest = True  # the compiler decides which pattern a name matches
        least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
        array = prefix[:least] + [schema.get("items", True)] * (least > len(prefix))
        ways = {"array": array, "object": [properties.get(name, rest) for name in schema.get("required", ())]}
        yield [ways[type] for type in sorted(types)]


def _target(root: Any, reference: str) -> object:
    """The definition at a rewritten reference."""
    return root["$defs"][reference.removeprefix("#/$defs/")]
