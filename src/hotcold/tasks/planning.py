"""Plans what of a model a GPU and a CPU get, and predicts the speed, at a full context. Loads no weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, block_type
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.model.kv_cache import CACHE_TYPES
from hotcold.placement.baselines import last_layers, layer_split, paper_placement
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import DEFAULT, PRESETS, Hardware, find_hardware
from hotcold.placement.placement import Placement, read_placement, write_placement
from hotcold.placement.profiles import Profile, find_profile, power_law_profile
from hotcold.placement.sizes import SHAPES, Sizes, sizes_of_file, sizes_of_shape
from hotcold.placement.solver import Solver
from hotcold.runtime.opening import Source, file_of
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.predictor import find_predictors
from hotcold.tasks.profiling import ModelProfile
from hotcold.tasks.texts import new_file
from hotcold.values import integer, printable, size, whole
from hotcold.version import __version__

_GIB = 1 << 30

#: ``time`` is the least predicted time of a token, ``paper`` the most firings on the GPU, as in PowerInfer.
Objective = Literal["time", "paper"]
OBJECTIVES: tuple[Objective, ...] = ("time", "paper")


@dataclass(frozen=True)
class Plan:
    """A placement and what it promises; ``str()`` gives the lines that ``hotcold plan`` prints.

    Speeds are predicted tokens a second of one sequence whose context is full: of the plan, of the CPU alone,
    of the last layers on the GPU without sparsity, and of a GPU that has everything."""

    model: str
    fingerprint: str
    context: int  #: positions
    profile: str  #: where the neurons' activity comes from
    hardware: str
    hardware_source: str
    objective: Literal["time", "paper", "given"]
    budget_bytes: int
    gpu_bytes: int
    cpu_bytes: int
    hot_share: float  #: of the neurons
    hot_activation_share: float  #: of the firings
    predicted_tok_s: float
    cpu_tok_s: float
    layer_split_tok_s: float
    layer_split_layers: int
    all_gpu_tok_s: float
    all_gpu_bytes: int
    #: where every byte goes: ``kind``, ``layer`` or None, ``gpu_bytes``, ``cpu_bytes``; ``hot_share``
    parts: Sequence[dict[str, Any]] = field(repr=False)
    placement: Placement = field(repr=False)
    sizes: Sizes = field(repr=False)

    def report(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        names = [each.name for each in fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("placement", "sizes")}

    def __str__(self) -> str:
        rows = (
            ("predicted", self.predicted_tok_s, ""),
            ("cpu", self.cpu_tok_s, ""),
            ("layer split", self.layer_split_tok_s, f"{self.layer_split_layers} layers, dense"),
            ("all GPU", self.all_gpu_tok_s, f"needs {size(self.all_gpu_bytes)}"),
        )
        hot = f"hot: {self.hot_share:.1%} of neurons, {self.hot_activation_share:.1%} of firings"
        lines = [
            printable(f"{'model':<12}{self.model}", 80),
            printable(f"{'profile':<12}{self.profile}", 80),
            printable(f"{'hardware':<12}{self.hardware}", 80),
            printable(f"{'source':<12}{self.hardware_source}", 80),
            f"{'context':<12}{self.context}",
            f"{'budget':<12}{size(self.budget_bytes)}",
            *self._lines_of_bytes(),
            *("", hot, ""),
            *(f"{title:<12}{speed:>9.2f} tok/s  {note}".rstrip() for title, speed, note in rows),
            *self._lines_of_neurons(),
        ]
        return "\n".join(lines)

    def _lines_of_bytes(self) -> list[str]:
        lines = ["", f"{'':<12}{'GPU':>12}{'CPU':>12}"]
        for kind in [*dict.fromkeys(part["kind"] for part in self.parts), "total"]:
            rows = [part for part in self.parts if kind in (part["kind"], "total")]
            gpu, cpu = (size(sum(row[side] for row in rows)) for side in ("gpu_bytes", "cpu_bytes"))
            lines.append(f"{kind:<12}{gpu:>12}{cpu:>12}")
        return lines

    def _lines_of_neurons(self) -> list[str]:
        lines = ["", "hot neurons by layer"]
        for part in self.parts:
            if part["kind"] == "neurons":
                share, layer = part["hot_share"], part["layer"]
                label = f"{share:.1%}" if layer in self.placement.layers else "CPU"
                lines.append(f"{layer:>5} {'#' * round(60 * share):<60}{label:>8}")
        return lines


_GivenProfile: TypeAlias = str | os.PathLike[str] | Profile | None


@dataclass(frozen=True)
class _Subject:
    """What is to be placed, and how often its neurons fire."""

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
    vram_budget: int | None = None,
    profile: str | os.PathLike[str] | Profile | None = None,
    hardware: str | os.PathLike[str] | Hardware = DEFAULT,
    objective: Objective = "time",
    placement: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Plan:
    """Decides which neurons, layers and other parts of a model a GPU gets, and predicts the speed.

    >>> print(hotcold.plan("model.gguf", vram_budget=8 << 30, output="model.gpuidx"))

    Args:
        model: a GGUF file, or what was loaded from one; None is the built-in model.
        shape: instead of a model, the name of one without a file, with matrices of block type ``type``.
        context: positions; None: a loaded model's own, else the file's, 4096 at most; of a shape 2048. 0: all
            that the model has.
        cache_type: of keys and values; None: a loaded model's own, else ``f16``.
        vram_budget: bytes of GPU memory that may be allocated; None: all of the card's but 1 GiB, or but an
            eighth where it has less than 8 GiB.
        profile: what :func:`hotcold.profile` gave or wrote; None finds ``MODEL.profile.gguf`` beside the
            model, else assumes a power law.
        hardware: the name of a preset, a file that ``hotcold doctor`` wrote, or a :class:`Hardware`.
        objective: what is best.
        placement: a ``.gpuidx`` file that is judged instead of finding another.
        output: where to write the placement; nothing is written without it.

    UserError: names and numbers that are not allowed, and files that are another model's or damaged."""
    if objective not in OBJECTIVES:
        raise UserError(f"objective {objective!r}: choose from {', '.join(OBJECTIVES)}")
    if cache_type is not None and cache_type not in CACHE_TYPES:
        raise UserError(f"cache type {cache_type!r}: choose from {', '.join(CACHE_TYPES)}")
    if context:
        context = whole("context", context, 2)
    to_write = None if output is None else new_file(output)
    machine = hardware if isinstance(hardware, Hardware) else find_hardware(os.fspath(hardware))
    budget = _budget(vram_budget, machine)
    kind = block_type(type.upper())
    if shape is None:
        subject = _of_model(source_of(model), context, cache_type, profile)
    elif model is None:
        subject = _of_shape(shape, kind, context or 2048, cache_type or "f16", profile)
    else:
        raise UserError(f"a model and the shape {shape!r}: give one of them")
    found = _placement(subject, machine, budget, objective, None if placement is None else Path(placement))
    if to_write is not None:
        write_placement(to_write, subject.sizes, found, __version__)
    return _judged(subject, machine, budget, "given" if placement is not None else objective, found)


