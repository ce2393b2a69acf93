"""The ways to run one model file on a CPU and a GPU that benchmarks/gpu/compare.py compares.

A contestant is a placement and a sparsity mode. Placements are files, as `hotcold plan -o` writes them; those
of one placement share the loaded weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.sampler import Allowed
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import BACKENDS
from hotcold.kernels.backend import BatchLimits
from hotcold.model.config import Config
from hotcold.placement.baselines import last_layers, paper_placement
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import INDEX_BYTES, Placement, write_placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes, sizes_of_file
from hotcold.placement.solver import Solver
from hotcold.runtime.counters import Counters, Figures
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.ffn import FFN, SplitFFN
from hotcold.sparse.timeline import Timeline
from lib.contestants import random_tokens

CONTEXT = 256  #: positions: the longest prompt and what follows it
CHUNK = 128

#: The placement (None: the CPU alone) and the sparsity mode of each contestant, in the order of loading: the
#: last ones are left out where there is no time for all.
CONTESTANTS: dict[str, tuple[str | None, str]] = {
    "CPU dense": (None, "off"),
    "GPU dense": ("GPU", "off"),
    "solver": ("solver", "predicted"),
    "CPU predicted": (None, "predicted"),
    "GPU predicted": ("GPU", "predicted"),
    "frequency": ("frequency", "predicted"),
    "random": ("random", "predicted"),
    "CPU exact": (None, "exact"),
    "GPU exact": ("GPU", "exact"),
    "solver exact": ("solver", "exact"),
    "some layers": ("some layers", "off"),
}


def gpu_options(gpu: str) -> dict[str, Any]:
    """Returns options of loading: a GPU by name or index, or a backend without one, for trying the script."""
    return {"hot_backend": gpu} if gpu in BACKENDS else {"gpu": gpu}


def sizes_of(path: Path, predictors: Path | None, gpu: str) -> Sizes:
    """Returns the sizes of a model file as contestants run it."""
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        is_gpu = gpu not in BACKENDS
        limits = BatchLimits.from_context(CONTEXT, 1, CHUNK)
        return sizes_of_file(file, config, limits, "f16", predictors=predictors, gpu=is_gpu)


@dataclass(frozen=True)
class Subject:
    """A model file, and what planning knows of it: bytes with predictors and without, and the firing."""

    path: Path
    sizes: dict[str, Sizes]  #: by sparsity mode
    profile: Profile
    hardware: Hardware

    @classmethod
    def of(cls, path: Path, profile: Profile, hardware: Hardware, gpu: str) -> Subject:
        predicted, exact = sizes_of(path, path, gpu), sizes_of(path, None, gpu)
        dense = replace(exact, always_read=1.0)
        return cls(path, {"predicted": predicted, "exact": exact, "off": dense}, profile, hardware)

    @property
    def weight_bytes(self) -> int:
        """Bytes of everything that a budget may hold, except the buffers of a step."""
        sizes = self.sizes["predicted"]
        neurons = (sizes.neurons * (sizes.neuron_bytes + INDEX_BYTES)).sum()
        return int(sizes.dense.sum() + neurons + sizes.head)

    def budget(self, share: float) -> int:
        """A share of the weights, and the buffers, which a slice of the layers needs as the whole does."""
        sizes = self.sizes["predicted"]
        everything = last_layers(sizes, len(sizes.neurons))
        return int(share * self.weight_bytes) + everything.gpu_bytes(sizes, "buffers")

    def place(self, kind: str, share: float) -> Placement:
        """ValueError: it does not fit the card."""
        sizes, profile, hardware = self.sizes["predicted"], self.profile, self.hardware
        budget = self.budget(share)
        if kind == "GPU":
            placement = last_layers(sizes, len(sizes.neurons))
            needed = placement.gpu_bytes(sizes)
            if needed > hardware.vram_bytes:
                raise ValueError(f"it needs {needed >> 20} MiB, the card has {hardware.vram_bytes >> 20}")
            return placement
        if kind == "some layers":
            layers = len(sizes.neurons)
            return last_layers(sizes, max(1, round(share * layers)))
        if kind == "frequency":
            return paper_placement(sizes, profile, hardware, budget)
        solved = Solver(sizes, profile, Costs.expected(sizes, profile, hardware)).solve(budget)
        return shuffled(solved) if kind == "random" else solved

    def split_share(self, share: float, factor: float) -> float:
        """Part of the whole model's layers that a budget holds, dense; ``factor`` times these are its layers.
        In a slice of a few layers a split at whole ones would be far from it."""
        dense, layers = self.sizes["off"], len(self.sizes["off"].neurons)
        layer = float((dense.attention + dense.kv + dense.neurons * dense.neuron_bytes).mean())
        room = (share * self.weight_bytes - dense.head) * factor
        whole = min(max(0, int(room / layer)), round(layers * factor))
        return whole / (layers * factor)

    def predicted_seconds(self, placement: Placement | None, mode: str) -> float:
        """Seconds of a token, as `hotcold plan` has it."""
        sizes = self.sizes[mode]
        return Costs.expected(sizes, self.profile, self.hardware).token(placement or last_layers(sizes, 0))

    def predicted_ratio(self, share: float, factor: float, hardware: Hardware) -> float:
        """How many times faster than a layer split the solver's placement is, as predicted for a machine."""
        sizes, dense, profile = self.sizes["predicted"], self.sizes["off"], self.profile
        costs = Costs.expected(sizes, profile, hardware)
        ours = costs.token(Solver(sizes, profile, costs).solve(self.budget(share)))
        of_dense = Costs.expected(dense, profile, hardware)
        none, every = (of_dense.token(last_layers(dense, n)) for n in (0, len(dense.neurons)))
        return (none + self.split_share(share, factor) * (every - none)) / ours

    def gpu_firing_share(self, placement: Placement | None) -> float:
        """The expected share of active neurons that the GPU has."""
        if placement is None:
            return 0.0
        pairs = zip(self.profile.firing, placement.hot, strict=True)
        hot = sum(float(firing[mask].sum()) for firing, mask in pairs)
        return hot / sum(float(firing.sum()) for firing in self.profile.firing)


