"""The engines of a comparison: each prepares a measure, and then is timed.

Between ``prepare`` and the run lies whatever is not to be timed: the beginning of eight sequences, or 8192
positions of a KV cache. These positions are not computed, which would take half of the time: speed does not
depend on their content, so ours and llama.cpp's are written (512 real positions, 16 times). All get random
tokens as prompts: in the synthetic models a token's features decide which neurons are active.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hotcold.engine.engine import Engine
from hotcold.engine.prefix_cache import PrefixCache
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.counters import Figures
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer, score
from lib.machine import Conditions, MachineState

FIRST_TOKEN = 259  #: those before are control tokens and bytes
FILL = 512  #: computed positions; copies of them fill llama.cpp's cache
DECODE = "decode at 0"  #: a measure: generation after a short prompt
LOADING = "loading, MB/s"  #: a measure: from a file in the page cache to where it can run
TURNS = 3  #: of each short measure in a round


@dataclass(frozen=True)
class Measured:
    tokens: int
    seconds: float
    bytes: float | None = None  #: of weights and KV cache that had to be read, None where that is not known

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def gb_s(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.seconds / 1e9


Run = Callable[[], Measured]


@dataclass(frozen=True)
class Plan:
    """The measures: prompts of these lengths, generation after these positions, several sequences."""

    prompts: tuple[int, ...] = (128, 2048)
    depths: tuple[int, ...] = (0, 8192)
    sequences: int = 8
    generate: int = 24
    parallel_prompt: int = 16  #: of each sequence, and of generation at depth 0
    parallel_generate: int = 12
    layers: int = 1  #: of the models
    published: bool = False  #: published files, whose loading is timed, too
    last_logits: bool = False  #: of a prompt only the last logits are asked for

    @property
    def measures(self) -> list[str]:
        names = [f"prompt of {length}" for length in self.prompts]
        names += [f"decode at {depth}" for depth in self.depths]
        names += [f"{self.sequences} sequences"] if self.sequences > 1 else []
        return names + ([LOADING] if self.published else [])

    @staticmethod
    def slow(measure: str) -> bool:
        """True if the measure is so long that one sample must suffice."""
        return measure.startswith("prompt") and number(measure) > FILL

    @property
    def context(self) -> int:
        """Positions that the longest sequence needs."""
        deepest = max(self.depths, default=0) + self.parallel_prompt + self.generate
        return -(-(max([deepest, *self.prompts]) + 64) // 256) * 256


def number(measure: str) -> int:
    """The number in a measure's name: its tokens, positions or sequences."""
    return int(next(word for word in measure.split() if word.isdigit()))


class Contestant(Protocol):
    def can(self, measure: str, turn: int) -> bool:
        """True if it takes a sample of the measure in this turn of a round."""
        ...

    def warm(self, measure: str) -> None:
        """Before the first sample: warms memory and threads, and chooses settings."""
        ...

    def prepare(self, measure: str, seed: int) -> Run:
        """Gets everything ready that is not timed. The same ``seed`` gives everyone the same prompts."""
        ...


def order(names: Sequence[str], round: int) -> list[str]:
    """Turns by one every second round and runs backwards in the others."""
    at = round // 2 % len(names)
    turned = [*names[at:], *names[:at]]
    return turned if round % 2 == 0 else turned[::-1]


def run_round(
    by_name: Mapping[str, Contestant], plan: Plan, machine: MachineState, round: int
) -> Iterator[tuple[str, int, str, Measured, Conditions]]:
    """Measure, turn, contestant, what was measured, and under which conditions: of each measure all
    contestants right after each other, and of a short one several turns."""
    for measure in plan.measures:
        turns = 1 if plan.slow(measure) else TURNS
        for turn in range(turns * round, turns * (round + 1)):
            for name in order([each for each in by_name if by_name[each].can(measure, turn % turns)], turn):
                run = by_name[name].prepare(measure, turn + 1)
                yield measure, turn, name, *machine.around(run, 0.05)


def random_tokens(length: int, vocab: int, seed: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(FIRST_TOKEN, vocab, length - 1).tolist()]


def read(engine: Engine, requests: Sequence[Request]) -> Measured:
    """Until each has its first token."""
    start = time.perf_counter()
    while not all(request.output for request in requests):
        engine.step()
    return Measured(sum(len(request.job.prompt) for request in requests), time.perf_counter() - start)


