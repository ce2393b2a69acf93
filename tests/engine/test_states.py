"""Requests of a model that keeps states: pages are not enough to begin where another ended."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history_model import VOCAB, follow, history_model
from support.page_count import assert_no_page_is_lost

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.sampling import SamplingParams

pytestmark = pytest.mark.long  # no backend computes here

GREEDY = SamplingParams(temperature=0)


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    return Request(Job(prompt, GREEDY, max_tokens=n, ignore_eos=True, **more))


def some_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def right(request: Request, *, prefill_equals_decode: bool = True) -> bool:
    prompt = list(request.job.prompt)
    return request.output == follow(
        prompt, request.job.max_tokens, ignore_eos=True, prefill_equals_decode=prefill_equals_decode
    )


def ran(engine: Engine, prompt: list[int], n: int, **more: Any) -> int:
    """Positions that a request by itself found."""
    engine.run([request := greedy(prompt, n, **more)])
    assert right(request)
    return request.reused


@pytest.mark.parametrize("prefill_equals_decode", [True, False])
@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 60)), min_size=1, max_size=12),
    n=st.integers(1, 40),
    sequences=st.integers(1, 4),
    copies=st.integers(0, 6),
    spare_pages=st.integers(0, 20),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_whatever_copies_are_kept(
    prefill_equals_decode: bool,
    lengths: list[tuple[int, int]],
    n: int,
    sequences: int,
    copies: int,
    spare_pages: int,
    chunk: int,
    seed: int,
) -> None:
    """The model itself refuses a state after other tokens, and a step that writes what another reads."""
    session = history_model(
        context=230,
        sequences=sequences,
        pages=8 + spare_pages,
        chunk=chunk,
        prefill_equals_decode=prefill_equals_decode,
        copies=copies,
    )
    engine = Engine(session)
    give = session.slots._give

    def give_blank_slot() -> int:
        assert session.slots._blank, "the copy that makes way was not chosen"
        slot: int = give()
        return slot

    session.slots._give = give_blank_slot
    rng, stem = np.random.default_rng(seed), some_prompt(400, seed)
    requests = [
        greedy([*stem[:common], *rng.integers(0, VOCAB, own).tolist()] or [0], n) for common, own in lengths
    ]
    engine.run(requests)
    assert all(right(request, prefill_equals_decode=prefill_equals_decode) for request in requests)
    assert session.slots.free == session.slots.slots == sequences + copies
    assert_no_page_is_lost(session.slots)


@pytest.mark.parametrize(
    ("tokens", "same", "next_turn"),
    [(97, 96, 64), (101, 96, 64), (102, 96, 96), (120, 96, 96), (128, 96, 96), (38, 32, 32), (37, 32, 0)],
)
def test_a_later_prompt_goes_on_from_the_last_page(tokens: int, same: int, next_turn: int) -> None:
    """The next turn may have others in the place of the last six tokens. One token at least is computed."""
    engine = Engine(history_model(context=200, chunk=200, copies=4))
    prompt = some_prompt(tokens)
    assert ran(engine, prompt, 2) == 0
    assert ran(engine, prompt, 3) == same
    assert ran(engine, [*prompt[:-6], *some_prompt(9, 1)], 4) == next_turn
    assert ran(engine, [*prompt, *some_prompt(9, 1)], 4) == tokens // PAGE * PAGE


def test_another_answer_does_not_replace_the_state_at_the_prompts_end() -> None:
    """Where the prompt fills its pages, its end is a border, and no page that was generated."""
    engine = Engine(history_model(context=300, chunk=300, copies=4))
    prompt = some_prompt(128)
    assert ran(engine, prompt, 40) == 0
    assert ran(engine, [*prompt, *some_prompt(30, 1)], 3) == 128


def test_states_are_kept_at_message_borders() -> None:
    """The pages before them are whole; a border beyond the prompt is its end."""
    session = history_model(context=400, chunk=400, copies=6)
    engine, prompt = Engine(session), some_prompt(300)
    ran(engine, prompt, 1, borders=(70, 200, 4000))
    assert [rows for _, rows in session.transformer.row_counts] == [64, 128, 96, 12]
    for length, reused in ((299, 288), (295, 288), (280, 192), (200, 192), (191, 64), (70, 64), (63, 0)):
        assert ran(engine, [*prompt[:length], 1, 2, 3], 1) == reused


def test_a_request_that_shares_nothing_ends_no_step_at_a_border() -> None:
    session = history_model(context=400, chunk=400, copies=6)
    ran(Engine(session), some_prompt(300), 1, borders=(70, 200), cache=False)
    assert [rows for _, rows in session.transformer.row_counts] == [300]


def test_copies_of_another_conversation_stay_while_one_goes_on() -> None:
    """A chat continues from its end, though another one has had many turns since."""
    engine = Engine(history_model(context=2000, chunk=400, copies=6))
    first, prompt = greedy(some_prompt(100), 10), some_prompt(100, 1)
    engine.run([first])
    for turn in range(12):
        engine.run([request := greedy(prompt, 10)])
        assert request.reused == ((len(prompt) - 41) // PAGE * PAGE if turn else 0)
        prompt = [*prompt, *request.output, *some_prompt(40, turn)]
    assert ran(engine, [*first.job.prompt, *first.output, *some_prompt(40, 9)], 3) == 96


def test_copies_of_a_long_conversation_become_sparse_with_the_distance_from_its_end() -> None:
    session = history_model(context=4000, chunk=400, copies=12)
    engine, prompt = Engine(session), some_prompt(50)
    for turn in range(50):
        engine.run([request := greedy(prompt, 10)])
        prompt = [*prompt, *request.output, *some_prompt(60, turn)]
    states = engine.scheduler.states
    assert states is not None
    pages = sorted(copy.pages for copy in states._copies.values())
    distances = [len(prompt) // PAGE + 2 - each for each in [0, *pages]]
    assert len(pages) == 12 and distances[-1] <= 6
    assert all(before < 3 * after for before, after in pairwise(distances))


def test_a_step_ends_where_the_state_is_worth_keeping() -> None:
    """And nowhere else: the last full page, once for two requests."""
    session = history_model(context=300, chunk=64, copies=2)
    engine = Engine(session)
    ran(engine, some_prompt(200), 1)
    assert [rows for _, rows in session.transformer.row_counts] == [64, 64, 64, 8]
    ran(engine, some_prompt(170, 1), 1)
    assert [rows for _, rows in session.transformer.row_counts][4:] == [64, 64, 32, 10]


def test_an_engine_that_shares_nothing_cuts_nothing() -> None:
    session = history_model(context=300, chunk=64, copies=2)
    ran(Engine(session, reuse=False), some_prompt(170), 40)
    assert [rows for _, rows in session.transformer.row_counts][:3] == [64, 64, 42]
    assert session.slots.kept == 0


def test_a_chats_next_turn_goes_on_from_its_last_answer() -> None:
    session = history_model(context=300, chunk=300, copies=2)
    engine = Engine(session)
    turn = some_prompt(50)
    engine.run([first := greedy(turn, 80)])
    assert session.slots.kept == 2, "of the prompt, and of all that was generated the last"
    turn = [*turn, *first.output, *some_prompt(20, 1)]
    assert ran(engine, turn, 5) == 128
    assert ran(engine, [*first.job.prompt, 3], 5) == 32
    assert ran(engine, turn, 5) == 128


def test_what_is_generated_is_not_found_where_its_rows_are_others() -> None:
    session = history_model(context=300, chunk=300, copies=2, prefill_equals_decode=False)
    engine = Engine(session)
    engine.run([first := greedy(some_prompt(50), 80)])
    engine.run([second := greedy([*first.job.prompt, *first.output, 4], 5)])
    assert (
        second.reused == 32
        and right(first, prefill_equals_decode=False)
        and right(second, prefill_equals_decode=False)
    )


def test_the_end_of_a_system_prompt_shows_with_the_second_of_them() -> None:
    """Its pages are there, a state is not; the second one leaves it to the third."""
    engine = Engine(history_model(context=300, chunk=300, copies=4))
    system = some_prompt(100)
    for i, reused in enumerate([0, 0, 96, 96]):
        assert ran(engine, [*system, i, *some_prompt(90, i + 1)], 3) == reused


def test_several_of_one_prompt_read_it_once() -> None:
    session = history_model(context=200, sequences=4, chunk=105, copies=1)
    engine = Engine(session)
    prompt = some_prompt(105)
    engine.add(first := greedy(prompt, 40))
    engine.step()
    others = [greedy(prompt, 40) for _ in range(3)]
    engine.run(others)
    for request in (first, *others):
        assert right(request)
    assert [request.reused for request in (first, *others)] == [0, 96, 96, 96]


@pytest.mark.parametrize("copies", [0, 1, 8])
def test_copies_hold_up_nobody(copies: int) -> None:
    """All requests run although copies have taken every slot before, at the latest when a step has read its
    initial states."""
    session = history_model(context=128, sequences=3, chunk=128, copies=copies)
    engine = Engine(session)
    for seed in range(6):
        ran(engine, some_prompt(70, seed), 3)
    requests = [greedy(some_prompt(70, seed), 40) for seed in range(4, 7)]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    assert len(engine.scheduler.running) == 3
    while not all(request.finished for request in requests):
        engine.step()
    assert all(right(request) for request in requests)
    assert session.slots.free == session.slots.slots


def test_the_only_slot_that_is_left_is_read_and_written() -> None:
    """It holds what a request begins with: no copy stays, and none is needed."""
    session = history_model(context=128, sequences=2, chunk=128, copies=0)
    engine = Engine(session)
    prompt = some_prompt(70)
    ran(engine, prompt, 1)
    assert session.slots.kept == 1
    engine.add(other := greedy(some_prompt(10, 1), 50))
    engine.step()
    assert ran(engine, prompt, 8) == 64
    assert session.slots.kept == 0
    engine.abort(other)


def test_a_preempted_request_goes_on_from_its_copies() -> None:
    session = history_model(context=160, sequences=2, pages=6, chunk=160, copies=4)
    engine = Engine(session)
    requests = [greedy(some_prompt(60, i), 90) for i in range(2)]
    engine.run(requests)
    assert engine.scheduler.preemptions > 0
    assert all(right(request) for request in requests)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_broken_step_leaves_copies_as_they_were(error: type[BaseException]) -> None:
    """The step's own results are lost with the requests that ran; copies that it read are not."""
    session = history_model(context=200, sequences=2, chunk=200, copies=2)
    engine = Engine(session)
    prompt = some_prompt(105)
    ran(engine, prompt, 2)
    for when in range(8):
        session.transformer.interrupt, session.transformer.interrupt_in = error, when
        with pytest.raises(error):
            engine.run([greedy(prompt, 40)])
        assert_no_page_is_lost(session.slots)
        assert session.slots.free == session.slots.slots
        assert ran(engine, prompt, 3) == 96


def test_copies_that_another_user_of_the_session_took_are_forgotten() -> None:
    session = history_model(context=200, chunk=200, copies=3)
    engine = Engine(session)
    for seed in range(10):
        if seed == 5:
            session.state.clear()
        assert ran(engine, some_prompt(105, seed), 2) == 0
    states = engine.scheduler.states
    assert states is not None and session.slots.kept == 3
    assert sorted(states._copies) == sorted(session.slots._by_key)


def test_figures_of_slots() -> None:
    engine = Engine(history_model(context=200, sequences=2, chunk=200, copies=3))
    ran(engine, some_prompt(105), 2)
    engine.add(greedy(some_prompt(10), 5))
    engine.step()
    scheduler, slots = engine.scheduler, engine.session.slots
    assert (slots.slots, slots.free, slots.kept, len(scheduler.running)) == (5, 4, 1, 1)
