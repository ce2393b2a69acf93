"""Requests of all kinds beside each other give the tokens that each gives alone, on the built-in model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sidecars import with_sidecar

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import quantise
from hotcold.kernels.backend import PredictorTensors
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.scoring import Scorer, score

GREEDY = SamplingParams(temperature=0)


def some_predictors(neurons: int, dim: int, rank: int) -> PredictorTensors:
    """Random ones, which name half of the neurons: rows that decode are not what rows of a prompt are."""
    random = np.random.default_rng(neurons)
    first, second = random.normal(size=(rank, dim)), random.normal(size=(neurons, rank))
    return PredictorTensors(
        quantise(first.astype(np.float32), "Q8_0"),
        quantise(second.astype(np.float32), "Q8_0"),
        np.zeros(neurons, np.float32),
        relu=False,
    )


@pytest.fixture(scope="module", params=["off", "exact", "predicted"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = with_sidecar(tmp_path_factory.mktemp("model"), tensors=some_predictors)
    return load(path, LoadOptions(sparsity=request.param, sequences=6, chunk=40, threads=1, context=160))


def some_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts that share beginnings or do not, of different lengths; some neither share nor read pages."""
    random = np.random.default_rng(seed)
    stem = random.integers(259, 4096, 130).tolist()
    made = []
    for _ in range(count):
        common, own = int(random.integers(0, 100)), int(random.integers(1, 24))
        prompt = [*stem[:common], *random.integers(259, 4096, own).tolist()]
        made.append({"prompt": prompt, "max_tokens": int(random.integers(1, 45))})
        if random.random() < 0.2:
            made[-1] |= {"echo": True, "logprobs": 1}
    return made


def request(given: dict[str, Any]) -> Request:
    return Request(Job(params=GREEDY, ignore_eos=True, **given))


def alone(session: Session, given: dict[str, Any]) -> Request:
    Engine(session, reuse=False).run([made := request(given)])
    return made


@pytest.mark.parametrize("count", [1, 5, 16])
def test_greedy_tokens_are_those_of_each_alone(model: LoadedModel, count: int) -> None:
    """Arrivals at random, a cache with room for a third of them at a time, some that are cancelled."""
    random = np.random.default_rng(count)
    made, session = some_requests(count, count), model.session()
    expected = [alone(session, given) for given in made]
    engine = Engine(replace(model, plan=replace(model.plan, pages=8)).session())
    requests = [request(given) for given in made]
    left = list(requests)
    for _ in range(3000):
        while left and random.random() < 0.4:
            engine.add(left.pop(0))
        if count > 5 and random.random() < 0.01:
            engine.abort(requests[int(random.integers(count))])
        engine.step()
        if not left and all(each.finished for each in requests):
            break
    for mine, its in zip(requests, expected, strict=True):
        assert mine.finished
        assert mine.output == its.output[: len(mine.output)]
        assert mine.finish_reason == "cancelled" or mine.output == its.output
        assert mine.prompt_logprobs == its.prompt_logprobs[: len(mine.prompt_logprobs)]
    pool = engine.session.cache
    assert pool.free_pages == pool.pages == 8
    if count == 16:
        assert engine.scheduler.preemptions and engine.scheduler.reused
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, engine.scheduler.preemptions)
    assert stats.free_pages + stats.shared_pages == stats.pages == 8
    if not any(each.finish_reason == "cancelled" for each in requests):
        assert stats.generated_tokens == sum(len(each.output) for each in requests)


def test_echo_gives_what_perplexity_computes(model: LoadedModel) -> None:
    """Every token by the decode rule, whatever runs beside it."""
    text = "The old man sat down by the fire and told the children a story about the sea. " * 3
    prompt = model.tokenizer.encode(text)[:70]
    expected = -score(Scorer(model.session()), prompt)
    engine = Engine(model.session())
    scored = request({"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 3})
    others = [request({"prompt": prompt[:n], "max_tokens": 30}) for n in (3, 40)]
    engine.run([others[0], scored, others[1]])
    assert scored.prompt_logprobs[0] is None
    found = [each.logprob for each in scored.prompt_logprobs if each is not None]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    tops = [each.top for each in scored.prompt_logprobs if each is not None]
    assert all(len(top) == 3 and top == tuple(sorted(top, key=lambda pair: -pair[1])) for top in tops)
    assert scored.reused == 0
