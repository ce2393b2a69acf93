"""Kinds of JSON values. Each kind reads a value, reports an error in it, and describes itself as a schema.

The fields of a route are a table of these kinds. Validation and the OpenAPI document both use it, so they
always agree. ``null`` means the same as an absent field, as in OpenAI's description."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.limits import LARGEST, MAX_DEPTH
from hotcold.values import shown

Schema: TypeAlias = dict[str, Any]

#: A number in JSON's form; forms, shells and settings files often send it as text.
NUMBER = r"-?(0|[1-9][0-9]{0,29})([.][0-9]{1,30})?([eE][+-]?[0-9]{1,3})?"
_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Kind(Protocol):
    def read(self, value: Any, param: str) -> Any:
        """Returns the value as the program uses it. ``param`` is the field's name, for the ``APIError``."""

    def schema(self) -> Schema:
        """Returns the JSON Schema (2020-12) of the values that :meth:`read` accepts."""


def shown_value(value: object) -> str:
    """Returns a value of a request for an error message: short, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object of {len(value)}" if value else "an empty object"
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"
    return shown(value, 40)


def refuse(param: str, value: object, needed: str, code: str = "invalid_value") -> NoReturn:
    raise APIError(f"{param} is {shown_value(value)}: {needed}", param=param, code=code)


def inside(param: str, name: str) -> str:
    return f"{param}.{name}" if param else name


def _number(value: Any) -> Any:
    """Returns the number that a text has; any other value is unchanged."""
    if not isinstance(value, str) or not re.fullmatch(NUMBER, value):
        return value
    number = float(value)
    if number.is_integer() and re.fullmatch("-?[0-9]+", value):
        return int(value)
    return number if math.isfinite(number) else value


def _or_text(schema: Schema) -> Schema:
    """Returns the schema of a number, or of a number as text, whose bounds a schema cannot state."""
    return {"anyOf": [schema, {"type": "string", "pattern": f"^(?:{NUMBER})$"}]}


@dataclass(frozen=True)
class Whole:
    """A whole number. ``5.0`` is one, as in JSON Schema, and so is ``"5"``."""

    low: int
    high: int = LARGEST
    hint: str = ""
    without: int | None = None  #: a value between the bounds that is not allowed

    def read(self, value: Any, param: str) -> int:
        given, value = value, _number(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not self.low <= value <= self.high or value == self.without:
            hint = f" ({self.hint})" if self.hint else ""
            but = "" if self.without is None else f" without {self.without}"
            refuse(param, given, f"allowed are the whole numbers {self.low} to {self.high}{but}{hint}")
        return int(value)

    def schema(self) -> Schema:
        json_schema: Schema = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return _or_text(
            json_schema if self.without is None else {**json_schema, "not": {"const": self.without}}
        )


@dataclass(frozen=True)
class Real:
    """A finite number, also as text."""

    low: float
    high: float
    hint: str = ""

    def read(self, value: Any, param: str) -> float:
        given, value = value, _number(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.low <= value <= self.high:  # also true for NaN
            hint = f" ({self.hint})" if self.hint else ""
            refuse(param, given, f"allowed are {self.low:g} to {self.high:g}{hint}")
        return float(value)

    def schema(self) -> Schema:
        return _or_text({"type": "number", "minimum": self.low, "maximum": self.high})


@dataclass(frozen=True)
class Flag:
    """True or false, also as text."""

    def read(self, value: Any, param: str) -> bool:
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value, value)
        if not isinstance(value, bool):
            refuse(param, value, "true or false is needed")
        return value

    def schema(self) -> Schema:
        return {"enum": [True, False, "true", "false"]}


@dataclass(frozen=True)
class Text:
    """A string of valid Unicode. ``pattern`` must match all of it; ``hint`` describes the pattern."""

    low: int = 0
    high: int | None = None  #: limit in characters; None: only the body's limit
    pattern: str | None = None
    hint: str = ""

    def read(self, value: Any, param: str) -> str:
        if not isinstance(value, str):
            refuse(param, value, "a string is needed")
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            most = "or more" if self.high is None else f"to {self.high}"
            got = f"a string of {len(value)} characters"
            raise APIError(
                f"{param} is {got}: allowed are {self.low} {most}", param=param, code="invalid_value"
            )
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            refuse(param, value, self.hint or f"it must match {self.pattern}")
        surrogate = None if value.isascii() else _SURROGATE.search(value)
        if surrogate:
            problem = f"a lone surrogate, U+{ord(surrogate[0]):04X}, at character {surrogate.start()}"
            raise APIError(
                f"{param} has {problem}: only valid Unicode is allowed", param=param, code="invalid_value"
            )
        return value

    def schema(self) -> Schema:
        json_schema: Schema = {"type": "string"}
        if self.low:
            json_schema["minLength"] = self.low
        if self.high is not None:
            json_schema["maxLength"] = self.high
        if self.pattern is not None:
            json_schema["pattern"] = f"^(?:{self.pattern})$"
        return json_schema


@dataclass(frozen=True)
class Choice:
    """One of some strings."""

    allowed: tuple[str, ...]

    def read(self, value: Any, param: str) -> str:
        if not isinstance(value, str) or value not in self.allowed:
            refuse(param, value, f"allowed are {', '.join(self.allowed)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.allowed)}


@dataclass(frozen=True)
class Items:
    """A list."""

    kind: Kind
    low: int
    high: int | None = None  #: limit of entries; None: only the body's limit

    def read(self, value: Any, param: str) -> list[Any]:
        if not isinstance(value, list):
            refuse(param, value, "a list is needed")
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            most = "or more" if self.high is None else f"to {self.high}"
            needed = f"allowed are {self.low} {most} entries"
            refuse(param, value, needed, "array_above_max_length" if value else "empty_array")
        return [self.kind.read(each, f"{param}[{i}]") for i, each in enumerate(value)]

    def schema(self) -> Schema:
        json_schema = {"type": "array", "minItems": self.low, "items": self.kind.schema()}
        return json_schema if self.high is None else {**json_schema, "maxItems": self.high}


@dataclass(frozen=True)
class Anything:
    """Any object, unchanged."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(param, value, "an object is needed")
        return value

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True)
class Neutral:
    """An unsupported field, with the values that request nothing."""

    allowed: tuple[Any, ...] = ()
    reason: str = "this is not supported here"

    def read(self, value: Any, param: str) -> None:
        for neutral in self.allowed:
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return
        values = (
            f"leave it out, or {' or '.join(map(shown_value, self.allowed))}"
            if self.allowed
            else "leave it out"
        )
        refuse(param, value, f"{self.reason}: {values}", "unsupported_parameter")

    def schema(self) -> Schema:
        return {"enum": list(self.allowed)} if self.allowed else {"type": "null"}


