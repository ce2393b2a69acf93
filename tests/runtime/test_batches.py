"""A sequence's logits are the same to the last bit alone, among 1 to 16 decode rows, and beside prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

CHUNK = 24
Logits = dict[int, np.ndarray]  # by position


@pytest.fixture(scope="module")
def exact() -> Session:
    return load(
        None, LoadOptions(sparsity="exact", sequences=DECODE_ROWS + 3, chunk=CHUNK, threads=2)
    ).session()


@pytest.fixture(scope="module", params=["exact", "off"])
def model(exact: Session, request: pytest.FixtureRequest) -> Session:
    return exact if request.param == "exact" else exact.model.session("off")


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(259, 4096, length).tolist() for length in lengths]


class Watched:
    """Runs requests greedily and keeps every row of logits that chose a token."""

    def __init__(self, model: Session, tokens: int) -> None:
        self.tokens = tokens
        self.engine = Engine(model)
        self.logits: dict[int, Logits] = {}
        self.steps: set[tuple[int, bool]] = set()  # decode rows of a step, and whether there were prompt rows
        self.engine.sampler.sample = self._sample  # type: ignore[method-assign]

    def add(self, name: int, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0, seed=name)
        self.engine.add(Request(Job(prompt, params, max_tokens=self.tokens, ignore_eos=True)))

    def run(self, steps: int = 10_000) -> dict[int, Logits]:
        scheduler, counts = self.engine.scheduler, self.engine.session.transformer.batch.counts
        for _ in range(steps):
            if not (scheduler.running or scheduler.waiting):
                break
            self.engine.step()
            self.steps.add((int(counts[1]), bool(counts[0] > counts[1])))
        return self.logits

    def _sample(self, buffer: Any, row: int, params: SamplingParams, position: int, recent: Any = ()) -> int:
        assert params.seed is not None
        logits = self.engine.session.transformer.read_logits(row, row + 1)[0]
        self.logits.setdefault(params.seed, {})[position] = np.array(logits)
        return int(logits.argmax())


def alone(model: Session, prompts: list[list[int]], tokens: int) -> dict[int, Logits]:
    logits: dict[int, Logits] = {}
    for name, prompt in enumerate(prompts):
        watched = Watched(model, tokens)
        watched.add(name, prompt)
        logits |= watched.run()
    return logits


def assert_same(logits: dict[int, Logits], expected: dict[int, Logits]) -> None:
    for name, rows in logits.items():
        assert rows.keys() == expected[name].keys()
        for position, row in rows.items():
            assert np.array_equal(row, expected[name][position]), (name, position)


def test_one_to_sixteen_decode_rows(model: Session) -> None:
    texts = prompts([1, 2, 5, 7, 9, 12, 16, 20, 23, 24, 3, 4, 6, 8, 10, 11])
    expected = alone(model, texts, 10)
    for rows in range(1, DECODE_ROWS + 1):
        watched = Watched(model, 10)
        for name, prompt in enumerate(texts[:rows]):
            watched.add(name, prompt)
        assert_same(watched.run(), expected)
        assert (rows, False) in watched.steps


def test_decode_rows_beside_prompts_in_chunks(model: Session) -> None:
    """Prompts of up to four chunks arrive while others generate, more of them than there are rows."""
    texts = prompts([1, 70, 24, 25, 3, 49, 90, 2, 33, 47, 48, 5, 17, 61, 29, 8, 55, 13, 80, 26, 40])
    expected = alone(model, texts, 28)
    watched = Watched(model, 28)
    for name, prompt in enumerate(texts):
        watched.add(name, prompt)
        watched.run(steps=1)
    assert_same(watched.run(), expected)
    mixed = {rows for rows, prompt in watched.steps if prompt}
    assert len(mixed) > 8 and max(rows for rows, _ in watched.steps) == DECODE_ROWS


def test_a_prompt_in_any_chunks() -> None:
    """The same text after a prompt that is read whole, and in pieces of 1, 7 and 16 rows."""
    [text] = prompts([90])
    logits = []
    for chunk in (1, 7, 16, 90):
        watched = Watched(load(None, LoadOptions(chunk=chunk)).session(), 10)
        watched.add(0, text)
        logits.append(watched.run())
    for other in logits[1:]:
        assert_same(other, logits[0])
