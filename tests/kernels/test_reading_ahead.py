"""Experts that are read before a step names them: what is asked for and which make room, against plain lists,
and who is told what to guess, against the router op."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_layers import choices, make_layer, with_slots
from support.op_truth import FFNKind, plain_batch, random_rows, random_tensor, rng

from hotcold.errors import UserError
from hotcold.formats.blocks import Tensor
from hotcold.formats.files import FileError
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels import _native, cpu_disk, file_reads
from hotcold.kernels.backend import Chosen, ExpertGroups, FFNCall, FFNTensors, LookAhead, Norm, RouterCall
from hotcold.kernels.cpu import CPUBackend

EXPERTS, K, NEURONS, DIM = 12, 2, 64, 96


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(file_reads.AHEAD_VARIABLE, "on")


def stored(folder: Path) -> tuple[FFNTensors, FFNTensors]:
    """A layer in memory, and the same in a file."""
    whole = make_layer(K, (NEURONS,) * EXPERTS, DIM, ("Q8_0",) * 3, FFNKind("silu"), "by_output").tensors
    parts = {"gate": whole.gate, "up": whole.up, "down": whole.down}
    path = folder / "layer.gguf"
    write_gguf(path, {"general.architecture": "llama"}, parts)  # type: ignore[arg-type]
    file = open_gguf(path)
    return whole, replace(whole, **{name: file.stored(name).flat() for name in parts})


class Steps:
    """Runs steps of decode rows on a layer, which may be told before what they will choose."""

    def __init__(self, tensors: FFNTensors, ops: CPUBackend | None = None) -> None:
        self.ops = ops or CPUBackend(2)
        self.weights: Any = self.ops.ffn_weights(tensors)

    def guess(self, experts: list[int]) -> None:
        self.weights.shelf.guess(sorted(experts))

    def run(
        self,
        ids: np.ndarray,
        factors: np.ndarray,
        x: np.ndarray,
        ahead: LookAhead | None = None,
        prompt: int = 0,
    ) -> np.ndarray:
        rows = len(x)
        batch = plain_batch(self.ops, rows - prompt, prompt)
        more = ((0, len(batch.tokens) - rows), (0, 0))  # buffers are as long as the batch's arrays
        x, ids, factors = (np.pad(each, more) for each in (x, ids, factors))
        if ahead is not None:
            ahead = replace(ahead, x=np.pad(ahead.x, more))
        out = np.zeros_like(x)
        self.ops.ffn(
            FFNCall(x, self.weights, batch, out, skip=False, chosen=Chosen(ids, factors), ahead=ahead)
        )
        return out[:rows]

    def counts(self) -> tuple[int, int, int, int]:
        found = self.ops.disk_counts()
        assert found is not None
        return found.hits, found.misses, found.guessed, found.right


class Lists:
    """The places of a layer: the least recently named expert makes room, for a guess only if the last step
    did not name it; guesses that a step does not name leave at once."""

    def __init__(self, places: int, hot: tuple[int, ...], kept: int, mode: str) -> None:
        self.for_good, self.free, self.mode = set(hot[:kept]), places - kept, mode
        self.named = {expert: -1 - i for i, expert in enumerate(hot) if i >= kept}
        self.guesses: list[int] = []  # that were read
        self.judged: list[int] = []  # that are judged
        self.record = [0, 0]
        self.step = self.hits = self.misses = self.guessed = self.right = 0

    @property
    def pays(self) -> bool:
        all_of_them, right = self.record
        return all_of_them >= 16 and 4 * right >= 3 * all_of_them

    def drop(self, candidates: list[int]) -> None:
        del self.named[min(candidates, key=lambda e: (self.named[e], e))]

    def guess(self, experts: set[int]) -> None:
        reads = self.mode == "on" or self.pays
        absent = [e for e in sorted(experts) if e not in self.named and e not in self.for_good]
        for expert in absent:
            if reads:
                if len(self.named) + len(self.guesses) == self.free:
                    old = [e for e, step in self.named.items() if step < self.step and e not in experts]
                    if not old:
                        break
                    self.drop(old)
                self.guesses.append(expert)
                self.guessed += 1
            self.judged.append(expert)

    def run(self, experts: set[int]) -> None:
        self.step += 1
        self.record[0] += len(self.judged)
        self.record[1] += len(experts & set(self.judged))
        if self.record[0] >= 64:
            self.record = [n // 2 for n in self.record]
        right = experts & set(self.guesses)
        self.right += len(right)
        self.guesses, self.judged = [], []
        here = {e for e in experts if e in self.named or e in self.for_good}
        self.hits += len(here)
        self.misses += len(experts - here)
        self.named |= dict.fromkeys((here - self.for_good) | right, self.step)
        for expert in sorted(experts - here - right):
            if len(self.named) == self.free:
                self.drop(list(self.named))
            self.named[expert] = self.step

    def counts(self) -> tuple[int, int, int, int]:
        return self.hits, self.misses, self.guessed, self.right


@given(
    seed=st.integers(0, 1000),
    hot=st.integers(0, 8),
    kept=st.integers(0, 4),
    free=st.integers(4, 6),
    rows=st.integers(1, 2),
    how=st.sampled_from(["well", "badly", "all"]),
    mode=st.sampled_from(["on", "auto"]),
)
@settings(max_examples=40, deadline=None)
def test_guesses_take_places_by_the_layers_rule(
    seed: int,
    hot: int,
    kept: int,
    free: int,
    rows: int,
    how: str,
    mode: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """No step names more than there are free places; what it gives has the same bits."""
    whole, lying = stored(tmp_path_factory.mktemp("layer"))
    kept = min(kept, hot)
    places = kept + free
    order = tuple(rng("hot", seed).permutation(EXPERTS)[: min(hot, places)].tolist())
    resident = Steps(whole)
    shelved = Steps(with_slots(lying, places, order, kept))
    shelved.weights.shelf.set_guessing(mode)
    lists = Lists(places, order, kept, mode)
    for step in range(24):
        ids, factors = choices((seed, step), rows, EXPERTS, K)
        named = set(ids.ravel().tolist())
        random = rng("guess", seed, step)
        guess = set(random.permutation(EXPERTS)[: random.integers(0, 2 * K + 1)].tolist())
        guess = {"well": named | set(list(guess)[:1]), "badly": guess, "all": set(range(EXPERTS))}[how]
        if step % 5:  # not before each step: prompts have none
            shelved.guess(list(guess))
            lists.guess(guess)
        x = random_rows(rng(seed, step), rows, DIM)
        np.testing.assert_array_equal(shelved.run(ids, factors, x), resident.run(ids, factors, x))
        lists.run(named)
        assert shelved.counts() == lists.counts()


def choose(*experts: int) -> tuple[np.ndarray, np.ndarray]:
    """One row's choice."""
    return np.array([experts], np.int32), np.ones((1, len(experts)), np.float32)


