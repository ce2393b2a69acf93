"""Whether the options of a ``oneOf`` exclude each other, as far as types and constants tell."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hotcold.grammar.schema_keywords import TYPES

_MOST = 200  #: options that are compared, each with each other

_Values = frozenset[str] | None  # None: any


@dataclass(frozen=True)
class _Option:
    types: frozenset[str]
    values: _Values
    tags: Mapping[str, "_Option"]  #: of the properties that must be there


def exclude_each_other(options: Sequence[Any], resolved: Callable[[Any], Any]) -> bool:
    """False where nothing tells. ``resolved`` follows references."""
    found = [_option(each, resolved, 1) for each in options]
    values = [each.values for each in found]
    if all(each is not None for each in values):
        return sum(len(each or ()) for each in values) == len(
            frozenset().union(*map(frozenset, filter(None, values)))
        )
    if len(found) > _MOST:
        return False
    return all(_apart(one, other) for one, other in combinations(found, 2))


def _option(schema: Any, resolved: Callable[[Any], Any], levels: int) -> _Option:
    schema = resolved(schema)
    if not isinstance(schema, dict):
        return _Option(frozenset(TYPES) if schema is not False else frozenset(), None, {})
    types = schema.get("type", TYPES)
    kinds = frozenset([types] if isinstance(types, str) else types)
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    values = None if constants is None else frozenset(map(_key, constants))
    if constants is not None:
        kinds &= frozenset(_type(each) for each in constants) | {"number"}
    tags = {}
    properties, required = schema.get("properties"), schema.get("required")
    if levels and isinstance(properties, dict) and isinstance(required, list):
        tags = {
            name: _option(properties[name], resolved, levels - 1)
            for name in required
            if isinstance(name, str) and name in properties
        }
    return _Option(kinds, values, tags)


def _apart(one: _Option, other: _Option) -> bool:
    both = _widened(one.types) & _widened(other.types)
    if not both:
        return True
    if one.values is not None and other.values is not None and not one.values & other.values:
        return True
    if both != {"object"}:
        return False
    return any(_apart(one.tags[name], other.tags[name]) for name in one.tags.keys() & other.tags.keys())


def _widened(types: frozenset[str]) -> frozenset[str]:
    """Whole numbers are numbers, and the other way round 1.0 is a whole one."""
    return types - {"integer"} | {"number"} if "integer" in types else types


def _key(value: Any) -> str:
    """Equal for equal JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
