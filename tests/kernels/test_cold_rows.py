"""Rows that are read when their neurons are active or named: which are read, against gates computed in
float64 and against masks, and what they give, against all of them in memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.expert_layers import RELU, choices, make_layer, with_hot, with_slots
from support.op_truth import FFNKind, plain_batch, random_rows, rng

from hotcold.formats.blocks import Tensor
from hotcold.formats.files import FileError, RegularFile
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.formats.words import SIDE_BY_SIDE, SIDE_BY_SIDE_KEY
from hotcold.kernels import _native, cpu_disk
from hotcold.kernels.backend import Chosen, FFNCall, FFNTensors
from hotcold.kernels.cpu import CPUBackend

EXPERTS, K, NEURONS, DIM = 6, 2, 200, 96

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back by the page on Linux")


def stored(
    folder: Path,
    type: str,
    *,
    neurons: int = NEURONS,
    dim: int = DIM,
    kind: FFNKind = RELU,
    side_by_side: bool = False,
) -> tuple[FFNTensors, FFNTensors]:
    """A layer in memory, and the same in a file, in which the rows of a neuron perhaps lie together."""
    whole = make_layer(K, (neurons,) * EXPERTS, dim, (type,) * 3, kind).tensors
    parts = {"gate": whole.gate, "up": whole.up, "down": whole.down}
    assert all(isinstance(each, Tensor) for each in parts.values())
    path = folder / "layer.gguf"
    keys: dict[str, Any] = {"general.architecture": "llama"}
    tensors: dict[str, Any] = {f"l.{name}.w": each for name, each in parts.items()}
    if side_by_side:
        keys[SIDE_BY_SIDE_KEY] = list(parts)
        rows = np.stack([each.data for each in tensors.values()], axis=1).reshape(3 * EXPERTS * neurons, -1)
        tensors = {f"l.{SIDE_BY_SIDE}.w": Tensor(whole.up.type, (len(rows), dim), rows)}
    write_gguf(path, keys, tensors)
    file = open_gguf(path)
    lying = {name: file.stored(f"l.{name}.w").flat() for name in parts}
    return whole, replace(whole, **lying)


class Steps:
    """Runs steps on a layer."""

    dim = DIM

    def __init__(self, tensors: FFNTensors, threads: int = 2) -> None:
        self.ops = CPUBackend(threads)
        self.weights = self.ops.ffn_weights(tensors)

    def run(
        self, key: object, decode: int, prompt: int = 0, *, skip: bool = True, mask: Any = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The answer, the input and the experts of rows that follow from a key."""
        rows = decode + prompt
        batch = plain_batch(self.ops, decode, prompt)
        ids, factors = choices(key, rows, EXPERTS, K)
        x = random_rows(rng("x", key), rows, self.dim)
        more = ((0, len(batch.tokens) - rows), (0, 0))  # buffers are as long as the batch's arrays
        padded = [np.pad(each, more) for each in (x, ids, factors)]
        out = np.zeros_like(padded[0])
        named = None if mask is None else np.pad(mask, more)
        chosen = Chosen(padded[1], padded[2])
        self.ops.ffn(FFNCall(padded[0], self.weights, batch, out, skip=skip, mask=named, chosen=chosen))
        return out[:rows], x, ids


def hot_of(key: object) -> tuple[int, ...]:
    """Some experts have none, or nothing but hot neurons."""
    return tuple(rng("hot", key).choice([0, 1, 63, 64, 130, NEURONS], EXPERTS).tolist())


@pytest.mark.parametrize(
    ("seed", "rows", "neurons_at_once"), [(1, 1, 500), (2, 2, 60), (3, 4, 1), (4, 1, 60)]
)
def test_rows_of_active_neurons_are_read(seed: int, rows: int, neurons_at_once: int, tmp_path: Path) -> None:
    """Except gates near 0, which rounding decides."""
    whole, lying = stored(tmp_path, "F32")
    hot = hot_of(seed)
    resident, cold = Steps(whole), Steps(with_hot(lying, hot, neurons_at_once))
    assert isinstance(whole.gate, Tensor)
    gates = whole.gate.dequantise().astype(np.float64).reshape(EXPERTS, NEURONS, DIM)
    least, most = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for step in range(4):
        expected, x, ids = resident.run((seed, step), rows)
        np.testing.assert_array_equal(cold.run((seed, step), rows)[0], expected)
        for expert in {*ids.ravel().tolist()}:
            given = x[(ids == expert).any(axis=1)].astype(np.float64)
            values = given @ gates[expert].T
            for counts, bound in ((least, 1e-5), (most, -1e-5)):
                active = (values > bound).any(axis=0)
                counts += active[: hot[expert]].sum(), active[hot[expert] :].sum()
    found = cold.ops.disk_counts()
    assert found is not None and least.sum() > 100 and most.sum() - least.sum() < 5
    assert (least <= (found.hits, found.misses)).all() and (most >= (found.hits, found.misses)).all()