def one_row(key: str) -> np.ndarray:
    return random_rows(rng(key), 1, DIM)


def test_a_wrong_guess_is_the_first_to_make_room(tmp_path: Path) -> None:
    _, lying = stored(tmp_path)
    steps = Steps(with_slots(lying, 4))
    for pair in ((0, 1), (2, 3)):
        steps.run(*choose(*pair), one_row("room"))
    steps.guess([2, 3, 8])  # for which expert 0 makes room
    steps.run(*choose(1, 9), one_row("room"))  # takes the place of 8
    before = steps.counts()
    steps.run(*choose(1, 2), one_row("room"))
    steps.run(*choose(3, 9), one_row("room"))
    assert before == (1, 5, 1, 0) and steps.counts() == (5, 5, 1, 0)


def test_what_the_last_step_named_stays(tmp_path: Path) -> None:
    _, lying = stored(tmp_path)
    steps = Steps(with_slots(lying, 3))
    for pair in ((0, 1), (2, 3)):
        steps.run(*choose(*pair), one_row("last"))
    steps.guess([7, 8, 9])  # one has the place of expert 1
    steps.run(*choose(2, 3), one_row("last"))
    assert steps.counts() == (2, 4, 1, 0)


def test_nothing_waits_for_a_guess(tmp_path: Path) -> None:
    """A read under way that turns out to be wrong does not reach its place."""
    _, lying = stored(tmp_path)
    steps = Steps(with_slots(lying, 4))
    steps.run(*choose(0, 1), one_row("wait"))
    disk: Any = steps.ops._packer.disk
    read = disk.counts().nbytes
    disk.native.hold(True)
    steps.guess([5, 6])
    steps.run(*choose(0, 1), one_row("wait"))
    disk.native.hold(False)
    counts = disk.counts()
    assert (counts.hits, counts.misses, counts.guessed, counts.right) == (2, 2, 2, 0)
    assert counts.nbytes == read and counts.vain_bytes == 0


