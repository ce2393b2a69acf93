"""Who takes part in ``benchmarks/compare_cpu.py --quick``: each prepares a measure, and then is timed.

Between ``prepare`` and the run lies whatever is not to be timed: the beginning of eight sequences, or 8192
positions of a KV cache. Nobody waits for these to be computed: their speed does not depend on what they hold,
so ours and llama.cpp's are written (512 real positions, 16 times), which would take half of the time else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from contestants import Lengths, LlamaCpp, Measured, generate, random_tokens, read

from hotcold.engine.engine import Engine
from hotcold.engine.prefix_cache import PrefixCache
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.scoring import Scorer, log_softmax, score

Run = Callable[[], Measured]

FILL = 512  #: computed positions, of which copies fill llama.cpp's cache
LOADING = "loading, MB/s"  #: a measure: from a file in the page cache to where it can run


@dataclass(frozen=True)
class Plan:
    """What is measured: prompts of so many tokens, generation after so many positions, several sequences."""

    prompts: tuple[int, ...] = (128, 2048)
    depths: tuple[int, ...] = (0, 8192)
    sequences: int = 8
    generate: int = 24
    parallel_prompt: int = 16  #: of each sequence, and of generation at depth 0
    parallel_generate: int = 12
    layers: int = 1  #: of the models
    published: bool = False  #: whether they are files of somebody's, whose loading is timed, too

    @property
    def measures(self) -> list[str]:
        found = [f"prompt of {length}" for length in self.prompts]
        found += [f"decode at {depth}" for depth in self.depths]
        found += [f"{self.sequences} sequences"] if self.sequences > 1 else []
        return found + ([LOADING] if self.published else [])

    @staticmethod
    def slow(measure: str) -> bool:
        """Whether it takes so long that a sample has to do."""
        return measure.startswith("prompt") and number(measure) > FILL

    @property
    def context(self) -> int:
        """Positions that the longest sequence needs."""
        deepest = max(self.depths, default=0) + self.parallel_prompt + self.generate
        return -(-(max([deepest, *self.prompts]) + 64) // 256) * 256

    @property
    def lengths(self) -> Lengths:
        """For the contestants of the long comparison."""
        return Lengths(
            max(self.prompts, default=16), self.generate, self.sequences,
            self.parallel_prompt, self.parallel_generate,
        )  # fmt: skip


def number(measure: str) -> int:
    """Of a measure's name: its tokens, positions or sequences."""
    return int(next(word for word in measure.split() if word.isdigit()))


class Contestant(Protocol):
    def can(self, measure: str, turn: int) -> bool:
        """Whether it has a sample of the measure, in this turn of a round."""
        ...

    def warm(self, measure: str) -> None:
        """Before the first sample: warms memory and threads, and chooses settings."""
        ...

    def prepare(self, measure: str, seed: int) -> Run:
        """Gets everything ready that is not timed. The same ``seed`` gives everyone the same prompts."""
        ...


class QuickOurs:
    """This engine, by the clock of whoever calls ``step``: with scheduling and sampling."""

    def __init__(self, session: Session, plan: Plan, again: Callable[[], Session] | None = None) -> None:
        self.session, self.plan = session, plan
        self._again = again  # loads it once more
        self._engine = Engine(session)
        self._running: list[Request] = []
        rng = np.random.default_rng(0)
        for buffers in session.cache.layers:
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
        """Of each token of these but the first ones, the mean in nats."""
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


