"""Commands whose figures no test looks at measure little."""

from __future__ import annotations

import io
import sys

import pytest

from hotcold.kernels.cpu import CPUBackend
from hotcold.tasks import bench


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotcold bench` fills 256 MiB, and reads for a fifth of a second in each round: here a MiB, once."""
    monkeypatch.setattr(CPUBackend.read_probe, "__defaults__", (1 << 20,))
    monkeypatch.setattr(bench, "_PROBE_S", 0.0)


@pytest.fixture(autouse=True)
def standard_input_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotcold generate` reads it where no text is given; pytest's own cannot be read."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
