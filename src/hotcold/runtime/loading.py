"""Loading of a model file: parses it, chooses a memory plan that fits and the device of each part, and reads
the weights."""

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.hub.download import located
from hotcold.kernels.backend import BatchLimits
from hotcold.kernels.gpu import GPU, GPUBackend, GPUError, GPUMemoryError
from hotcold.kernels.instruction_sets import slow_kernels
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.draft_block import load_draft, with_draft
from hotcold.model.reading import Progress
from hotcold.model.weights import Weights, load_weights
from hotcold.placement.expert_cache import BudgetTooSmallError, NoExpertsError
from hotcold.placement.memory_plan import MemoryPlan, MemoryRequest, WeightBytes
from hotcold.placement.sizes import CHUNK
from hotcold.runtime import memory
from hotcold.runtime.drafts import check_draft
from hotcold.runtime.machine import use_measured_fetching
from hotcold.runtime.memory import MemoryShortError
from hotcold.runtime.mode import SparsityMode, choose_mode
from hotcold.runtime.named_templates import with_template
from hotcold.runtime.options import AllOptions, LoadError, complete, ram_budget
from hotcold.runtime.placing import Decision, ToLoad, beside_ram_budget, decide
from hotcold.runtime.sampling import sampling_of_file
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.predictor import find_predictors
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import exact_size, printable, round_size, size

_T = TypeVar("_T")

_NO_BLOCK = "the draft block is not used"
_TRIES = 8  # attempts, each with less of a GPU's memory
#: Tokens of a context: the largest default if experts or neurons compete with the KV cache for memory, and
#: the smallest that loading chooses for lack of memory.
_SHORT_CONTEXT = 4096


def load(path: Path | None, options: Mapping[str, Any], progress: Progress | None = None) -> LoadedModel:
    """Loads a GGUF file, ``hf:...`` on the hub, or the built-in model. ``options``: see :class:`AllOptions`;
    ``progress`` is called with the bytes read so far and in total. ValueError: not a model file (GGUFError),
    an unsupported model (ModelError), or options that do not fit it or the machine (LoadError). Weights are
    read last, after a session is known to fit."""
    wanted = complete(options)
    with open_gguf(located(path or model_path())) as file:
        return load_open(file, wanted, progress)


def load_open(file: GGUFFile, options: Mapping[str, Any], progress: Progress | None = None) -> LoadedModel:
    """Loads an open file, as :func:`load` does."""
    try:
        settings = complete(options)
        if (budget := ram_budget(settings)) is not None:
            memory.check_budget(budget)
        return _load(file, settings, progress)
    except UserError:
        raise
    except ValueError as error:  # for example, a valid shape that is too large for a kernel
        raise LoadError(f"{printable(file.path.name)} cannot run here: {error}") from error


def plan_memory(file: GGUFFile, options: Mapping[str, Any]) -> MemoryPlan:
    """Returns the plan of :func:`load` for these options, with a ``ram_budget``; it may exceed the free
    memory. Errors as in :func:`load`."""
    return _first_that_fits(_Model.parse(file, complete(options)), lambda model: model.plan()[0])


def plan_load(file: GGUFFile, options: Mapping[str, Any]) -> tuple[MemoryPlan, tuple[str, ...], str]:
    """Returns the present plan of :func:`load` for these options, its notes, and an error text if memory does
    not suffice. Errors as in :func:`load`, except errors about memory."""
    model = _Model.parse(file, complete(options))
    try:
        choice = _first_that_fits(model, partial(_Choice.from_model, most={}))
    except (MemoryShortError, BudgetTooSmallError) as error:
        *_, smallest = (form for form in model.forms() if not form.budget_note)
        return smallest.plan()[0], (), str(error)
    return choice.plan, choice.all_notes, ""


