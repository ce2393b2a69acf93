"""JSON schemas as grammars: their sizes, what must end, and the term of a grammar that one becomes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.grammar.schema_keywords import TYPES
from hotcold.grammar.schema_rewriting import Rewritten, rewritten
from hotcold.values import shown

MOST_BYTES = 1 << 16
MOST_DEPTH = 64  #: of JSON within JSON, names of properties and constants included

#: How answers are written. A space, or a line break and an indent of a few steps: as much white space as JSON
#: allows would let a model write nothing else. No characters by their numbers, with which a name could be
#: spelt in a second way and pass for another one.
_WRITTEN = {
    "whitespace_pattern": r" |\r?\n((  ){0,6}|\t{0,3})",
    "json_allowed_escapes": 'nrbtf\\"',
}

_Schema = dict[str, Any]


def lark_of_schema(text: str, notes: list[str] | None = None) -> str:
    """The grammar of a schema in JSON; ``notes`` gets what it is not held to. GrammarError: the schema is
    broken, or beyond the limits."""
    _check_bytes(len(text.encode(errors="replace")))
    return f"start: {lark_term(parsed(text), notes)}\n"


def lark_term(schema: object, notes: list[str] | None = None) -> str:
    """A schema as a term of a grammar; otherwise as :func:`lark_of_schema`."""
    if schema is False:
        raise GrammarError("the schema is false, which nothing matches")
    _check_depth(schema)
    read = _read(schema)
    if notes is not None:
        notes += read.notes
    found = {} if read.schema is True else read.schema
    # Last, since the compiler takes it out by putting the last key in its place.
    return "%json " + json.dumps({**found, "x-guidance": _WRITTEN})


def read(schema: object, *, strict: bool = False, open: bool = False) -> Rewritten:
    """A schema as it is enforced, with notes on what is not; ``strict``: that is an error. ``open``: as of
    :func:`~hotcold.grammar.schema_rewriting.rewritten`. GrammarError: see :func:`lark_of_schema`."""
    check_schema_size(schema)
    return _read(schema, strict=strict, open=open)


def checked(schema: object) -> object:
    """A schema as it is enforced. GrammarError: see :func:`lark_of_schema`."""
    _check_depth(schema)
    return _read(schema).schema


def _read(schema: object, *, strict: bool = False, open: bool = False) -> Rewritten:
    found = rewritten(schema, open=open)
    if strict and found.notes:
        told = f"{found.notes[0]} cannot be enforced"
        raise GrammarError(f"{told}: leave it out, or leave strict out and it will not be enforced")
    if not _Ends(found.schema).ends():
        raise GrammarError("nothing finite matches the schema: something that it requires contains itself")
    return found


def check_schema_size(schema: object) -> None:
    _check_depth(schema)
    _check_bytes(len(json.dumps(schema)))


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise GrammarError(f"the schema has {size} bytes: allowed are {MOST_BYTES}")


def schemas_in_lark(text: str, notes: list[str] | None = None) -> str:
    """A grammar in Lark, with the schemas in it as :func:`lark_term` writes them."""
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
        parts += [text[:at], lark_term(schema, notes)]
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


def _target(root: _Schema, reference: str) -> object:
    """A definition, as rewriting refers to it."""
    definitions: _Schema = root["$defs"]
    return definitions[reference.removeprefix("#/$defs/")]


class _Ends:
    """Whether something finite matches: what is required must not require itself. Each schema is looked at
    once, however many others refer to it, and nothing calls itself: a stranger wrote them, and this runs
    where nothing could end it."""

    def __init__(self, root: Any) -> None:
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
        if "anyOf" in schema:
            parts.append(self._condition(1, [self._schema(each) for each in schema["anyOf"]]))
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
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    yield from prefix[:least]
    if least > len(prefix):
        yield schema.get("items", True)
