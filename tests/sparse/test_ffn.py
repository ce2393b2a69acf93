"""Leaving neurons out: lossless in `exact`, wrong only by what a predictor misses in `predicted`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.golden import golden
from support.op_truth import plain_batch, random_ffn, random_rows, random_tensor, rng, to_bits, to_words
from support.plain_forward import Model
from support.pwri import write_pwri
from support.runner import Runner, dense, exact, predicted

from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend, FFNCall, FFNStats, PredictorTensors
from hotcold.sparse.ffn import FFN, Prediction, make_ffns

TOKENS = [int(t) for t in rng("tokens").integers(3, 61, 40)]
STEPS = 24
RANK = 32


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


def by_neuron(folder: Path, type: str = "Q8_0") -> Path:
    """The tiny dReLU model, whose down lies by neuron."""
    return golden("tiny-drelu", folder, type=type, down="by_neuron").path


def pwri(folder: Path, threshold: float | None, type: str = "Q8_0") -> Path:
    """The same in PowerInfer's format, with the gate's leading singular vectors as a predictor."""
    source, path = by_neuron(folder, type), folder / f"{threshold}.gguf"
    factors = {}
    with open_gguf(source) as file:
        for layer in range(3):
            gate = file.load(f"blk.{layer}.ffn_gate.weight").dequantise()
            left, sizes, right = np.linalg.svd(gate, full_matrices=False)
            half = RANK // 2  # x and -x, so that the ReLU between the factors loses nothing
            first = np.vstack([right[:half], -right[:half]])
            second = np.hstack([left[:, :half] * sizes[:half], -left[:, :half] * sizes[:half]])
            factors[layer] = (first.astype(np.float32), second.astype(np.float32))
    write_pwri(path, source, factors, threshold)
    return path


@pytest.mark.parametrize("activation", ["relu", "drelu", "relu2"])
@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_exact_changes_no_bit_of_the_logits(
    tmp_path: Path, activation: str, type: str, threshold: float
) -> None:
    shape = {"dim": 96, "heads": 4, "head_dim": 24, "rotary": 24, "neurons": (96, 160)}
    model = Model(activation=activation, threshold=threshold, type=type, **shape)
    path = model.write(tmp_path / "model.gguf")
    results, tokens = [], []
    for how in (dense, exact):
        runner = Runner(path, open_backend("cpu"), how)
        results.append(np.vstack([runner.run(TOKENS[:20]), runner.run(TOKENS[20:], decode=True)]))
        tokens.append(runner.greedy([TOKENS[0]], STEPS))
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
    assert tokens[0] == tokens[1]


def test_exact_counts_what_it_reads(tmp_path: Path, backend: Backend) -> None:
    runner = Runner(by_neuron(tmp_path), backend, exact)
    runner.run(TOKENS[:20])
    assert not any(ffn.counts().any() for ffn in runner.ffns)  # a prompt is dense
    rows = 7
    runner.run(TOKENS[20 : 20 + rows], decode=True)
    for ffn, neurons in zip(runner.ffns, runner.config.neurons, strict=True):
        gate, up, down, pairs, _ = ffn.counts().tolist()
        assert gate == neurons and up <= gate and down <= up
        assert 0 < down <= pairs < rows * neurons / 2  # dReLU: a quarter, for random weights


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_a_predictor_that_names_all_gives_the_dense_twins_tokens(
    tmp_path: Path, backend: Backend, type: str
) -> None:
    dense_tokens = Runner(by_neuron(tmp_path, type), backend).greedy(TOKENS, STEPS)
    path = pwri(tmp_path, -1e30, type)
    runner = Runner(path, backend, predicted(path))
    assert runner.greedy(TOKENS, STEPS) == dense_tokens
    assert [ffn.counts()[0] for ffn in runner.ffns] == [n * (STEPS - 1) for n in runner.config.neurons]


def test_a_predictor_that_names_all_changes_no_bit(tmp_path: Path) -> None:
    path = pwri(tmp_path, -1e30)
    expected = Runner(by_neuron(tmp_path), open_backend("cpu")).run(TOKENS, decode=True)
    actual = Runner(path, open_backend("cpu"), predicted(path)).run(TOKENS, decode=True)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_a_predictor_that_names_nothing_gives_other_tokens(tmp_path: Path, backend: Backend) -> None:
    dense_tokens = Runner(by_neuron(tmp_path), backend).greedy(TOKENS, STEPS)
    path = pwri(tmp_path, 1e30)
    runner = Runner(path, backend, predicted(path))
    tokens = runner.greedy(TOKENS, STEPS)
    assert tokens[0] == dense_tokens[0]  # chosen by the prompt's logits, and prompts are dense
    assert tokens != dense_tokens
    assert not any(ffn.counts().any() for ffn in runner.ffns)


def test_a_real_predictor_leaves_out_some(tmp_path: Path, backend: Backend) -> None:
    """About half, as half of the gates are positive; and most active neurons are among the rest."""
    path = pwri(tmp_path, None)
    counts = []
    for how in (predicted(path), exact):
        runner = Runner(path, backend, how)
        for token in TOKENS:
            runner.run([token], decode=True)
        counts.append(np.array([ffn.counts() for ffn in runner.ffns]))
    share, recall = counts[0][:, 0] / counts[1][:, 0], counts[0][:, 3] / counts[1][:, 3]
    assert (share > 0.3).all() and (share < 0.7).all()
    assert (recall > share + 0.1).all() and (recall < 1).all()


@pytest.mark.parametrize("source", ["residual", "normed"])
def test_the_predictor_reads_what_it_was_made_for(backend: Backend, source: str) -> None:
    """Against the ops called one by one."""
    random = rng("source")
    n, d = 100, 64
    weights = backend.ffn_weights(random_ffn(random, (n, d), ("Q8_0",) * 3))
    first, second = random_tensor(random, "F16", RANK, d), random_tensor(random, "F16", n, RANK)
    tensors = PredictorTensors(first, second, np.zeros(n, np.float32), relu=True)
    predictor = backend.predictor_weights(tensors)
    batch = plain_batch(backend, 5)
    rows = batch.limits.tokens
    normed, residual = (backend.zeros((rows, d)) for _ in range(2))
    values = random_rows(random, 2, rows, d)
    backend.write(normed, values[0])
    backend.write(residual, values[1])
    mask, out, expected = (
        backend.zeros((rows, size), dtype)
        for size, dtype in ((2, np.uint64), (d, np.float32), (d, np.float32))
    )
    stats, expected_stats = (FFNStats(backend.zeros((2, 5), np.int64), 1) for _ in range(2))
    ffn = FFN(backend, weights, "predicted", prediction=Prediction(predictor, mask, source), stats=stats)
    backend.write(out, values[1])
    backend.write(expected, values[1])
    ffn(normed, residual, batch, out)
    named = backend.zeros((rows, 2), np.uint64)
    backend.predict(residual if source == "residual" else normed, predictor, batch, named)
    backend.ffn(
        FFNCall(
            normed, weights, batch, expected, skip=True, mask=named, stats=expected_stats, accumulate=True
        )
    )
    for one, other in ((mask, named), (out, expected), (stats.counts, expected_stats.counts)):
        np.testing.assert_array_equal(backend.read(one), backend.read(other))
    words = backend.read(named)
    share = to_bits(words[:5], n).mean()
    assert 0.1 < share < 0.9
    np.testing.assert_array_equal(to_words(to_bits(words, n)), words)


def test_layers_of_one_width_share_a_mask(backend: Backend) -> None:
    random = rng("masks")
    sizes = (100, 90, 200)  # words of 64: 2, 2, 4
    weights = [backend.ffn_weights(random_ffn(random, (n, 64), ("F16",) * 3)) for n in sizes]
    predictors = [
        backend.predictor_weights(
            PredictorTensors(random_tensor(random, "F16", RANK, 64), random_tensor(random, "F16", n, RANK),
                             np.zeros(n, np.float32), False)
        )
        for n in sizes
    ]  # fmt: skip
    allocated: list[tuple[int, ...]] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def zeros(self, shape: tuple[int, ...], dtype: object) -> np.ndarray:
            allocated.append(shape)
            return backend.zeros(shape, dtype)

    ffns = make_ffns(Counting(), weights, 20, mode="predicted", predictors=predictors)
    assert sorted(allocated) == [(3, 5), (20, 2), (20, 4)]
    assert [ffn.stats.row for ffn in ffns] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        make_ffns(backend, weights, 20, mode="predicted", predictors=predictors[:2])
    with pytest.raises(ValueError, match="predictor input 'logits': choose from residual, normed"):
        make_ffns(backend, weights, 20, mode="predicted", predictors=predictors, predictor_input="logits")


def test_exact_is_refused_where_nothing_is_zero(tmp_path: Path, backend: Backend) -> None:
    path = Model(activation="silu").write(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="skip with 'silu'"):
        Runner(path, backend, exact).run(TOKENS[:2])
