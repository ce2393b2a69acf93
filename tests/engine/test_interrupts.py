"""Exceptions out of the engine, Ctrl-C at any instruction: what ran ends, and what comes next is right."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pytest
from support.history_model import VOCAB, follow, history_model
from support.interrupter import Interrupter
from support.opaque_backend import OpaqueBackend
from support.page_count import assert_no_page_is_lost
from support.vulkan.devices import DRIVERS, device_index

from hotcold.engine.engine import Engine
from hotcold.engine.generation import generate, stream
from hotcold.engine.request import Job, Request, RequestError
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PAGE
from hotcold.runtime import placing
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel

GREEDY = SamplingParams(temperature=0, seed=1)
VULKAN = DRIVERS[0]  #: lavapipe, or a GPU that was named


def greedy(prompt: list[int], n: int) -> Request:
    return Request(Job(prompt, GREEDY, max_tokens=n, ignore_eos=True))


def step_to_the_end(engine: Engine) -> None:
    for _ in range(200):
        if not engine.scheduler.unfinished:
            return
        engine.step()
    raise AssertionError("the engine spins")


# --- an exception of the model ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", range(6))
def test_what_ran_ends_and_what_waits_goes_on(at: int, error: type[BaseException]) -> None:
    session = history_model(sequences=2, chunk=8)
    engine = Engine(session)
    requests = [greedy([1] * 20, 9), greedy([2] * 3, 9), greedy([3] * 40, 9)]
    for request in requests:
        engine.add(request)
    session.transformer.interrupt, session.transformer.interrupt_in = error, at
    with pytest.raises(error):
        step_to_the_end(engine)
    *ran, waits = requests
    for request in ran:
        assert request.finish_reason == "cancelled"
        message = (
            f"a step ended with {error.__name__}, which ended the running requests: send the request again"
        )
        assert isinstance(request.error, RequestError) and str(request.error) == message
        assert request.output == follow([*request.job.prompt], len(request.output), ignore_eos=True)
    assert not waits.finished and engine.scheduler.unfinished == 1
    assert session.cache.free_pages == session.cache.pages
    step_to_the_end(engine)
    assert waits.output == follow([3] * 40, 9, ignore_eos=True) and waits.error is None


def test_pages_that_others_may_find_stay_where_the_model_is_interrupted() -> None:
    """The next turn of a chat whose last answer was interrupted reads only what is new."""
    session = history_model()
    engine = Engine(session)
    session.transformer.interrupt_in = 70 // 16 + 3
    with pytest.raises(KeyboardInterrupt):
        engine.run([greedy([1] * 70, 40)])
    engine.run([again := greedy([1] * 70 + [2], 4)])
    assert again.reused == 2 * PAGE
    assert again.output == follow([*again.job.prompt], 4, ignore_eos=True)


def test_a_stream_beside_one_that_is_interrupted_says_why_it_ends() -> None:
    engine = history_engine()
    first, second = (stream(engine, greedy([i], 9)) for i in (1, 2))
    texts = [str(next(first)), str(next(second))]
    engine.session.transformer.interrupt_in = 2
    with pytest.raises(KeyboardInterrupt):
        for piece in first:
            texts[0] += str(piece)
    with pytest.raises(RequestError, match="a step ended with KeyboardInterrupt"):
        for piece in second:
            texts[1] += str(piece)
    for text, prompt, n in zip(texts, ([1], [2]), (4, 3), strict=True):
        assert text == "".join(f" {token}" for token in follow(prompt, n, ignore_eos=True))


# --- at random instructions ---------------------------------------------------------------------------


Truth: TypeAlias = Callable[[Request], list[int]]  #: the tokens of one that comes to its end


class Decoder:
    """Makes a text of the history model's tokens."""

    def __init__(self, shown: Iterable[int] = ()) -> None:
        assert not shown

    def push(self, token: int) -> str:
        return f" {token}"

    def flush(self) -> str:
        return ""


def history_engine(prefill_equals_decode: bool = True, copies: int | None = None) -> Engine:
    engine = Engine(
        history_model(
            context=70,
            sequences=2,
            pages=4,
            chunk=24,
            prefill_equals_decode=prefill_equals_decode,
            copies=copies,
        )
    )
    engine.model.tokenizer.stream_decoder = Decoder
    return engine