def generate(engine: Engine, requests: Sequence[Request], tokens_of_each: int) -> Measured:
    """Generates this number of tokens of each sequence."""
    had = sum(len(request.output) for request in requests)
    session = engine.session
    before, start = session.counters.copy(), time.perf_counter()
    for _ in range(tokens_of_each):
        engine.step()
    seconds = time.perf_counter() - start
    figures = Figures.from_counters(session.counters.since(before), session.footprint)
    tokens = sum(len(request.output) for request in requests) - had
    assert tokens == tokens_of_each * len(requests)
    assert figures.bytes_per_token is not None
    return Measured(tokens, seconds, figures.bytes_per_token * tokens)


class Ours:
    """This engine, timed around ``step``: with scheduling and sampling."""

    def __init__(self, session: Session, plan: Plan, again: Callable[[], Session] | None = None) -> None:
        self.session, self.plan = session, plan
        self._again = again  # loads it once more
        self._engine = Engine(session)
        self._running: list[Request] = []
        rng = np.random.default_rng(0)
        for buffers in session.state.layers:
            for buffer in buffers:  # fresh memory is one page of zeros, which is read from L1
                flat = np.asarray(buffer).reshape(-1).view(np.float16)
                flat[:] = np.resize(rng.standard_normal(1 << 16).astype(np.float16), len(flat))

    def can(self, measure: str, turn: int) -> bool:
        return not (measure.startswith("prompt") and self.session.sparsity == "predicted")

    def warm(self, measure: str) -> None:
        if not self.plan.slow(measure):
            self.prepare(measure, 0)()

    def prepare(self, measure: str, seed: int) -> Run:
        for request in self._running:
            self._engine.abort(request)
        if measure == LOADING:
            assert self._again is not None
            return loading(self.session.model.path, self._again, lambda session: None)
        plan, n = self.plan, number(measure)
        if measure.startswith("prompt"):
            # Without the cache, or it would find the pages of its like.
            requests = self._running = [self._request(n, 1, seed, cache=False)]
            self._engine.add(requests[0])
            return lambda: read(self._engine, requests)
        if measure.startswith("decode"):
            prompt, steps, count = n or plan.parallel_prompt, plan.generate, 1
        else:
            prompt, steps, count = plan.parallel_prompt, plan.parallel_generate, n
        requests = [self._request(prompt, steps + 2, 1000 * (seed + 1) + i) for i in range(count)]
        if prompt >= FILL:
            self._pretend(requests[0])
        self._running = requests
        for request in requests:
            self._engine.add(request)
        read(self._engine, requests)
        generate(self._engine, requests, 1)
        return lambda: generate(self._engine, requests, steps)

    def surprise(self, windows: list[list[int]]) -> float:
        """The mean loss of each token of these but the first ones, in nats."""
        scorer = Scorer(self.session.model.session(self.session.sparsity))
        return float(np.concatenate([score(scorer, window) for window in windows]).mean())

    def _request(self, prompt: int, generate: int, seed: int, cache: bool = True) -> Request:
        tokens = random_tokens(prompt, self.session.model.config.vocab, seed)
        params = SamplingParams(seed=seed)
        return Request(Job(tokens, params, max_tokens=generate, ignore_eos=True, cache=cache))

    def _pretend(self, request: Request) -> None:
        """Says of pages that they hold the request's prompt, as if an earlier request had left them."""
        session = self.session
        session.claim(self._engine)
        kept = PrefixCache(session.cache, session.identity, generated=session.sparsity != "predicted")
        before = Request(Job(request.job.prompt))
        before.pages = session.cache.allocate("before", len(request.job.prompt) // PAGE)
        before.computed = len(before.pages) * PAGE
        kept.keep(before)
        session.cache.release("before")


def loading(path: Path, load: Callable[[], Any], free: Callable[[Any], None]) -> Run:
    """Giving the memory back is not timed."""

    def run() -> Measured:
        start = time.perf_counter()
        loaded = load()
        seconds = time.perf_counter() - start
        free(loaded)
        return Measured(round(path.stat().st_size / 1e6), seconds)

    return run
