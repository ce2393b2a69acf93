"""Guesses change no token of real models: in each mode, with experts and with states, at each temperature,
size of batch and number of threads, on each backend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.drafting import Reckless
from support.expert_models import expert_golden
from support.hybrid_models import write_hybrid
from support.placed import on_two
from support.sidecars import with_sidecar
from support.vulkan.devices import DRIVERS, open_vulkan

from hotcold.engine.engine import Engine
from hotcold.engine.generation import generate
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Allowed
from hotcold.engine.speculation import Speculation, speculation_of
from hotcold.kernels.cpu import CPUBackend
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session

#: What guesses must not change, and what they must not depend on.
FACTORS: dict[str, Sequence[Any]] = {
    "kind": ("off", "exact", "predicted", "experts", "states"),
    "batch": (1, 3, 5, 16),
    "threads": (1, 2, 5),
    "right": (0.3, 0.6, 0.9),
    "temperature": (0, 0.8),
    "cancelled": (False, True),
}


class Case(NamedTuple):
    kind: str
    batch: int
    threads: int
    right: float
    temperature: float
    cancelled: bool


#: Each pair of values of two factors comes up.
CASES = [
    Case(kind, batch, FACTORS["threads"][(i + j) % 3], FACTORS["right"][(i + 2 * j) % 3],
         FACTORS["temperature"][(i + (j > 1)) % 2], (i // 2 + j) % 2 == 1)
    for i, kind in enumerate(FACTORS["kind"])
    for j, batch in enumerate(FACTORS["batch"])
]  # fmt: skip


def model_of(kind: str, folder: Path, threads: int = 2, sequences: int = 5) -> LoadedModel:
    options = LoadOptions(sequences=sequences, chunk=40, threads=threads, context=160, draft_max=7)
    if kind == "experts":
        return load(expert_golden("tiny-mixtral", folder).path, options | {"context": 64})
    if kind == "states":
        return load(write_hybrid(folder / "states.gguf", "qwen35"), options)
    return load(with_sidecar(folder), options | {"sparsity": kind})


@pytest.fixture(scope="module", params=["off", "exact", "predicted", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return model_of(request.param, tmp_path_factory.mktemp("model"))


def some_requests(model: LoadedModel, count: int, temperature: float, tokens: int) -> list[Request]:
    """Prompts that repeat a few tokens, so that there is something to look up."""
    random = np.random.default_rng(count)
    made = []
    for seed in range(count):
        words = random.integers(3, model.config.vocab, 6)
        prompt = words[random.integers(0, 6, 10 + 3 * (seed % 5))].tolist()
        params = SamplingParams(temperature=temperature, seed=seed, repeat_penalty=1.1 if seed == 2 else 1)
        more: dict[str, Any] = {"logprobs": 2} if seed == 1 else {}
        length = tokens - seed if count > 5 else tokens
        made.append(Request(Job(prompt, params, max_tokens=max(length, 2), ignore_eos=True, **more)))
    return made


def assert_same(session: Session, requests: list[Request], again: list[Request], share: float) -> Speculation:
    """With this share of right guesses, and with the engine's own guesses."""
    Engine(session).run(requests)
    known = {mine: its.output for mine, its in zip(again, requests, strict=True)}
    speculation = Reckless(known.__getitem__, share, session.model.config.vocab)
    Engine(session, reuse=False, speculation=speculation).run(again)
    for mine, its in zip(again, requests, strict=True):
        assert mine.output == its.output and mine.output_logprobs == its.output_logprobs
        assert mine.finish_reason == its.finish_reason
    assert speculation.guessed > speculation.accepted > 0
    return speculation


