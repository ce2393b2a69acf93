"""Questions that tests ask of buffers, which show their values to their own backend alone."""

from __future__ import annotations

from typing import Any

import pytest

from hotcold.kernels.cpu import CPUBackend
from hotcold.runtime.session import Session


def cache_bytes(session: Session) -> int:
    """Bytes of the keys and values of all layers."""
    layers = zip(session.model.devices.layers, session.state.layers, strict=True)
    return sum(ops.read(buffer).nbytes for ops, layer in layers for buffer in layer)


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each buffer that CPU backends make from now on."""
    found: list[int] = []
    inner = CPUBackend.zeros

    def zeros(self: CPUBackend, *args: Any, **options: Any) -> Any:
        buffer = inner(self, *args, **options)
        found.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(CPUBackend, "zeros", zeros)
    return found