def _budget(asked: int | None, hardware: Hardware) -> int:
    vram = int(hardware.vram_bytes)
    if not vram:
        seen = f"`hardware={printable(hardware.name)}`: no GPU was measured, so nothing is to be placed"
        raise UserError(f"{seen}; choose a preset, {', '.join(PRESETS)}, or leave it out")
    if asked is None:
        return vram - min(_GIB, vram // 8)
    if not 0 < integer("vram_budget", asked) <= vram:
        allowed = f"more than 0, which is the CPU alone, and at most the card's {vram / _GIB:g} are needed"
        raise UserError(f"`vram_budget` is {asked / _GIB:g} GiB: {allowed}")
    return int(asked)


def _of_shape(name: str, type: BlockType, context: int, cache_type: str, profile: _GivenProfile) -> _Subject:
    if name not in SHAPES:
        raise UserError(f"shape {name!r}: choose from {', '.join(SHAPES)}")
    sizes = sizes_of_shape(name, type, context, cache_type)
    found = power_law_profile(sizes, SHAPES[name]) if profile is None else _profile(sizes, profile, None)
    return _Subject(sizes, found, context)


def _of_model(
    model: Source,
    context: int | None,
    cache_type: str | None,
    profile: _GivenProfile,
) -> _Subject:
    if isinstance(model, LoadedModel):
        context = model.context if context is None else context
        cache_type = cache_type or model.cache_type
    with open_gguf(path := file_of(model)) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        positions = min(config.context, 4096) if context is None else context or config.context
        if positions > config.context:
            raise UserError(f"`context={positions}`: this model has {config.context} positions")
        predictors = find_predictors(file)
        sizes = sizes_of_file(file, config, positions, cache_type or "f16", predictors=predictors)
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
            f"the profile is of {len(neurons)} layers with {neurons[:1]} neurons: another model's"
        )
    return profile


def _placement(
    subject: _Subject, hardware: Hardware, budget: int, objective: Objective, given: Path | None
) -> Placement:
    sizes, profile = subject.sizes, subject.profile
    if given is not None:
        placement = read_placement(given, sizes)
        needed = placement.gpu_bytes(sizes)
        if needed > budget:
            raise UserError(f"{given} needs {needed} bytes: `vram_budget` is {budget}")
        return placement
    if objective == "paper":
        return paper_placement(sizes, profile, hardware, budget)
    return Solver(sizes, profile, Costs.expected(sizes, profile, hardware)).solve(budget)


def _judged(
    subject: _Subject,
    hardware: Hardware,
    budget: int,
    objective: Literal["time", "paper", "given"],
    placement: Placement,
) -> Plan:
    sizes, profile = subject.sizes, subject.profile
    parts = placement.bill(sizes)
    costs = Costs.expected(sizes, profile, hardware)
    everything = last_layers(sizes, len(sizes.neurons))
    dense, split = layer_split(sizes, budget)
    return Plan(
        model=sizes.name,
        fingerprint=sizes.fingerprint,
        context=subject.context,
        profile=profile.source,
        hardware=hardware.name,
        hardware_source=hardware.source,
        objective=objective,
        budget_bytes=budget,
        gpu_bytes=sum(part["gpu_bytes"] for part in parts),
        cpu_bytes=sum(part["cpu_bytes"] for part in parts),
        hot_share=placement.hot_share,
        hot_activation_share=placement.share_of(profile.firing),
        predicted_tok_s=1 / costs.token(placement),
        cpu_tok_s=1 / costs.token(last_layers(sizes, 0)),
        layer_split_tok_s=1 / Costs.expected(dense, profile, hardware).token(split),
        layer_split_layers=len(split.layers),
        all_gpu_tok_s=1 / costs.token(everything),
        all_gpu_bytes=everything.gpu_bytes(sizes),
        parts=parts,
        placement=placement,
        sizes=sizes,
    )
