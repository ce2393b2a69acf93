"""Memory plan of a model, made before anything is allocated, from the file's tensors, the configuration and
options. Loading follows the plan; ``hotcold plan``, the page and messages show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import DECODE_ROWS, PAGE, BatchLimits
from hotcold.kernels.gpus import STAGING_BYTES
from hotcold.model.config import Config
from hotcold.model.draft_block import draft_bytes
from hotcold.model.kv_cache import COPIES_PART, copies_within, spare_slots_of
from hotcold.model.weights import check_tensors, made_bytes
from hotcold.placement.expert_cache import BudgetTooSmallError, ExpertCachePlan, expert_bytes
from hotcold.placement.hot_neurons import HotNeurons, suits
from hotcold.placement.placement import WEIGHTS, Placement
from hotcold.placement.profiles import profile_beside
from hotcold.placement.sizes import Sizes, sizes_of_file
from hotcold.placement.step_memory import GPUStep, buffer_bytes, scratch_bytes
from hotcold.sparse.predictor import PredictorFacts, predictor_names

GPU_CHUNK = 512  #: default prompt tokens of a step with a GPU
#: Part of a GPU's memory that these tokens may take beyond the usual prompt tokens of a step.
GPU_CHUNK_PART = 1 / 32


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a file's weights in memory."""

    read: int  #: all tensors of the layers, the embedding and the head, as stored in the file
    model: int  #: these tensors in memory, with the matrices computed from them
    experts: int  #: the part of ``model`` that can stay in the file
    draft: int  #: the draft block, if the configuration has one
    embedding: int  #: the table, which a tied head also uses
    head: int  #: the head's tensor; 0 without one

    @classmethod
    def from_file(cls, file: GGUFFile, config: Config) -> Self:
        """Counts the bytes. ModelError: the tensors are not the model's (:func:`check_tensors`)."""
        tensors, read = file.tensors, check_tensors(file, config, predictor_names(file))
        return cls(
            read=read,
            model=read + made_bytes(file, config),
            experts=config.experts.count * sum(expert_bytes(file, config)) if config.experts else 0,
            draft=draft_bytes(file, config),
            embedding=tensors["token_embd.weight"].nbytes,
            head=tensors["output.weight"].nbytes if "output.weight" in tensors else 0,
        )


