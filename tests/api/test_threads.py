"""Several threads on one LLM: each gets what one thread gets, and none waits for what another does not do."""

from __future__ import annotations

import gc
import importlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from engine.test_mixed_requests import some_predictors
from support.sidecars import with_sidecar
from support.threads import Running, wait_until

from hotcold import LLM
from hotcold.api import llm as api
from hotcold.engine.generation import Continuation, Piece
from hotcold.engine.request import RequestError
from hotcold.errors import UserError
from hotcold.grammar import constraint
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer

pytestmark = pytest.mark.usefixtures("benchmarks")

PROMPT = "Once upon a time"
LONG: Any = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(sequences=2) as llm:
        yield llm


class Gate:
    """Holds a step of an LLM before the model runs: until the test opens it, or for ever longer steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        run = llm.session.run

        def gated(*args: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            run(*args)

        monkeypatch.setattr(llm.session, "run", gated)


def text_of(pieces: Generator[Piece, None, None]) -> str:
    return "".join(map(str, pieces))


def assert_nothing_is_left(llm: LLM) -> None:
    llm.engine.stats()  # makes the changes that wait
    assert not llm.engine.scheduler.unfinished
    assert llm.session.cache.free_pages == llm.session.cache.pages


@pytest.mark.parametrize(
    ("sparsity", "sequences", "count"), [("exact", 1, 20), ("predicted", 3, 40)], ids=["one row", "predicted"]
)
def test_calls_of_all_kinds_give_in_eight_threads_what_they_give_in_one(
    sparsity: str, sequences: int, count: int, tmp_path: Path, full: bool
) -> None:
    threads = importlib.import_module("serving.threads")
    path = with_sidecar(tmp_path, tensors=some_predictors)
    model = threads.loaded(path, sparsity=sparsity, sequences=sequences, chunk=24)
    calls = threads.mixed_calls(200 if full else count, 20)
    assert {call.kind for call in calls} == {*threads.KINDS}
    with LLM(model) as llm:
        expected = [call.result(llm) for call in calls]
        stream = llm.stream(PROMPT, **LONG)
        text = str(next(stream))
        found = threads.compare(llm, calls, expected, 8)
        assert (found["different"], found["failed"]) == (0, 0)
        assert text + text_of(stream) == llm.generate(PROMPT, **LONG).text
        assert_nothing_is_left(llm)


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("method", ["stream", "stream_chat"])
def test_a_stream_that_is_not_read_on_delays_no_thread(method: str, sequences: int) -> None:
    """Not even where it has the only row; its own text is right in the end."""
    prompt: Any = PROMPT if method == "stream" else [{"role": "user", "content": PROMPT}]
    with LLM(sequences=sequences) as llm:
        expected = llm.generate(PROMPT, **LONG).text
        stop = expected[len(expected) // 2 :][:12]
        paused = [getattr(llm, method)(prompt, **LONG), getattr(llm, method)(prompt, stop=stop, **LONG)]
        texts = [str(next(paused[0])), ""]
        others = [Running(lambda: llm.generate(PROMPT, **LONG).text) for _ in range(3)]
        assert [each.result() for each in others] == [expected] * 3
        texts[1] += str(next(paused[1]))
        assert Running(lambda: llm.generate(PROMPT, **LONG).text).result() == expected
        for i, each in enumerate(paused):
            texts[i] += "".join(map(str, each))
        assert texts == [expected, expected[: expected.index(stop)]]
        assert_nothing_is_left(llm)


def test_threads_share_steps(llm: LLM) -> None:
    """Two requests of two threads take no more steps than one of them."""
    expected = llm.generate(PROMPT, **LONG)
    before = llm.engine.stats().steps
    streams = [llm.stream(PROMPT, **LONG) for _ in range(2)]
    pieces = [next(stream) for stream in streams]
    reading = [Running(lambda stream=stream: text_of(stream)) for stream in streams]
    for piece, each in zip(pieces, reading, strict=True):
        assert str(piece) + each.result() == expected.text
    assert llm.engine.stats().steps - before <= len(expected.ids) + 4


def test_streams_that_are_dropped_in_any_thread_give_their_pages_back(llm: LLM) -> None:
    expected = llm.generate(PROMPT, **LONG).text
    texts: list[str] = []

    def drop(count: int) -> None:
        for i in range(count):
            stream = llm.stream(PROMPT, **LONG)
            next(stream)
            if i % 2:
                cycle: list[Any] = [stream]
                cycle.append(cycle)  # the garbage collector closes it, in the thread that it runs in
            del stream

    def generate() -> None:
        for _ in range(3):
            texts.append(llm.generate(PROMPT, **LONG).text)
            gc.collect()

    running = [Running(work) for work in (lambda: drop(8), lambda: drop(8), generate, generate)]
    for each in running:
        each.result()
    gc.collect()
    assert texts == [expected] * 6
    assert_nothing_is_left(llm)


def test_a_stream_that_is_dropped_within_a_step_of_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run there, and closing changes what the step computes."""
    expected = llm.generate(PROMPT, **LONG).text
    streams = [llm.stream(PROMPT, **LONG)]
    next(streams[0])
    run, steps = llm.session.run, 0

    def collected(*args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            streams[0].close()
            assert llm.engine.scheduler.unfinished == 2, "it ends after the step"
        run(*args)

    monkeypatch.setattr(llm.session, "run", collected)
    assert llm.generate(PROMPT, **LONG).text == expected and steps > 5
    assert_nothing_is_left(llm)


def test_ending_a_request_waits_for_the_step_that_it_runs_in(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPT, **LONG)
    text = str(next(stream))
    (request,) = llm.engine.scheduler.running
    gate = Gate(llm, monkeypatch)
    other = Running(lambda: llm.generate(PROMPT, **LONG).text)
    assert gate.reached.wait(60)
    ending = Running(lambda: llm.engine.finish(request))
    wait_until(lambda: len(llm.session.lock._changes) == 1)
    assert not request.finished and not ending.ended
    gate.open.set()
    ending.result()
    assert request.finish_reason == "stop"
    assert 2 <= len(request.output) < 60 and text + text_of(stream) == llm.tokenizer.decode(request.output)
    assert other.result() == llm.generate(PROMPT, **LONG).text
    assert_nothing_is_left(llm)


def test_tokens_that_come_while_a_piece_is_made_are_in_the_next_one(llm: LLM) -> None:
    """A step of another thread may end the request then."""
    expected = llm.generate(PROMPT, **LONG)
    llm.engine.add(request := llm.request(PROMPT, **LONG))
    continuation = Continuation(llm.engine, request)
    while len(request.output) < 5:
        llm.engine.step()
    push = continuation._text.push

    def push_slowly(id: int) -> str:
        while not request.finished:
            llm.engine.step()
        return push(id)

    continuation._text.push = push_slowly  # type: ignore[method-assign]
    first, second = continuation.take(), continuation.take()
    assert first is not None and second is not None
    assert (first.ids, first.finish_reason) == (expected.ids[:5], None)
    assert (second.ids, second.finish_reason) == (expected.ids[5:], "length")
    assert str(first) + str(second) == expected.text


def test_a_constraint_that_uses_the_same_model(llm: LLM) -> None:
    def constraint(output: Any) -> Any:
        return llm.generate("The king", max_tokens=1)

    with pytest.raises(UserError, match="a step of a model uses the same model"):
        Running(lambda: llm.generate(PROMPT, constraint=constraint, max_tokens=3)).result()
    assert_nothing_is_left(llm)


def test_a_failed_step_ends_the_requests_that_ran_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread raises the error of its own request, whichever of them ran the step."""
    prompts = [PROMPT, "The king", "I", "The sea"]
    expected = [llm.generate(prompt, **LONG).text for prompt in prompts]
    run, gate = llm.session.run, Gate(llm, monkeypatch)

    def fail_once(*args: Any) -> None:
        monkeypatch.setattr(llm.session, "run", run)
        raise ZeroDivisionError("of the model")

    def generate(prompt: str) -> str | Exception:
        try:
            return llm.generate(prompt, **LONG).text
        except Exception as error:
            return error

    running = [Running(lambda prompt=prompt: generate(prompt)) for prompt in prompts]
    wait_until(lambda: gate.reached.is_set() and len(llm.session.lock._changes) == 3)
    monkeypatch.setattr(llm.session, "run", fail_once)
    gate.open.set()
    found = [each.result() for each in running]
    errors = [each for each in found if isinstance(each, Exception)]
    assert len(errors) == 2, "of two rows"
    message = "a step ended with ZeroDivisionError, which ended the running requests: send the request again"
    assert {str(error) for error in errors} <= {message, "of the model"}
    assert [each for each in found if each not in errors] == [
        text for text, each in zip(expected, found, strict=True) if each not in errors
    ]
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("times", [1, 2])
def test_a_thread_that_waits_for_a_row_is_not_ended_by_a_step_of_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Though it runs that step. If its own request is in the next one, which fails as well, it is."""
    expected = llm.generate(PROMPT, **LONG).text
    streams = [llm.stream(PROMPT, **LONG) for _ in range(2)]
    texts = [str(next(stream)) for stream in streams]
    run, left = llm.session.run, [ZeroDivisionError("of the model")] * times
    monkeypatch.setattr(llm.session, "run", lambda *args: run(*args) if not left else fail(left.pop()))
    third = Running(lambda: llm.generate(PROMPT, **LONG).text)
    if times == 1:
        assert third.result() == expected
    else:
        with pytest.raises(ZeroDivisionError, match="of the model"):
            third.result()
    for text, stream in zip(texts, streams, strict=True):
        with pytest.raises(RequestError, match="a step ended with ZeroDivisionError"):
            for piece in stream:
                text += str(piece)
        assert expected.startswith(text)
    assert_nothing_is_left(llm)


def fail(error: Exception) -> None:
    raise error


def test_a_step_that_fails_before_any_request_runs_is_not_tried_for_ever(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "_admit", lambda step: fail(ZeroDivisionError("at once")))
    with pytest.raises(ZeroDivisionError, match="at once"):
        Running(lambda: llm.generate(PROMPT)).result()
    assert_nothing_is_left(llm)


def test_ctrl_c_while_another_thread_runs_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread stops at once, and the other thread's text is as it was."""
    expected = llm.generate(PROMPT, **LONG).text
    gate = Gate(llm, monkeypatch)
    other = Running(lambda: llm.generate(PROMPT, **LONG).text)
    assert gate.reached.wait(60)
    main = threading.main_thread().ident
    assert main is not None and threading.get_ident() == main

    def interrupt() -> None:
        wait_until(lambda: llm.session.lock._sleepers)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = Running(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("The king", **LONG)
    assert not other.ended and not gate.open.is_set()
    interrupting.result()
    gate.open.set()
    assert other.result() == expected
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("owner", ["LLM", "another LLM of the model", "loaded model"])
def test_closing_while_other_threads_generate(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls end with one line that says why: running, waiting, streaming and later ones."""
    first = LLM(sequences=2)
    llm = LLM(first.model) if owner == "another LLM of the model" else first
    expected = llm.generate(PROMPT, **LONG).text
    stream = llm.stream(PROMPT, **LONG)
    text = str(next(stream))
    gate = Gate(llm, monkeypatch)
    running = [Running(lambda: llm.generate(PROMPT, **LONG)) for _ in range(3)]
    session, name = llm.session, llm.model.name
    wait_until(lambda: gate.reached.is_set() and len(session.lock._changes) == 2)
    closing = Running(llm.model.close if owner == "loaded model" else first.close)
    wait_until(lambda: len(session.lock._changes) == 3)
    assert not closing.ended, "a step runs"
    gate.open.set()
    closing.result()
    for each in running:
        with pytest.raises(UserError, match=f"^the model {name} is closed: load it again$"):
            each.result()
    with pytest.raises(UserError, match=f"^the model {name} is closed: load it again$"):
        for piece in stream:
            text += str(piece)
    assert expected.startswith(text)
    assert session.cache.free_pages == session.cache.pages
    with pytest.raises(UserError, match="is closed"):
        llm.generate(PROMPT)
    llm.close()


def test_threads_make_one_template_and_one_set_of_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def slow(*args: Any) -> Any:
        made.append("part")
        time.sleep(0.05)  # in which other threads look whether there is one
        return Mock()

    monkeypatch.setattr(api, "Chat", slow)
    monkeypatch.setattr(constraint, "Grammars", slow)
    running = [Running(lambda: (llm.template, llm._of_grammars())) for _ in range(4)]
    assert len({each.result() for each in running}) == 1 and len(made) == 2


def test_llms_that_share_a_model_in_threads_of_their_own() -> None:
    model = load(None, LoadOptions(sequences=2))
    with LLM(model) as one, LLM(model) as two:
        expected = one.generate(PROMPT, **LONG).text
        running = [Running(lambda llm=llm: llm.generate(PROMPT, **LONG).text) for llm in (one, two) * 3]
        assert [each.result() for each in running] == [expected] * 6
    model.close()


def test_a_scoring_and_texts_in_threads_never_mix(llm: LLM) -> None:
    """Either may find the session in use by the other one, and says so."""
    expected = llm.generate(PROMPT, **LONG).text
    window = llm.tokenizer.encode(PROMPT + expected)

    def scores() -> list[float]:
        return [float(row.sum()) for rows in Scorer(llm.session).logits(window) for row in rows]

    def ten_times(work: Callable[[], Any], user: str) -> list[Any]:
        results = []
        while len(results) < 10:
            try:
                results.append(work())
            except UserError as error:
                assert f"the session is in use by {user}" in str(error)
        return results

    expected_scores = scores()
    scoring = Running(lambda: ten_times(scores, "an engine with"))
    texts = ten_times(lambda: llm.generate(PROMPT, **LONG).text, "a scoring that")
    assert texts == [expected] * 10 and scoring.result() == [expected_scores] * 10
    assert_nothing_is_left(llm)