def masks(key: object, rows: int) -> np.ndarray:
    """A third of each expert's neurons, for each row; an expert begins at a whole word."""
    words = -(-NEURONS // 64)
    bits = rng("mask", key).random((rows, EXPERTS, 64 * words)) < 1 / 3
    bits[:, :, NEURONS:] = False
    return np.packbits(bits, axis=-1, bitorder="little").view("<u8").reshape(rows, EXPERTS * words)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(("seed", "rows", "neurons_at_once"), [(1, 1, 500), (2, 3, 60), (3, 4, 1)])
def test_rows_that_are_named_are_read(
    side_by_side: bool, seed: int, rows: int, neurons_at_once: int, tmp_path: Path
) -> None:
    """And no gate beside them."""
    whole, lying = stored(tmp_path, "Q8_0", side_by_side=side_by_side)
    hot = hot_of(seed)
    resident = Steps(whole)
    cold = Steps(with_hot(lying, hot, neurons_at_once, gates=True))
    hits = misses = 0
    for step in range(3):
        mask = masks((seed, step), rows)
        expected, _, ids = resident.run((seed, step), rows, mask=mask)
        np.testing.assert_array_equal(cold.run((seed, step), rows, mask=mask)[0], expected)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little").reshape(rows, EXPERTS, -1)
        for expert in {*ids.ravel().tolist()}:
            named = bits[(ids == expert).any(axis=1), expert].any(axis=0)
            hits += int(named[: hot[expert]].sum())
            misses += int(named[hot[expert] :].sum())
    counts = cold.ops.disk_counts()
    assert counts is not None and (counts.hits, counts.misses) == (hits, misses)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_same_bits_with_cold_gates(side_by_side: bool, tmp_path: Path) -> None:
    """With a mask and without, and of prompts, which no mask is for."""
    ways = (("Q4_0", RELU, 1, 1), ("F16", FFNKind("drelu", threshold=0.0), 3, 250))
    for type, kind, threads, neurons_at_once in ways:
        whole, lying = stored(tmp_path, type, kind=kind, side_by_side=side_by_side)
        resident = Steps(whole)
        some = with_hot(lying, hot_of((type, neurons_at_once)), neurons_at_once, gates=True)
        cold = Steps(some, threads)
        for decode, prompt, skip in ((1, 0, True), (16, 0, True), (0, 9, True), (3, 20, True), (2, 3, False)):
            for mask in (None, masks(decode, decode + prompt)):
                key = decode, prompt
                expected = resident.run(key, decode, prompt, skip=skip, mask=mask)[0]
                found = cold.run(key, decode, prompt, skip=skip, mask=mask)[0]
                np.testing.assert_array_equal(found, expected)


def test_a_mask_with_all_gates_in_memory(tmp_path: Path) -> None:
    whole, lying = stored(tmp_path, "Q8_0")
    resident, cold = Steps(whole), Steps(with_hot(lying, hot_of(1), 60))
    for rows, skip in ((1, True), (4, True), (2, False)):
        mask = masks(rows, rows)
        expected = resident.run(rows, rows, skip=skip, mask=mask)[0]
        np.testing.assert_array_equal(cold.run(rows, rows, skip=skip, mask=mask)[0], expected)


@pytest.mark.parametrize("type", ["Q4_0", "F32"])
def test_rows_side_by_side_however_they_are_held(type: str, tmp_path: Path) -> None:
    whole, lying = stored(tmp_path, type, side_by_side=True)
    resident = Steps(whole)
    for tensors in (lying, with_slots(lying, 3), with_hot(lying, hot_of(type), 60)):
        other = Steps(tensors)
        for decode, prompt in ((1, 0), (2, 9)):
            expected = resident.run((decode, prompt), decode, prompt)[0]
            np.testing.assert_array_equal(other.run((decode, prompt), decode, prompt)[0], expected)


def test_rows_side_by_side_are_one_read(tmp_path: Path) -> None:
    """The result of each neuron that is read alone."""
    counts = []
    for side_by_side in (False, True):
        _, lying = stored(tmp_path, "F32", neurons=64, dim=4096, side_by_side=side_by_side)
        cold = Steps(with_hot(lying, (0,) * EXPERTS, 64, gates=True))
        cold.dim = 4096
        words = np.full((1, EXPERTS), 1 | 1 << 10 | 1 << 40, np.uint64)
        cold.run("reads", 1, mask=words)
        disk = cold.ops._packer.disk
        assert disk is not None
        counts.append(disk.native.counts()[1])
    assert counts == [3 * 3 * K, 3 * K]


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("kind", [RELU, FFNKind("drelu", threshold=0.0), FFNKind("relu2")])
def test_the_same_bits_in_every_mix_of_rows(type: str, kind: FFNKind, tmp_path: Path) -> None:
    whole, lying = stored(tmp_path, type, kind=kind)
    resident = Steps(whole)
    for threads, neurons_at_once in ((1, 1), (3, 250)):
        cold = Steps(with_hot(lying, hot_of((type, neurons_at_once)), neurons_at_once), threads)
        for decode, prompt, skip in ((1, 0, True), (16, 0, True), (0, 9, True), (3, 20, True), (2, 3, False)):
            key = decode, prompt
            expected = resident.run(key, decode, prompt, skip=skip)[0]
            np.testing.assert_array_equal(cold.run(key, decode, prompt, skip=skip)[0], expected)


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of a memory there is a page for."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    pages = np.zeros((end - first) // page, np.uint8)
    to = ctypes.c_void_p(pages.ctypes.data)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), to)
    return int((pages & 1).sum()) * page


