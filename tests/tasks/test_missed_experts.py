"""Missed experts: tokens miss what they are asked to, and a disk of known habits costs what it costs
in a simulation of whole tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.many_experts import budget, many_experts

from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import _native
from hotcold.kernels.backend import Batch, BatchLimits
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.placement import measuring, shelves
from hotcold.runtime.loading import shelves_of
from hotcold.tasks import missed_experts
from hotcold.tasks.missed_experts import Between, MissTime, Numbers, Places, mean_spread, time_misses

COUNT = 20


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shelves, "reading_bytes", lambda row_bytes: 0)
    return many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)


@given(places=st.integers(4, 19), chosen=st.integers(1, 4), asked=st.lists(st.integers(0, 4), max_size=40))
@settings(deadline=None)
def test_tokens_miss_as_many_as_is_asked(places: int, chosen: int, asked: list[int]) -> None:
    """Beside a list of what lies in memory, the least recently named first."""
    drawn, memory = Places(COUNT, places, chosen, 3), [*range(places)][::-1]
    for number in asked:
        missed = min(number, chosen, COUNT - places)
        token = drawn.token(missed)
        assert token == sorted({*token}) and len(token) == chosen and max(token) < COUNT
        absent = [each for each in token if each not in memory]
        assert len(absent) == missed
        memory = [each for each in memory if each not in token]
        memory = memory[max(0, len(memory) + chosen - places) :]
        # Of one step the one with the smallest number makes room first.
        memory += token


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_shelves_miss_as_many_as_is_asked(share: float, model: Path) -> None:
    """The experts that are really read of a file."""
    with open_gguf(model) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        assert config.experts is not None
        how = {"ram_budget": budget(model, share, context=128), "context": 128}
        fit: Any = shelves_of(file, config, how)
        backend, batch = CPUBackend(1), Batch(BatchLimits(1, 1, 1, 1))
        batch.counts[:] = 1, 1, 0, 1
        layer = missed_experts._layer(file, config, fit, 1, backend, batch)
        assert missed_experts._misses(backend) == 0
        asked = np.random.default_rng(1).integers(0, config.experts.chosen + 1, 50).tolist()
        for number in asked:
            before = missed_experts._misses(backend)
            layer.run(number)
            assert missed_experts._misses(backend) - before == number


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), count=st.integers(1, 300))
def test_numbers_come_evenly(weights: list[int], count: int) -> None:
    spread = np.array(weights) / sum(weights)
    numbers = Numbers(spread)
    seen = np.bincount([numbers.next() for _ in range(count)], minlength=len(weights))
    assert len(seen) == len(weights) and np.abs(seen - count * spread).max() <= 4


def test_a_mean_of_shares() -> None:
    np.testing.assert_allclose(
        mean_spread([np.array([1.0]), np.array([0.5, 0.25, 0.25])]), [0.75, 0.125, 0.125]
    )


class Clock:
    """A made-up machine: experts of a layer take 1.5 ms, a call of what fills pauses 0.1; a read takes 1 ms
    and 0.8 for each expert, and 2.5 more where nothing was read for 10 ms."""

    def __init__(self) -> None:
        self.now, self.last, self.misses = 0.0, -1.0, 0

    def fill(self) -> None:
        self.now += 0.0001

    def experts(self, missed: int) -> None:
        self.misses += missed
        if missed:
            self.now += 0.001 + 0.0008 * missed + 0.0025 * (self.now - self.last > 0.010)
            self.last = self.now
        self.now += 0.0015


@pytest.mark.parametrize("spread", [(0.4, 0.3, 0.2, 0.1), (0.9, 0.1), (0.975, 0.02, 0.005)])
def test_a_disk_that_falls_asleep(spread: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an event simulation of 400 tokens of all 24 layers, of which each token has its own draws."""
    layers, layer_s, besides_s = 24, 0.0024, 0.008
    clock = Clock()
    own = SimpleNamespace(run=clock.experts, places=SimpleNamespace(holds_a_token=True))
    monkeypatch.setattr(missed_experts, "_layer", lambda *given: own)
    monkeypatch.setattr(missed_experts, "_filler", lambda *given: clock.fill)
    monkeypatch.setattr(missed_experts, "_misses", lambda backend: clock.misses)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    config: Any = SimpleNamespace(layers=layers, dim=32)
    some: Any = SimpleNamespace(places=(9,) * layers, experts=20)
    seconds = Between(layer_s, 0.0015, besides_s)
    found = time_misses(None, config, some, [np.array(spread)] * layers, seconds, 1)  # type: ignore[arg-type]
    assert found.hits_s == pytest.approx(layers * layer_s + besides_s, rel=0.01)

    truth, random, missed = Clock(), np.random.default_rng(5), 0
    for _ in range(400):
        for number in random.choice(len(spread), layers, p=spread):
            truth.experts(int(number))
            truth.now += layer_s - 0.0015
            missed += number
        truth.now += besides_s
    assert found.missed == pytest.approx(missed / 400, rel=0.1)
    assert found.misses_s == pytest.approx(truth.now / 400, rel=0.03)
    assert found.more_s == found.misses_s - found.hits_s
    assert f"add {1e3 * found.more_s:.1f} ms" in str(found)


def test_misses_are_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_experts, "_HITS_S", 0.0)
    monkeypatch.setattr(missed_experts, "_MISSES_S", 0.0)
    monkeypatch.setattr(missed_experts, "_FILLER_S", 0.0)
    for share, asked in ((0.5, 1), (0.1, 2)):  # a half; two places, as many as a token chooses
        with open_gguf(model) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            how = {"ram_budget": budget(model, share, context=128), "context": 128}
            fit: Any = shelves_of(file, config, how)
            always = np.eye(asked + 1)[asked]
            found = time_misses(file, config, fit, [always] * config.layers, Between(1e-4, 5e-5, 1e-4), 1)
        assert found.missed == asked * config.layers and found.hits_s > 0


def test_a_file_that_cannot_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise _native.DiskError("blk.1: expert 3 cannot be read: it was changed")

    monkeypatch.setattr(missed_experts, "_time_misses", fails)
    with open_gguf(model) as file, pytest.raises(UserError, match=r"gguf: blk\.1: expert 3 cannot be read"):
        time_misses(file, *[None] * 4)  # type: ignore[arg-type]


def test_what_is_faster_with_misses_adds_nothing() -> None:
    assert MissTime(0.2, 0.1, 3.0).more_s == 0
