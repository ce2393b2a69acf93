"""Reading of GGUF metadata values, checked before they determine any size."""

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.values import shown

_OF_BLOCK = re.compile(r"blk\.(?P<block>\d{1,9})\.(?P<nextn>nextn\.)?")


class ModelError(UserError):
    """Error of a model file whose metadata or tensors are wrong or not supported."""


@dataclass(frozen=True)
class Keys:
    """Metadata keys with a ``prefix``. ModelError names the key, the value, and the allowed values."""

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

    @property
    def drafting(self) -> int:
        """Number of blocks after the last layer that only draft tokens."""
        return self.whole("nextn_predict_layers", 0, 1024, default=0)

    def alike(
        self,
        key: str,
        low: int,
        high: int,
        layers: int,
        default: int | None = None,
        *,
        none: bool = False,
    ) -> int:
        """Reads one number for all layers, which a file may repeat for each. ``none``: layers may have 0."""
        if self.get(key) is None:
            return self.whole(key, low, high, default)
        values = set(self.per_layer(key, 0 if none else low, high, layers))
        counted = (values - {0} if none else values) or values
        if len(counted) > 1:
            got = f"{self.name(key)} is {min(counted)} in some layers and {max(counted)} in others"
            raise ModelError(f"{got}: layers that differ in it are not supported yet")
        return counted.pop()

    def per_layer(
        self, key: str, low: int, high: int, layers: int, default: int | None = None
    ) -> tuple[int, ...]:
        """Reads one number for all layers, or an array with one for each."""
        value = self.get(key)
        if not hasattr(value, "__len__") or isinstance(value, str):
            return (self.whole(key, low, high, default),) * layers
        name, values = self.name(key), list(value.tolist() if isinstance(value, np.ndarray) else value)
        if len(values) not in (layers, layers + self.drafting):
            raise ModelError(f"{name} is an array of {len(values)}: one number or {layers} are needed")
        return tuple(whole(f"{name}[{i}]", each, low, high) for i, each in enumerate(values[:layers]))

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Reads a number above ``low`` and at most ``high``."""
        value = self._value(key, default)
        if not is_number(value) or not low < value <= high:
            got = f"{self.name(key)} is {shown(value)}"
            raise ModelError(f"{got}: above {low:g} and at most {high:g} is needed")
        return float(value)

    def factor(self, key: str, default: float) -> float:
        """Reads a number above a millionth; 0 in a file means unset, as in llama.cpp."""
        value = self.get(key)
        return default if value is None or (is_number(value) and value == 0) else self.number(key, 1e-6, 1e6)

    def choice(self, key: str, allowed: Iterable[str], default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(f"{self.name(key)} is {shown(value)}: choose from {', '.join(allowed)}")
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise ModelError(f"{self.name(key)} is {shown(value)}: a truth value is needed")
        return bool(value)

    def truths(self, key: str, layers: int) -> tuple[bool, ...]:
        """Reads an array with one truth value for each layer."""
        value: Any = self.get(key)
        values = (
            list(value) if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str) else []
        )
        wrong = len(values) not in (layers, layers + self.drafting)
        if wrong or any(flag not in (False, True) for flag in values):
            raise ModelError(f"{self.name(key)} is {shown(value)}: {layers} truth values are needed")
        return tuple(bool(flag) for flag in values[:layers])

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


def check_drafting(keys: Keys, layers: int, tensors: Iterable[str]) -> None:
    """Checks draft blocks. ModelError: the file has only these, or counts a layer of the model as one."""
    if not keys.drafting:
        return
    block_names = [matched for name in tensors if (matched := _OF_BLOCK.match(name))]
    present = {int(each["block"]) for each in block_names}
    if block_names and 0 not in present:
        raise ModelError(f"the file has no blk.0: it holds {keys.drafting} blocks that only draft tokens")
    drafting = {int(each["block"]) for each in block_names if each["nextn"]}
    if wrong := present.intersection(range(layers, layers + keys.drafting)) - drafting:
        names = f"{keys.name('block_count')} and {keys.name('nextn_predict_layers')}"
        got = f"{names} are {layers + keys.drafting} and {keys.drafting}"
        fix = "gguf-set-metadata changes them, or convert the checkpoint again"
        raise ModelError(
            f"{got}, but blk.{max(wrong)} has no nextn tensors, so it is a layer of the model: "
            f"{max(present) + 1} and {len(drafting)} are needed ({fix})"
        )
