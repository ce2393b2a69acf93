"""The loop that owns an engine, run in a thread of this process on the built-in model."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from hotcold import LLM
from hotcold.engine import generation
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Generation, Piece, joined
from hotcold.engine.request import Grammar, Job, Request, RequestError
from hotcold.engine.sampler import Allowed, Sampler
from hotcold.errors import UserError
from hotcold.hosting.loop import Command, EngineBroken, EngineThread
from hotcold.hosting.messages import Abort, AskStats, Close, Failure, Stats, Step, Submit
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel

GREEDY = SamplingParams(temperature=0)
LIMIT_S = 240


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    model = load(None, LoadOptions(sequences=2, threads=1, chunk=16))
    yield model
    model.close()


class Running:
    """An engine in a thread. Everything that it tells is kept, and can be waited for."""

    def __init__(self, model: LoadedModel, constraint: Callable[[Grammar], Any] | None = None) -> None:
        self.engine = Engine(model.session())
        self.error: BaseException | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._messages: list[Any] = []
        self.loop = EngineThread(self.engine, self._commands, self._tell, constraint)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, *commands: Command) -> None:
        for command in commands:
            self._commands.put(command)

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Until this is true of what was told."""
        with self._changed:
            assert self._changed.wait_for(ready, LIMIT_S), self._messages
            return ready()

    def pieces(self, id: int) -> list[Piece]:
        steps = [each for each in self._messages if isinstance(each, Step)]
        return [piece for step in steps for own, piece in step.pieces if own == id]

    def failures(self, id: int) -> list[Failure]:
        steps = [each for each in self._messages if isinstance(each, Step)]
        return [failure for step in steps for failure in step.failures if failure.id == id]

    def done(self, id: int) -> Generation:
        def finished() -> bool:
            pieces = self.pieces(id)
            return bool(pieces and pieces[-1].finish_reason)

        self.wait(finished)
        return joined(self.pieces(id))

    def failed(self, id: int) -> Failure:
        self.wait(lambda: self.failures(id))
        (failure,) = self.failures(id)
        return failure

    def stats(self, id: int) -> Any:
        self.put(AskStats(id))
        return self.wait(lambda: self.answer(id))

    def answer(self, id: int) -> Any:
        return next(
            (each.stats for each in self._messages if isinstance(each, Stats) and each.id == id), None
        )

    def close(self) -> None:
        self.put(Close())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _tell(self, message: Any) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self.loop.run()
        except EngineBroken as error:
            self.error = error


@pytest.fixture
def running(model: LoadedModel) -> Iterator[Running]:
    running = Running(model)
    yield running
    running.close()
    assert not running.engine.scheduler.unfinished
    assert running.engine.session.cache.free_pages == running.engine.session.cache.pages


def ids(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text)


def test_scores_of_a_prompt_come_while_it_is_read(
    model: LoadedModel, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a long prompt in one message would hold up everybody's texts."""
    monkeypatch.setattr(generation, "SCORED_TOKENS", 30)
    prompt = (ids(model, "The old man sat down by the fire and told the children a story. ") * 9)[:150]
    running.put(Submit(1, Job(prompt, GREEDY, max_tokens=3, logprobs=2, echo=True)))
    done, pieces = running.done(1), running.pieces(1)
    sizes = [len(piece.prompt_logprobs) for piece in pieces]
    assert sum(sizes) == len(prompt) and len(sizes) >= 4 and max(sizes) < 30 + 32
    request = Request(Job(prompt, GREEDY, max_tokens=3, logprobs=2, echo=True, cache=False))
    Engine(model.session(), reuse=False).run([request])
    assert list(done.prompt_logprobs) == request.prompt_logprobs
    assert list(done.ids) == request.output


def test_jobs_get_the_texts_of_generate(model: LoadedModel, running: Running) -> None:
    prompts = ["Once upon a time", "The king", "I", "Peter and Heidi went up the mountain"]
    jobs = [
        Job(ids(model, prompt), SamplingParams(seed=i), max_tokens=30, stop=(" the",), logprobs=1)
        for i, prompt in enumerate(prompts)
    ]
    running.put(*(Submit(i, job) for i, job in enumerate(jobs)))
    done = [running.done(i) for i in range(len(jobs))]
    with LLM(model) as llm:
        for i, (prompt, found) in enumerate(zip(prompts, done, strict=True)):
            expected = llm.generate(prompt, seed=i, max_tokens=30, stop=" the", logprobs=1)
            assert (found.text, found.ids, found.stop) == (expected.text, expected.ids, expected.stop)
            assert (found.finish_reason, found.logprobs) == (expected.finish_reason, expected.logprobs)


def test_a_job_that_is_not_allowed_fails_alone(model: LoadedModel, running: Running) -> None:
    good = Job(ids(model, "Once"), GREEDY, max_tokens=20)
    bad = {
        2: Job([], GREEDY),
        4: Job([1 << 30], GREEDY),
        5: Job([1] * 256, GREEDY),
        7: Job([1], SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(4096), -float("inf")))),
        8: Job([1], GREEDY, grammar=Grammar("json_object")),
    }
    running.put(Submit(1, good), *(Submit(id, job) for id, job in bad.items()))
    for id in bad:
        failure = running.failed(id)
        assert failure.code in ("invalid_request", "context_length_exceeded")
        assert failure.message and "\n" not in failure.message and failure.error.code == failure.code
    assert len(running.done(1).ids) == 20
    assert not any(running.pieces(id) for id in bad)