def wait_until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_wrong_guess_that_was_read_is_counted(tmp_path: Path) -> None:
    whole, lying = stored(tmp_path)
    steps = Steps(with_slots(lying, 4))
    disk: Any = steps.ops._packer.disk
    steps.guess([5, 6])
    wait_until(lambda: disk.native.counts()[1] == 6)
    steps.run(*choose(0, 1), one_row("vain"))
    each = (whole.gate.nbytes + whole.up.nbytes + whole.down.nbytes) // EXPERTS  # type: ignore[union-attr]
    assert disk.counts().vain_bytes == 2 * each


def test_a_guess_that_cannot_be_read_is_an_error_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cpu_disk.Disk._experts

    def bad(self: cpu_disk.Disk, tensor: Any, experts: int) -> Any:
        lying = plain(self, tensor, experts)
        lying.offsets[5] = 1 << 40
        return lying

    whole, lying = stored(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_disk.Disk, "_experts", bad)
        steps = Steps(with_slots(lying, 4))
    x, right = one_row("bad"), choose(0, 1)
    expected = Steps(whole).run(*right, x)
    disk: Any = steps.ops._packer.disk
    for _ in range(2):
        reads = disk.native.counts()[1]
        steps.guess([0, 5])
        wait_until(lambda before=reads: disk.native.counts()[1] > before)  # type: ignore[misc]
        np.testing.assert_array_equal(steps.run(*right, x), expected)
        steps.guess([5])
        with pytest.raises(FileError, match="layer 7: expert 5 cannot be read: the file is shorter"):
            steps.run(*choose(0, 5), x)
    np.testing.assert_array_equal(steps.run(*right, x), expected)


def test_a_guess_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    whole, lying = stored(tmp_path)
    steps, path = Steps(with_slots(lying, 4)), tmp_path / "layer.gguf"
    disk: Any = steps.ops._packer.disk
    data, times = path.read_bytes(), os.stat(path)
    os.truncate(path, 100)
    steps.guess([5])
    wait_until(lambda: disk.native.counts()[1] == 3)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    x = one_row("again")
    np.testing.assert_array_equal(steps.run(*choose(0, 5), x), Steps(whole).run(*choose(0, 5), x))
    assert steps.counts() == (0, 2, 1, 1)


def test_what_is_needed_is_read_before_what_is_guessed(tmp_path: Path) -> None:
    """By one thread, which has read all that was guessed when it comes to the rest, if it was asked first."""
    rows, row, count = 256, 1 << 12, 24
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(count * rows * row)

    def shelf(disk: _native.Disk, places: int) -> _native.Shelf:
        weights = _native.WeightRows(
            _native.Arena().take(places * rows * row), 0, row, places * rows, row // 4, 0
        )
        with path.open("rb") as file:
            number = disk.add(file.fileno())
        found = _native.Shelf(disk, "a layer", count, places)
        found.add(disk, weights, False, number, [i * rows * row for i in range(count)], rows, row)
        found.set_guessing("on")
        return found

    for _ in range(10):  # where this thread is slow to look, all may have been read
        disk = _native.Disk(1, False, False)
        ahead, needed = shelf(disk, count - 1), shelf(disk, 2)
        disk.hold(True)
        ahead.guess(list(range(count - 1)))
        thread = threading.Thread(target=lambda own=needed: own.fill([3], 0))  # type: ignore[misc]
        thread.start()
        time.sleep(0.1)
        disk.hold(False)
        thread.join()
        if disk.counts()[1] < count:
            return
    raise AssertionError("guesses are read first")


ROUTERS: list[dict[str, Any]] = [
    {"k": 2, "score": "softmax", "selection_bias": None, "groups": None},
    {"k": 3, "score": "sigmoid", "selection_bias": None, "groups": ExpertGroups(4, 2)},
    {"k": 2, "score": "sigmoid", "selection_bias": rng("bias").normal(size=EXPERTS), "groups": None},
]


