"""JSON schemas as grammars: what is supported, checked keyword by keyword before anything is compiled.

A keyword that the compiler would pass over is refused by name. Those that state facts for readers only are
left out knowingly."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hotcold.engine.grammar_error import GrammarError
from hotcold.formats.files import shown

MOST_BYTES = 1 << 16
MOST_LEVELS = 32  #: of schemas within schemas
MOST_DEPTH = 64  #: of JSON within JSON, names of properties and constants included
MOST_ENUM = 4096
MOST_COUNT = 100_000  #: that minItems, maxLength and the like may state

#: One space, or a line break and an indent: as much as JSON allows would let a model write nothing else.
WHITESPACE = r" |\r?\n[ \t]{0,20}"

_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,31}"
#: Where the compiler's own rule allows what is not of the format: February 29 in any year, a leap second at
#: any minute, names that are too long. All of it is of the format; not all of the format is in it.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
    "email": rf"^{_ATOM}(\.{_ATOM})?@{_LABEL}(\.{_LABEL}){{0,2}}$",
}
FORMATS = (*FORMAT_PATTERNS, "duration", "ipv4", "ipv6", "uri", "uuid")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
    "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
}  # fmt: skip
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/(2019-09|2020-12))/schema#?")
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_BRANCHES = {"anyOf", "oneOf", "allOf"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_SINGLE = {"additionalProperties", "items"}
#: Where these have this value they ask for nothing.
_NO_DEMAND = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "nullable": False,
}

_Schema = dict[str, Any]


def lark_of_schema(text: str) -> str:
    """The grammar of a schema in JSON. GrammarError: it is broken, not supported, or beyond the limits."""
    _check_bytes(len(text.encode(errors="replace")))
    return f"start: {lark_term(parsed(text))}\n"


def lark_term(schema: object) -> str:
    """A schema as a term of a grammar; checked as for :func:`lark_of_schema`."""
    if schema is False:
        raise GrammarError("the schema is false, which nothing matches")
    found = checked(schema)
    if found is True:
        found = {}
    assert isinstance(found, dict)
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **found})


def check_schema_size(schema: object) -> None:
    _check_depth(schema)
    _check_bytes(len(json.dumps(schema)))


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise GrammarError(f"the schema has {size} bytes: allowed are {MOST_BYTES}")


def schemas_in_lark(text: str) -> str:
    """A grammar in Lark, with the schemas in it checked, too."""
    parts = []
    while (at := text.find("%json")) >= 0:
        start = at + len("%json")
        start += len(text[start:]) - len(text[start:].lstrip())
        try:
            schema, end = _decoder().raw_decode(text, start)
        except RecursionError:
            raise GrammarError(_too_deep()) from None
        except ValueError as error:
            raise GrammarError(f"%json is not followed by JSON: {shown(str(error), 100)}") from None
        parts += [text[:at], lark_term(schema)]
        text = text[end:]
    return "".join([*parts, text])


def parsed(text: str) -> object:
    try:
        return _decoder().decode(text)
    except RecursionError:
        raise GrammarError(_too_deep()) from None
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {shown(str(error), 100)}") from None


def _decoder() -> json.JSONDecoder:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    return json.JSONDecoder(parse_constant=refuse)


def _too_deep() -> str:
    return f"the schema is too deep: allowed are {MOST_DEPTH} values within each other"


def checked(schema: object) -> object:
    """A schema without what is said for readers only. GrammarError: see :func:`lark_of_schema`."""
    _check_depth(schema)
    check = _Check(schema)
    found = check.schema(schema, "the schema", 1)
    done: set[str] = set()
    while left := sorted(check.references - done):
        for reference in left:
            # It may lie where no schema is expected, and have references of its own.
            check.schema(_target(schema, reference), reference, 1)
        done.update(left)
    if not _Ends(schema).ends():
        raise GrammarError("nothing finite matches the schema: something that it requires contains itself")
    return found


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        if not level:
            return
        inner: list[object] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        level = inner
    raise GrammarError(_too_deep())


def _target(root: object, reference: str) -> object:
    """What a reference within the document points at; a path of plain names, as the compiler reads it."""
    found = root
    for name in reference.split("/")[1:]:
        if isinstance(found, list) and re.fullmatch("0|[1-9][0-9]{0,8}", name) and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise GrammarError(f"$ref {shown(reference)} points at nothing in the schema")
    return found


class _Check:
    """Goes through one document."""

    def __init__(self, root: object) -> None:
        self._root = root
        self.references: set[str] = set()

    def schema(self, schema: object, where: str, level: int) -> object:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"{where} is {shown(schema)}: a schema is an object, true or false")
        if level > MOST_LEVELS:
            raise GrammarError(f"the schema has more than {MOST_LEVELS} schemas within each other")
        found = {}
        for key, value in schema.items():
            if key in _ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
                continue
            if key in _NO_DEMAND and value is _NO_DEMAND[key]:
                continue
            if key in ("$schema", "$id"):
                self._name(key, value, where, level)
                continue
            found[key] = self._keyword(key, value, where, level)
        if found.get("format") in FORMAT_PATTERNS:
            found = _with_pattern(found, FORMAT_PATTERNS[str(found.pop("format"))])
        if isinstance(found.get("items"), list):
            _tuple_to_prefix(found, where)
        if "additionalItems" in found:
            raise GrammarError(f"additionalItems in {where} is supported beside a list of items only")
        return found

    def _keyword(self, key: str, value: Any, where: str, level: int) -> object:
        at = f"{key} in {where}" if where == "the schema" else f"{key} in {where:.200}"
        if key in _SINGLE or key == "additionalItems":
            if key == "items" and isinstance(value, list):
                return [self.schema(each, f"items[{i}]", level + 1) for i, each in enumerate(value)]
            return self.schema(value, key, level + 1)
        if key in _BRANCHES or key == "prefixItems":
            if not isinstance(value, list) or not value:
                raise GrammarError(f"{at} is {shown(value)}: a list of schemas is needed")
            return [self.schema(each, f"{key}[{i}]", level + 1) for i, each in enumerate(value)]
        if key in _MAPS:
            if not isinstance(value, dict):
                raise GrammarError(f"{at} is {shown(value)}: an object of schemas is needed")
            return {name: self.schema(each, shown(name), level + 1) for name, each in value.items()}
        if key == "$ref":
            return self._reference(value, at)
        if key not in _VALUES:
            raise GrammarError(f"{shown(key)} in {where} is not supported: {_supported()}")
        _VALUES[key](value, at)
        return value

    def _reference(self, value: Any, at: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise GrammarError(
                f"{at} is {shown(value)}: only references within the schema, '#/...', are allowed"
            )
        if value != "#" and not re.fullmatch(r"#(/[^/~%]+)+", value):
            raise GrammarError(f"{at} is {shown(value)}: a path of plain names, as '#/$defs/name', is needed")
        self.references.add(value)
        return value

    def _name(self, key: str, value: Any, where: str, level: int) -> None:
        if key == "$schema" and not (isinstance(value, str) and _DIALECT.fullmatch(value)):
            raise GrammarError(
                f"$schema is {shown(value)}: allowed are JSON Schema's drafts 4, 6, 7, 2019-09 and 2020-12"
            )
        if level > 1:
            raise GrammarError(f"{key} in {where} is supported at the top only")


def _with_pattern(schema: _Schema, pattern: str) -> _Schema:
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    return {**schema, "allOf": [*schema.get("allOf", ()), {"pattern": pattern}]}


def _tuple_to_prefix(found: _Schema, where: str) -> None:
    """The older drafts' list of items, as newer ones write it."""
    if "prefixItems" in found:
        raise GrammarError(f"{where} has both prefixItems and a list of items")
    found["prefixItems"] = found.pop("items")
    if "additionalItems" in found:
        found["items"] = found.pop("additionalItems")


