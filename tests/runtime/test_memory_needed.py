"""How much memory a model says it needs, beside what its loading allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.buffers import cache_bytes

from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cpu import CPUBackend
from hotcold.runtime import loading, memory
from hotcold.runtime.options import LoadError, LoadOptions

pytestmark = pytest.mark.long  # no instruction set or backend changes it


def least(accepted: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that have to be free, to a page of memory."""
    low, high = 0, 1 << 30
    while high - low > 4096:
        middle = (low + high) // 2
        monkeypatch.setattr(memory, "available_memory", lambda free=middle: free)
        low, high = (low, middle) if accepted() else (middle, high)
    monkeypatch.undo()
    return high


def needed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    def fits() -> bool:
        monkeypatch.setattr(loading, "load_weights", stop)
        try:
            loading.load(None, LoadOptions(**options)).session()
        except LoadError:
            return False
        except Enough:
            return True
        raise AssertionError("weights were not read")

    return least(fits, monkeypatch)


def allocated(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """In buffers: KV cache, activations, logits."""
    total, zeros = 0, CPUBackend.zeros

    def counted(self: CPUBackend, *arguments: Any, **options: Any) -> np.ndarray:
        nonlocal total
        buffer: np.ndarray = zeros(self, *arguments, **options)
        total += buffer.nbytes
        return buffer

    monkeypatch.setattr(CPUBackend, "zeros", counted)
    loading.load(None, LoadOptions(**options)).session().close()
    monkeypatch.undo()
    return total


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"chunk": 1}, {"chunk": 256}),  # activations
        (
            {"context": 2, "sequences": 16, "cache_positions": 2},
            {"context": 2, "sequences": 512, "cache_positions": 2},
        ),  # logits
        ({"cache_positions": 256}, {"cache_positions": 2048}),  # keys and values
        ({"cache_positions": 1024, "cache_type": "q8_0"}, {"cache_positions": 1024, "cache_type": "f32"}),
    ],
)
def test_what_is_needed_grows_with_what_is_allocated(
    small: dict[str, Any], large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = allocated(monkeypatch, **large) - allocated(monkeypatch, **small)
    asked = needed(monkeypatch, **large) - needed(monkeypatch, **small)
    assert 0.97 * more <= asked <= 2.5 * more


def test_a_smaller_context_is_advised_where_it_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the weights alone are too large, and always where keys and values are what is too much."""
    options = LoadOptions(cache_positions=20 * 256)
    session = loading.load(None, options).session()
    cache = cache_bytes(session)
    with open_gguf(model_path()) as file:
        weights = sum(info.nbytes for info in file.tensors.values())

    def advised() -> bool:
        try:
            loading.load(None, options).session()
        except LoadError as error:
            return "context (`context`)" in str(error)
        return True

    advice = least(advised, monkeypatch)
    assert 0.99 * weights <= advice <= needed(monkeypatch, cache_positions=20 * 256) - 0.99 * cache
