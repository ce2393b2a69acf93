"""Loads a model file into memory: checks what fits, decides where each part lies, and reads the weights."""

import gc
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.hub.download import located
from hotcold.kernels.backend import DECODE_ROWS, PAGE, BatchLimits
from hotcold.kernels.gpu import GPUError, GPUMemoryError
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.draft_block import draft_bytes, load_draft, with_draft
from hotcold.model.kv_cache import COPIES_PART, copies_within, spare_slots_of
from hotcold.model.reading import Progress
from hotcold.model.weights import Weights, check_tensors, load_weights, made_bytes
from hotcold.placement.hot_neurons import HotNeurons, suits
from hotcold.placement.profiles import profile_beside
from hotcold.placement.shelves import NoExpertsError, NoRoomError, Shelves, expert_bytes
from hotcold.placement.sizes import sizes_of_file
from hotcold.runtime.drafts import check_draft
from hotcold.runtime.memory import (
    MemoryShortError,
    affordable_bytes,
    check_budget,
    check_memory,
    memory_bill,
    own_budget,
)
from hotcold.runtime.mode import SparsityMode, choose_mode
from hotcold.runtime.named_templates import with_template
from hotcold.runtime.options import LoadError, LoadOptions, complete, ram_budget
from hotcold.runtime.placing import Decision, ToLoad, beside_ram_budget, decide
from hotcold.runtime.sampling import sampling_of_file
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.predictor import find_predictors, predictor_names
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import exact_size, printable, round_size, size

_NO_BLOCK = "the block that guesses tokens is left out"
_TRIES = 8  # with less of a GPU's memory each time


def load(path: Path | None, options: Mapping[str, Any], progress: Progress | None = None) -> LoadedModel:
    """Loads a GGUF file, ``hf:...`` of the hub, or the built-in model; ``options`` are :class:`LoadOptions`;
    ``progress`` is called with bytes read so far and in all.

    ValueError: not a model file (GGUFError), a model that is not supported (ModelError), or options that do
    not fit it or the machine (LoadError). Weights are read last, when a session has been found to fit."""
    wanted = complete(options)
    with open_gguf(located(path or model_path())) as file:
        return load_open(file, wanted, progress)


def load_open(file: GGUFFile, options: Mapping[str, Any], progress: Progress | None = None) -> LoadedModel:
    """Loads a file that is open, as :func:`load` does."""
    try:
        settings = complete(options)
        if (budget := ram_budget(settings)) is not None:
            check_budget(budget)
        return _load_as_it_fits(file, settings, progress)
    except UserError:
        raise
    except ValueError as error:  # a shape that is right and that a kernel has no room for, say
        raise LoadError(f"{printable(file.path.name)} cannot run here: {error}") from error


