"""Finds the properties that the schemas of one value allow: names, patterns, and whether others may exist."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hotcold.grammar.schema_keywords import compiled_pattern

GROUPS = ("allOf", "anyOf", "oneOf")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
#: Keywords for schemas of the same value that are not enforced, but name properties that it may need.
CONDITIONAL = ("then", "else", "dependentSchemas", "dependencies")

_Schema = dict[str, Any]


@dataclass(frozen=True)
class Others:
    """Statements of other schemas about the properties of the same value."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    open: bool = False  #: a schema allows further properties


NOTHING = Others()


def total(others: Iterable[Others]) -> Others:
    all_others = [*others]
    return Others(
        tuple(dict.fromkeys(name for one in all_others for name in one.names)),
        tuple(dict.fromkeys(pattern for one in all_others for pattern in one.patterns)),
        any(one.open for one in all_others),
    )


def said_by(schema: _Schema) -> Others:
    """Returns the statements of one schema about its value's properties."""
    names: list[str] = []
    for key in ("properties", "required"):
        value = schema.get(key)
        names += [each for each in value if isinstance(each, str)] if isinstance(value, dict | list) else []
    patterns = schema.get("patternProperties")
    compiled = map(compiled_pattern, patterns) if isinstance(patterns, dict) else ()
    keys = ("additionalProperties", "unevaluatedProperties")
    open = any(schema.get(key, False) is not False for key in keys)
    return Others(tuple(dict.fromkeys(names)), tuple(filter(None, compiled)), open)


def names_properties(schema: _Schema) -> bool:
    """True if a schema names the properties of its value."""
    named = "properties" in schema or "patternProperties" in schema
    return named or schema.get("unevaluatedProperties") is False


def conditional(schema: _Schema, key: str) -> list[Any]:
    """The schemas under one of :data:`CONDITIONAL`."""
    value = schema.get(key)
    if key in ("then", "else"):
        return [value] if isinstance(value, dict) else []
    return [each for each in value.values() if isinstance(each, dict)] if isinstance(value, dict) else []