def test_each_pair_of_values_comes_up() -> None:
    for a, b in combinations(FACTORS, 2):
        assert {(getattr(case, a), getattr(case, b)) for case in CASES} == {*product(FACTORS[a], FACTORS[b])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_tokens_are_those_without_guesses(case: Case, tmp_path: Path) -> None:
    """In a full batch rows become free as texts end; some are cancelled among guesses."""
    session = model_of(case.kind, tmp_path, case.threads, sequences=16).session()
    own, again = (some_requests(session.model, case.batch, case.temperature, 12) for _ in range(2))
    Engine(session, reuse=False).run(own)
    known = {mine: its.output for mine, its in zip(again, own, strict=True)}
    speculation = Reckless(known.__getitem__, case.right, session.model.config.vocab)
    engine = Engine(session, reuse=False, speculation=speculation)
    random = np.random.default_rng(case.batch)
    for request in again:
        engine.add(request)
    while not all(request.finished for request in again):
        engine.step()
        if case.cancelled and random.random() < 0.1:
            engine.abort(again[int(random.integers(case.batch))])
    for mine, its in zip(again, own, strict=True):
        ended = mine.finish_reason != "cancelled"
        n = len(its.output if ended else mine.output)
        assert mine.output == its.output[:n] and mine.finish_reason in (its.finish_reason, "cancelled")
        assert not ended or mine.output_logprobs == its.output_logprobs
    assert speculation.guessed > speculation.accepted > 0


def test_what_is_looked_up_changes_no_token(model: LoadedModel) -> None:
    """By the engine's own choice, which the clock decides."""
    session = model.session()
    own, again = (some_requests(model, 3, 0, 24) for _ in range(2))
    Engine(session).run(own)
    speculation = speculation_of(session)
    assert speculation is not None
    speculation.costs.measured = lambda rows: True  # type: ignore[method-assign]
    engine = Engine(session, speculation=speculation)
    engine.run(again)
    assert [each.output for each in again] == [each.output for each in own]
    stats = engine.stats()
    assert stats.guessed_tokens == speculation.guessed and stats.accepted_tokens == speculation.accepted


def test_tokens_are_counted_without_wrong_guesses(model: LoadedModel) -> None:
    session = model.session()
    both = (some_requests(model, 1, 0, 20) for _ in range(2))
    before = session.counters.decode_tokens
    speculation = assert_same(session, *both, 0.5)
    counters = session.counters
    assert counters.decode_tokens - before == 2 * 19
    assert counters.drafts == speculation.guessed
    assert counters.rejected_drafts == speculation.guessed - speculation.accepted


def test_a_stop_string_ends_a_text_with_the_same_token() -> None:
    """Also where the guesses after it are right, or end in an error or at the length that was asked for."""
    session = load(None, LoadOptions(threads=1, context=128)).session()
    prompt = session.model.tokenizer.encode("Once upon a time")
    greedy = SamplingParams(temperature=0)
    whole = Request(Job(prompt, greedy, max_tokens=40, logprobs=1))
    Engine(session).run([whole])

    def fail(output: Sequence[int]) -> Allowed:
        if len(output) > len(whole.output) - 8:
            raise LookupError("too far")
        return Allowed(None)

    text = session.model.tokenizer.decode(whole.output)
    stop = text[len(text) // 2 :][:6]
    found = []
    for drafts in (False, True):
        speculation = Reckless(lambda _: whole.output, 1.0, session.model.config.vocab) if drafts else None
        engine = Engine(session, reuse=False, speculation=speculation)
        for n, constraint in ((40, None), (40, fail)):
            request = Request(Job(prompt, greedy, max_tokens=n, logprobs=1, stop=(stop,)), constraint)
            (own,) = generate(engine, [request])
            assert (own.finish_reason, own.stop, own.error) == ("stop", stop, None)
            assert list(own.ids) == request.output and len(own.logprobs) == len(own.ids)
            assert request.finish_reason == "stop" and request.output_logprobs == list(own.logprobs)
            found.append((own.text, own.ids, own.logprobs))
    assert found == [found[0]] * 4


def test_a_model_may_be_loaded_without_guesses() -> None:
    assert speculation_of(load(None, LoadOptions(draft_max=0)).session()) is None
    with pytest.raises(ValueError, match=r"`draft_max=16`: 0 \(no draft tokens\) to 15"):
        load(None, LoadOptions(draft_max=16))


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
def test_layers_on_two_backends(tmp_path: Path, share: float, sparsity: str) -> None:
    path = with_sidecar(tmp_path)
    session = on_two(CPUBackend(1), share, path, sparsity=sparsity, sequences=3, context=96)
    both = (some_requests(session.model, 3, 0.8, 10) for _ in range(2))
    assert_same(session, *both, 0.7)


def test_a_gpu() -> None:
    session = on_two(open_vulkan(DRIVERS[0]), 0.4, sparsity="exact", sequences=3, context=96)
    both = (some_requests(session.model, 2, 0.8, 5) for _ in range(2))
    assert_same(session, *both, 0.7)