def _load_as_it_fits(file: GGUFFile, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    """Loads all of a model, or, where memory is short of that, as many of its experts as fit."""
    try:
        return _load_with_block(file, options, progress)
    except MemoryShortError as error:
        own = own_budget()
        if own is None or options["ram_budget"] is not None or beside_ram_budget(options) is not None:
            raise
        budget, reserve = own
        smaller = LoadOptions(**{**options, "ram_budget": budget})
        chosen = f"memory does not suffice for all of it: `ram_budget={exact_size(budget)}` was chosen"
        note = f"{chosen}, which leaves {size(reserve)} of what is free to others"
        try:
            return _load_with_block(file, smaller, progress, note)
        except (NoRoomError, NoExpertsError, MemoryShortError):
            raise error from None


def _load_with_block(
    file: GGUFFile, options: LoadOptions, progress: Progress | None, own: str = ""
) -> LoadedModel:
    """Loads a model with the block that guesses tokens, or, where memory is short of that, without it."""
    try:
        return _load(file, options, progress, own)
    except (MemoryShortError, NoRoomError):
        if not any(".nextn." in name for name in file.tensors):
            raise
    return _load(file, options, progress, own, block=False)


def _load(
    file: GGUFFile, options: LoadOptions, progress: Progress | None, own: str, *, block: bool = True
) -> LoadedModel:
    """``own`` tells of a budget of RAM that nobody gave, before all else; without ``block`` that which
    guesses tokens has no room."""
    named = None if options["predictor"] is None else Path(options["predictor"])
    factors, predictor = predictor_names(file), find_predictors(file, named)
    config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    fingerprint = file.fingerprint()
    config, block_note = _with_draft(config, file, options, room=block)
    weight_bytes = check_tensors(file, config, factors)
    weight_bytes += made_bytes(file, config) + draft_bytes(file, config)
    mode = choose_mode(options["sparsity"], config, file.path, predictor, fingerprint)
    limits, context, chunk = _limits(config, options)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    drafts = None if options["draft"] is None else located(Path(options["draft"]))
    its_context = check_draft(drafts, file.path, config, tokenizer) if drafts else 0
    if mode.predictors:
        weight_bytes += mode.predictors.nbytes
    second = options["second_sparsity"]
    other = second and choose_mode(second, config, file.path, predictor, fingerprint)
    used = mode.predictors or (other.predictors if other else None)
    budget, resident = options["ram_budget"], weight_bytes
    if budget is not None:  # what experts leave is known when all else is
        resident -= _all_experts(file, config)
    slots, spare_slots, slot_notes = _slots(config, options, limits, resident)
    pages, page_notes = _pool(config, options, limits, resident + slots * config.slot_bytes)
    shelves, profile_note = None, ""
    if budget is not None:
        bill = memory_bill(resident, options["cache_type"], config, limits, pages, slots)
        if drafts:
            bill["draft"] = _draft_bytes(drafts, options, min(context, its_context))
        shelves, profile_note = _fit(file, config, options, bill, mode, asked=not own)
        weight_bytes = resident + shelves.loaded_bytes
    model = ToLoad(file, config, options, limits, pages, slots, spare_slots, used.path if used else None)
    reading = _Reading(model, weight_bytes, progress, factors, shelves)
    decision, devices, weights = _read_where_it_fits(reading)
    if config.draft and not weights.draft:
        config = replace(config, draft=None)
        block_note = f"{_NO_BLOCK}: it runs on the CPU, and GPUs compute all layers"
    sampling, sampling_notes = sampling_of_file(file.metadata)
    draft, draft_note = _load_draft(drafts, options, min(context, its_context)) if drafts else (None, "")
    plain = {key: value for key, value in file.metadata.items() if isinstance(value, str | int | float)}
    return LoadedModel(
        path=file.path,
        fingerprint=fingerprint,
        config=config,
        tokenizer=tokenizer,
        weights=weights,
        devices=devices,
        limits=limits,
        pages=pages,
        slots=decision.slots_of(model),
        spare_slots=spare_slots,
        context=context,
        chunk=chunk,
        cache_type=options["cache_type"],
        sparsity=options["sparsity"],
        predictor=predictor,
        notes=(
            *([own] if own else []),
            *config.notes,
            *tokenizer.notes,
            *slot_notes,
            *page_notes,
            *sampling_notes,
            *decision.notes,
            *([] if shelves is None else [str(shelves)]),
            *([profile_note] if profile_note else []),
            *([draft_note] if draft else []),
            *([block_note] if block_note else []),
        ),
        on_gpus=decision.on_gpus,
        shelves=shelves,
        chat_metadata=with_template(plain, options["chat_template"]),
        chosen_pooling=options["pooling"],
        sampling=sampling,
        draft_max=options["draft_max"],
        draft=draft,
    )


def _with_draft(config: Config, file: GGUFFile, options: LoadOptions, *, room: bool) -> tuple[Config, str]:
    """The configuration with the file's block that guesses tokens, where it is to be used and there is
    ``room`` for it; or why not."""
    if not options["draft_max"] or options["draft"] is not None:
        return config, ""
    if config.drafting and not room:
        memory = "memory" if options["ram_budget"] is None else "`ram_budget`"
        return config, f"{_NO_BLOCK}: {memory} has no room for it"
    return with_draft(config, file.tensors)


def shelves_of(file: GGUFFile, config: Config, options: Mapping[str, Any]) -> Shelves | HotNeurons:
    """Returns what :func:`load` would keep of a model's experts with these options and a ``ram_budget``.
    Errors as there."""
    wanted = complete(options)
    guessing, _ = _with_draft(config, file, wanted, room=True)
    try:
        return _shelves_of(file, guessing, wanted)
    except NoRoomError:
        if guessing.draft is None:
            raise
    return _shelves_of(file, config, wanted)


def _shelves_of(file: GGUFFile, config: Config, options: LoadOptions) -> Shelves | HotNeurons:
    resident = check_tensors(file, config, predictor_names(file)) + made_bytes(file, config)
    resident += draft_bytes(file, config) - _all_experts(file, config)
    named = None if options["predictor"] is None else Path(options["predictor"])
    predictor = find_predictors(file, named)
    mode = choose_mode(options["sparsity"], config, file.path, predictor, file.fingerprint())
    resident += mode.predictors.nbytes if mode.predictors else 0
    limits, _, _ = _limits(config, options)
    slots, _, _ = _slots(config, options, limits, resident)
    pages, _ = _pool(config, options, limits, resident + slots * config.slot_bytes)
    bill = memory_bill(resident, options["cache_type"], config, limits, pages, slots)
    return _fit(file, config, options, bill, mode, asked=True)[0]


def _fit(
    file: GGUFFile,
    config: Config,
    options: LoadOptions,
    bill: Mapping[str, int],
    mode: SparsityMode,
    *,
    asked: bool,
) -> tuple[Shelves | HotNeurons, str]:
    """Chooses the experts that lie in memory beside the bill, and says which profile is left out. UserError:
    the one beside the model is another model's, say, and the budget was ``asked`` for."""
    budget = ram_budget(options)
    assert budget is not None
    by_neuron, shelves, lacking = suits(file, config), None, ""
    try:
        shelves = Shelves.fit(budget, bill, file, config)
    except NoRoomError as error:
        if not by_neuron:
            raise
        lacking = str(error)
    assert config.experts is not None
    if shelves and (shelves.all_fit or not (by_neuron or file.path.with_suffix(".profile.gguf").exists())):
        return shelves, ""
    sizes = sizes_of_file(file, config, PAGE, options["cache_type"])
    profile, note = profile_beside(sizes, file.path, asked=asked)
    candidates = _candidates(config, mode)
    if by_neuron and (hot := HotNeurons.fit(budget, bill, file, config, profile, candidates)):
        return hot, note
    if shelves is None:
        less = "" if mode.predictors else "; with a predictor (`sparsity=predicted`) less will do"
        raise NoRoomError(f"{lacking}{less}")
    return shelves if profile.routing is None else shelves.by_profile(profile, config.experts.chosen), note


def _candidates(config: Config, mode: SparsityMode) -> list[float | None]:
    """By layer, the share of its neurons that a predictor names, 0 where that is not known; None: no
    predictor is used."""
    if mode.predictors is None:
        return [None] * config.layers
    return [*(mode.predictors.candidates or (0.0,) * config.layers)]


def _all_experts(file: GGUFFile, config: Config) -> int:
    """Bytes of all experts' matrices."""
    return config.experts.count * sum(expert_bytes(file, config)) if config.experts else 0


def _draft_options(options: LoadOptions, context: int) -> LoadOptions:
    """How the smaller model is loaded that guesses for one with these options."""
    return LoadOptions(
        threads=options["threads"],
        backend=options["backend"],
        sequences=options["sequences"],
        chunk=options["chunk"],
        context=context,
        gpu="off",
        draft_max=0,
    )


def _draft_bytes(path: Path, options: LoadOptions, context: int) -> int:
    """Counts the memory that the smaller model takes."""
    its = complete(_draft_options(options, context))
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        mode = choose_mode(
            its["sparsity"], config, file.path, find_predictors(file, None), file.fingerprint()
        )
        weight_bytes = check_tensors(file, config, predictor_names(file)) + made_bytes(file, config)
        weight_bytes += mode.predictors.nbytes if mode.predictors else 0
    limits, _, _ = _limits(config, its)
    pages = limits.sequences * limits.pages_per_sequence
    return sum(memory_bill(weight_bytes, its["cache_type"], config, limits, pages, 0).values())


def _load_draft(path: Path, options: LoadOptions, context: int) -> tuple[LoadedModel, str]:
    """Loads the smaller model that guesses for one with these options; and what is to be said of it."""
    try:
        draft = load(path, _draft_options(options, context))
    except MemoryShortError as error:  # a budget for the larger model's experts would not help
        raise LoadError(f"`draft`: {printable(path.name)} guesses tokens: {error}") from None
    return draft, f"{printable(draft.name)} guesses tokens, which changes no text"


@dataclass(frozen=True)
class _Reading:
    """The inputs of reading the weights that do not depend on devices."""

    model: ToLoad
    weight_bytes: int
    progress: Progress | None
    factors: Container[str]
    shelves: Shelves | HotNeurons | None  #: what of experts is in memory, where that has a budget

    def read(self, decision: Decision) -> tuple[Devices, Weights]:
        model, tensors, weight_bytes = self.model, self.model.file.tensors, self.weight_bytes
        devices = decision.open(model.options, model.config.layers)
        if self.shelves is not None:
            devices = self.shelves.devices(devices, model.file.path.name)
        if "output.weight" not in tensors and devices.head is not devices.embedding:
            weight_bytes += tensors["token_embd.weight"].nbytes  # each of the two has the table
        config = model.config if devices.cpu_computes else replace(model.config, draft=None)
        if config.draft and devices.head is not devices.embedding:
            weight_bytes += tensors["output.weight"].nbytes if "output.weight" in tensors else 0
        check_memory(
            weight_bytes,
            model.options["cache_type"],
            config,
            model.limits,
            model.pages,
            decision.slots_of(model),
            devices,
            decision.on_gpus,
        )
        weights = load_weights(model.file, config, devices, self.progress, self.factors)
        if config.draft:
            weights = replace(weights, draft=load_draft(model.file, config, devices, weights))
        return devices, weights


def _read_where_it_fits(reading: _Reading) -> tuple[Decision, Devices, Weights]:
    """Reads a model, with a smaller placement each time that a GPU's memory runs out, or on the CPU where a
    GPU fails that nobody asked for."""
    changes: list[str] = []
    decision = decide(reading.model)
    while True:
        try:
            devices, weights = reading.read(decision)
            return replace(decision, notes=(*changes, *decision.notes)), devices, weights
        except GPUMemoryError as error:
            if not decision.on_gpus or len(changes) == _TRIES:
                raise
            less = {each.gpu: _less(error.allocated, each.planned_bytes) for each in decision.on_gpus}
            now = " and ".join(f"`vram_budget={exact_size(n)}`" for n in less.values())
            changes.append(f"{error}: now {now}")
        except GPUError as error:
            if decision.asked:
                raise
            less = None
            changes.append(f"no GPU is used: {error}")
        gc.collect()  # here, where no traceback holds what was allocated any more
        decision = Decision() if less is None else decide(reading.model, less)


def _less(allocated: int, planned: int) -> int:
    """The next budget, a round size: 95 % of the bytes that could be allocated, or half of the plan."""
    return round_size(max(allocated * 19 // 20, planned // 2))


def _limits(config: Config, options: LoadOptions) -> tuple[BatchLimits, int, int]:
    """Returns (batch limits, context length, prompt chunk)."""
    asked, most = options["context"], config.context
    if asked == 0:
        asked = most
    if asked is not None and not 2 <= asked <= most:
        why = f": {config.context_limit}" if config.context_limit and asked > most else ""
        raise LoadError(
            f"context of {asked} positions (`context`): this model allows 2 to {most}, and 0 for all{why}"
        )
    context = asked or min(most, options["default_context"])
    if (pool := options["cache_positions"]) is not None and pool < context:
        if asked is not None or pool < 2:
            seen = f"a KV cache of {pool} positions (`cache_positions`)"
            raise LoadError(
                f"{seen} holds less than one context of {context} (`context`): make it as large at least"
            )
        context = pool
    chunk = min(options["chunk"], context)
    pages, logits = -(-context // PAGE), max(DECODE_ROWS, options["sequences"])
    return BatchLimits(DECODE_ROWS + chunk, options["sequences"], pages, logits), context, chunk


def _slots(
    config: Config, options: LoadOptions, limits: BatchLimits, weight_bytes: int
) -> tuple[int, int, tuple[str, ...]]:
    """Counts the slots for states: returns all, the part of them for states after guesses, and notes.

    Each sequence has one slot. Copies come after the pages of one context, and guesses after copies."""
    if not config.slot_bytes:
        return 0, 0, ()
    sequences, asked, notes = limits.sequences, options["state_copies"], []
    guesses = spare_slots_of(config, options["draft_max"])
    copies, usual = asked or 0, sequences + 2
    free = affordable_bytes(weight_bytes, config, limits, ram_budget(options))
    if free is None:
        return sequences + (usual if asked is None else asked) + guesses, guesses, ()
    context = limits.pages_per_sequence * config.page_bytes(options["cache_type"])
    most = max(0, (free - context) // config.slot_bytes - sequences)
    if asked is None:
        pages = _wanted_pages(options, limits)
        copies = min(copies_within(free, config, pages), most)
        if copies < min(usual, pages):
            kept = f"{copies} states are kept for prompts that begin alike (`state_copies`)"
            notes.append(f"{kept}: 1/{COPIES_PART} of free memory holds no more")
    if most < copies + guesses:
        wanted, guesses = guesses, max(0, most - copies)
        kept = f"{guesses} states are kept after guesses, so no step verifies more (`draft_max`)"
        notes.append(f"{kept}: memory does not suffice for {wanted}")
    return sequences + copies + guesses, guesses, tuple(notes)


def _wanted_pages(options: LoadOptions, limits: BatchLimits) -> int:
    """Counts the pages of the KV cache that are asked for: by default as many contexts as sequences."""
    if options["cache_positions"] is not None:
        return -(-options["cache_positions"] // PAGE)
    return limits.sequences * limits.pages_per_sequence


def _pool(
    config: Config, options: LoadOptions, limits: BatchLimits, weight_bytes: int
) -> tuple[int, tuple[str, ...]]:
    """Pages of the KV cache that all sequences share, and what is to be said of them."""
    wanted, least = _wanted_pages(options, limits), limits.pages_per_sequence
    if options["cache_positions"] is not None or wanted == least:
        return wanted, ()
    room, each = affordable_bytes(weight_bytes, config, limits), config.page_bytes(options["cache_type"])
    if room is None or room >= wanted * each:
        return wanted, ()
    pages = max(least, room // each)
    shared = f"{limits.sequences} requests share a KV cache of {pages * PAGE} positions"
    full = f"memory does not suffice for the {wanted * PAGE} of as many contexts"
    return pages, (f"{shared}: {full}, so they may wait for each other",)