@dataclass(frozen=True)
class _Model:
    """A parsed file and its options: everything that does not depend on memory."""

    file: GGUFFile
    options: AllOptions
    config: Config  #: with the draft block, if the options use it
    block_note: str  #: reason why the options do not use it
    weights: WeightBytes
    predictor: Path | None  #: the file with predictors, if there is one
    mode: SparsityMode
    predictors: Path | None  #: the same file, if a session uses it
    request: MemoryRequest
    fingerprint: str
    draft: tuple[Path, AllOptions] | None = None  #: the draft model
    budget_note: str = ""  #: about an automatic ``ram_budget``
    context_note: str = ""  #: about a context reduced for lack of memory

    @classmethod
    def parse(cls, file: GGUFFile, options: AllOptions) -> Self:
        """Parses and checks the model's file and its predictors, without the tokenizer and a draft model."""
        named = None if options["predictor"] is None else Path(options["predictor"])
        predictor = find_predictors(file, named)
        config, block_note = Config.from_metadata(file.metadata, file.magic, file.tensors), ""
        fingerprint = file.fingerprint()
        if options["draft_max"] and options["draft"] is None:
            config, block_note = with_draft(config, file.tensors)
        weights = WeightBytes.from_file(file, config)
        wanted = [options["sparsity"], *([options["second_sparsity"]] if options["second_sparsity"] else [])]
        modes = [choose_mode(each, config, file.path, predictor, fingerprint) for each in wanted]
        used = next((each.predictors.path for each in modes if each.predictors), None)
        request = _request(file, config, options)
        parsed = file, options, config, block_note, weights, predictor
        return cls(*parsed, modes[0], used, request, fingerprint)

    def forms(self) -> Iterator["_Model"]:
        """Yields the model in forms that need less and less memory: as requested; with smaller default
        contexts; without the draft block; and if experts may stay in the file, all of these again with a RAM
        budget."""
        yield from self._contexts()
        options, short = self.options, "memory" if self.options["ram_budget"] is None else "`ram_budget`"
        if self.config.draft is not None:
            note = f"{_NO_BLOCK}: it does not fit in {short}"
            yield from replace(self, config=replace(self.config, draft=None), block_note=note)._contexts()
        if options["ram_budget"] is not None or beside_ram_budget(options) is not None:
            return
        if (automatic := memory.own_budget()) is None:
            return
        budget, reserve = automatic
        chosen = f"the model does not fit in memory: `ram_budget={exact_size(budget)}` was chosen"
        yield from replace(
            self,
            options=AllOptions(**{**options, "ram_budget": budget}),
            request=replace(self.short().request, ram_budget=budget),
            budget_note=f"{chosen}, which leaves {size(reserve)} of the free memory to other programs",
        ).forms()

    def _contexts(self) -> Iterator["_Model"]:
        """Yields the model with its context, and if that is a default, with repeatedly halved contexts."""
        yield self
        model, wanted = self, self.request.context
        while self.options["context"] is None and model.request.context > _SHORT_CONTEXT:
            context = max(model.request.context // 2, _SHORT_CONTEXT)
            note = f"the context is {context} tokens (`context`): memory is too small for {wanted}"
            model = replace(model._with_context(context), context_note=note)
            yield model

    def short(self) -> "_Model":
        """Returns the model with a default context that leaves memory for experts and neurons."""
        if self.options["context"] is not None or self.request.context <= _SHORT_CONTEXT:
            return self
        return self._with_context(_SHORT_CONTEXT)

    def _with_context(self, context: int) -> "_Model":
        limits = _limits(context, self.options)
        return replace(self, request=replace(self.request, context=context, limits=limits))

    def plan(self) -> tuple[MemoryPlan, str]:
        """Plans for the CPU alone; also returns a note about an unusable profile. Errors as in
        :meth:`MemoryPlan.with_experts`."""
        free, predictors = memory.available_memory(), self.mode.predictors
        plan = MemoryPlan.make(self.weights, self.config, self.request, predictors, free)
        if self.request.ram_budget is None:
            return plan, ""
        draft = 0 if self.draft is None else _bytes_of(*self.draft)
        return plan.with_experts(self.file, draft, asked=not self.budget_note)


def _first_that_fits(model: _Model, choose: Callable[[_Model], _T]) -> _T:
    """Returns the result of ``choose`` for the first form of a model that fits in memory. If none fits,
    raises the error of the last form within the given options."""
    refused: UserError | None = None
    for form in model.forms():
        try:
            return choose(form)
        except (MemoryShortError, BudgetTooSmallError, NoExpertsError) as error:
            if isinstance(error, NoExpertsError) and not form.budget_note:
                raise
            refused = refused if form.budget_note else error
    assert refused is not None
    raise refused


@dataclass(frozen=True)
class _Choice:
    """The form of a model that fits, its plan, and the devices of its parts."""

    plan: MemoryPlan
    decision: Decision
    notes: tuple[str, ...]  #: about profiles, the draft block and the context
    budget_note: str

    @classmethod
    def from_model(cls, model: _Model, most: Mapping[GPU, int] | None) -> Self:
        """Chooses a plan and devices. ``most``: limits for GPUs whose memory ran out; None: no GPU is used.
        MemoryShortError: the plan needs more than the available memory."""
        plan, profile_note = model.plan()
        to_load = ToLoad(model.file, model.options, plan, model.predictors)
        decision, block_note = Decision() if most is None else decide(to_load, most), model.block_note
        if decision.on_gpus and model.short() is not model:
            return cls.from_model(model.short(), most)
        decided = decision.apply_to(plan)
        try:
            memory.check_memory(decided)
        except MemoryShortError:
            if decision.limits is None:
                raise
            decision = replace(decision, limits=None)  # the CPU's chunk of a prompt needs less memory
            decided = decision.apply_to(plan)
            memory.check_memory(decided)
        plan = decided
        if model.config.draft and not plan.config.draft:
            block_note = f"{_NO_BLOCK}: it runs on the CPU, and GPUs compute all layers"
        return cls(plan, decision, (profile_note, block_note, model.context_note), model.budget_note)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Facts about memory and devices for the user, one line each."""
        others = (*self.decision.notes, str(self.plan.experts or ""), *self.notes)
        return tuple(note for note in (self.budget_note, *self.plan.notes, *others) if note)


def _load(file: GGUFFile, options: AllOptions, progress: Progress | None) -> LoadedModel:
    use_measured_fetching()
    model = _Model.parse(file, options)
    # The tokenizer takes some tenths of a second of one thread, during which the pool reads weights.
    with ThreadPoolExecutor(1) as other_thread:
        tokenizer_made = other_thread.submit(Tokenizer.from_metadata, file.metadata)

        def check_progress(done: int, total: int) -> None:
            if tokenizer_made.done():
                tokenizer_made.result()  # raises the error of an invalid vocabulary before all is read
            if progress is not None:
                progress(done, total)

        if options["draft"] is not None:
            path, tokenizer = located(Path(options["draft"])), tokenizer_made.result()
            context = min(model.request.context, check_draft(path, file.path, model.config, tokenizer))
            model = replace(model, draft=(path, _draft_options(options, context)))
        choice, devices, weights = _read_where_it_fits(model, check_progress)
        tokenizer = tokenizer_made.result()
    plan = choice.plan
    sampling, sampling_notes = sampling_of_file(file.metadata)
    draft, draft_note = (None, "") if model.draft is None else _load_draft(*model.draft)
    plain = {key: value for key, value in file.metadata.items() if isinstance(value, str | int | float)}
    notes = (
        slow_kernels() if options["backend"] == "cpu" else "",
        choice.budget_note,
        *model.config.notes,
        *tokenizer.notes,
        *plan.notes,
        *sampling_notes,
        *choice.decision.notes,
        str(plan.experts or ""),
        *choice.notes,
        draft_note,
    )
    return LoadedModel(
        path=file.path,
        fingerprint=model.fingerprint,
        tokenizer=tokenizer,
        weights=weights,
        devices=devices,
        plan=plan,
        sparsity=options["sparsity"],
        predictor=model.predictor,
        notes=tuple(note for note in notes if note),
        on_gpus=choice.decision.on_gpus,
        chat_metadata=with_template(plain, options["chat_template"]),
        chosen_pooling=options["pooling"],
        sampling=sampling,
        draft_max=options["draft_max"],
        draft=draft,
    )


def _draft_options(options: AllOptions, context: int) -> AllOptions:
    """Returns the options for the draft model of a model with these options."""
    return complete(
        AllOptions(
            threads=options["threads"],
            backend=options["backend"],
            sequences=options["sequences"],
            chunk=options["chunk"],
            context=context,
            gpu="off",
            draft_max=0,
        )
    )


def _bytes_of(path: Path, options: AllOptions) -> int:
    """Returns the bytes of a draft model in memory."""
    with open_gguf(path) as file:
        model = _Model.parse(file, options)
    plan = MemoryPlan.make(model.weights, model.config, model.request, model.mode.predictors)
    return sum(plan.cpu_bytes().values())


def _load_draft(path: Path, options: AllOptions) -> tuple[LoadedModel, str]:
    """Loads the draft model; also returns the note about it."""
    try:
        draft = load(path, options)
    except MemoryShortError as error:  # a RAM budget for the larger model's experts would not help
        raise LoadError(f"`draft`: {printable(path.name)} cannot be loaded: {error}") from None
    return draft, f"{printable(draft.name)} drafts tokens, which changes the speed, not the text"


def _read(model: _Model, choice: _Choice, progress: Progress | None) -> tuple[Devices, Weights]:
    file, plan = model.file, choice.plan
    devices = choice.decision.open(model.options, plan.config.layers)
    if plan.experts is not None:
        devices = plan.experts.devices(devices, file.path.name)
    weights = load_weights(file, plan.config, devices, progress, plan.weights.read)
    for gpu in devices.gpus if choice.decision.on_gpus else ():
        cast(GPUBackend, gpu).check_budget()
    if plan.config.draft:
        weights = replace(weights, draft=load_draft(file, plan.config, devices, weights))
    return devices, weights


def _read_where_it_fits(model: _Model, progress: Progress | None) -> tuple[_Choice, Devices, Weights]:
    """Reads a model, with a smaller placement whenever a GPU's memory runs out. If a GPU fails that the user
    did not ask for, the CPU computes all parts. If it fails with streamed prompts that Hotcold chose, the
    CPU first takes the cold neurons of prompts."""
    changes: list[str] = []
    most: Mapping[GPU, int] | None = {}
    while True:
        choice = _first_that_fits(model, partial(_Choice.from_model, most=most))
        decision = choice.decision
        try:
            devices, weights = _read(model, choice, progress)
            decision = replace(decision, notes=(*changes, *decision.notes))
            return replace(choice, decision=decision), devices, weights
        except GPUMemoryError as error:
            if not decision.on_gpus or len(changes) == _TRIES:
                raise
            most = {each.gpu: _less(error.allocated, each.planned_bytes) for each in decision.on_gpus}
            now = " and ".join(f"`vram_budget={exact_size(n)}`" for n in most.values())
            changes.append(f"{error}: now {now}")
        except GPUError as error:
            if decision.streamed_bytes and model.options["cold_prompts"] == "auto":
                model = replace(model, options=AllOptions(**{**model.options, "cold_prompts": "cpu"}))
                changes.append(f"`cold_prompts=cpu` was chosen: {error}")
            elif decision.asked:
                raise
            else:
                most = None
                changes.append(f"no GPU is used: {error}")
        gc.collect()  # here no traceback refers to the failed allocations


def _less(allocated: int, planned: int) -> int:
    """Returns the next budget, a round size: 95 % of the bytes that could be allocated, or half of the
    plan."""
    return round_size(max(allocated * 19 // 20, planned // 2))


def _request(file: GGUFFile, config: Config, options: AllOptions) -> MemoryRequest:
    """Returns the memory request of the options. LoadError: the context is longer than the model's, or than
    the KV cache."""
    asked, most = options["context"], config.context
    if asked == 0:
        asked = most
    if asked is not None and not 2 <= asked <= most:
        why = f": {config.context_limit}" if config.context_limit and asked > most else ""
        raise LoadError(
            f"context of {asked} positions (`context`): this model allows 2 to {most}, and 0 for all{why}"
        )
    context = asked or min(most, _default_context(file, config, options))
    if (pool := options["cache_positions"]) is not None and pool < context:
        if asked is not None or pool < 2:
            got = f"a KV cache of {pool} positions (`cache_positions`)"
            raise LoadError(
                f"{got} holds less than one context of {context} (`context`): make it at least as large"
            )
        context = pool
    return MemoryRequest(
        limits=_limits(context, options),
        context=context,
        cache_type=options["cache_type"],
        chunk=options["chunk"],
        cache_positions=pool,
        state_copies=options["state_copies"],
        draft_max=options["draft_max"],
        ram_budget=ram_budget(options),
        prompt_math=options["prompt_math"],
    )


def _limits(context: int, options: AllOptions) -> BatchLimits:
    chunk = CHUNK if options["chunk"] is None else options["chunk"]
    return BatchLimits.from_context(context, options["sequences"], min(chunk, context))


def _default_context(file: GGUFFile, config: Config, options: AllOptions) -> int:
    """Returns the default context in tokens. LongRoPE models keep their original length, since another
    rotation applies beyond it (arXiv 2402.13753)."""
    default = options["default_context"]
    if any(options[name] is not None for name in ("ram_budget", "vram_budget", "placement")):
        default = min(default, _SHORT_CONTEXT)
    if "rope_factors_long.weight" in file.tensors:
        default = min([default, *(rope.original for rope in config.ropes if rope.original)])
    return default
