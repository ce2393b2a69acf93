"""Plan of a model's parts on GPUs, with the predicted speed at a full context. Loads no weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, block_type
from hotcold.formats.files import output_file
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import BatchLimits
from hotcold.kernels.gpus import slack_bytes, unsupported
from hotcold.model.config import Config
from hotcold.model.kv_cache import MOST_DRAFT_STATES
from hotcold.model.mixers.attention import CACHE_TYPES
from hotcold.placement.baselines import last_layers, layer_split, paper_placement
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import DEFAULT, PRESETS, Hardware, find_hardware
from hotcold.placement.memory_plan import MemoryPlan, MemoryRequest, WeightBytes
from hotcold.placement.placement import MOST_GPUS, Placement, read_placement, write_placement
from hotcold.placement.profiles import Profile, find_profile, power_law_profile
from hotcold.placement.sizes import CHUNK, SHAPES, Sizes, sizes_of_shape
from hotcold.placement.solver import Solver
from hotcold.runtime.opening import Source, file_of
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.predictor import find_predictors
from hotcold.tasks.profiling import ModelProfile
from hotcold.values import bytes_of, enough_size, exact_size, printable, round_size, size, whole
from hotcold.version import __version__

_GIB = 1 << 30
_AMPLE = 1 << 60  # bytes of RAM: a plan for GPUs does not depend on this machine's RAM

#: ``time``: the least predicted time of a token; ``paper``: the most activations on the GPU, as in
#: PowerInfer.
Objective = Literal["time", "paper"]
OBJECTIVES: tuple[Objective, ...] = ("time", "paper")


@dataclass(frozen=True)
class Plan:
    """A placement and its predicted speed; ``str()`` gives the lines that ``hotcold plan`` prints. Speeds are
    predicted tokens per second of one sequence with a full context: for the plan, for the CPU alone, for the
    last layers on the GPU without sparsity, and for everything on a GPU."""

    model: str
    fingerprint: str
    context: int  #: positions
    profile: str  #: source of the neurons' activity
    hardware: str
    hardware_source: str
    objective: Literal["time", "paper", "given"]
    budget_bytes: int  #: of all GPUs together, like ``gpu_bytes``
    gpu_bytes: int
    cpu_bytes: int
    hot_share: float  #: share of neurons that are hot
    hot_activation_share: float  #: share of activations that are hot neurons'
    predicted_tok_s: float
    cpu_tok_s: float
    layer_split_tok_s: float
    layer_split_layers: int
    all_gpu_tok_s: float
    all_gpu_bytes: int
    #: rows that account for every byte: ``kind``, ``layer`` or None, ``gpu`` (its number from 0) or None,
    #: ``gpu_bytes``, ``cpu_bytes``, ``hot_share``
    parts: Sequence[dict[str, Any]] = field(repr=False)
    #: each GPU: ``hardware``, ``source``, ``budget_bytes``, ``gpu_bytes``, ``layers``, ``head``
    gpus: Sequence[dict[str, Any]] = field(repr=False)
    placement: Placement = field(repr=False)
    sizes: Sizes = field(repr=False)

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        names = [each.name for each in fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("placement", "sizes")}

    def __str__(self) -> str:
        rows = (
            ("predicted", self.predicted_tok_s, ""),
            ("cpu", self.cpu_tok_s, ""),
            ("layer split", self.layer_split_tok_s, f"{self.layer_split_layers} layers, dense"),
            ("all GPU", self.all_gpu_tok_s, f"needs {size(self.all_gpu_bytes)}"),
        )
        hot = f"hot: {self.hot_share:.1%} of neurons, {self.hot_activation_share:.1%} of activations"
        lines = [
            printable(f"{'model':<12}{self.model}", 80),
            printable(f"{'profile':<12}{self.profile}", 80),
            *(
                printable(f"{kind:<12}{gpu[kind]}", 80)
                for gpu in self.gpus
                for kind in ("hardware", "source")
            ),
            f"{'context':<12}{self.context}",
            f"{'budget':<12}{','.join(exact_size(gpu['budget_bytes']) for gpu in self.gpus)}",
            *self._lines_of_bytes(),
            *("", hot, ""),
            *(f"{title:<12}{speed:>9.2f} tok/s  {note}".rstrip() for title, speed, note in rows),
            *self._lines_of_neurons(),
        ]
        return "\n".join(lines)

    def _lines_of_bytes(self) -> list[str]:
        several = len(self.gpus) > 1
        titles = [*(f"GPU {i}" if several else "GPU" for i in range(len(self.gpus))), "CPU"]
        lines = ["", " " * 12 + "".join(f"{title:>12}" for title in titles)]
        for kind in [*dict.fromkeys(part["kind"] for part in self.parts), "total"]:
            rows = [part for part in self.parts if kind in (part["kind"], "total")]
            sums = [sum(row["gpu_bytes"] for row in rows if row["gpu"] == i) for i in range(len(self.gpus))]
            sums.append(sum(row["cpu_bytes"] for row in rows))
            lines.append(f"{kind:<12}" + "".join(f"{size(nbytes):>12}" for nbytes in sums))
        return lines

    def _lines_of_neurons(self) -> list[str]:
        """Returns a line for each run of layers that print alike."""
        rows: list[tuple[int, str]] = []
        for part in self.parts:
            if part["kind"] == "neurons":
                share, gpu = part["hot_share"], part["gpu"]
                label = "CPU" if gpu is None else f"{share:.1%}"
                device = f" GPU {gpu}" if gpu is not None and len(self.gpus) > 1 else ""
                rows.append((part["layer"], f"{'#' * round(56 * share):<56}{label:>8}{device}"))
        lines = ["", "hot neurons by layer"]
        for line, run in groupby(rows, key=itemgetter(1)):
            layers = [layer for layer, _ in run]
            span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
            lines.append(f"{span:>9} {line}")
        return lines


_GivenHardware: TypeAlias = str | os.PathLike[str] | Hardware
_GivenProfile: TypeAlias = str | os.PathLike[str] | Profile | None


@dataclass(frozen=True)
class _Subject:
    """The model to place, and the activity of its neurons."""

    sizes: Sizes
    profile: Profile
    context: int


def plan(
    model: Model = None,
    *,
    shape: str | None = None,
    type: str = "Q4_0",
    context: int | None = None,
    cache_type: str | None = None,
    vram_budget: int | str | Sequence[int | str] | None = None,
    profile: str | os.PathLike[str] | Profile | None = None,
    hardware: _GivenHardware | Sequence[_GivenHardware] = DEFAULT,
    objective: Objective = "time",
    placement: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Plan:
    """Decides which neurons, layers and other parts of a model go to GPUs, and predicts the speed.

    >>> print(hotcold.plan("model.gguf", vram_budget=8 << 30, output="model.gpuidx"))

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        shape: instead of a model, the name of a shape, with matrices of block type ``type``.
        context: positions; None: a loaded model's own, else the file's, at most 4096, or 2048 for a shape. 0:
            the model's limit.
        cache_type: type of keys and values; None: a loaded model's own, else ``f16``.
        vram_budget: limit of GPU memory, bytes or ``"8GiB"``, the same for each GPU or a sequence; None: the
            GPU's memory minus 1 GiB, or minus an eighth if it has less than 8 GiB.
        profile: a result or file of :func:`hotcold.profile`; None takes ``MODEL.profile.gguf`` in the model's
            folder, else assumes a power law.
        hardware: the name of a preset, a file of ``hotcold doctor``, or a :class:`Hardware`. A sequence
            describes a machine with several GPUs, one each; the first one also describes the processor.
        objective: optimisation target, ``time`` or ``paper``, which is for one GPU.
        placement: a ``.gpuidx`` file to evaluate instead of solving.
        output: file to write the placement to; None writes nothing.
        force: whether to replace an existing ``output``.

    UserError: a name or number is not allowed, or a file is damaged or another model's."""
    if objective not in OBJECTIVES:
        raise UserError(f"objective {objective!r}: choose from {', '.join(OBJECTIVES)}")
    if cache_type is not None and cache_type not in CACHE_TYPES:
        raise UserError(f"cache type {cache_type!r}: choose from {', '.join(CACHE_TYPES)}")
    if context:
        context = whole("context", context, 2)
    to_write = output_file(output, force=force, inputs=[model, profile, placement, *_each(hardware)])
    machines, budgets = _gpus(hardware, vram_budget)
    kind = block_type(type.upper())
    if shape is None:
        subject = _of_model(source_of(model), context, cache_type, profile, min(budgets))
    elif model is None:
        subject = _of_shape(shape, kind, context or 2048, cache_type or "f16", profile)
    else:
        raise UserError(f"a model and the shape {shape!r}: give one of them")
    given = None if placement is None else Path(placement)
    chosen = _placement(subject, machines, budgets, objective, given)
    if to_write is not None:
        write_placement(to_write, subject.sizes, chosen, __version__)
    return _judged(subject, machines, budgets, "given" if placement is not None else objective, chosen)


