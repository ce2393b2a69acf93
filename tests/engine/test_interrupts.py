"""Ctrl-C before each instruction of the engine: no page is lost, and no token is another than it would be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import pytest
from support.history_model import VOCAB, follow, history_model

from hotcold.engine.engine import Engine
from hotcold.engine.generation import generate, stream
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Allowed, Logprobs
from hotcold.kernels.backend import PAGE
from hotcold.runtime.sampling import SamplingParams

#: Every how many instructions an interrupt comes; all of them take minutes.
STRIDE = int(os.environ.get("HOTCOLD_INTERRUPT_STRIDE", "61"))
Ending = tuple[list[int], str | None, bool, list[Logprobs]]
FILES = (
    "engine/engine.py",
    "engine/scheduler.py",
    "engine/prefix_cache.py",
    "engine/request.py",
    "api/llm.py",
    "model/kv_cache.py",
)


def watch(session: Any) -> None:
    """From now on a row that is written to a page of several owners, or to one that may be found, fails."""
    inner = session.transformer.run

    def run() -> None:
        batch, pool = session.transformer.batch, session.cache
        for page in set((batch.slots[: int(batch.counts[0])] // PAGE).tolist()):
            assert sum(page in pages for pages in pool._owned.values()) == 1, "a shared page was written"
            assert page not in pool._keys.values(), "a page that may be found was written"
        inner()

    session.run = run


class Interrupter:
    """Raises KeyboardInterrupt once, before the instruction numbered ``moment`` of the files of the
    engine."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.happened = False

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.happened:
            self.left -= 1
            if self.left < 0:
                self.happened = True
                raise KeyboardInterrupt
        return self._trace


