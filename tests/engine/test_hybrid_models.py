"""Models that keep states give the bits of a sequence that ran alone, whatever runs beside it, is shared,
taken away or broken off."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buffers import allocations, cache_bytes
from support.drafting import Reckless
from support.golden import CPU_HYBRIDS, HYBRIDS, LATENT_HYBRIDS, golden
from support.hybrid_models import CPU_KINDS, KINDS, write_hybrid
from support.page_count import assert_no_page_is_lost

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.scoring import Scorer
from hotcold.watch.memory_use import memory_use


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {kind: write_hybrid(folder / f"{kind}.gguf", kind) for kind in (*KINDS, *CPU_KINDS)}


class Alone:
    """The truth about a model: one request on a session of its own, its whole prompt in one step, nothing
    shared."""

    def __init__(self, path: Path, backend: str, context: int = 224) -> None:
        self.path = path
        self.options: dict[str, Any] = {"backend": backend, "sparsity": "off", "context": context}
        if backend == "cpu":
            self.options["threads"] = 2
        else:
            self.options["cache_type"] = "f32"
        self.model = self.load(chunk=context)
        self._found: dict[tuple[Any, ...], tuple[list[int], Any]] = {}

    def load(self, **options: Any) -> LoadedModel:
        return load(self.path, LoadOptions(**{**self.options, **options}))

    def of(self, request: Request) -> tuple[list[int], Any]:
        """The tokens and the bits of their probabilities."""
        key = (*request.job.prompt, request.job.max_tokens, request.seed)
        if key not in self._found:
            alone = Request(request.job)
            Engine(self.model.session(), reuse=False).run([alone])
            self._found[key] = alone.output, alone.output_logprobs
        return self._found[key]

    def check(self, *requests: Request) -> None:
        """The reference's sums depend on the number of rows, in the last bits."""
        for request in requests:
            output, logprobs = self.of(request)
            assert request.output == output
            if self.options["backend"] == "reference":
                found, expected = (
                    [each.logprob for each in all] for all in (request.output_logprobs, logprobs)
                )
                assert found == pytest.approx(expected, abs=1e-4)
            else:
                assert request.output_logprobs == logprobs


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(pair, id="-".join(pair))
            for pair in [("qwen35", "reference"), *product(KINDS, ["cpu"])]
        ),
        *(pytest.param((kind, "cpu"), id=f"{kind}-cpu", marks=pytest.mark.full) for kind in CPU_KINDS),
    ],
)
def alone(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Alone:
    kind, backend = request.param
    return Alone(paths[kind], backend)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4000, n).tolist()


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    params = more.pop("params", SamplingParams(temperature=0))
    return Request(Job(prompt, params, max_tokens=n, ignore_eos=True, logprobs=2, **more))


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_chunks_of_any_size(alone: Alone, chunk: int) -> None:
    request = greedy(tokens(75), 6)
    Engine(alone.load(chunk=chunk).session(), reuse=chunk == 7).run([request])
    alone.check(request)


def test_three_in_a_batch(alone: Alone) -> None:
    engine = Engine(alone.load(sequences=3, chunk=40).session())
    requests = [greedy(tokens(n, n), 12) for n in (70, 5, 33)]
    engine.run(requests)
    alone.check(*requests)


def test_a_system_prompt_and_turns(alone: Alone) -> None:
    """Copies are read: of what two have in common, of a prompt, and of an answer."""
    session = alone.load(sequences=2, chunk=64).session()
    engine = Engine(session)
    system = tokens(70)
    found = []
    for i in range(3):
        engine.run([request := greedy([*system, *tokens(40, i + 1)], 30)])
        found.append(request.reused)
        alone.check(request)
    turn = [*request.job.prompt, *request.output, *tokens(9, 9)]
    engine.run([request := greedy(turn, 8)])
    assert [*found, request.reused] == [0, 0, 64, 128]
    alone.check(request)
    assert_no_page_is_lost(session.slots)


def test_several_answers_of_one_prompt(alone: Alone) -> None:
    engine = Engine(alone.load(sequences=4, chunk=100).session())
    job = greedy(tokens(80), 10, params=SamplingParams(temperature=1, seed=5)).job
    engine.add(first := Request(job))
    engine.step()
    others = [Request(job.nth(i)) for i in range(1, 4)]
    engine.run([*others])
    while not first.finished:
        engine.step()
    assert [each.reused for each in others] == [64] * 3
    alone.check(first, *others)
    assert len({tuple(each.output) for each in (first, *others)}) > 1


@pytest.mark.parametrize(("temperature", "share"), [(0, 0.8), (0.9, 0.4)])
def test_guesses_right_and_wrong(alone: Alone, temperature: float, share: float) -> None:
    """Three in a batch, then the next turn of one, which continues from a state that guesses have passed."""
    if alone.options["backend"] == "reference":
        pytest.skip("its sums depend on the number of rows")
    params = SamplingParams(temperature=temperature, seed=int(10 * temperature))
    requests = [greedy(tokens(n, n), 30, params=params) for n in (70, 5, 33)]
    session = alone.load(sequences=3, chunk=40).session()
    speculation = Reckless(lambda request: alone.of(request)[0], share, session.model.config.vocab)
    engine = Engine(session, speculation=speculation)
    engine.run(requests)
    first = requests[0]
    engine.run([turn := greedy([*first.job.prompt, *first.output, 300], 8, params=params)])
    assert turn.reused == 96
    alone.check(*requests, turn)
    assert speculation.guessed == sum(each.guessed for each in [*requests, turn])
    assert 0 < sum(each.accepted for each in requests) < speculation.guessed
    assert_no_page_is_lost(session.slots)


