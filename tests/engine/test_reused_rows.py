"""Rows of the page table that a finished request leaves behind, below others that still run."""

from __future__ import annotations

from support.history_model import follow, history_model

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.runtime.sampling import SamplingParams


def greedy(prompt: list[int], tokens: int) -> Request:
    return Request(Job(prompt, SamplingParams(temperature=0), max_tokens=tokens, ignore_eos=True))


def test_a_step_covers_the_highest_row_whatever_was_admitted_below_it() -> None:
    """The second request ends while a long prompt gives no token, so that a new one comes between two rows.
    The model itself checks that the number of sequences covers every row's."""
    session = history_model(sequences=3, chunk=4)
    engine = Engine(session)
    requests = [greedy([1], 2), greedy([2], 5), greedy([3], 30), greedy([4] * 40, 3), greedy([5], 9)]
    for request in requests:
        engine.add(request)
    rows: list[set[int]] = []
    while not all(request.finished for request in requests):
        engine.step()
        running = [request.row for request in engine.scheduler.running]
        rows.append(set(running))
        assert len(rows[-1]) == len(running) <= 3
    assert {0, 1, 2} in rows and {2} in rows, "the highest row outlives those below it"
    for request in requests:
        assert request.output == follow(list(request.job.prompt), request.job.max_tokens, ignore_eos=True)
