"""Layers in two halves on two backends: the unsplit model's logits, masks and counts, for any placement."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.op_truth import FFNKind, plain_batch, random_ffn, random_rows, random_tensor, rng
from support.plain_forward import Model
from support.runner import ROWS, Runner, dense, exact, predicted

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import (
    PAGE,
    Backend,
    BatchLimits,
    FFNCall,
    FFNStats,
    PredictorTensors,
    PredictorWeights,
)
from hotcold.kernels.numpy_ffn import unpack_mask
from hotcold.model.config import Config
from hotcold.model.weights import Weights
from hotcold.placement.placement import Placement
from hotcold.placement.split import ColdSide, SplitDevices, split_predictor, take_neurons
from hotcold.sparse.ffn import FFN, SplitFFN, make_ffns
from hotcold.sparse.predictor import load_predictors

PAIRS = ("cpu, reference", "reference, cpu", "cpu, cpu again")
NEURONS = (70, 90, 128, 33)
TOKENS = [int(t) for t in rng("split").integers(0, 61, 40)]
#: Sums in two halves differ in their last bits; so would any other order of summing.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@functools.cache
def backend(name: str) -> Backend:
    return open_backend(name) if name == "reference" else open_backend("cpu", 1 if name == "cpu" else 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of float weights with biases, and predictors that name about half of the neurons."""
    model = Model(activation="relu", neurons=NEURONS, biases=True)
    tensors = model.tensors()
    for i, n in enumerate(NEURONS):
        for name, shape in (("fc1", (32, model.dim)), ("fc2", (n, 32))):
            values = rng(f"{name} {i}").standard_normal(shape).astype(np.float32)
            tensors[f"blk.{i}.{name}.weight"] = quantise(values, "F32")
    return model.write(tmp_path_factory.mktemp("split") / "model.gguf", tensors, "PWRI")