def _each(hardware: _GivenHardware | Sequence[_GivenHardware]) -> list[_GivenHardware]:
    """Returns the given machines as a list."""
    return [hardware] if isinstance(hardware, str | os.PathLike | Hardware) else [*hardware]


def _gpus(
    hardware: _GivenHardware | Sequence[_GivenHardware], budget: int | str | Sequence[int | str] | None
) -> tuple[list[Hardware], list[int]]:
    """Returns the hardware of each GPU, and its budget. One machine with several budgets means equal GPUs."""
    machines = [
        each if isinstance(each, Hardware) else find_hardware(os.fspath(each)) for each in _each(hardware)
    ]
    asked = (
        [*budget]
        if isinstance(budget, Sequence) and not isinstance(budget, str)
        else [budget] * len(machines)
    )
    if len(machines) == 1:
        machines *= len(asked)
    if len(asked) != len(machines):
        got = f"`vram_budget` has {len(asked)} sizes, and `hardware` {len(machines)} machines"
        raise UserError(f"{got}: give one size for each, or one for all")
    if not 1 <= len(machines) <= MOST_GPUS:
        raise UserError(f"{len(machines)} GPUs (`vram_budget`, `hardware`): 1 to {MOST_GPUS} can be planned")
    return machines, [_budget(*each) for each in zip(asked, machines, strict=True)]