class _Ends:
    """Whether something finite matches: what is required must not require itself. Each schema is looked at
    once, however many others refer to it, and nothing calls itself: a stranger wrote them, and this runs
    where nothing could end it."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._conditions: dict[int, int] = {}  # of each schema, by its identity: that it ends
        self._missing: list[int] = []  # how many others each condition needs before it is true
        self._needed_by: list[list[int]] = []
        self._unread: list[tuple[int, _Schema]] = []

    def ends(self) -> bool:
        whole = self._schema(self._root)
        while self._unread:
            self._read(*self._unread.pop())
        true = [condition for condition, missing in enumerate(self._missing) if missing == 0]
        for condition in true:  # more are added meanwhile
            for other in self._needed_by[condition]:
                self._missing[other] -= 1
                if self._missing[other] == 0:
                    true.append(other)
        return self._missing[whole] <= 0  # below 0: an option more than was needed

    def _schema(self, schema: object) -> int:
        if not isinstance(schema, dict):
            return self._condition(1 if schema is False else 0, [])
        if id(schema) not in self._conditions:
            self._conditions[id(schema)] = self._condition(0, [])
            self._unread.append((self._conditions[id(schema)], schema))
        return self._conditions[id(schema)]

    def _condition(self, missing: int, parts: list[int]) -> int:
        new = len(self._missing)
        self._missing.append(missing)
        self._needed_by.append([])
        for part in parts:
            self._needed_by[part].append(new)
        return new

    def _read(self, condition: int, schema: _Schema) -> None:
        parts = [self._schema(each) for each in schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._schema(_target(self._root, schema["$ref"])))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                parts.append(self._condition(1, [self._schema(each) for each in schema[key]]))
        types = set(_types(schema))
        if types <= {"object", "array"} and "enum" not in schema and "const" not in schema:
            inner = [[self._schema(each) for each in _demanded(schema, type)] for type in sorted(types)]
            parts.append(self._condition(1, [self._condition(len(each), each) for each in inner]))
        self._missing[condition] = len(parts)
        for part in parts:
            self._needed_by[part].append(condition)


def _demanded(schema: _Schema, type: str) -> Iterator[object]:
    """The schemas of what an object or an array must have."""
    if type == "array":
        yield from _first_items(schema)
        return
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        yield properties.get(name, rest)


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", list(TYPES))
    return [types] if isinstance(types, str) else types


def _first_items(schema: Mapping[str, Any]) -> Iterator[object]:
    """The schemas that the items follow which must be there."""
    least = schema.get("minItems", 0)
    items = schema.get("items", True)
    prefix = schema.get("prefixItems", items if isinstance(items, list) else [])
    yield from prefix[:least]
    if least > len(prefix):
        yield schema.get("additionalItems", True) if isinstance(items, list) else items


def _supported() -> str:
    names = sorted({*_VALUES, *_BRANCHES, *_MAPS, *_SINGLE, "prefixItems", "$ref"})
    return f"supported are {', '.join(names)}"


def _type_value(value: Any, at: str) -> None:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or any(each not in TYPES for each in found):
        raise GrammarError(f"{at} is {shown(value)}: allowed are {', '.join(TYPES)}, or a list of them")


def _enum_value(value: Any, at: str) -> None:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{at} is {shown(value)}: a list of values is needed")
    if len(value) > MOST_ENUM:
        raise GrammarError(f"{at} has {len(value)} values: allowed are {MOST_ENUM}")
    for each in value:
        _const_value(each, at)


def _const_value(value: Any, at: str) -> None:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _const_value(each, at)
    elif isinstance(value, int | float) and not abs(value) < 2**53:  # beyond, two numbers become one
        raise GrammarError(f"{at} has the number {shown(value)}: allowed are those below 2^53")


def _count_value(value: Any, at: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value <= MOST_COUNT:
        raise GrammarError(f"{at} is {shown(value)}: allowed are the whole numbers 0 to {MOST_COUNT}")


def _limit_value(value: Any, at: str) -> None:
    if isinstance(value, bool) and at.startswith("exclusive"):
        return  # draft 4
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        raise GrammarError(f"{at} is {shown(value)}: a number is needed, below 2^53")


def _multiple_value(value: Any, at: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1e-6 <= value < 2**31 or not math.isfinite(value):
        raise GrammarError(f"{at} is {shown(value)}: allowed are the numbers 0.000001 to 2^31")


def _names_value(value: Any, at: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(f"{at} is {shown(value)}: a list of names is needed")


def _pattern_value(value: Any, at: str) -> None:
    if not isinstance(value, str):
        raise GrammarError(f"{at} is {shown(value)}: a regular expression is needed")


def _format_value(value: Any, at: str) -> None:
    if value not in FORMATS:
        raise GrammarError(f"{at} is {shown(value)}: supported are {', '.join(FORMATS)}")


_VALUES: dict[str, Callable[[Any, str], None]] = {
    "type": _type_value,
    "enum": _enum_value,
    "const": _const_value,
    "required": _names_value,
    "pattern": _pattern_value,
    "format": _format_value,
    "multipleOf": _multiple_value,
    **dict.fromkeys(sorted(_COUNTS), _count_value),
    **dict.fromkeys(sorted(_LIMITS), _limit_value),
}
