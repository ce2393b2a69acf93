"""The probes read what they say they read; how fast is nobody's business here."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.formats.blocks import block_type
from hotcold.kernels.cpu import CPUBackend
from hotcold.sparse import measuring
from hotcold.sparse.measuring import NeuronProbe


@pytest.mark.parametrize(("kind", "dim"), measuring.SHAPES)
def test_a_call_reads_the_rows_of_a_tenth(kind: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten calls read each neuron once; with a clock of one second a call, so GB/s are bytes of calls."""
    backend = CPUBackend(2)
    probe = NeuronProbe(backend, kind, dim, 3 << 20)
    clock = iter(range(1000))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(clock)))
    bits = np.unpackbits(probe._masks.view(np.uint8), axis=1)
    assert (bits.sum(axis=0) == 1).all() and abs(bits.sum(axis=1) - bits.shape[1] / 10).max() < 1
    neuron = 3 * block_type(kind).row_bytes(dim)
    assert probe.run_bytes == neuron // 2
    assert probe.measure(False, 9, backend) == pytest.approx(bits.shape[1] * neuron / 10 / 1e9)
    assert probe.measure(True, 0, backend) == pytest.approx(bits.shape[1] * neuron / 1e9)