def test_memory_of_cold_rows_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = _native.Arena
    small: list[tuple[int, int]] = []

    class Arena:
        def __init__(self, *nodes: Any, huge: bool = True) -> None:
            self.own, self.huge = made(*nodes, huge=huge), huge

        def take(self, nbytes: int) -> Any:
            memory = self.own.take(nbytes)
            if not self.huge:
                small.append((memory.address, nbytes))
            return memory

    monkeypatch.setattr(cpu_disk._native, "Arena", Arena)
    neurons, dim, hot = 256, 1024, 40
    _, lying = stored(tmp_path, "Q8_0", neurons=neurons, dim=dim)
    cold = Steps(with_hot(lying, (hot,) * EXPERTS, neurons))
    cold.dim = dim
    ((address, nbytes),) = small
    most = EXPERTS * (nbytes // EXPERTS // neurons * hot + 2 * mmap.PAGESIZE)
    assert resident_bytes(address, nbytes) <= most
    for step in range(3):
        cold.run(("memory", step), 4, 5)
        assert resident_bytes(address, nbytes) <= most + 2 * EXPERTS * mmap.PAGESIZE
    counts = cold.ops.disk_counts()
    assert counts is not None and counts.misses > 100


def make_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a descriptor in the file's place that cannot be read."""

    @contextmanager
    def unreadable(self: RegularFile) -> Iterator[int]:
        with open(tmp_path / "other", "wb") as other:
            yield other.fileno()

    monkeypatch.setattr(cpu_disk.Disk, "_number", lambda self, tensor: _number_of(self, unreadable, tensor))
    made: Any = cpu_disk.Disk
    monkeypatch.setattr("hotcold.kernels.cpu_weights.Disk", lambda: made(direct=False))


def _number_of(disk: cpu_disk.Disk, opened: Any, tensor: Any) -> int:
    with opened(tensor.file) as number:
        return disk.native.add(number)


def test_a_disk_that_fails_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lying = stored(tmp_path, "Q8_0")
    make_unreadable(tmp_path, monkeypatch)
    cold = Steps(with_hot(lying, (0,) * EXPERTS, NEURONS))
    for step in range(2):
        with pytest.raises(FileError, match=r"layer 7: neurons of expert \d cannot be read: Bad file descr"):
            cold.run(("fails", step), 1)
    with pytest.raises(FileError, match="layer 7: neurons of expert 2 cannot be read: Bad file descriptor"):
        Steps(with_hot(lying, (0, 0, 5, 0, 0, 0), NEURONS))


def test_what_cannot_be_left_in_the_file_is_refused(tmp_path: Path) -> None:
    whole, lying = stored(tmp_path, "Q8_0")
    hot = (0,) * EXPERTS
    with pytest.raises(ValueError, match="must be stored in a file"):
        Steps(with_hot(whole, hot, 1))
    with pytest.raises(ValueError, match="experts with gates without a bias"):
        biased = replace(lying, gate_bias=np.zeros(EXPERTS * NEURONS, np.float32))
        Steps(with_hot(biased, hot, 1))
    with pytest.raises(ValueError, match="an expert cannot have more hot neurons than neurons"):
        Steps(with_hot(lying, (NEURONS + 1, *hot[1:]), 1))
    with pytest.raises(ValueError, match="an offset for each expert is needed"):
        Steps(with_hot(lying, hot[1:], 1))
