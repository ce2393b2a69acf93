"""Checks by types and constants if the options of a ``oneOf`` exclude each other."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from hotcold.grammar.schema_keywords import TYPES, type_list

_MOST = 200  #: most options, since all pairs are compared
#: Types by the first character of their JSON; all others are numbers.
_BEGIN = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}


class _Option(NamedTuple):
    types: set[str]  #: integer counts as number, because 1.0 is both
    values: set[str] | None  #: None: any
    tags: Mapping[str, "_Option"]  #: the required properties


def exclude_each_other(options: Sequence[Any], resolved: Callable[[Any], Any]) -> bool:
    """True if the options certainly exclude each other. ``resolved`` follows references."""
    parsed = [_option(option, resolved, 1) for option in options]
    values = [option.values for option in parsed if option.values is not None]
    if len(values) == len(parsed):
        return sum(map(len, values)) == len(set().union(*values))
    return len(parsed) <= _MOST and all(_exclusive(one, other) for one, other in combinations(parsed, 2))


def _option(schema: Any, resolved: Callable[[Any], Any], levels: int) -> _Option:
    schema = resolved(schema)
    if not isinstance(schema, dict):
        return _Option(set(TYPES) if schema is not False else set(), None, {})
    types = {"number" if each == "integer" else each for each in type_list(schema)}
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    values = None
    if constants is not None:
        values = set(map(_json, constants))
        types &= {_BEGIN.get(each[0], "number") for each in values}
    properties, required = schema.get("properties"), schema.get("required")
    if not levels or not isinstance(properties, dict) or not isinstance(required, list):
        return _Option(types, values, {})
    names = [name for name in required if isinstance(name, str) and name in properties]
    return _Option(types, values, {name: _option(properties[name], resolved, levels - 1) for name in names})


def _exclusive(one: _Option, other: _Option) -> bool:
    both = one.types & other.types
    if not both or (one.values is not None and other.values is not None and not one.values & other.values):
        return True
    names = one.tags.keys() & other.tags.keys()
    return both == {"object"} and any(_exclusive(one.tags[name], other.tags[name]) for name in names)


def _json(value: Any) -> str:
    """A text of a value; equal values have equal texts."""
    return json.dumps(
        int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True
    )