class QuickLlamaCpp(LlamaCpp):
    """llama.cpp, without sampling; each measure with flash attention on or off, whichever is faster."""

    def __init__(self, path: Path, threads: int, plan: Plan) -> None:
        self.plan, self.path = plan, path
        self.settings: dict[str, str] = {}
        # A whole model has many layers, and whoever reads a prompt wants the last logits.
        super().__init__(path, threads, plan.lengths, all_logits=not plan.published)

    def can(self, measure: str, turn: int) -> bool:
        return True

    def warm(self, measure: str) -> None:
        """Tries flash attention on and off."""
        if measure == LOADING:
            self.prepare(measure, 0)()
            return
        seconds: dict[str, list[float]] = {"on": [], "off": []}
        for attempt in range(1 if self.plan.slow(measure) else 2):
            for flash, times in seconds.items():
                times.append(self._prepare(measure, attempt, flash)().seconds)
        self.settings[measure] = min(seconds, key=lambda flash: min(seconds[flash]))

    def prepare(self, measure: str, seed: int) -> Run:
        if measure == LOADING:
            return loading(self.path, self._load, self._free)
        return self._prepare(measure, seed, self.settings[measure])

    def surprise(self, windows: list[list[int]]) -> float:
        """As ours, with the settings of generation."""
        kind = f"single {self.settings['decode at 0']}"
        found: list[float] = []
        for window in windows:
            self._clear(kind)
            self._decode(kind, [window], all_logits=True)
            pointer = self._lib.llama_get_logits(self._contexts[kind])
            logits = np.ctypeslib.as_array(pointer, (len(window), self._vocab))
            for row, following in zip(logits, window[1:], strict=False):
                found.append(-float(log_softmax(row)[following]))
        return float(np.mean(found))

    def _load(self) -> tuple[Any, Any]:
        """Another model and a context for it; llama.cpp maps the file."""
        lib, before = self._lib, self._model
        self._model = lib.llama_model_load_from_file(
            str(self.path).encode(), lib.llama_model_default_params()
        )
        try:
            return self._model, self._new_context("single", False)
        finally:
            self._model = before

    def _free(self, loaded: tuple[Any, Any]) -> None:
        model, context = loaded
        self._lib.llama_free(context)
        self._lib.llama_model_free(model)

    def _choose(self) -> None:
        """Makes both, before the first measure chooses."""
        kinds = ("single", "several") if self.plan.sequences > 1 else ("single",)
        for kind in kinds:
            for flash in ("on", "off"):
                self._contexts[f"{kind} {flash}"] = self._new_context(kind, flash == "on")

    def _prepare(self, measure: str, seed: int, flash: str) -> Run:
        plan, n = self.plan, number(measure)
        kind = f"{'several' if measure.endswith('sequences') else 'single'} {flash}"
        self._clear(kind)
        if measure.startswith("prompt"):
            prompt = random_tokens(n, self._vocab, seed)
            return lambda: self._read(kind, prompt)
        if measure.startswith("decode"):
            at, steps = n or plan.parallel_prompt, plan.generate
            if n:
                self._fill(kind, n)
            else:
                self._decode(kind, [random_tokens(at, self._vocab, seed)])
        else:
            at, steps = plan.parallel_prompt, plan.parallel_generate
            prompts = [random_tokens(at, self._vocab, 1000 * (seed + 1) + i) for i in range(n)]
            self._decode(kind, prompts)
        self._generate(kind, at, 1, seed)
        return lambda: self._generate(kind, at + 1, steps, seed)

    def _fill(self, kind: str, positions: int) -> None:
        """Copies of a computed beginning, each moved to its place, become one sequence."""
        lib, context = self._lib, self._contexts[kind]
        memory = lib.llama_get_memory(context)
        self._decode(kind, [random_tokens(FILL, self._vocab, 0)])
        size = lib.llama_state_seq_get_size(context, 0)
        state = (lib.ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(context, state, size, 0)
        for copy in range(1, positions // FILL):
            if not lib.llama_state_seq_set_data(context, state, size, copy):
                raise RuntimeError("llama.cpp does not take back the state of its cache")
            lib.llama_memory_seq_add(memory, copy, 0, -1, copy * FILL)
            lib.llama_memory_seq_cp(memory, copy, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, copy, -1, -1)
        assert lib.llama_memory_seq_pos_max(memory, 0) == positions - 1

    def _settings(self, kind: str, flash: bool) -> dict[str, Any]:
        found = super()._settings(kind, flash)
        if kind == "single":
            # Sequences that _fill needs; a batch and its parts as in llama-bench.
            copies = max([1, *(depth // FILL for depth in self.plan.depths)])
            found |= {"n_ctx": self.plan.context, "n_seq_max": copies, "kv_unified": True}
            found |= {"n_batch": max(2048, *self.plan.prompts, 1), "n_ubatch": 512}
        return found
