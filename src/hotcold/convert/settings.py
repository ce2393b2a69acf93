"""Reads untrusted JSON files; values are checked when they are read."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hotcold.errors import UserError
from hotcold.values import not_utf8, shown

_V = TypeVar("_V")

MAX_JSON = 64 << 20  #: bytes
MAX_DEPTH = 100  #: limit of nested lists and objects

_LEAST, _MOST = 2.0**-126, 2.0**127  #: range of float32 without subnormal numbers


class ConvertError(UserError):
    """Raised for a checkpoint that cannot be converted, or options that do not fit it."""


@dataclass(frozen=True)
class Settings:
    """A JSON object whose values are checked as they are read; errors name file, key and value."""

    path: Path
    values: Mapping[str, Any]
    read: set[str] = field(
        default_factory=set, compare=False, repr=False
    )  #: names of the keys that were read
    inside: str = ""  #: the prefix of these names: the objects around this one
    skipped: set[str] = field(default_factory=set, compare=False, repr=False)  #: see :meth:`skip`

    def __contains__(self, key: str) -> bool:
        """True if the key has a value; ``null`` counts as absent."""
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(self.inside + key)
        return self.values.get(key, default)

    def skip(self, *keys: str) -> None:
        """Removes keys, and the keys in them, from :meth:`unread`: they have no effect in this model."""
        self.skipped.update(self.inside + key for key in keys)

    def having(self, facts: Mapping[str, Any]) -> "Settings":
        """The same object with other values of these keys."""
        return replace(self, values={**self.values, **facts})

    def unread(self) -> Iterator[str]:
        """The names of the keys that were not read, including keys of nested objects."""
        for key, value in self.values.items():
            name = self.inside + key
            if value is None or name in self.skipped:
                continue
            if name not in self.read:
                yield name
            elif isinstance(value, dict):
                yield from self.section(key).unread()

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._typed(key, default, int, "an integer from 1 to 2^31 - 1")
        if not 1 <= value < 1 << 31:
            raise self.error(key, "an integer from 1 to 2^31 - 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.get(key) if key in self else default
        if not is_number(value):
            raise self.error(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, str, "a string")

    def section(self, key: str) -> "Settings":
        values = self._typed(key, {}, dict, "an object")
        return Settings(self.path, values, self.read, f"{self.inside}{key}.", self.skipped)

    def token(self, key: str) -> int | None:
        """A token id, or the first of a list; None if it is -1 or absent."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if value in (None, -1):
            return None
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.error(key, "a token id")
        return value

    def tokens(self, key: str) -> list[int]:
        """Token ids: of a number, of a list, or none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [value]
        checked = [Settings(self.path, {key: id}).token(key) for id in ids]
        return [id for id in checked if id is not None]

    def error(self, key: str, needed: str) -> ConvertError:
        got = f"is {shown(self.get(key))}" if key in self else "is missing"
        return ConvertError(f"{self.path}: {key} {got}: {needed} is needed")

    def _typed(self, key: str, default: _V | None, kind: type[_V], needed: str) -> _V:
        value = self.get(key) if key in self else default
        if type(value) is not kind:
            raise self.error(key, needed)
        return value


def is_number(value: Any) -> bool:
    """True if the value is above 0 and finite, also in float32. JSON has integers of any length."""
    return type(value) in (int, float) and _LEAST <= value <= _MOST


def _check_depth(path: Path, values: Any) -> None:
    """Refuses deeply nested values, so that recursive code needs no limit."""
    level = [values]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ConvertError(f"{path}: the JSON is nested too deeply")


def read_settings(path: Path) -> Settings:
    """Reads a JSON object of at most :data:`MAX_JSON` bytes; :class:`ConvertError`: it is not one."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ConvertError(f"{path} holds a JSON {type(values).__name__}: an object is needed")
    return Settings(path, values)


def read_json(path: Path) -> Any:
    """Reads a JSON file of at most :data:`MAX_JSON` bytes; :class:`ConvertError`: it is not one."""
    if path.stat().st_size > MAX_JSON:
        raise ConvertError(f"{path} is larger than {MAX_JSON >> 20} MiB: too large for a configuration")
    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise ConvertError(f"{path}: the JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} {not_utf8(error)}: save it as UTF-8, or download it again") from None
    except ValueError as error:
        raise ConvertError(f"{path} is not valid JSON: {error}") from None
    _check_depth(path, values)
    return values