def _budget(asked: int | str | None, hardware: Hardware) -> int:
    vram = int(hardware.vram_bytes)
    if not vram:
        got = f"`hardware={printable(hardware.name)}`: no GPU was measured, so nothing can be placed"
        raise UserError(f"{got}; choose a preset, {', '.join(PRESETS)}, or leave it out")
    if asked is None:
        return round_size(vram - min(_GIB, vram // 8))
    budget = bytes_of("vram_budget", asked)
    if not 0 < budget <= vram:
        allowed = f"more than 0 and at most the GPU's {exact_size(vram)} is needed (0 uses only the CPU)"
        raise UserError(f"`vram_budget` is {exact_size(budget)}: {allowed}")
    return budget


def _of_shape(name: str, type: BlockType, context: int, cache_type: str, profile: _GivenProfile) -> _Subject:
    if name not in SHAPES:
        raise UserError(f"shape {name!r}: choose from {', '.join(SHAPES)}")
    sizes = sizes_of_shape(name, type, context, cache_type)
    activity = power_law_profile(sizes, SHAPES[name]) if profile is None else _profile(sizes, profile, None)
    return _Subject(sizes, activity, context)


def _of_model(
    model: Source,
    context: int | None,
    cache_type: str | None,
    profile: _GivenProfile,
    budget: int,
) -> _Subject:
    if isinstance(model, LoadedModel):
        context = model.context if context is None else context
        cache_type = cache_type or model.plan.request.cache_type
    with open_gguf(path := file_of(model)) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        positions = min(config.context, 4096) if context is None else context or config.context
        if positions > config.context:
            raise UserError(f"`context={positions}`: this model has {config.context} positions")
        if reason := unsupported(config.state_ops):
            raise UserError(f"there is nothing to place: {reason}")
        predictors = find_predictors(file)
        limits = BatchLimits.from_context(positions, 1, CHUNK)
        request = MemoryRequest(limits, positions, cache_type or "f16", draft_max=MOST_DRAFT_STATES)
        memory = MemoryPlan.make(WeightBytes.from_file(file, config), config, request, free=_AMPLE)
        memory = memory.within([budget]).with_gpu_chunk(max(0, budget - slack_bytes(budget)))
        sizes = memory.sizes(file, predictors)
    return _Subject(sizes, _profile(sizes, profile, path), positions)


def _profile(sizes: Sizes, profile: _GivenProfile, model: Path | None) -> Profile:
    if not isinstance(profile, Profile):
        return find_profile(sizes, None if profile is None else Path(profile), model)
    owner = profile.fingerprint if isinstance(profile, ModelProfile) else sizes.fingerprint
    if owner != sizes.fingerprint:
        needed = f"one of this model ({sizes.fingerprint!r}) is needed"
        raise UserError(f"the profile belongs to the model {owner!r}: {needed}")
    neurons = [len(each) for each in profile.firing]
    if neurons != sizes.neurons.tolist():
        raise UserError(
            f"the profile has {len(neurons)} layers with {neurons[:1]} neurons: it belongs to another model"
        )
    return profile


def _placement(
    subject: _Subject,
    machines: Sequence[Hardware],
    budgets: Sequence[int],
    objective: Objective,
    given: Path | None,
) -> Placement:
    sizes, profile = subject.sizes, subject.profile
    if given is not None:
        placement = read_placement(given, sizes)
        for gpu in placement.gpus:
            if gpu >= len(budgets):
                got = f"{given} places layers on GPU {gpu}, counted from 0, of {len(budgets)} GPUs"
                raise UserError(f"{got}: give each a `vram_budget`")
            needed = placement.part_of(gpu).gpu_bytes(sizes)
            if needed > budgets[gpu]:
                raise UserError(
                    f"{given} needs {enough_size(needed)}: `vram_budget` is {exact_size(budgets[gpu])}"
                )
        return placement
    if objective == "paper":
        if len(machines) > 1:
            raise UserError(f"objective 'paper' is for one GPU, not {len(machines)}: leave it out")
        return paper_placement(sizes, profile, machines[0], budgets[0])
    return Solver(sizes, profile, Costs.expected(sizes, profile, *machines)).solve(*budgets)


def _judged(
    subject: _Subject,
    machines: Sequence[Hardware],
    budgets: Sequence[int],
    objective: Literal["time", "paper", "given"],
    placement: Placement,
) -> Plan:
    sizes, profile = subject.sizes, subject.profile
    parts = placement.bill(sizes)
    costs = Costs.expected(sizes, profile, *machines)
    everything = last_layers(sizes, len(sizes.neurons))
    dense, split = layer_split(sizes, *budgets)
    gpus = [
        {
            "hardware": machine.name,
            "source": machine.source,
            "budget_bytes": budget,
            "gpu_bytes": sum(part["gpu_bytes"] for part in parts if part["gpu"] == gpu),
            "layers": placement.layers_of(gpu),
            "head": placement.head == gpu,
        }
        for gpu, (machine, budget) in enumerate(zip(machines, budgets, strict=True))
    ]
    return Plan(
        model=sizes.name,
        fingerprint=sizes.fingerprint,
        context=subject.context,
        profile=profile.source,
        hardware=" and ".join(dict.fromkeys(each.name for each in machines)),
        hardware_source=" and ".join(dict.fromkeys(each.source for each in machines)),
        objective=objective,
        budget_bytes=sum(budgets),
        gpu_bytes=sum(part["gpu_bytes"] for part in parts),
        cpu_bytes=sum(part["cpu_bytes"] for part in parts),
        hot_share=placement.hot_share,
        hot_activation_share=placement.share_of(profile.firing),
        predicted_tok_s=1 / costs.token(placement),
        cpu_tok_s=1 / costs.token(last_layers(sizes, 0)),
        layer_split_tok_s=1 / Costs.expected(dense, profile, *machines).token(split),
        layer_split_layers=len(split.hot) - split.where.count(None),
        all_gpu_tok_s=1 / costs.token(everything),
        all_gpu_bytes=everything.gpu_bytes(sizes),
        parts=parts,
        gpus=gpus,
        placement=placement,
        sizes=sizes,
    )