@contextmanager
def split_runner(path: Path, placement: Placement, pair: str, mode: str) -> Iterator[Runner]:
    cold, hot = map(backend, pair.split(", "))
    sides: list[ColdSide] = []
    devices = SplitDevices.place(placement, cold, {0: hot})

    def make(_: Backend, config: Config, weights: Weights) -> Sequence[FFN]:
        predictors: Sequence[PredictorWeights | None] = [None] * config.layers
        if mode == "predicted":
            with open_gguf(path) as file:
                predictors = load_predictors(file, config, devices)
        limits = BatchLimits(ROWS, 1, config.context // PAGE, ROWS)
        layers = [layer.ffn for layer in weights.layers]
        side = ColdSide(devices, hot, layers, predictors, limits, [(config.dim, 0)] * config.layers)
        ffns = make_ffns(devices, layers, ROWS, mode=mode, predictors=predictors, cold=(cold, side.boxes))
        side.serve(ffns)
        sides.append(side)
        return ffns

    try:
        yield Runner(path, devices, make, cache_type="f32")  # type: ignore[arg-type]
    finally:
        for side in sides:
            side.close()


def unsplit(path: Path, mode: str) -> Runner:
    make = {"off": dense, "exact": exact, "predicted": predicted(path)}[mode]
    return Runner(path, backend("reference"), make, cache_type="f32")


def with_shares(shares: Sequence[float], layers: range, head: bool, seed: int = 0) -> Placement:
    random = np.random.default_rng(seed)
    hot = [
        random.permutation(n) < (round(share * n) if i in layers else 0)
        for i, (n, share) in enumerate(zip(NEURONS, shares, strict=True))
    ]
    return Placement.on_one(hot, layers, head)


def compare(path: Path, placement: Placement, pair: str, mode: str) -> None:
    """A prompt, decode rows 16 at a time, and greedy tokens."""
    whole = unsplit(path, mode)
    with split_runner(path, placement, pair, mode) as split:
        np.testing.assert_allclose(split.run(TOKENS[:25]), whole.run(TOKENS[:25]), **CLOSE)
        rows, expected = (each.run(TOKENS[25:], decode=True) for each in (split, whole))
        np.testing.assert_allclose(rows, expected, **CLOSE)
        for one, other in zip(split.ffns, whole.ffns, strict=True):
            if mode != "off":
                assert isinstance(one, FFN) and isinstance(other, FFN)
                np.testing.assert_array_equal(one.counts(), other.counts())
        whole.length = split.length = 0
        assert split.greedy(TOKENS[:3], 50) == whole.greedy(TOKENS[:3], 50)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("mode", ["off", "predicted"])
def test_the_cold_side_reads_nothing_of_its_last_answer(
    path: Path, pair: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mailbox for a device may be in memory that the processor reads slowly."""
    compute_cold = SplitFFN.compute_cold

    def poisoned(self: SplitFFN) -> None:
        nan = self.cold.zeros(self.box.y.shape)
        self.cold.write(nan, np.full(self.box.y.shape, np.nan, np.float32))
        self.cold.add(self.box.y, nan, self.box.batch, keep=0)
        compute_cold(self)

    monkeypatch.setattr(SplitFFN, "compute_cold", poisoned)
    compare(path, with_shares((0.3, 0.5, 0.9, 0), range(4), True), pair, mode)


MODES = ("off", "exact", "predicted")
SHARES = (0, 0.1, 0.5, 1)


@pytest.mark.parametrize(
    ("pair", "share", "mode"),  # each pair of values of two of them comes up
    [(pair, share, MODES[(i + j) % 3]) for i, pair in enumerate(PAIRS) for j, share in enumerate(SHARES)],
)
def test_the_logits_and_counts_of_the_unsplit_model(path: Path, pair: str, share: float, mode: str) -> None:
    compare(path, with_shares([share] * 4, range(4), True), pair, mode)


PLACEMENTS = st.builds(
    with_shares,
    st.tuples(*[st.sampled_from([0, 0.02, 0.3, 0.7, 0.97, 1]) for _ in NEURONS]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ends: range(*sorted(ends))),
    st.booleans(),
    st.integers(0, 99),
)


@given(PLACEMENTS, st.sampled_from(PAIRS), st.sampled_from(MODES))
@settings(max_examples=15)
def test_any_placement(path: Path, placement: Placement, pair: str, mode: str) -> None:
    compare(path, placement, pair, mode)


def test_a_parallel_block_without_gates(tmp_path: Path) -> None:
    model = Model("falcon", layer_norm=True, parallel=True, gated=False, interleaved=False, activation="gelu",
                  neurons=NEURONS, biases=True, tied=True)  # fmt: skip
    compare(
        model.write(tmp_path / "x.gguf"), with_shares([0.5] * 4, range(1, 3), True), "cpu, cpu again", "off"
    )


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_two_halves_are_the_whole(name: str, type: str, layout: str) -> None:
    """Nothing is rounded again: the two halves' sum differs in its last bits only."""
    random, d, n = rng(f"halves {type} {layout}"), 256, 1024
    whole = random_ffn(random, (n, d), (type,) * 3, FFNKind(biases=True), layout)
    shared = whole.down.type.weights if layout == "by_output" else 1
    hot = np.repeat(random.random(n // shared) < 0.4, shared)
    ops = backend(name)
    batch = plain_batch(ops, 5)
    x, out, expected = (ops.zeros((batch.limits.tokens, d)) for _ in range(3))
    ops.write(x, random_rows(random, batch.limits.tokens, d))
    stats, all_stats = (FFNStats(ops.zeros((1, 5), np.int64)) for _ in range(2))
    halves = [take_neurons(whole, hot), replace(take_neurons(whole, ~hot), down_bias=whole.down_bias)]
    for tensors in halves:
        ops.ffn(FFNCall(x, ops.ffn_weights(tensors), batch, out, skip=True, stats=stats, accumulate=True))
    ops.ffn(FFNCall(x, ops.ffn_weights(whole), batch, expected, skip=True, stats=all_stats))
    found, truth = ops.read(out), ops.read(expected)
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5 * np.abs(truth).max())
    np.testing.assert_array_equal(ops.read(stats.counts), ops.read(all_stats.counts))
    sizes = [ops.ffn_weights(tensors).nbytes for tensors in (*halves, whole)]
    assert sizes[0] + sizes[1] == sizes[2]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_stock_quantised_file(tmp_path: Path, pair: str) -> None:
    """Its down blocks lie along the neurons. Sums in two halves now and then turn an int8 code."""
    model = Model(dim=64, heads=4, head_dim=32, rotary=32, neurons=(128, 96), type="Q8_0", activation="relu")
    path, hot = model.write(tmp_path / "x.gguf"), [np.arange(n) // 32 % 2 == 1 for n in model.neurons]
    whole = unsplit(path, "exact").run(TOKENS, decode=True)
    with split_runner(path, Placement.on_one(hot, range(2), False), pair, "exact") as split:
        assert [layer.ffn.runs for layer in split.weights.layers] == [4, 3]
        error = split.run(TOKENS, decode=True) - whole
    assert np.sqrt((error**2).mean()) < 0.01 * np.sqrt((whole**2).mean())


def test_a_block_of_neurons_is_not_divided() -> None:
    tensors = random_ffn(rng("block"), (64, 32), ("Q8_0",) * 3, layout="by_output")
    with pytest.raises(ValueError, match=r"divides neurons .* in one block, 32 of type Q8_0: .*hotcold plan"):
        take_neurons(tensors, np.arange(64) < 33)


@given(st.integers(1, 200).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n)))
@settings(max_examples=50)
def test_a_split_predictor_marks_what_the_whole_one_marks(flags: list[bool]) -> None:
    hot, n, random = np.array(flags), len(flags), rng(f"predictor {len(flags)}")
    tensors = PredictorTensors(
        random_tensor(random, "F16", 8, 32), random_tensor(random, "F16", n, 8),
        random.standard_normal(n).astype(np.float32) * 0.1, True,
    )  # fmt: skip
    ops = backend("cpu")
    batch, words = plain_batch(ops, 3), (-(-n // 64), -(-int(hot.sum()) // 64), -(-int((~hot).sum()) // 64))
    rows = batch.limits.tokens
    x = ops.zeros((rows, 32))
    ops.write(x, random_rows(random, rows, 32))
    whole = ops.zeros((rows, words[0]), np.uint64)
    parts = ops.zeros((rows, words[1] + words[2]), np.uint64)
    ops.predict(x, ops.predictor_weights(tensors), batch, whole)
    ops.predict(x, ops.predictor_weights(split_predictor(tensors, hot)), batch, parts)
    marked = unpack_mask(ops.read(whole, 0, 3), n)
    found = ops.read(parts, 0, 3)
    for part, which in ((found[:, : words[1]], hot), (found[:, words[1] :], ~hot)):
        np.testing.assert_array_equal(
            unpack_mask(part, part.shape[1] * 64)[:, : which.sum()], marked[:, which]
        )
        assert not unpack_mask(part, part.shape[1] * 64)[:, which.sum() :].any()
