"""Conversations of an agent with tools.

Each step is a request with the history so far. A new user message drops the thoughts of the turn before, as
templates of thinking models do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.sampling import SamplingParams

_ANSWER, _THINK, _END = [1, 2, 3], [4, 5], [6]  # tokens with which a template opens and closes an answer


class AgentSession:
    """One agent. ``hinted``: its requests name message borders, as a chat template shows them."""

    def __init__(
        self,
        system: Sequence[int],
        seed: int,
        vocab: int,
        *,
        hinted: bool,
        longest: tuple[int, int] = (60, 60),
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab = vocab
        self._hinted = hinted
        self._longest_answer, self._longest_text = longest
        self._past = [*system]  # without thoughts
        self._system = len(system)
        self._turn: list[int] = []  # behind the last user message, with thoughts
        self._later: list[int] = []  # the same as the next turn's prompts have it

    def says(self) -> None:
        """The user writes another message."""
        self._past += [*self._later, *self._text()]
        self._turn, self._later = [], []

    def request(self, **more: Any) -> Request:
        """Makes the next step's request."""
        borders = (self._system, len(self._past) + len(_ANSWER)) if self._hinted else ()
        prompt = [*self._past, *self._turn, *_ANSWER, *_THINK]
        tokens = int(self._random.integers(12, self._longest_answer))
        job = Job(prompt, SamplingParams(temperature=0), tokens, ignore_eos=True, borders=borders, **more)
        return Request(job)

    def take(self, output: Sequence[int]) -> None:
        """Takes an answer, a thought that ends with a call of 10 tokens, and the call's result."""
        result = [*_END, *self._text()]
        self._turn += [*_ANSWER, *_THINK, *output, *result]
        self._later += [*_ANSWER, *output[-10:], *result]

    def _text(self) -> list[int]:
        tokens: list[int] = self._random.integers(
            8, self._vocab, self._random.integers(5, self._longest_text)
        ).tolist()
        return tokens


class Reuse:
    """Compares what requests reuse with what earlier ones have computed, counted in whole pages."""

    def __init__(self) -> None:
        self._computed: list[list[int]] = []
        self.equal_pages = self.reused_pages = 0

    def add(self, request: Request) -> float:
        """Adds a request that has ended; returns the share of the equal pages that it has reused."""
        prompt = list(request.job.prompt)
        equal = max((_equal_tokens(prompt, each) for each in self._computed), default=0)
        pages = min(equal, len(prompt) - 1) // PAGE
        self._computed.append([*prompt, *request.output[:-1]])
        self.equal_pages += pages
        self.reused_pages += request.reused // PAGE
        return request.reused / (pages * PAGE) if pages else 1.0

    @property
    def share(self) -> float:
        return self.reused_pages / self.equal_pages


def _equal_tokens(prompt: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(prompt, other, strict=False)):
        if a != b:
            return i
    return min(len(prompt), len(other))


def run_sessions(
    engine: Engine, sessions: Sequence[AgentSession], turns: int, steps: int, *, together: bool = False
) -> tuple[Reuse, list[float], list[Request]]:
    """Runs a step of each session after the other, or ``together``; returns what was reused in all, the share
    of each request that follows a new user message, and the requests."""
    reuse, after_messages, requests = Reuse(), [], []
    for turn in range(turns):
        for session in sessions:
            session.says()
        for step in range(steps + 1):
            for group in [sessions] if together else [[each] for each in sessions]:
                engine.run(new := [session.request() for session in group])
                requests += new
                for session, request in zip(group, new, strict=True):
                    session.take(request.output)
                    share = reuse.add(request)
                    if turn and not step:
                        after_messages.append(share)
    return reuse, after_messages, requests