def test_an_abort_frees_everything_wherever_the_job_is(model: LoadedModel, running: Running) -> None:
    """Two decode, one waits, then one reads its prompt."""
    for id in (1, 2, 3):
        running.put(Submit(id, Job([id + 5], GREEDY, max_tokens=200, ignore_eos=True)))
    running.wait(lambda: running.pieces(1) and running.pieces(2))
    running.put(Abort(3), Abort(1), Abort(77))
    long = Job([5] * 200, GREEDY, max_tokens=50, ignore_eos=True)
    running.put(Submit(4, long), Abort(4), Abort(4))
    running.put(Submit(5, long))
    running.put(Abort(2))
    running.wait(lambda: running.pieces(5))
    running.put(Abort(5))
    stats = running.stats(9)
    assert (stats.running, stats.waiting) == (0, 0)
    assert not running.pieces(3) and not running.pieces(4)
    assert not any(piece.finish_reason for id in (1, 2, 5) for piece in running.pieces(id))


def test_jobs_that_come_at_once_start_between_steps(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, where starting one takes all the time that there is; what was aborted never starts."""
    monkeypatch.setattr("hotcold.hosting.loop._STARTING_S", 0)
    engine, happened = Engine(model.session()), []
    add, step = engine.add, engine.step
    monkeypatch.setattr(engine, "add", lambda request: (happened.append(request.job.prompt[0]), add(request)))
    monkeypatch.setattr(engine, "step", lambda: (happened.append("step"), step())[1])
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for id in (11, 12, 13, 14):
        commands.put(Submit(id, Job([id], GREEDY, max_tokens=5, ignore_eos=True)))
    commands.put(Abort(13))
    messages: list[Any] = []

    def tell(message: Any) -> None:
        messages.append(message)
        if any(piece.finish_reason for id, piece in message.pieces if id == 14):
            commands.put(Close())

    EngineThread(engine, commands, tell).run()
    assert happened[:6] == [11, "step", 12, "step", 14, "step"] and 13 not in happened
    assert not engine.scheduler.unfinished


def test_a_request_that_cannot_go_on_ends_alone(model: LoadedModel) -> None:
    """Its text so far comes before its error."""

    def constraint(_: Grammar) -> Any:
        def allow(output: Any) -> Allowed:
            if len(output) == 3:
                raise RequestError("no such text", "invalid_grammar")
            return Allowed()

        return allow

    running = Running(model, constraint)
    job = Job(ids(model, "Once upon"), GREEDY, max_tokens=9, ignore_eos=True)
    with LLM(model) as llm:
        third = [*llm.stream(job.prompt, temperature=0, max_tokens=3, ignore_eos=True)][-1].text
    held = (third + "\0",)  # the text of the last token waits for what would follow
    other = Job(job.prompt, GREEDY, max_tokens=9, ignore_eos=True, stop=held, grammar=Grammar("regex", "x"))
    running.put(Submit(1, job), Submit(2, other))
    assert running.failed(2) == Failure(2, "no such text", "invalid_grammar")
    assert [len(piece.ids) for piece in running.pieces(2)] == [1, 1, 1]
    assert running.pieces(2)[-1].text == third
    assert len(running.done(1).ids) == 9
    running.close()
    assert not running.engine.scheduler.unfinished


def test_steps_of_others_go_on_while_a_grammar_is_compiled(model: LoadedModel) -> None:
    may_compile, compiled = threading.Event(), []

    def constraint(grammar: Grammar) -> Any:
        compiled.append(grammar.source)
        assert may_compile.wait(LIMIT_S)
        if grammar.source == "wrong":
            raise RequestError("wrong", "invalid_grammar")
        return lambda output: Allowed(bias={7: 100.0})

    running = Running(model, constraint)
    job = Job([9], GREEDY, max_tokens=4, ignore_eos=True)
    for id, source in ((5, "too late"), (1, "right"), (2, "wrong"), (3, "aborted")):
        own = Job([9], GREEDY, max_tokens=4, ignore_eos=True, grammar=Grammar("regex", source))
        running.put(Submit(id, own))
    running.put(Submit(4, job))
    running.done(4)  # before any of the others
    running.wait(lambda: compiled == ["too late"])
    running.put(Abort(3), Abort(5))
    assert running.stats(8).running == 0
    may_compile.set()
    assert running.done(1).ids == (7, 7, 7, 7)
    assert running.failed(2).code == "invalid_grammar"
    running.close()
    assert not any(running.pieces(id) or running.failures(id) for id in (3, 5))
    assert compiled == ["too late", "right", "wrong"]


def test_a_grammar_that_is_being_compiled_does_not_hold_up_closing(model: LoadedModel) -> None:
    may_compile = threading.Event()
    running = Running(model, lambda grammar: may_compile.wait(LIMIT_S))
    running.put(Submit(1, Job([9], GREEDY, grammar=Grammar("regex", "x"))))
    running.close()
    may_compile.set()


def test_a_step_that_fails_ends_the_jobs_that_ran_alone(
    model: LoadedModel, running: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(model) as llm:
        expected = llm.generate([9], max_tokens=200, temperature=0, ignore_eos=True).ids
    run, failing = running.engine.session.run, threading.Event()

    def fail() -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("the model fell over")
        run()

    monkeypatch.setattr(running.engine.session, "run", fail)
    job = Job([9], GREEDY, max_tokens=200, ignore_eos=True)
    for first in (11, 21, 31, 41):  # more often than an engine may fail in a row
        ran, waits = (first, first + 1), first + 2
        running.put(*(Submit(id, job) for id in (*ran, waits)))
        running.wait(lambda: running.pieces(first) and running.pieces(first + 1))  # noqa: B023
        failing.set()
        for id in ran:
            failure = running.failed(id)
            assert failure.code == "engine_failed" and "fell over" not in failure.message
        assert "RuntimeError: the model fell over" in capfd.readouterr().err
        assert running.done(waits).ids == expected and not running.failures(waits)
    assert running.stats(5).running == running.stats(6).waiting == 0


def test_what_is_wrong_with_the_model_is_no_mistake_of_a_request(
    model: LoadedModel, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = running.engine.session.transformer.head

    class Damaged:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def read(self, *where: Any) -> Any:
            return np.full_like(backend.read(*where), np.nan)

    forbidden = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(model.config.vocab), -math.inf))
    running.put(Submit(1, Job([9], forbidden)))
    assert running.failed(1).code == "invalid_request"
    running.engine.sampler = Sampler(cast("Any", Damaged()))
    running.put(Submit(2, Job([9], GREEDY)))
    assert running.failed(2).code == "engine_failed" and "damaged" in running.failed(2).message

    def fail() -> None:
        raise UserError("the GPU has no memory left")

    monkeypatch.setattr(running.engine.session, "run", fail)
    running.put(Submit(3, Job([9], GREEDY)))
    assert running.failed(3).code == "engine_failed" and "GPU" in running.failed(3).message


def test_an_engine_of_which_every_step_fails_is_given_up(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(model)

    def fail() -> None:
        raise RuntimeError("always")

    monkeypatch.setattr(running.engine.session, "run", fail)
    for id in (1, 2, 3):
        running.put(Submit(id, Job([9], GREEDY)))
        assert running.failed(id).code == "engine_failed"
    running.close()
    assert isinstance(running.error, EngineBroken)


def test_a_deadline_ends_a_job(model: LoadedModel, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([9], GREEDY, max_tokens=200, ignore_eos=True, deadline_s=0)
    running.put(Submit(1, job))
    assert running.failed(1).code == "deadline"
    assert not running.pieces(1)
    running.put(Submit(2, replace(job, deadline_s=1000)))
    assert len(running.done(2).ids) == 200
    run = running.engine.session.run
    monkeypatch.setattr(running.engine.session, "run", lambda: (time.sleep(0.02), run()))
    running.put(Submit(3, replace(job, deadline_s=0.5)))  # 200 steps take four seconds at least
    assert running.failed(3).code == "deadline"


def test_closing_aborts_what_runs(model: LoadedModel) -> None:
    running = Running(model)
    running.put(*(Submit(id, Job([9], GREEDY, max_tokens=200, ignore_eos=True)) for id in range(5)))
    running.wait(lambda: running.pieces(0))
    running.close()
    assert not running.engine.scheduler.unfinished


def test_an_idle_engine_does_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is run, and the queue is asked once for each command, without polling."""
    steps = []
    monkeypatch.setattr(running.engine, "step", lambda: steps.append(1) or [])
    for id in range(3):
        assert running.stats(id).running == 0
    assert not steps


def test_times_of_steps_are_told_once(model: LoadedModel, running: Running) -> None:
    """Not those in which the engine had nothing to do."""
    for id in (1, 2):
        running.put(Submit(id, Job([9 + id], GREEDY, max_tokens=20, ignore_eos=True)))
        running.done(id)
        assert running.stats(10 + id).step_s == ()
    running.put(AskStats(5, steps=True), AskStats(6, steps=True))
    found = [running.wait(lambda: running.answer(id)).step_s for id in (5, 6)]  # noqa: B023
    assert len(found[0]) == 2 * 19 and min(found[0]) > 0 and found[1] == ()