def moments() -> Iterator[int]:
    """Each STRIDE-th, with an offset that goes through all remainders, so that loops are met everywhere."""
    moment = 0
    while True:
        yield moment
        moment += STRIDE + (moment // STRIDE) % 3 - 1 if STRIDE > 1 else 1


def some_requests() -> list[Request]:
    """More than there are rows and pages for: long and short prompts, one that stops, one that is sampled."""
    stops = next([i] for i in range(VOCAB) if len(follow([i], 3)) < 3)
    greedy = SamplingParams(temperature=0)
    return [
        Request(Job([1] * 19, greedy, max_tokens=3, ignore_eos=True)),
        Request(Job([2] * 3, greedy, max_tokens=4, ignore_eos=True)),
        Request(Job(stops, greedy, max_tokens=3)),
        Request(
            Job(
                [3, 4],
                SamplingParams(temperature=3, seed=5, repeat_penalty=1.1),
                max_tokens=3,
                ignore_eos=True,
                logprobs=2,
            ),
            constraint=lambda output: Allowed(bias={len(output): 3.0}),
        ),
        Request(Job([5] * 30, greedy, max_tokens=20, ignore_eos=True)),  # up to the end of the context
    ]


def fresh_engine() -> Engine:
    return Engine(history_model(context=34, sequences=2, pages=3, chunk=8))


def undisturbed() -> list[Ending]:
    engine = fresh_engine()
    requests = some_requests()
    engine.run(requests)
    return list(map(ending, requests))


def ending(request: Request) -> Ending:
    """All that must not depend on interrupts."""
    logprobs = request.output_logprobs
    assert len(logprobs) == (0 if request.job.logprobs is None else len(request.output))
    return request.output, request.finish_reason, request.context_full, logprobs


def assert_nothing_is_held(engine: Engine) -> None:
    assert engine.session.cache.free_pages == engine.session.cache.pages
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert not engine.in_use


def assert_still_right(engine: Engine, expected: list[Ending]) -> None:
    requests = some_requests()
    for request in requests:
        engine.add(request)
    step_to_the_end(engine, requests)
    assert list(map(ending, requests)) == expected
    assert_nothing_is_held(engine)


def step_to_the_end(engine: Engine, requests: list[Request]) -> None:
    for _ in range(100):
        engine.step()
        if all(request.finished for request in requests):
            return
    raise AssertionError("the engine spins")


def each_moment(scene: Callable[[int], bool]) -> int:
    """Plays a scene with an interrupt at each moment until one is too late; returns how many there were."""
    for count, moment in enumerate(moments()):
        if not scene(moment):
            return count
    raise AssertionError


def test_a_run_that_is_interrupted_gives_everything_back() -> None:
    expected = undisturbed()

    def scene(moment: int) -> bool:
        engine, requests = fresh_engine(), some_requests()
        try:
            with Interrupter(moment) as interrupter:
                engine.run(requests)
        except KeyboardInterrupt:
            assert interrupter.happened
        else:
            assert not interrupter.happened, "an interrupt was swallowed"
        assert_nothing_is_held(engine)
        if interrupter.happened:
            outputs = [output for output, *_ in expected]
            for request, output in zip(requests, outputs, strict=True):
                assert request.output == output[: len(request.output)]
            if moment % 5 == 0:
                assert_still_right(engine, expected)
        return interrupter.happened

    assert each_moment(scene) * STRIDE > 3000


def test_an_interrupt_while_a_run_that_failed_cleans_up() -> None:
    """The second Ctrl-C of somebody impatient, or the only one, at the wrong moment."""
    for error in (KeyboardInterrupt, MemoryError):

        def scene(moment: int, error: type[BaseException] = error) -> bool:
            engine, requests = fresh_engine(), some_requests()
            transformer = engine.session.transformer
            transformer.interrupt = error
            transformer.interrupt_in = 1
            interrupter = Interrupter(moment)
            with pytest.raises((KeyboardInterrupt, error)), interrupter:
                engine.run(requests)
            assert_nothing_is_held(engine)
            return interrupter.happened

        assert each_moment(scene) * STRIDE > 500


def test_a_waiting_request_that_was_cancelled_holds_nothing() -> None:
    """Interrupted twice: when it was started, and when it was aborted."""
    engine, requests = fresh_engine(), some_requests()[:2]
    for request in requests:
        engine.add(request)
    engine.scheduler.cache.allocate(requests[0], 1)
    requests[0].finish("cancelled")
    step_to_the_end(engine, requests)
    assert requests[1].output == follow([2] * 3, 4, ignore_eos=True) and not requests[0].output
    assert_nothing_is_held(engine)


def test_steps_that_go_on_after_an_interrupt_give_the_same_tokens() -> None:
    expected = undisturbed()

    def scene(moment: int) -> bool:
        engine, requests = fresh_engine(), some_requests()
        for request in requests:
            engine.add(request)
        interrupter = Interrupter(moment)
        try:
            with interrupter:
                step_to_the_end(engine, requests)
        except KeyboardInterrupt:
            pass
        if interrupter.happened:
            step_to_the_end(engine, requests)
        assert list(map(ending, requests)) == expected
        engine.scheduler.settle()
        assert_nothing_is_held(engine)
        return interrupter.happened

    assert each_moment(scene) * STRIDE > 3000


def test_aborting_after_an_interrupt_gives_pages_and_rows_back() -> None:
    """Steps, then an abort of a running, a waiting and an ended request; whatever was interrupted is
    repeated."""
    expected = undisturbed()

    def scene(moment: int) -> bool:
        engine, requests = fresh_engine(), some_requests()
        interrupter = Interrupter(moment)
        try:
            with interrupter:
                for request in requests:
                    engine.add(request)
                for _ in range(3):
                    engine.step()
                for request in requests:
                    engine.abort(request)
        except KeyboardInterrupt:
            pass
        for request in reversed(requests):
            engine.abort(request)
        assert_nothing_is_held(engine)
        if moment % 5 == 0:
            assert_still_right(engine, expected)
        return interrupter.happened

    assert each_moment(scene) * STRIDE > 1500


def test_shared_pages_stay_what_they_are_through_interrupts() -> None:
    """Prompts that begin alike, of requests beside each other and after them: no interrupt frees a page that
    somebody has, or lets one be written that others may find."""
    prompts = [[1] * 40, [1] * 33 + [2], [1] * 40 + [3]]

    def play(moment: int | None) -> tuple[list[Ending], int, bool]:
        engine = Engine(history_model(context=70, sequences=2, pages=4, chunk=30))
        watch(engine.session)
        greedy = SamplingParams(temperature=0)
        requests = [Request(Job(each, greedy, max_tokens=5, ignore_eos=True)) for each in prompts]
        interrupter = Interrupter(10**9 if moment is None else moment)
        try:
            with interrupter:
                for request in requests:
                    engine.add(request)
                step_to_the_end(engine, requests)
        except KeyboardInterrupt:
            queued = {*engine.scheduler.running, *engine.scheduler.waiting}
            for request in requests:
                if not request.finished and request not in queued:
                    engine.add(request)
            step_to_the_end(engine, requests)
        engine.scheduler.settle()
        rows = sum(prompt for _, prompt in engine.session.transformer.row_counts)
        assert_nothing_is_held(engine)
        return list(map(ending, requests)), rows, interrupter.happened

    expected, rows, _ = play(None)
    assert [output for output, *_ in expected] == [follow(each, 5, ignore_eos=True) for each in prompts]
    assert rows == 40 + 2 + 9

    def scene(moment: int) -> bool:
        endings, _, happened = play(moment)
        assert endings == expected
        return happened

    assert each_moment(scene) * STRIDE > 1500


@pytest.mark.parametrize("alike", [True, False])
def test_pages_that_are_taken_from_a_request_through_interrupts(alike: bool) -> None:
    """Two that outgrow the cache, and a prompt that is scored: the younger one goes back to the queue."""
    prompts, tokens = [[1] * 60, [2] * 28, [3] * 5], [8, 9, 1]

    def play(moment: int) -> tuple[list[Ending], int, bool]:
        engine = Engine(history_model(context=80, sequences=2, pages=4, chunk=64, alike=alike))
        watch(engine.session)
        greedy = SamplingParams(temperature=0)
        requests = [
            Request(
                Job(each, greedy, max_tokens=n, ignore_eos=True, echo=n == 1, logprobs=0 if n == 1 else None)
            )
            for each, n in zip(prompts, tokens, strict=True)
        ]
        for request in requests:
            engine.add(request)
        interrupter = Interrupter(moment)
        try:
            with interrupter:
                step_to_the_end(engine, requests)
        except KeyboardInterrupt:
            step_to_the_end(engine, requests)
        engine.scheduler.settle()
        assert_nothing_is_held(engine)
        assert len(requests[2].prompt_logprobs) == 5
        return list(map(ending, requests)), engine.scheduler.preemptions, interrupter.happened

    expected, preemptions, _ = play(10**9)
    assert preemptions == 1
    outputs = [
        follow(each, n, ignore_eos=True, alike=alike, scored=n == 1)
        for each, n in zip(prompts, tokens, strict=True)
    ]
    assert [output for output, *_ in expected] == outputs

    def scene(moment: int) -> bool:
        endings, _, happened = play(moment)
        assert endings == expected
        return happened

    assert each_moment(scene) * STRIDE > 1500


def test_a_stream_that_is_interrupted_gives_everything_back() -> None:
    def scene(moment: int) -> bool:
        engine, request = fresh_engine(), some_requests()[0]
        engine.model.tokenizer.stream_decoder = Decoder
        interrupter = Interrupter(moment)
        try:
            with interrupter:
                pieces = "".join(map(str, stream(engine, request)))
        except KeyboardInterrupt:
            assert interrupter.happened
        else:
            assert pieces == "".join(f" {token}" for token in request.output)
        assert_nothing_is_held(engine)
        return interrupter.happened

    assert each_moment(scene) * STRIDE > 500


def test_generations_that_are_interrupted_give_everything_back() -> None:
    def scene(moment: int) -> bool:
        engine, requests = fresh_engine(), some_requests()
        engine.model.tokenizer.stream_decoder = Decoder
        interrupter = Interrupter(moment)
        try:
            with interrupter:
                done = generate(engine, requests)
        except KeyboardInterrupt:
            assert interrupter.happened
        else:
            assert [list(each.ids) for each in done] == [request.output for request in requests]
        assert_nothing_is_held(engine)
        return interrupter.happened

    assert each_moment(scene) * STRIDE > 1500


class Decoder:
    def __init__(self, shown: Iterable[int] = ()) -> None:
        assert not shown

    def push(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("times", [2, 5])
def test_several_interrupts_of_one_run_of_steps(times: int) -> None:
    expected = undisturbed()
    for moment in range(0, 1500, 10 * STRIDE):
        engine, requests = fresh_engine(), some_requests()
        for request in requests:
            engine.add(request)
        for _ in range(times):
            try:
                with Interrupter(moment):
                    step_to_the_end(engine, requests)
            except KeyboardInterrupt:
                pass
        if not all(request.finished for request in requests):
            step_to_the_end(engine, requests)
        assert list(map(ending, requests)) == expected