def shuffled(placement: Placement) -> Placement:
    """As many hot neurons in each layer, but any: the paper's engine without its policy."""
    random = np.random.default_rng(0)
    hot = [random.permutation(mask) for mask in placement.hot]
    return replace(placement, hot=hot)


def hottest(firing: Sequence[Any], share: float) -> Placement:
    """The hottest share of every layer, and all of attention and the head."""
    hot = []
    for shares in firing:
        mask = np.zeros(len(shares), bool)
        mask[np.argsort(-shares, kind="stable")[: round(share * len(shares))]] = True
        hot.append(mask)
    return Placement.on_one(hot, range(len(hot)), True)


@dataclass
class Pass:
    """One prompt and a continuation; seconds of the steps of the latter, by the clock of who calls."""

    prompt: int
    prompt_s: float
    steps_s: list[float]
    python_s: float  #: of the steps, outside of the recorded programs: once a token, in however many layers
    counters: Counters | None


@dataclass(eq=False)
class Placed:
    """A loaded model in one mode."""

    name: str
    mode: str
    model: LoadedModel
    placement: Placement | None
    load_s: float
    passes: list[Pass] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        self.ffns: list[FFN] = []
        self.session = self.model.session(self.mode, wrap=self._keep)
        self.engine = Engine(self.session)
        #: On the device, with the first session's buffers and programs; None where the backend does not say.
        self.allocated_bytes: int | None = getattr([*self.model.gpus, None][0], "allocated_bytes", None)

    def _keep(self, ffns: Any) -> Any:
        self.ffns = list(ffns)
        return ffns

    def run(self, prompt: int, steps: int, seed: int, seconds: float) -> Pass:
        """Begins no step after this number of seconds, except the first three."""
        vocab = self.model.config.vocab
        tokens = random_tokens(prompt, vocab, seed)
        request = Request(Job(tokens, SamplingParams(seed=seed), max_tokens=steps + 1, ignore_eos=True))
        self.engine.add(request)
        try:
            start = time.perf_counter()
            while not request.output:
                self.engine.step()
            prompt_s = time.perf_counter() - start
            if request.error is not None:
                raise request.error
            if not steps:
                return Pass(prompt, prompt_s, [], 0.0, None)
            before, times = self.session.counters.copy(), []
            until = time.perf_counter() + seconds
            while len(times) < steps and (len(times) < 3 or time.perf_counter() < until):
                start = time.perf_counter()
                self.engine.step()
                times.append(time.perf_counter() - start)
            counters = self.session.counters.since(before)
            return Pass(prompt, prompt_s, times, sum(times) - counters.run_s, counters)
        finally:
            self.engine.abort(request)

    def read_logits(self, prompt: Sequence[int], forced: Sequence[int]) -> npt.NDArray[np.float32]:
        """After a prompt, and after each of the tokens that are then forced: ``[1 + len(forced), V]``."""
        words = -(-self.model.config.vocab // 64)

        def constraint(output: Sequence[int]) -> Allowed:
            mask = np.zeros(words, np.uint64)
            token = [*forced, forced[0]][len(output)]
            mask[token // 64] = np.uint64(1 << token % 64)
            return Allowed(mask)

        params = SamplingParams(temperature=0.0)
        request = Request(
            Job(prompt, params, max_tokens=len(forced) + 2, ignore_eos=True), constraint=constraint
        )
        self.engine.add(request)
        try:
            rows = []
            while len(rows) <= len(forced):
                had = len(request.output)
                self.engine.step()
                if request.error is not None:
                    raise request.error
                if len(request.output) > had:
                    rows.append(self.session.transformer.read_logits(0, 1)[0].copy())
            return np.array(rows)
        finally:
            self.engine.abort(request)

    def figures(self, counters: Counters) -> Figures:
        return Figures.from_counters(counters, self.session.footprint)

    def pairs(self) -> tuple[int, int]:
        """(token, neuron) pairs that were computed so far: on the GPU, and in all."""
        hot = every = 0
        for ffn in self.ffns:
            counted = int(ffn.counts()[3])
            every += counted
            if isinstance(ffn, SplitFFN):
                hot += int(FFN.counts(ffn)[3])
            elif ffn.backend is not self.model.backend:
                hot += counted
        return hot, every

    def trace(self, steps: int, seconds: float) -> tuple[Timeline, int]:
        """The moments of one more pass, and its steps."""
        timeline = Timeline(self.model.backend)
        self.session.trace(timeline)
        try:
            return timeline, len(self.run(16, steps, 0, seconds).steps_s)
        finally:
            self.session.trace(None)

    @property
    def splits(self) -> int:
        """Layers with a handshake."""
        return sum(isinstance(ffn, SplitFFN) for ffn in self.ffns)

    def close(self) -> None:
        self.session.close()


def load_placement(
    subject: Subject, placement: Placement | None, mode: str, gpu: str, threads: int | None
) -> tuple[LoadedModel, float]:
    """The model as placed, and the seconds that it took."""
    options: dict[str, Any] = {"sparsity": mode, "threads": threads, "context": CONTEXT, "chunk": CHUNK}
    if placement is None:
        options |= gpu_options("off")
    else:
        path = subject.path.with_suffix(".gpuidx")
        write_placement(path, subject.sizes["predicted"], placement)
        options |= {"placement": path, **gpu_options(gpu)}
    start = time.perf_counter()
    model = load(subject.path, LoadOptions(**options))
    seconds = time.perf_counter() - start
    masks = getattr(model.devices, "masks", None)
    if placement is not None and masks is not None:
        same = all(np.array_equal(*pair) for pair in zip(masks, placement.hot, strict=True))
        if not same:
            raise MemoryError(f"the device has no room for this placement: {'; '.join(model.notes)}")
    return model, seconds