@pytest.mark.parametrize("copies", [0, 4])
def test_preempted_and_resumed(alone: Alone, copies: int) -> None:
    """A pool of fewer pages than the two need: the younger one has to go, and comes again."""
    model = alone.load(sequences=2, chunk=50, context=128, cache_positions=160, state_copies=copies)
    engine = Engine(model.session())
    requests = [greedy(tokens(50, i), 60) for i in range(2)]
    engine.run(requests)
    assert engine.scheduler.preemptions > 0
    alone.check(*requests)


def test_broken_off_at_random(alone: Alone) -> None:
    """Copies survive steps that ended anywhere, and cancellations between two steps."""
    session = alone.load(sequences=2, chunk=40).session()
    engine, random = Engine(session), np.random.default_rng(7)
    stem, inner, broken = tokens(70), session.run, 0

    def run(*more: Any) -> None:
        nonlocal broken
        if random.random() < 0.15:
            if random.random() < 0.5:
                inner(*more)
            broken += 1
            raise KeyboardInterrupt
        inner(*more)

    session.run = run  # type: ignore[method-assign]
    for i in range(16):
        requests = [greedy([*stem[: random.integers(20, 71)], *tokens(5, i % 4)], 8) for _ in range(2)]
        for request in requests:
            engine.add(request)
        try:
            for _ in range(random.integers(1, 16)):
                engine.step()
        except KeyboardInterrupt:
            pass
        for request in requests:
            engine.abort(request)
            expected, _ = alone.of(request)
            assert request.output == expected[: len(request.output)]
            if request.finish_reason == "length":
                alone.check(request)
        assert session.slots.free == session.slots.slots
        assert_no_page_is_lost(session.slots)
    assert broken > 2


def test_scores_are_those_of_one_token_a_step(alone: Alone) -> None:
    """A window is scored in a slot of its own, which it gives back; so are prompts that are echoed."""
    model, window = alone.load(), tokens(50)
    session = model.session()
    rows = np.vstack([logits.copy() for logits in Scorer(session).logits(window)])
    assert session.slots.free == session.slots.slots
    engine = Engine(alone.load(chunk=5).session())
    request = greedy(window, 1, echo=True)
    engine.run([request])
    assert (
        rows[:-1].argmax(-1).tolist() == [each.top[0][0] for each in request.prompt_logprobs[1:] if each][:-1]
    )


def test_sixty_four_sequences_stay_within_their_bill(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are counted as they are made: none is made after loading, whatever is kept, and their sum is
    what the check of memory and the page's bill say."""
    made = allocations(monkeypatch)
    options = LoadOptions(
        threads=2, sparsity="off", sequences=64, chunk=128, context=96, state_copies=20, cache_type="f32"
    )
    model = load(paths["qwen35"], options)
    session = model.session()
    assert session.slots is not None and (session.slots.slots, model.plan.slots) == (84, 88)
    before = sum(made)
    uses = {use.kind: use.cpu_bytes for use in memory_use(session)}
    assert uses["states"] == 88 * model.config.slot_bytes
    assert uses["kv"] == model.plan.pages * model.config.page_bytes("f32")
    assert cache_bytes(session) == uses["states"] + uses["kv"]
    assert before <= uses["states"] + uses["kv"] + uses["buffers"]
    engine = Engine(session)
    requests = [greedy([*tokens(34), *tokens(10, i % 40)], 30) for i in range(100)]
    engine.run(requests)
    assert sum(made) == before
    assert len({tuple(each.output) for each in requests}) == 40 and session.slots.kept > 20
    stats = engine.stats()
    assert (stats.states, stats.free_states + stats.shared_states) == (84, 84)


@pytest.mark.parametrize("name", (*HYBRIDS, *LATENT_HYBRIDS, *CPU_HYBRIDS))
def test_each_family_shares_and_is_preempted(name: str, tmp_path: Path) -> None:
    """As alone, to the bit: a prompt that begins where another ended, and two that take pages from each
    other; and the tokens of transformers."""
    tiny = golden(name, tmp_path)
    alone = Alone(tiny.path, "cpu", context=64)
    engine = Engine(alone.load(sequences=2, chunk=24, cache_positions=96).session())
    stem = np.random.default_rng(3).integers(8, 288, 44).tolist()
    found = []
    for last in range(2):
        engine.run([request := greedy([*stem[:40], last + 9], 16)])
        alone.check(request)
        found.append(request.reused)
    assert found == [0, 32]
    requests = [greedy(stem[i : i + 20], 40) for i in (0, 9)]
    engine.run(requests)
    assert engine.scheduler.preemptions > 0
    alone.check(*requests)
    engine.run([request := greedy(tiny.prompt.tolist(), len(tiny.steps))])
    assert request.output == tiny.steps.tolist()
