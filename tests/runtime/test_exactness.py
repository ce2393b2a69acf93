"""Leaving out neurons that are zero changes no bit, nor does the number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.pwri import built_in_pwri

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer, compare

SENTENCE = "The old man sat down by the fire and told the children a story about the sea and the white ship."


def session(**options: object) -> Session:
    return load(None, LoadOptions(**options)).session()  # type: ignore[arg-type]


def prompts(n: int) -> list[list[int]]:
    """Random tokens, so that runs are not alike."""
    return np.random.default_rng(7).integers(259, 4096, (n, 16)).tolist()


def greedy(session: Session, prompts: list[list[int]], n: int, *, together: bool = False) -> list[list[int]]:
    """One text after the other, or as many ``together`` as the session has sequences."""
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=n, ignore_eos=True)) for prompt in prompts]
    engine = Engine(session)
    for some in [requests] if together else [[request] for request in requests]:
        engine.run(some)
    return [request.output for request in requests]


def logits(session: Session) -> np.ndarray:
    window = session.model.tokenizer.encode(SENTENCE)
    return np.concatenate([rows.copy() for rows in Scorer(session).logits(window)])


@pytest.mark.long
@pytest.mark.full
def test_ten_thousand_greedy_tokens_are_the_same_exact_and_off() -> None:
    """One sequence at a time exact, sixteen together off: a batch changes no bit either."""
    exact = session(sparsity="exact", sequences=16)
    off = exact.model.session("off")
    few, many = (
        prompts(20),
        prompts(240)[20:],
    )  # greedy text soon repeats itself: short runs see more of the model
    texts = greedy(exact, few, 240) + greedy(exact, many, 25)
    assert sum(map(len, texts)) > 10_000
    assert len({token for text in texts for token in text}) > 300, "too much alike to show anything"
    assert texts == greedy(off, few, 240, together=True) + greedy(off, many, 25, together=True)


@pytest.mark.parametrize(("threads", "cache_type"), [(1, "f16"), (2, "f16"), (3, "f16"), (3, "q8_0")])
def test_logits_are_bit_identical_exact_or_off_at_any_number_of_threads(
    threads: int, cache_type: str
) -> None:
    exact = session(sparsity="exact", threads=threads, cache_type=cache_type)
    expected = logits(session(sparsity="off", threads=1, cache_type=cache_type))
    assert np.array_equal(logits(exact), expected)
    assert np.array_equal(logits(exact.model.session("off")), expected)


def test_sampled_text_is_the_same_at_one_and_two_threads() -> None:
    def sampled(threads: int) -> list[int]:
        engine = Engine(session(threads=threads))
        request = Request(Job(list(range(300, 310)), SamplingParams(seed=4), max_tokens=200, ignore_eos=True))
        engine.add(request)
        while not request.finished:
            engine.step()
        return request.output

    assert sampled(1) == sampled(2)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_cpu_follows_the_reference(cache_type: str) -> None:
    """Not bit by bit: float sums in another order now and then turn an int8 code of some dot's input."""
    window = session().model.tokenizer.encode(SENTENCE)
    cpu, reference = (session(backend=backend, cache_type=cache_type) for backend in ("cpu", "reference"))
    both = compare(Scorer(cpu), Scorer(reference), window)
    assert both.kl.max() < 1e-3 and both.same_top.all()
    assert both.perplexity_ratio == pytest.approx(1, abs=5e-3)


def test_an_exact_step_reads_less_and_counts_what_the_reference_counts() -> None:
    counts = []
    for backend in ("cpu", "reference"):
        exact = session(sparsity="exact", backend=backend)
        logits(exact)
        counts.append(exact.counters.rows)
    gate, up, down, pairs, _ = counts[0].T
    assert (up < gate).all() and (down < gate).all() and (pairs >= down).all()
    assert counts[0] == pytest.approx(counts[1], rel=0.01)  # rounding decides about a gate near 0


def test_a_predictor_that_names_all_changes_nothing_and_one_that_names_none_ruins_it(tmp_path: Path) -> None:
    runs = prompts(3)
    dense = session(sparsity="off")
    everything = load(built_in_pwri(tmp_path / "low.gguf", -1e9), LoadOptions(sparsity="predicted")).session()
    nothing = load(built_in_pwri(tmp_path / "high.gguf", 1e9), LoadOptions(sparsity="predicted")).session()
    assert greedy(everything, runs, 60) == greedy(dense, runs, 60) != greedy(nothing, runs, 60)
    assert np.array_equal(logits(everything), logits(dense))

    both = compare(Scorer(nothing), Scorer(dense), dense.model.tokenizer.encode(SENTENCE))
    assert both.perplexity_ratio > 5, (
        "perplexity is measured by the decode rule, not on the dense prompt path"
    )
    assert (nothing.counters.rows == 0).all()
