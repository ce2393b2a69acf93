"""Sessions of one model: what they share, what each has of its own, what they take, and how they end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.buffers import cache_bytes
from support.file_sizes import file_sizes
from support.sidecars import with_sidecar
from support.threads import Running, begun_threads, held, wait_until

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, write_placement
from hotcold.placement.step_memory import buffer_bytes, scratch_bytes
from hotcold.runtime import memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import AllOptions, LoadError, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session


@pytest.fixture
def half(tmp_path: Path) -> Iterator[LoadedModel]:
    """With half of each layer's neurons on another backend."""
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    hot = [np.arange(n) < n // 2 for n in sizes.neurons]
    write_placement(tmp_path / "half.gpuidx", sizes, Placement.on_one(hot, range(config.layers), True))
    model = load(None, AllOptions(placement=tmp_path / "half.gpuidx", hot_backend="cpu", threads=1))
    yield model
    model.close()


def greedy(tokens: int = 6) -> Request:
    return Request(Job([1, 400, 300], SamplingParams(temperature=0), max_tokens=tokens))


def test_counters_wait_for_the_step_that_runs() -> None:
    """A GPU's counts cannot be read while another thread's step uses it."""
    session = load(None, LoadOptions(sparsity="exact")).session()
    Engine(session).run([greedy()])
    expected = session.counters.rows.tolist()
    step, thread = held(session.lock)
    reading = Running(lambda: session.counters)
    wait_until(lambda: len(session.lock._changes) == 1)
    assert not reading.ended
    step.go.set()
    thread.result()
    assert reading.result().rows.tolist() == expected


def test_sessions_share_weights_and_nothing_else() -> None:
    """Two engines take turns, step by step; each gives the tokens that it gives alone."""
    model = load(None, LoadOptions(sparsity="off"))
    Engine(model.session()).run([alone := greedy()])
    sessions = [model.session(), model.session("exact")]
    assert [session.sparsity for session in sessions] == ["off", "exact"]
    requests = [greedy(), greedy()]
    engines = [Engine(session) for session in sessions]
    for engine, request in zip(engines, requests, strict=True):
        engine.add(request)
    while not all(request.finished for request in requests):
        for engine in engines:
            engine.step()
    assert [request.output for request in requests] == [alone.output] * 2
    first, second = (session.counters for session in sessions)
    assert first.decode_tokens == second.decode_tokens == 5 and first.prompt_tokens == 3
    assert first.rows[:, 1].sum() > second.rows[:, 1].sum() > 0
    assert sessions[0].state.layers[0][0] is not sessions[1].state.layers[0][0]


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LoadError, match=r"sparsity 'best': choose from auto, exact, predicted, off"):
        load(None, LoadOptions()).session("best")


def test_another_session_is_refused_where_its_cache_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are there already, so what is too much is keys and values; nothing is allocated before."""
    model = load(None, LoadOptions(sequences=8))
    taken = cache_bytes(model.session())
    monkeypatch.setattr(memory, "available_memory", lambda: taken)
    monkeypatch.setattr(type(model.backend), "zeros", lambda *_: pytest.fail("something was allocated"))
    refused = r"the session needs 0\.\d\d GiB \(predictors 0\.00 GiB, KV cache .*a smaller KV .* context"
    with pytest.raises(LoadError, match=refused):
        model.session()


def test_the_predictors_of_a_session_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the byte: with room for all but one of them it is refused, and a mode without predictors is not."""
    model = load(with_sidecar(tmp_path), LoadOptions(sparsity="exact"))
    with open_gguf(tmp_path / "model.predictor.gguf") as file:
        predictors = sum(info.nbytes for info in file.tensors.values())
    steps = buffer_bytes(model.config, model.limits) + scratch_bytes(model.config, model.limits)
    pages = model.limits.sequences * model.limits.pages_per_sequence
    cache = pages * model.config.page_bytes(model.plan.request.cache_type)
    monkeypatch.setattr(memory, "available_memory", lambda: steps + cache + predictors)
    assert model.session("predicted").sparsity == "predicted"
    monkeypatch.setattr(memory, "available_memory", lambda: steps + cache + predictors - 1)
    with pytest.raises(LoadError, match=r"the session needs .*predictors"):
        model.session("predicted")
    monkeypatch.setattr(memory, "available_memory", lambda: steps + cache)
    assert model.session().sparsity == "exact"


def test_each_session_ends_its_own_cold_side_and_the_model_all(half: LoadedModel) -> None:
    begun = begun_threads()
    first, second, third = (half.session() for _ in range(3))
    assert len(begun()) == 3
    first.close()
    assert len(begun()) == 2
    Engine(second).run([request := greedy(2)])
    assert len(request.output) == 2
    half.close()
    assert not begun()
    del third


def test_a_session_that_nobody_has_any_more_ends(half: LoadedModel) -> None:
    begun = begun_threads()
    session: Session | None = half.session()
    assert len(begun()) == 1 and session is not None
    session = None
    gc.collect()
    assert not begun()


def test_loading_alone_allocates_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotcold.runtime import session

    monkeypatch.setattr(session, "SequenceState", lambda *_: pytest.fail("a cache was made"))
    load(None, LoadOptions())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sessions_of_one_model_in_two_threads(backend: str) -> None:
    """They take turns on the model's threads; each gets its own tokens."""
    model = load(None, LoadOptions(backend=backend, context=64))
    prompts = [[1, 400 + i, 300] for i in range(2)]

    def generate(prompt: list[int]) -> list[int]:
        request = Request(Job(prompt, SamplingParams(temperature=0), max_tokens=12, ignore_eos=True))
        Engine(model.session()).run([request])
        return request.output

    expected = [generate(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(generate, prompts * 4)) == expected * 4