def layers_and_router(
    folder: Path, kind: dict[str, Any], *, normed: bool, places: int = 9
) -> tuple[Steps, Steps, LookAhead]:
    """A layer in memory, a later one on a shelf, and the router between them, without its x."""
    whole, lying = stored(folder)
    first = Steps(whole)
    second = Steps(with_slots(lying, places), first.ops)
    tensor: Tensor = random_tensor(rng("router"), "F32", EXPERTS, DIM)
    bias = None if kind["selection_bias"] is None else kind["selection_bias"].astype(np.float32)
    scale = np.asarray(rng("norm").uniform(0.2, 2, DIM), np.float32)
    return (
        first,
        second,
        LookAhead(
            norm=Norm(scale, None, 1e-6) if normed else None,
            weights=first.ops.matrix(tensor),
            ffn=second.weights,
            **kind | {"selection_bias": bias},
        ),
    )


def chosen_by(ops: CPUBackend, ahead: LookAhead, x: np.ndarray) -> set[int]:
    """Returns the choice of the router op."""
    batch = plain_batch(ops, len(x))
    x = np.pad(x, ((0, len(batch.tokens) - len(x)), (0, 0)))
    if ahead.norm is not None:
        ops.norm(x.copy(), ahead.norm, batch, x)
    ids, factors = np.zeros((len(x), ahead.k), np.int32), np.zeros((len(x), ahead.k), np.float32)
    names = "k", "score", "selection_bias", "groups"
    kind = {name: getattr(ahead, name) for name in names}
    ops.router(RouterCall(x, ahead.weights, batch, ids, factors, normalise=True, scale=1.0, **kind))
    return set(ids[: batch.n_tokens].ravel().tolist())


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_next_router_is_tried_on_the_residual_stream(
    rows: int, kind: dict[str, Any], normed: bool, tmp_path: Path
) -> None:
    first, second, ahead = layers_and_router(tmp_path, kind, normed=normed)
    (ids, factors), x = choices("ahead", rows, EXPERTS, K), random_rows(rng("x", rows), rows, DIM)
    stream = random_rows(rng("stream", rows), rows, DIM)
    guess = sorted(chosen_by(first.ops, ahead, stream))[:9]
    plain = first.run(ids, factors, x)
    given = replace(ahead, x=stream)
    np.testing.assert_array_equal(first.run(ids, factors, x, given), plain)
    own, numbers = choices("own", rows, EXPERTS, K)
    second.run(own, numbers, x)
    right = len({*own.ravel().tolist()} & {*guess})
    assert second.counts()[2:] == (len(guess), right)
    # Neither prompts nor many rows are looked at.
    many = random_rows(rng("many"), 5, DIM)
    for prompt in (0, 2):
        more = choices("many", 5, EXPERTS, K)
        first.run(*more, many, replace(ahead, x=many), prompt=prompt)
        second.run(*more, many)
    assert second.counts()[2:] == (len(guess), right)


def test_guesses_are_tried_now_and_then_where_they_do_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And begin to be read where they turn out well."""
    monkeypatch.setenv(file_reads.AHEAD_VARIABLE, "auto")
    first, second, ahead = layers_and_router(tmp_path, ROUTERS[0], normed=True, places=4)
    x, guessed = one_row("auto"), []
    for step in range(1000):
        stream = random_rows(rng("auto", step), 1, DIM)
        guess = sorted(chosen_by(first.ops, ahead, stream))
        first.run(*choose(0, 1), x, replace(ahead, x=stream))
        other = [e for e in range(EXPERTS) if e not in guess][:K]
        second.run(*choose(*(other if step < 100 else guess)), x)
        guessed.append(second.counts()[2:])
    assert guessed[99] == (0, 0) and 0 < guessed[-1][0] == guessed[-1][1]


def test_nothing_is_read_ahead_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(file_reads.AHEAD_VARIABLE)
    assert file_reads.reading_ahead() == "off"


def test_the_variable_names_one_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(file_reads.AHEAD_VARIABLE, "maybe")
    with pytest.raises(UserError, match="HOTCOLD_AHEAD is 'maybe': there are off, on and auto"):
        cpu_disk.Disk()
