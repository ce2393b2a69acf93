"""Experts of one layer that are read when rows choose them: which are read, against a plain list of the least
recently named, and what they give, against all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_layers import choices, make_layer, with_slots
from support.op_truth import FFNKind, plain_batch, random_rows, rng

from hotcold.formats.blocks import Tensor
from hotcold.formats.files import FileError, RegularFile
from hotcold.formats.gguf import GGUFError, open_gguf, write_gguf
from hotcold.kernels import cpu_disk
from hotcold.kernels.backend import Chosen, FFNCall, FFNTensors
from hotcold.kernels.cpu import CPUBackend

EXPERTS, K, NEURONS, DIM = 12, 2, 64, 96
SILU = FFNKind("silu")


def stored(folder: Path) -> tuple[FFNTensors, FFNTensors]:
    """A layer in memory, and the same in a file."""
    whole = make_layer(K, (NEURONS,) * EXPERTS, DIM, ("Q8_0",) * 3, SILU, "by_output").tensors
    parts = {"gate": whole.gate, "up": whole.up, "down": whole.down}
    assert all(isinstance(each, Tensor) for each in parts.values())
    path = folder / "layer.gguf"
    write_gguf(path, {"general.architecture": "llama"}, parts)  # type: ignore[arg-type]
    file = open_gguf(path)
    lying = {name: file.stored(name).flat() for name in parts}
    return whole, replace(whole, **lying)


class Steps:
    """Runs steps of decode rows on a layer."""

    def __init__(self, tensors: FFNTensors) -> None:
        self.ops = CPUBackend(2)
        self.weights = self.ops.ffn_weights(tensors)

    def run(self, ids: np.ndarray, factors: np.ndarray, x: np.ndarray) -> np.ndarray:
        batch, rows = plain_batch(self.ops, len(x)), len(x)
        more = ((0, len(batch.tokens) - rows), (0, 0))  # buffers are as long as the batch's arrays
        x, ids, factors = (np.pad(each, more) for each in (x, ids, factors))
        out = np.zeros_like(x)
        self.ops.ffn(FFNCall(x, self.weights, batch, out, skip=False, chosen=Chosen(ids, factors)))
        return out[:rows]


def least_recently_named(
    steps: list[list[int]], places: int, hot: Sequence[int] = (), kept: int = 0
) -> tuple[int, int]:
    """Hits and misses: a step reads experts after it has used the cached ones, and never evicts the first
    ``kept`` hot experts."""
    for_good, places = set(hot[:kept]), places - kept
    named = {expert: -1 - i for i, expert in enumerate(hot) if i >= kept}  # by the last step that named them
    hits = misses = 0
    for number, experts in enumerate(steps):
        here = [e for e in experts if e in named or e in for_good]
        absent = sorted(set(experts) - set(here))
        hits, misses = hits + len(here), misses + len(absent)
        for expert in set(here) - for_good:
            named[expert] = number
        for expert in absent:
            if len(named) == places:
                del named[min(named, key=lambda e: (named[e], e))]
            named[expert] = number
    return hits, misses


@given(seed=st.integers(0, 1000), places=st.integers(8, EXPERTS - 1), rows=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_the_least_recently_named_make_room(
    seed: int, places: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No step names more than there are places."""
    whole, lying = stored(tmp_path_factory.mktemp("layer"))
    resident, shelved = Steps(whole), Steps(with_slots(lying, places))
    named = []
    for step in range(8):
        ids, factors = choices((seed, step), rows, EXPERTS, K)
        named.append(sorted({*ids.ravel().tolist()}))
        x = random_rows(rng(seed, step), rows, DIM)
        np.testing.assert_array_equal(shelved.run(ids, factors, x), resident.run(ids, factors, x))
    counts = shelved.ops.disk_counts()
    assert counts is not None
    assert (counts.hits, counts.misses) == least_recently_named(named, places)


