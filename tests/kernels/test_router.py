"""The router op: against a plain formula, its choice exactly, and bit for bit in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.op_truth import buffers, plain_batch, random_rows, random_tensor, rng, weights_of

from hotcold.formats.blocks import Tensor, quantise
from hotcold.kernels.backend import Backend, Floats, Ints, RouterCall
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.numpy_matrix import quantise_input

OpenBackend = Callable[..., Backend]


class Kind(NamedTuple):
    """The numbers of a router besides its weights."""

    experts: int
    k: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    bias: bool = False
    expert_scale: bool = False


MODELS = {
    "mixtral": Kind(8, 2),
    "gpt-oss": Kind(32, 4, bias=True),
    "qwen3-moe": Kind(128, 8),
    "qwen2-moe": Kind(60, 4, normalise=False),
    "deepseek-v2": Kind(160, 6, normalise=False, scale=16.0),
    "deepseek-v3": Kind(256, 8, "sigmoid", scale=2.5, selection_bias=True),
    "kimi-k2": Kind(384, 8, "sigmoid", scale=2.827, selection_bias=True),
    "llama4": Kind(16, 1, "sigmoid", normalise=False),
    "shared": Kind(1, 1, "sigmoid", normalise=False),
    "gemma4": Kind(128, 8, expert_scale=True),
    "all": Kind(32, 32, "softmax", normalise=False, bias=True),
    "largest": Kind(1024, 32, "softmax", scale=0.5, selection_bias=True, bias=True),
    "odd": Kind(37, 3, "sigmoid"),
}
#: (decode rows, prompt rows)
STEPS = ((1, 0), (3, 5), (0, 33), (16, 0))


@dataclass(frozen=True)
class Case:
    tensor: Tensor
    bias: Floats | None
    selection_bias: Floats | None
    kind: Kind
    expert_scale: Floats | None = None

    @classmethod
    def random(cls, name: str, type: str = "F32", width: int = 96) -> Case:
        kind, random = MODELS[name], rng("router", name, type)
        tensor = random_tensor(random, type, kind.experts, width, scale=2 * width**-0.5)
        bias, selection_bias, each = random_rows(random, 3, kind.experts)
        given = bias if kind.bias else None, selection_bias if kind.selection_bias else None
        return cls(tensor, *given, kind, each if kind.expert_scale else None)

    def run(self, backend: Backend, x: Floats, decode: int) -> tuple[Ints, Floats]:
        batch = plain_batch(backend, decode, len(x) - decode)
        rows, kind = batch.limits.tokens, self.kind
        buffer = buffers(backend, batch, x)
        ids, factors = backend.zeros((rows, kind.k), np.int32), backend.zeros((rows, kind.k))
        ids[:], factors[:] = -7, 7
        weights, options = backend.matrix(self.tensor, self.bias), {"k": kind.k, "score": kind.score}
        more: dict[str, Any] = {"normalise": kind.normalise, "scale": kind.scale}
        if self.selection_bias is not None:
            more["selection_bias"] = self.selection_bias
        if self.expert_scale is not None:
            more["expert_scale"] = self.expert_scale
        backend.router(RouterCall(buffer, weights, batch, ids, factors, **options, **more))
        assert (ids[len(x) :] == -7).all() and (factors[len(x) :] == 7).all()
        return np.array(ids[: len(x)]), np.array(factors[: len(x)])

    def logits(self, x: Floats) -> list[float]:
        """Returns the logits of one row."""
        if self.tensor.type.weights > 1:
            codes, scales = quantise_input(x)
            x = (codes * scales).reshape(x.shape)
        bias = np.zeros(self.kind.experts) if self.bias is None else self.bias
        return list(weights_of(self.tensor) @ x.astype(np.float64) + bias)

    def scores(self, logits: list[float]) -> list[float]:
        if self.kind.score == "sigmoid":
            return [1 / (1 + math.exp(-v)) for v in logits]
        largest = max(logits)
        total = math.fsum(math.exp(v - largest) for v in logits)
        return [math.exp(v - largest) / total for v in logits]

    def check(self, x: Floats, ids: Ints, factors: Floats) -> None:
        """The chosen experts rank above all others, except ties in float32; then the factors."""
        kind = self.kind
        for row, chosen, given in zip(x, ids.tolist(), factors, strict=True):
            assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < kind.experts
            scores = self.scores(self.logits(row))
            more = np.zeros(kind.experts) if self.selection_bias is None else self.selection_bias
            ranks = [score + float(b) for score, b in zip(scores, more, strict=True)]
            others = [ranks[e] for e in range(kind.experts) if e not in chosen]
            assert min(ranks[e] for e in chosen) >= max(others, default=-math.inf) - 2e-6
            expected = [scores[e] for e in chosen]
            if kind.normalise:
                expected = [score / math.fsum(expected) for score in expected]
            if self.expert_scale is not None:
                expected = [v * float(self.expert_scale[e]) for v, e in zip(expected, chosen, strict=True)]
            np.testing.assert_allclose(given, [kind.scale * v for v in expected], rtol=2e-5)


@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("model", MODELS)
def test_router(backend: Backend, model: str, type: str) -> None:
    case = Case.random(model, type)
    for decode, prompt in STEPS:
        x = random_rows(rng("x", model), decode + prompt, 96)
        case.check(x, *case.run(backend, x, decode))


def of_logits(backend: Backend, logits: list[float], kind: Kind, more: Floats | None = None) -> Any:
    """Ids and factors where the logits are given: the input is a one, the weights are they."""
    tensor = quantise(np.array(logits, np.float32)[:, None], "F32")
    case = Case(tensor, None, more, kind._replace(experts=len(logits)))
    ids, factors = case.run(backend, np.ones((1, 1), np.float32), 1)
    return ids[0].tolist(), factors[0]


def test_ties_go_to_the_lower_id(backend: Backend) -> None:
    logits = [1.0, 3.0, 3.0, -2.0, 3.0, 1.0]
    for k, chosen in enumerate(([1], [1, 2], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4, 5]), 1):
        for score in ("softmax", "sigmoid"):
            assert of_logits(backend, logits, Kind(6, k, score))[0] == chosen
    equal = [0.25] * 100
    assert of_logits(backend, equal, Kind(100, 32))[0] == list(range(32))


def test_logits_rank_where_scores_have_become_equal(backend: Backend) -> None:
    """Two sigmoids of 1, two exponentials of 0: without a selection bias they still rank."""
    assert of_logits(backend, [40.0, 41.0, 39.0], Kind(3, 1, "sigmoid"))[0] == [1]
    assert of_logits(backend, [-300.0, 0.0, -200.0], Kind(3, 2, "softmax"))[0] == [1, 2]


def test_nan_ranks_last(backend: Backend) -> None:
    nan = float("nan")
    logits = [nan, 1.0, nan, -3.0]
    for more in (None, np.zeros(4, np.float32)):
        for k, chosen in enumerate(([1], [1, 3], [0, 1, 3], [0, 1, 2, 3]), 1):
            ids, factors = of_logits(backend, logits, Kind(4, k, "sigmoid", normalise=False), more)
            assert ids == chosen
            np.testing.assert_array_equal(np.isnan(factors), [math.isnan(logits[e]) for e in chosen])
    ids, factors = of_logits(backend, logits, Kind(4, 2, "softmax"))
    assert ids == [1, 3] and np.isnan(factors).all()


def test_the_selection_bias_chooses_and_does_not_weigh(backend: Backend) -> None:
    logits, more = [0.0, 2.0, 1.0, -1.0], np.array([0.5, -5, 0, 0.9], np.float32)
    ids, factors = of_logits(backend, logits, Kind(4, 2, "sigmoid", normalise=False, scale=3.0), more)
    assert ids == [0, 3]  # 0.5 + 0.5 and 0.27 + 0.9, before 0.73 and 0.88 - 5
    np.testing.assert_allclose(factors, [1.5, 3 / (1 + math.e)], rtol=1e-6)


def test_normalised_softmax_is_a_softmax_of_the_chosen(backend: Backend) -> None:
    """As Mixtral and gpt-oss have it."""
    logits = [float(v) for v in rng("mixtral").normal(0, 3, 64)]
    ids, factors = of_logits(backend, logits, Kind(64, 4))
    chosen = np.sort(np.argsort(logits)[-4:])
    assert ids == chosen.tolist()
    terms = np.exp(np.array(logits)[chosen])
    np.testing.assert_allclose(factors, terms / terms.sum(), rtol=2e-6)


def test_the_gate_of_a_shared_expert(backend: Backend) -> None:
    for logit in (-3.0, 0.0, 2.5):
        ids, factors = of_logits(backend, [logit], Kind(1, 1, "sigmoid", normalise=False))
        assert ids == [0]
        np.testing.assert_allclose(factors, [1 / (1 + math.exp(-logit))], rtol=1e-6)


def test_scores_of_nothing_give_no_nan(backend: Backend) -> None:
    """A selection bias may choose experts whose scores are all 0 in float32."""
    more = np.array([0, 9, 9, 9], np.float32)
    for score in ("softmax", "sigmoid"):
        ids, factors = of_logits(backend, [200.0, -200.0, -200.0, -300.0], Kind(4, 2, score), more)
        assert ids == [1, 2] and (np.abs(factors) < 1e-15).all()


def same_bits(a: tuple[Ints, Floats], b: tuple[Ints, Floats]) -> None:
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1].view(np.uint32), b[1].view(np.uint32))


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("model", ["gpt-oss", "deepseek-v3", "gemma4", "largest"])
def test_a_row_is_the_same_in_any_batch(open_exact: OpenBackend, model: str, type: str) -> None:
    """Alone, among decode rows, as a prompt row, with any number of threads (which a GPU does not have)."""
    case, x = Case.random(model, type), random_rows(rng("bits"), 24, 96)
    alone = [case.run(open_exact(), row[None], 1) for row in x]
    all_alone = np.vstack([ids for ids, _ in alone]), np.vstack([factors for _, factors in alone])
    for threads in (1, 2, 5) if isinstance(open_exact(), CPUBackend) else (1,):
        for decode in (0, 1, 7, 16):
            same_bits(case.run(open_exact(threads), x, decode), all_alone)


@pytest.mark.parametrize(
    ("experts", "wrong", "error", "message"),
    [
        (1025, {}, ValueError, "router of 1025 experts: up to 1024 are allowed"),
        (8, {"k": 0}, ValueError, "router k 0 of 8 experts: 1 to 8 are allowed"),
        (8, {"k": 9}, ValueError, "router k 9 of 8 experts: 1 to 8 are allowed"),
        (64, {"k": 33}, ValueError, "router k 33 of 64 experts: 1 to 32 are allowed"),
        (8, {"score": "relu"}, ValueError, "router score 'relu': choose from softmax, sigmoid"),
        (
            8,
            {"selection_bias": np.zeros(9, np.float32)},
            ValueError,
            r"bias of shape \(9,\): \(8,\) is needed",
        ),
        (8, {"selection_bias": np.zeros(8)}, TypeError, "selection bias is float64: float32 is needed"),
    ],
)
def test_what_no_router_has_is_refused(
    backend: Backend, experts: int, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    """By every backend in the same words."""
    matrix = backend.matrix(random_tensor(rng(), "F32", experts, 4))
    batch = plain_batch(backend, 1)
    options = {"k": 2, "score": "softmax", "normalise": True, "scale": 1.0} | wrong
    rows, k = batch.limits.tokens, options["k"]
    ids, factors = backend.zeros((rows, k), np.int32), backend.zeros((rows, k))
    with pytest.raises(error, match=message):
        backend.router(RouterCall(backend.zeros((rows, 4)), matrix, batch, ids, factors, **options))


def test_a_program_routes_what_it_finds(open_exact: OpenBackend) -> None:
    """Recorded once, run with other rows; nothing is done at record."""
    backend, case = open_exact(), Case.random("gpt-oss")
    batch = plain_batch(backend, 2, 3)
    rows = batch.limits.tokens
    x, ids, factors = backend.zeros((rows, 96)), backend.zeros((rows, 4), np.int32), backend.zeros((rows, 4))
    matrix = backend.matrix(case.tensor, case.bias)
    program = backend.record(
        lambda: backend.router(
            RouterCall(x, matrix, batch, ids, factors, k=4, score="softmax", normalise=True, scale=1.0)
        )
    )
    assert not factors.any()
    for n in (5, 0, 2):
        batch.counts[:2] = n, min(n, 2)
        x[:] = random_rows(rng("again", n), rows, 96)
        factors[:] = 7
        program.run()
        case.check(x[:n], ids[:n], factors[:n])
        assert (factors[n:] == 7).all()
