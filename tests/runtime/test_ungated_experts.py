"""Experts without gates, as Nemotron's, and shared ones, on the whole stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.golden import golden
from support.opaque_backend import OpaqueBackend
from support.placed import on_two
from support.ungated_models import CHOSEN, EXPERTS, NEURONS, SHARED, ungated_model

import hotcold
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PredictorTensors
from hotcold.placement.placement import Placement
from hotcold.runtime.counters import Figures
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse import fitting
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.scoring import Scorer
from hotcold.watch.memory_use import memory_use
from hotcold.watch.neuron_map import NeuronMap

TOKENS = [1, *np.random.default_rng(3).integers(3, 288, 40).tolist()]
#: The block types of Nemotron's files, which a stock file has by output: panels; and our own layout.
STORED = [(type, "by_output") for type in ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16")]
STORED += [("Q4_0", "by_neuron"), ("MXFP4", "by_neuron")]


def opened(path: Path, sparsity: str, threads: int = 1) -> Session:
    return load(path, LoadOptions(sparsity=sparsity, threads=threads, sequences=3)).session()


def logits(session: Session) -> np.ndarray:
    """By the decode rule."""
    return np.concatenate([rows.copy() for rows in Scorer(session).logits(TOKENS)])


def greedy(session: Session, lengths: tuple[int, ...] = (4, 30, 9)) -> list[list[int]]:
    random = np.random.default_rng(5)
    prompts = [[1, *random.integers(3, 288, length).tolist()] for length in lengths]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=12, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


@pytest.mark.parametrize(("type", "down"), STORED)
def test_exact_is_off_bit_for_bit_and_reads_less(type: str, down: str, tmp_path: Path) -> None:
    path = ungated_model(tmp_path, type, down)
    exact, off = opened(path, "exact", 2), opened(path, "off")
    np.testing.assert_array_equal(logits(exact), logits(off))
    assert greedy(exact) == greedy(off)
    rows, whole = exact.counters.rows, off.counters.rows
    tokens = off.counters.decode_tokens
    assert (whole[:, 3] == tokens * CHOSEN * NEURONS).all()
    np.testing.assert_array_equal(rows[:, 0], whole[:, 0])
    assert not rows[:, 1].any() and (rows[:, 3] < 0.6 * whole[:, 3]).all()
    shared = exact.counters.shared
    assert (shared[:, 0] == exact.counters.decode_steps * SHARED).all() and not shared[:, 1].any()
    assert (shared[:, 3] > 0).all() and (shared[:, 3] < 0.6 * tokens * SHARED).all()
    assert not off.counters.shared.size


@pytest.mark.parametrize("down", ["by_output", "by_neuron"])
@pytest.mark.parametrize("factor", [True, False])
def test_a_gate_that_is_a_copy_of_up_gives_the_same(down: str, factor: bool, tmp_path: Path) -> None:
    """An independent way through the op: relu(u) u."""
    found = []
    for twin in (False, True):
        session = opened(ungated_model(tmp_path, "Q5_0", down, twin=twin, factor=factor), "exact")
        found.append((logits(session), session.counters.rows[:, 3], session.counters.shared[:, 3]))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_bytes_and_parameters_are_those_that_were_read(tmp_path: Path) -> None:
    """Bytes of one sequence against the sizes of rows, and those of `off` against all that is there."""
    path = ungated_model(tmp_path, "Q8_0")
    exact, off = opened(path, "exact"), opened(path, "off")
    assert greedy(exact, (9,)) == greedy(off, (9,))
    less, more = (Figures.from_counters(each.counters, each.footprint) for each in (exact, off))
    assert less.bytes_per_token is not None and more.bytes_per_token is not None
    tokens, saved, unread = off.counters.decode_tokens, 0, 0
    code, scale = 32, 64  # bytes of a neuron's codes, and of scales that 32 neurons share
    for part in ("rows", "shared"):
        read = getattr(exact.counters, part)
        some = getattr(off.counters, part)
        steps = exact.counters.decode_steps
        whole = some.sum(0) if len(some) else np.array([1, 0, 1, tokens, 1 / 32]) * 2 * steps * SHARED
        saved += (whole[2] - read[:, 2].sum()) * code + (whole[4] - read[:, 4].sum()) * scale
        unread += (whole[2] - read[:, 2].sum()) * 32
    assert (more.bytes_per_token - less.bytes_per_token) * tokens == pytest.approx(saved)
    assert more.params_per_token is not None and less.params_per_token is not None
    assert (more.params_per_token - less.params_per_token) * tokens == pytest.approx(unread)
    for a, b in zip(memory_use(exact), memory_use(off), strict=True):
        assert (a.kind, a.cpu_bytes) == (b.kind, b.cpu_bytes)


def with_predictors(path: Path, bound: float) -> None:
    with open_gguf(path) as file:
        random, layers = np.random.default_rng(9), []
        for n in (EXPERTS * NEURONS,) * 2:
            first, second = (random.standard_normal(shape) for shape in ((32, 32), (n, 32)))
            factors = (quantise(each.astype(np.float32) / 6, "F32") for each in (first, second))
            layers.append(PredictorTensors(*factors, np.full(n, bound, np.float32), relu=False))
        facts = {"input": "normed"}
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), layers, facts)


@pytest.mark.parametrize("down", ["by_output", "by_neuron"])
def test_a_predictor_spares_rows_of_up(down: str, tmp_path: Path) -> None:
    """One that names all gives what exact gives; one that names nothing leaves the shared expert alone."""
    path = ungated_model(tmp_path, "Q5_1", down)
    exact = opened(path, "exact")
    expected = logits(exact)
    for bound, least, most in ((-1e30, 1.0, 1.0), (0.0, 0.3, 0.95), (1e30, 0.0, 0.0)):
        with_predictors(path, bound)
        predicted = opened(path, "predicted")
        found = logits(predicted)
        assert np.array_equal(found, expected) is (bound < 0)
        share = predicted.counters.rows[:, 0] / exact.counters.rows[:, 0]
        assert (least <= share).all() and (share <= most).all()
        assert (predicted.counters.shared[0, 0] == exact.counters.shared[0, 0]).all()


@pytest.mark.parametrize(
    ("down", "mode"), [("by_output", "exact"), ("by_output", "predicted"), ("by_neuron", "exact")]
)
def test_two_backends_equal_one(down: str, mode: str, tmp_path: Path) -> None:
    """Neurons inside experts are hot, by output in blocks; so is the shared expert, with its layer."""
    path = ungated_model(tmp_path, "Q5_0", down)
    with_predictors(path, 0.0)
    one = opened(path, mode)
    random, block = np.random.default_rng(1), 1 if down == "by_neuron" else 32
    blocks = EXPERTS * NEURONS // block
    hot = [np.repeat(random.random(blocks) < share, block) for share in (0.5, 0.3)]
    expected, text = logits(one), greedy(one)
    for other in (open_backend("cpu", 1), OpaqueBackend(open_backend("reference"))):
        two = on_two(other, Placement.on_one(hot, range(2), True), path, sparsity=mode, sequences=3)
        # A value whose last bit differs may become another int8 or float16, which is rare and visible.
        errors = np.abs(logits(two) - expected).max(axis=1)
        assert np.median(errors) < 5e-5 and errors.max() < 1e-2
        assert greedy(two) == text
        for part in ("rows", "shared"):
            read, wanted = getattr(two.counters, part), getattr(one.counters, part)
            # Rounding may make a gate active, or not, now and then.
            np.testing.assert_allclose(read[:, :4], wanted[:, :4], rtol=0.01)


def text_file(folder: Path) -> Path:
    (folder / "text.txt").write_text("the hen and the ant in the tent and the dinner in the train " * 12)
    return folder / "text.txt"


def test_a_profile_counts_routing_times_firing(tmp_path: Path) -> None:
    """Against the reference backend; and a neuron is active as often as its expert is chosen, times how often
    it is active then."""
    path = ungated_model(tmp_path, "F16")
    found = hotcold.profile(path, text_file(tmp_path), context=64, threads=1)
    slow = hotcold.profile(path, text_file(tmp_path), context=64, backend="reference")
    assert found.routing is not None and slow.routing is not None and found.tokens
    for layer in range(2):
        np.testing.assert_allclose(found.firing[layer], slow.firing[layer], atol=2 / found.tokens)
        np.testing.assert_allclose(found.routing[layer], slow.routing[layer], atol=2 / found.tokens)
        firing, routing = found.firing[layer].reshape(EXPERTS, NEURONS), found.routing[layer]
        assert (firing <= routing[:, None] + 1e-9).all()
        chosen = routing > 0
        assert 0.02 < (firing[chosen].mean(axis=1) / routing[chosen]).mean() < 0.6


def test_predictors_are_fitted_to_ups(tmp_path: Path) -> None:
    path = ungated_model(tmp_path, "F32", "by_neuron")
    out = path.with_suffix(".predictor.gguf")
    options = {"context": 64, "threads": 1, "max_share": 1.0, "type": "F32"}
    found = hotcold.fit_predictor(path, text_file(tmp_path), output=out, **options)
    for fit in found.layers:
        assert fit.rank == 32 and fit.recall > 0.9 and fit.candidates < 1.2 * fit.active
        # Up is read of every candidate, and of all neurons of a chosen expert without a predictor.
        first, second, row = 32 * 32 * 4, EXPERTS * NEURONS * (32 + 1) * 4, 32 * 4
        rows = CHOSEN * NEURONS * row
        predicted = first + second * CHOSEN // EXPERTS + rows * (fit.candidates + fit.active * fit.recall)
        assert fit.read_ratio == pytest.approx(predicted / (rows * (1 + fit.active)), rel=1e-6)
    exact, sparser = (opened(path, mode) for mode in ("exact", "predicted"))
    greedy(exact, (9,)), greedy(sparser, (9,))
    assert (sparser.counters.rows[:, 0] < 0.9 * exact.counters.rows[:, 0]).all()


def test_a_plan_divides_experts(tmp_path: Path) -> None:
    plan = hotcold.plan(ungated_model(tmp_path, "Q4_0"), vram_budget=1 << 30)
    assert "a power law in every layer" in plan.profile


def test_layers_without_an_ffn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron-H's: three of five layers are a mixer alone. Profiles, predictors, plans and what is watched
    have nothing of them."""
    model = golden("tiny-nemotron-h-moe", tmp_path)
    out, options = model.path.with_suffix(".predictor.gguf"), {"context": 64, "backend": "reference"}
    found = hotcold.profile(
        model.path, text_file(tmp_path), output=model.path.with_suffix(".profile.gguf"), **options
    )
    assert found.routing is not None and [len(each) for each in found.firing] == [0, 120, 0, 0, 120]
    for layer, (firing, routing) in enumerate(zip(found.firing, found.routing, strict=True)):
        assert routing.sum() == pytest.approx(3 if layer in (1, 4) else 0)
        assert (firing.reshape(6, -1) <= routing[:, None] + 1e-9).all()
    monkeypatch.setattr(fitting, "RANK_STEP", 8)  # the model is narrower than a rank usually is
    fitted = hotcold.fit_predictor(
        model.path, text_file(tmp_path), output=out, max_share=1.0, type="F32", **options
    )
    assert [fit.rank > 0 for fit in fitted.layers] == [False, True, False, False, True]
    assert "text.txt" in hotcold.plan(model.path, vram_budget=1 << 30).profile
    exact, predicted = (
        load(model.path, LoadOptions(sparsity=mode, backend="reference")).session()
        for mode in ("exact", "predicted")
    )
    logits(exact), logits(predicted)
    rows, fewer = exact.counters.rows, predicted.counters.rows
    assert not rows[[0, 2, 3]].any() and (fewer[[1, 4], 3] > 0.8 * rows[[1, 4], 3]).all()
    assert exact.counters.shared[[1, 4], 0].all() and not exact.counters.shared[[0, 2, 3]].any()
    figures = Figures.from_counters(exact.counters, exact.footprint)
    assert figures.active_share is not None and 0.1 < figures.active_share < 0.6
    active_masks = exact.watched().active_masks(1)
    assert NeuronMap(exact.model).cells(np.hstack(active_masks))[1] == [(0, 0)]