@dataclass(frozen=True)
class MemoryRequest:
    """The memory that a caller requests. None leaves a number to the plan."""

    limits: BatchLimits
    context: int  #: positions of a sequence
    cache_type: str
    chunk: int | None = None  #: prompt tokens of a step; None: those of ``limits``, or more with a GPU
    cache_positions: int | None = None  #: positions of the KV cache
    state_copies: int | None = None
    draft_max: int = 0  #: draft tokens of a sequence in one step
    ram_budget: int | None = None
    prompt_math: str = "same"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a model and one session of it, by kind."""

    config: Config  #: without the draft block if memory cannot hold it
    weights: WeightBytes
    predictors: PredictorFacts | None  #: predictors that the sparsity mode uses
    request: MemoryRequest
    pages: int  #: pages of the KV cache
    slots: int  #: slots for states of sequences
    spare_slots: int  #: the part of ``slots`` for states after draft tokens
    notes: tuple[str, ...] = ()  #: messages about numbers below their defaults
    experts: ExpertCachePlan | HotNeurons | None = None  #: experts in memory, if they have a budget
    placement: Placement | None = None  #: None: all parts are on the CPU
    gpu_bytes: Sequence[Mapping[str, int]] = field(default=())  #: of each GPU with its own memory, by kind
    streamed_bytes: int = 0  #: cold neurons as GPUs read them for prompts, besides the CPU's own

    @classmethod
    def make(
        cls,
        weights: WeightBytes,
        config: Config,
        request: MemoryRequest,
        predictors: PredictorFacts | None = None,
        free: int | None = None,
    ) -> Self:
        """Plans for the CPU alone. ``free``: free bytes of memory, or None if unknown. Experts with a budget
        are counted later (:meth:`with_experts`)."""
        pages, limits = request.cache_positions, request.limits
        pages = limits.sequences * limits.pages_per_sequence if pages is None else -(-pages // PAGE)
        return (
            cls(config, weights, predictors, request, 0, 0, 0)
            ._with_slots(free, pages)
            ._with_pages(free, pages)
        )

    def _with_slots(self, free: int | None, pages: int) -> Self:
        """Gives each sequence a slot; the pages of one context take precedence over copies of states, and
        copies over states after draft tokens."""
        config, request, notes = self.config, self.request, []
        if not config.slot_bytes:
            return self
        sequences, asked = request.limits.sequences, request.state_copies
        spare, usual = spare_slots_of(config, request.draft_max), sequences + 2
        limits = [nbytes for nbytes in (free, request.ram_budget) if nbytes is not None]
        left = self._left_of(min(limits, default=None))
        if left is None:
            slots = sequences + (usual if asked is None else asked) + spare
            return replace(self, slots=slots, spare_slots=spare)
        context = request.limits.pages_per_sequence * config.page_bytes(request.cache_type)
        most, copies = max(0, (left - context) // config.slot_bytes - sequences), asked or 0
        if asked is None:
            copies = min(copies_within(left, config, pages), most)
            if copies < min(usual, pages):
                kept = f"{copies} states are kept for prompts with a common prefix (`state_copies`)"
                notes.append(f"{kept}, since more do not fit in 1/{COPIES_PART} of the free memory")
        if most < copies + spare:
            wanted, spare = spare, max(0, most - copies)
            kept = f"a step verifies at most {spare} draft tokens (`draft_max`)"
            notes.append(f"{kept}: memory is too small for the states of {wanted}")
        return replace(self, slots=sequences + copies + spare, spare_slots=spare, notes=tuple(notes))

    def _with_pages(self, free: int | None, wanted: int) -> Self:
        """Reduces a KV cache of default size to the free memory, but not below one context."""
        limits, left, request = self.request.limits, self._left_of(free), self.request
        least, page_bytes = limits.pages_per_sequence, self.config.page_bytes(request.cache_type)
        asked = request.cache_positions is not None or wanted == least
        if asked or left is None or wanted * page_bytes <= left:
            return replace(self, pages=wanted)
        pages = max(least, left // page_bytes)
        shared = f"{limits.sequences} requests share a KV cache of {pages * PAGE} positions"
        full = f"memory is too small for {wanted * PAGE}, a full context for each"
        note = f"{shared}: {full}, so requests may wait for each other"
        return replace(self, pages=pages, notes=(*self.notes, note))

    def with_experts(self, file: GGUFFile, draft_model: int = 0, *, asked: bool = True) -> tuple[Self, str]:
        """Plans the experts in memory, as many as the budget holds besides everything else and
        ``draft_model`` bytes. Also returns a note about an unusable profile. BudgetTooSmallError: the budget
        cannot hold two experts of each layer. NoExpertsError: no experts can stay in the file. UserError: the
        profile of the model is another model's, and the budget was ``asked`` for."""
        budget, config = self.request.ram_budget, self.config
        assert budget is not None
        bill = self.cpu_bytes() | ({"draft": draft_model} if draft_model else {})
        by_neuron, expert_cache, lacking = suits(file, config), None, ""
        try:
            expert_cache = ExpertCachePlan.fit(budget, bill, file, config)
        except BudgetTooSmallError as error:
            if not by_neuron:
                raise
            lacking = str(error)
        assert config.experts is not None
        if expert_cache and (
            expert_cache.all_fit or not (by_neuron or file.path.with_suffix(".profile.gguf").exists())
        ):
            return replace(self, experts=expert_cache), ""
        profile, note = profile_beside(self.sizes(file), file.path, asked=asked)
        if by_neuron and (hot := HotNeurons.fit(budget, bill, file, config, profile, self._candidates)):
            return replace(self, experts=hot), note
        if expert_cache is None:
            less = "" if self.predictors else "; with a predictor (`sparsity=predicted`) less is enough"
            raise BudgetTooSmallError(f"{lacking}{less}")
        if profile.routing is not None:
            expert_cache = expert_cache.by_profile(profile, config.experts.chosen)
        return replace(self, experts=expert_cache), note

    @property
    def _candidates(self) -> list[float | None]:
        """By layer, the share of neurons that the predictor selects; 0: unknown; None: no predictor is
        used."""
        if self.predictors is None:
            return [None] * self.config.layers
        return [*(self.predictors.candidates or (0.0,) * self.config.layers)]

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's buffers and scratch memory on a CPU."""
        split = self.placement is not None and bool(self.placement.gpus)
        limits, math = self.request.limits, self.request.prompt_math
        return buffer_bytes(self.config, limits, split=split) + scratch_bytes(self.config, limits, math)

    def cpu_bytes(self, weights: int | None = None) -> dict[str, int]:
        """Returns the bytes outside the GPUs' own memory, by kind. ``weights`` replaces the model's, for a
        further session of a loaded model."""
        config, placement, others = self.config, self.placement, 0
        if weights is None:
            weights = self.weights.model + (self.weights.draft if config.draft else 0)
            weights += self.predictors.nbytes if self.predictors else 0
            weights -= 0 if self.request.ram_budget is None else self.weights.experts
            weights += self.experts.loaded_bytes if self.experts else 0
            weights += self.streamed_bytes
            if placement is not None and placement.head is not None:  # the GPU's head has its own table
                tied = not self.weights.head
                weights += self.weights.embedding if tied else self.weights.head if config.draft else 0
        cache = self.pages * config.page_bytes(self.request.cache_type)
        states = self.slots * config.slot_bytes
        if placement is not None:
            others = len(placement.gpus) - len(self.gpu_bytes)
        steps = self.step_bytes * (1 + others)
        for gpu in self.gpu_bytes:
            on_gpu = sum(gpu[kind] for kind in WEIGHTS)
            weights = max(0, weights - on_gpu)
            cache -= gpu["kv"]
            states -= gpu["states"]
            steps += min(STAGING_BYTES, on_gpu)
        return {"weights": weights, "KV cache": cache, "states": states, "steps": steps}

    def sizes(
        self, file: GGUFFile, predictors: Path | None = None, *, sessions: int = 1, gpu: bool = True
    ) -> Sizes:
        """Returns the bytes of each layer, for placements. Errors as in :func:`sizes_of_file`."""
        return sizes_of_file(
            file,
            self.config,
            self.request.limits,
            self.request.cache_type,
            predictors=predictors,
            pages=self.pages,
            slots=self.slots,
            sessions=sessions,
            gpu=gpu,
        )

    def within(self, budgets: Sequence[int]) -> Self:
        """Returns the plan with only as many state copies as GPUs with these budgets keep by default."""
        if self.request.state_copies is not None:
            return self
        others = self.request.limits.sequences + self.spare_slots
        most = others + copies_within(min(budgets), self.config, self.pages)
        return replace(self, slots=min(self.slots, most))

    def with_gpu_chunk(self, budget: int) -> Self:
        """Returns the plan with a GPU's default of prompt tokens in a step, if the larger buffers are a small
        part of the budget. Each step of a prompt reads all weights, so longer chunks read them less often."""
        request, types = self.request, (BLOCK_TYPES["F32"],) * 3  # rows of any width; types change little
        limits = replace(request.limits, tokens=DECODE_ROWS + min(GPU_CHUNK, request.context))
        now, then = (
            GPUStep(self.config, each, types).nbytes(max(self.config.neurons))
            for each in (request.limits, limits)
        )
        if request.chunk is not None or then - now > budget * GPU_CHUNK_PART:
            return self
        return replace(self, request=replace(request, limits=limits))

    def _left_of(self, free: int | None) -> int | None:
        """Returns the bytes for more states: nine tenths of the memory that the plan leaves free."""
        return None if free is None else max(0, (free - sum(self.cpu_bytes().values())) * 9 // 10)

    def shortage(self, free: int, predictors: int | None = None) -> str:
        """Returns an error text if ``free`` bytes of memory do not suffice, else an empty text.
        ``predictors``: bytes of the predictors of a further session of a loaded model."""
        needed = self.cpu_bytes(predictors)
        names = ("model", "weights") if predictors is None else ("session", "predictors")
        return self._advice(needed, free, names) if sum(needed.values()) > free else ""

    def _advice(self, needed: Mapping[str, int], free: int, names: tuple[str, str]) -> str:
        weights, limits = needed["weights"], self.request.limits
        smaller = "context (`context`)" if weights < free else "or more quantised model"
        if weights < free and self.pages > limits.pages_per_sequence:
            smaller = f"KV cache (`cache_positions`) or {smaller}"
        if weights < free and self.slots > limits.sequences:
            smaller = f"number of kept states (`state_copies`, `draft_max`) or {smaller}"
        if self.streamed_bytes:
            smaller += ", or compute prompts on both sides (`cold_prompts=cpu`)"
        if weights >= free and self.config.experts is not None:
            smaller += ", or leave experts in the file (`ram_budget`)"
        text = {kind: f"{nbytes / 2**30:.2f} GiB" for kind, nbytes in (*needed.items(), ("free", free))}
        label, kind = names
        parts = f"{kind} {text['weights']}, KV cache of {self.pages * PAGE} tokens {text['KV cache']}"
        parts += f", steps {text['steps']}"
        if self.slots:
            parts += f", {self.slots} states of sequences {text['states']}"
        got = (
            f"the {label} needs {sum(needed.values()) / 2**30:.2f} GiB ({parts}), and {text['free']} are free"
        )
        return f"not enough memory: {got}: use a smaller {smaller}"
