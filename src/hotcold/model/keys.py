"""Reads values of GGUF metadata, and checks them before anything is sized by them."""

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.values import shown


class ModelError(UserError):
    """Raised for a model file whose metadata or tensors are wrong or not supported."""


@dataclass(frozen=True)
class Keys:
    """The keys that begin with ``prefix``. ModelError has the key, the value and the values allowed."""

    metadata: Mapping[str, Any]
    prefix: str

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self.name(key), default)

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        return whole(self.name(key), self._value(key, default), low, high)

    def alike(self, key: str, low: int, high: int, layers: int, default: int | None = None) -> int:
        """Reads one number for all layers, which a file may repeat for each."""
        if self.get(key) is None:
            return self.whole(key, low, high, default)
        values = self.per_layer(key, low, high, layers)
        if len(set(values)) > 1:
            seen = f"{self.name(key)} is {min(values)} in some layers and {max(values)} in others"
            raise ModelError(f"{seen}: layers that differ in it are not supported yet")
        return values[0]

    def per_layer(self, key: str, low: int, high: int, layers: int) -> tuple[int, ...]:
        """Reads one number for all layers, or an array of one for each."""
        value = self.get(key)
        if not hasattr(value, "__len__") or isinstance(value, str):
            return (self.whole(key, low, high),) * layers
        name, values = self.name(key), list(value.tolist() if isinstance(value, np.ndarray) else value)
        if len(values) != layers:
            raise ModelError(f"{name} is an array of {len(values)}: one number or {layers} are needed")
        return tuple(whole(f"{name}[{i}]", each, low, high) for i, each in enumerate(values))

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number above ``low`` and at most ``high``."""
        value = self._value(key, default)
        if not is_number(value) or not low < value <= high:
            seen = f"{self.name(key)} is {shown(value)}"
            raise ModelError(f"{seen}: above {low:g} and at most {high:g} is needed")
        return float(value)

    def factor(self, key: str, default: float) -> float:
        """A number above a millionth; 0 in a file stands for none, as in llama.cpp."""
        value = self.get(key)
        return default if value is None or (is_number(value) and value == 0) else self.number(key, 1e-6, 1e6)

    def choice(self, key: str, allowed: Iterable[str], default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(f"{self.name(key)} is {shown(value)}: choose from {', '.join(allowed)}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.name(key)} is missing: the model file must give a number")
        return value


def whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ModelError(f"{name} is {shown(value)}: a whole number from {low} to {high} is needed")
    return int(value)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