def test_latent_experts_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors read the few values that such experts read; one that names all neurons gives `exact`."""
    path, out = golden("tiny-nemotron-latent", tmp_path).path, tmp_path / "fitted.gguf"
    monkeypatch.setattr(fitting, "RANK_STEP", 8)
    options = {"context": 64, "tokens": 1024}
    fitted = hotcold.fit_predictor(
        path, text_file(tmp_path), output=out, max_share=1.0, type="F32", recall=0.95, **options
    )
    model = load(path, LoadOptions(sparsity="exact", threads=1))
    latent = model.config.experts.latent
    assert 0 < latent < model.config.dim
    some = [fit for fit in fitted.layers if fit.rank]
    assert some and all(fit.recall > 0.9 and fit.candidates < 1 for fit in some)
    exact, predicted = model.session("exact"), model.session("predicted", out)
    truth = logits(exact)
    logits(predicted)
    assert predicted.counters.rows[:, 0].sum() < exact.counters.rows[:, 0].sum()
    tensors = [
        each and replace(each, threshold=np.full_like(each.threshold, -1e9)) for each in fitted.tensors
    ]
    with open_gguf(path) as file:
        write_sidecar(tmp_path / "all.gguf", file.fingerprint(), tensors, fitted.metadata)
    np.testing.assert_array_equal(logits(model.session("predicted", tmp_path / "all.gguf")), truth)