def model_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The built-in model on one backend, or on two."""
    options: dict[str, Any] = {"context": 70, "sequences": 2, "chunk": 24, "cache_positions": 4 * PAGE}
    match backend:
        case "reference":
            options |= {"backend": "reference"}
        case "opaque":
            monkeypatch.setattr(placing, "open_backend", lambda *args: OpaqueBackend(open_backend(*args)))
        case "two":
            options |= {"hot_backend": "cpu", "vram_budget": 4 << 20}
        case "lavapipe" | "gpu":
            options |= {"gpu": str(device_index(backend)), "vram_budget": 4 << 20}
    if backend != "reference":
        options["threads"] = 1
    return load(None, LoadOptions(**options))


def play(engine: Engine, random: np.random.Generator, made: list[Request]) -> None:
    """Streams beside each other, several prompts at once, requests without a stream; some are left early."""

    def new() -> Request:
        prompt = [1] * int(random.integers(0, 40)) + random.integers(8, VOCAB, 2).tolist()
        made.append(greedy(prompt, int(random.integers(1, 7))))
        return made[-1]

    streams = [stream(engine, new()) for _ in range(2)]
    queued = [new()]
    engine.add(queued[0])
    for what in random.integers(0, 8, 9):
        match what:
            case 0:
                queued.append(new())
                engine.add(queued[-1])
            case 1:
                engine.abort(queued[random.integers(len(queued))])
            case 2:
                generate(engine, [new(), new()])
            case 3:
                streams[random.integers(2)].close()
            case 4 | 5:
                next(streams[random.integers(2)], None)
            case _:
                engine.step()
    for each in streams:
        each.close()


def interrupted(engine: Engine, seed: int, interrupter: Interrupter) -> list[Request]:
    """Plays until an interrupt comes, and lets what waits come to its end. Half of the plays are interrupted
    in the model as well, so that the interrupter may meet the engine while it cleans up."""
    random, made, raised, run = np.random.default_rng(seed), list[Request](), False, engine.session.run
    left = int(random.integers(12))

    def interrupted_run() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "run", interrupted_run)
        try:
            with interrupter:
                play(engine, random, made)
        except KeyboardInterrupt:
            raised = True
    assert raised or not interrupter.came, "an interrupt was swallowed"
    step_to_the_end(engine)
    return made


def check(request: Request, truth: Truth | None) -> None:
    """It ended, or was not queued; its tokens are right; it says why where an exception ended it."""
    if request.finish_reason is None:
        assert request.timings.started is None
    elif request.error is not None:
        assert request.finish_reason == "cancelled" and "ended the running requests" in str(request.error)
    if truth is not None:
        whole = truth(request)
        done = len(whole) if request.finish_reason == "length" else len(request.output)
        assert request.output == whole[:done]


def interrupt_at_random(
    engine: Engine, fresh: list[Request], points: int, truth: Truth | None = None
) -> None:
    """All on one engine, so that whatever interrupts leave behind would come together. Each instruction is
    as likely as any other, however often it comes. New requests get the tokens of a fresh engine."""
    pool, slots = engine.session.cache, engine.session.slots
    random, seed = np.random.default_rng(points), 0
    requests = sum(type(each) is Request for each in gc.get_objects())
    most = 10 + points // 5
    while points > 0:
        seed += 1
        assert seed < most, "most instructions are not met again"
        interrupted(engine, seed, counting := Interrupter())
        places = [*counting.passed]
        for _ in range(min(points, 10)):
            where = places[random.integers(len(places))]
            turn = int(random.integers(counting.passed[where])) + 1
            for request in interrupted(engine, seed, interrupter := Interrupter(where, turn)):
                check(request, truth)
            points -= interrupter.came
            engine.run(again := [greedy([*each.job.prompt], each.job.max_tokens) for each in fresh])
            assert [each.output for each in again] == [each.output for each in fresh]
            assert not engine.scheduler.running and not engine.scheduler.waiting and not pool._owned
            assert_no_page_is_lost(pool)
            if slots is not None:
                assert not slots._owned
                assert_no_page_is_lost(slots)
    del request, again
    # CPython still handles an exception whose handler is interrupted at its last instruction, where a
    # trace function comes and Ctrl-C does not: that exception alone would hold requests.
    if (handled := sys.exc_info()[1]) is not None:
        handled.__traceback__ = handled.__context__ = None
    gc.collect()
    assert sum(type(each) is Request for each in gc.get_objects()) <= requests


def some_requests(last: int = 9) -> list[Request]:
    return [greedy([1] * 5 + [last], 4), greedy([1] * 40 + [last], 3)]


#: How many times as many interrupts as CI tries.
TIMES = int(os.environ.get("HOTCOLD_TEST_INTERRUPTS", "1"))


@pytest.mark.parametrize(("prefill_equals_decode", "copies"), [(True, None), (False, None), (True, 1)])
def test_after_interrupts_at_random_instructions(
    prefill_equals_decode: bool, copies: int | None, full: bool
) -> None:
    """On a model whose tokens depend on every row that was ever written, through pages that are few, and
    through states and copies of them that are few, too."""

    def truth(request: Request) -> list[int]:
        return follow(
            [*request.job.prompt],
            request.job.max_tokens,
            ignore_eos=True,
            prefill_equals_decode=prefill_equals_decode,
        )

    history_engine(prefill_equals_decode).run(fresh := some_requests())
    assert [each.output for each in fresh] == [truth(each) for each in fresh]
    interrupt_at_random(
        history_engine(prefill_equals_decode, copies), fresh, 200 * TIMES if full else 30, truth
    )


#: On each backend, without --full and with it.
POINTS = {"cpu": (10, 60), "opaque": (5, 30), "two": (10, 60), "reference": (2, 12), VULKAN: (1, 6)}


@pytest.mark.parametrize("backend", POINTS)
def test_after_interrupts_of_a_backend(backend: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(backend, monkeypatch)
    # Behind 300 no two tokens are nearly equal: then rounding, which depends on a batch's size, would decide.
    Engine(model.session()).run(fresh := some_requests(300))
    few, many = POINTS[backend]
    interrupt_at_random(Engine(model.session()), fresh, many * TIMES if full else few)
    model.close()