@dataclass(frozen=True)
class Either:
    """One of several kinds, by the JSON type of the value."""

    kinds: Mapping[type, Kind]
    needed: str

    def read(self, value: Any, param: str) -> Any:
        kind = self.kinds.get(type(value))
        if kind is None:
            refuse(param, value, f"{self.needed} is needed")
        return kind.read(value, param)

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in dict.fromkeys(self.kinds.values())]}


@dataclass(frozen=True)
class Field:
    kind: Kind
    default: Any = None  #: the value if the field is absent or null
    note: str = ""
    required: bool = False

    def schema(self) -> Schema:
        json_schema = self.kind.schema()
        if not self.required and json_schema.get("type") != "null":
            json_schema = {"anyOf": [json_schema, {"type": "null"}]}
        if self.default is not None:
            json_schema = {**json_schema, "default": self.default}
        return {**json_schema, "description": self.note} if self.note else json_schema


Fields: TypeAlias = Mapping[str, Field]


@dataclass(frozen=True, eq=False)
class Shape:
    """An object with named fields; other fields are ignored."""

    fields: Fields
    check: Callable[[dict[str, Any], str], None] | None = None  #: checks fields that depend on each other

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(param or "the body", value, "an object is needed")
        values: dict[str, Any] = {}
        for name, field in self.fields.items():
            entry = value.get(name)
            if entry is not None:
                values[name] = field.kind.read(entry, inside(param, name))
            elif field.required:
                raise APIError(
                    f"{inside(param, name)} is {'null' if name in value else 'missing'}: it is required",
                    param=inside(param, name),
                    code="missing_required_parameter",
                )
            else:
                values[name] = field.default
        if self.check is not None:
            self.check(values, param)
        return values

    def schema(self) -> Schema:
        schema: Schema = {
            "type": "object",
            "properties": {name: field.schema() for name, field in self.fields.items()},
        }
        required = [name for name, field in self.fields.items() if field.required]
        return {**schema, "required": required} if required else schema


@dataclass(frozen=True, eq=False)
class Tagged:
    """An object whose field ``key`` names its shape. The result has this field, too."""

    key: str
    shapes: Mapping[str, Shape]
    unsupported: str = ""  #: message about values that only other servers support

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(param, value, f"an object with {self.key} is needed")
        tag = value.get(self.key)
        shape = self.shapes.get(tag) if isinstance(tag, str) else None
        if shape is None:
            needed = f"allowed are {', '.join(self.shapes)}{self.unsupported}"
            refuse(inside(param, self.key), tag, needed)
        return {self.key: tag, **shape.read(value, param)}

    def schema(self) -> Schema:
        return {"oneOf": [self._schema(tag, shape) for tag, shape in self.shapes.items()]}

    def _schema(self, tag: str, shape: Shape) -> Schema:
        schema = shape.schema()
        properties = {self.key: {"type": "string", "const": tag}, **schema["properties"]}
        return {**schema, "properties": properties, "required": [self.key, *schema.get("required", ())]}


def check_depth(value: object) -> None:
    """Raises APIError if lists and objects are nested more than :data:`MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.values()
            elif isinstance(container, list):
                inner += container
        level = [container for container in inner if isinstance(container, dict | list)]
        if not level:
            return
    raise APIError(
        f"lists and objects are nested too deeply: {MAX_DEPTH} levels are allowed",
        code="invalid_value",
    )


def finite(value: float) -> float:
    """Returns a log-probability for JSON: infinity becomes OpenAI's value for a very unlikely token."""
    return value if math.isfinite(value) else -9999.0