@given(seed=st.integers(0, 1000), hot=st.integers(1, 9), kept=st.integers(0, 5), rows=st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_hot_experts_are_read_at_loading_and_some_keep_their_place(
    seed: int, hot: int, kept: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, lying = stored(tmp_path_factory.mktemp("layer"))
    order, places = tuple(rng("hot", seed).permutation(EXPERTS)[:hot].tolist()), 9
    kept = min(kept, hot)
    resident = Steps(whole)
    shelved = Steps(with_slots(lying, places, order, kept))
    at_loading = shelved.ops.disk_counts()
    assert at_loading is not None and at_loading.misses == 0
    assert at_loading.nbytes >= hot * 3 * NEURONS * DIM
    named = []
    for step in range(8):
        ids, factors = choices(("hot", seed, step), rows, EXPERTS, K)
        named.append(sorted({*ids.ravel().tolist()}))
        x = random_rows(rng("hot", seed, step), rows, DIM)
        np.testing.assert_array_equal(shelved.run(ids, factors, x), resident.run(ids, factors, x))
    counts = shelved.ops.disk_counts()
    assert counts is not None
    assert (counts.hits, counts.misses) == least_recently_named(named, places, order, kept)


@pytest.mark.parametrize(("hot", "kept"), [(tuple(range(5)), 0), ((0, 1, 2), 3), ((0,), 2), ((0, 1), -1)])
def test_hot_experts_leave_places_to_others(hot: tuple[int, ...], kept: int, tmp_path: Path) -> None:
    _, lying = stored(tmp_path)
    with pytest.raises(ValueError, match=f"{len(hot)} experts are preloaded and {kept} pinned in 4 slots"):
        Steps(with_slots(lying, 4, hot, kept))


@pytest.mark.parametrize("hot", [(3, 3), (EXPERTS,), (-1,)])
def test_hot_experts_are_experts(hot: tuple[int, ...], tmp_path: Path) -> None:
    _, lying = stored(tmp_path)
    with pytest.raises(ValueError, match="must be there, once each"):
        Steps(with_slots(lying, 4, hot))


@pytest.mark.parametrize("places", [2, 3, 5])
def test_a_step_may_name_more_than_there_are_places(places: int, tmp_path: Path) -> None:
    whole, lying = stored(tmp_path)
    resident, shelved = Steps(whole), Steps(with_slots(lying, places))
    for step in range(4):
        ids, factors = choices(("many", step), 16, EXPERTS, K)
        x = random_rows(rng("many", step), 16, DIM)
        np.testing.assert_array_equal(shelved.run(ids, factors, x), resident.run(ids, factors, x))


def test_a_file_that_cannot_be_opened_again_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process may have no more open files."""
    _, lying = stored(tmp_path)
    monkeypatch.setattr(RegularFile, "descriptor", lambda self: nullcontext(-1))
    with pytest.raises(GGUFError, match=r"layer\.gguf: the model's file cannot be opened again: Bad file"):
        Steps(with_slots(lying, 4))


def make_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a descriptor in the file's place that cannot be read."""

    @contextmanager
    def unreadable(self: RegularFile) -> Iterator[int]:
        with open(tmp_path / "other", "wb") as other:
            yield other.fileno()

    monkeypatch.setattr(RegularFile, "descriptor", unreadable)
    made: Any = cpu_disk.Disk
    monkeypatch.setattr("hotcold.kernels.cpu_weights.Disk", lambda: made(direct=False))


def test_a_disk_that_fails_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lying = stored(tmp_path)
    make_unreadable(tmp_path, monkeypatch)
    steps = Steps(with_slots(lying, 4))
    ids, factors = choices("fails", 1, EXPERTS, K)
    needed = f"layer.gguf, layer 7: expert {ids[0, 0]} cannot be read: Bad file descriptor"
    for _ in range(2):
        with pytest.raises(FileError, match=needed):
            steps.run(ids, factors, random_rows(rng("fails"), 1, DIM))


def test_a_disk_that_fails_at_loading_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lying = stored(tmp_path)
    make_unreadable(tmp_path, monkeypatch)
    with pytest.raises(FileError, match="layer 7: expert 11 cannot be read: Bad file descriptor"):
        Steps(with_slots(lying, 4, (11, 2), 1))


@pytest.mark.parametrize("places", [1, EXPERTS])
def test_places_for_one_or_for_all_are_refused(places: int, tmp_path: Path) -> None:
    _, lying = stored(tmp_path)
    with pytest.raises(ValueError, match=f"slots for {places} of {EXPERTS} experts"):
        Steps(with_slots(lying, places))


def test_experts_in_memory_have_no_file(tmp_path: Path) -> None:
    whole, _ = stored(tmp_path)
    with pytest.raises(ValueError, match="must be stored in a file"):
        Steps(with_slots(whole, 4))
