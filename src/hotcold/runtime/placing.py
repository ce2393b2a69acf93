"""Decides which backend computes which part of a model that is to be loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import BACKENDS, open_backend
from hotcold.kernels.backend import Backend
from hotcold.kernels.gpu import GPU
from hotcold.kernels.gpus import (
    ENVIRONMENT,
    OFF,
    choose_gpus,
    open_gpu,
    slack_bytes,
    titles,
    unread_types,
    unsupported,
    wished,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.placement.baselines import last_layers
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import DEFAULT, Hardware, find_hardware
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.placement.placement import KINDS, MOST_GPUS, WEIGHTS, Placement, read_placement
from hotcold.placement.profiles import Profile, find_profile, profile_beside
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import Solver
from hotcold.placement.split import SplitDevices
from hotcold.runtime.machine import measured_hardware
from hotcold.runtime.options import AllOptions
from hotcold.values import exact_size, round_size, size

_BESIDES_S = 5e-5  # of a handshake, of a step, and of a layer's kernels
_PAYS = 0.95  # a GPU that nobody asked for is used if a token takes at most this part of the CPU's time


@dataclass(frozen=True)
class ToLoad:
    """A model's file, and how it is to be loaded."""

    file: GGUFFile
    options: AllOptions
    plan: MemoryPlan  #: for the CPU alone
    predictors: Path | None  #: the file of the predictors that sessions use; None: they use none

    def sizes(self, *, gpu: bool) -> Sizes:
        sessions = 2 if self.options["second_sparsity"] else 1
        return self.plan.sizes(self.file, self.predictors, sessions=sessions, gpu=gpu)


@dataclass(frozen=True)
class OnGPU:
    """The part of a model on a GPU, and the form in which it works with the CPU."""

    gpu: GPU
    budget_bytes: int  #: the most that may be allocated
    nbytes: Mapping[str, int]  #: of that, what the placement takes, by the kinds of its bill
    layers: Sequence[int]
    all_layers: int
    head: bool
    hot_share: float  #: of the neurons
    hot_activation_share: float  #: of the firings, by the profile
    spin: bool  #: shaders wait for the CPU's answers, else each answer submits what follows

    def open(self) -> Backend:
        """GPUMemoryError: it has no room for this. GPUError: it cannot be used."""
        backend = open_gpu(self.gpu, self.budget_bytes, spin=self.spin)
        backend.check_memory(self.planned_bytes)  # before gigabytes are read
        return backend

    @property
    def planned_bytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def weight_bytes(self) -> int:
        return sum(self.nbytes[kind] for kind in WEIGHTS)

    def __str__(self) -> str:
        parts = f"{len(self.layers)} of {self.all_layers} layers{' and the head' if self.head else ''}"
        hot = f"{self.hot_share:.1%} of the neurons, {self.hot_activation_share:.1%} of the firings"
        memory = f"{size(self.planned_bytes)} of {exact_size(self.budget_bytes)}"
        form = "a shader that waits" if self.spin else "submits"
        return f"GPU {self.gpu.name} ({self.gpu.driver}): {parts}; {hot}; {memory}; handshakes by {form}"

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            "name": self.gpu.name,
            "driver": self.gpu.driver,
            "kind": self.gpu.kind,
            "budget_bytes": self.budget_bytes,
            "planned_bytes": self.planned_bytes,
            "first_layer": self.layers[0] if self.layers else 0,
            "layers": len(self.layers),
            "head": self.head,
            "hot_share": self.hot_share,
            "hot_activation_share": self.hot_activation_share,
            "handshake": "spin" if self.spin else "submit",
        }


@dataclass(frozen=True)
class Decision:
    """Which backends a model's parts get; without a placement all of them the CPU."""

    notes: tuple[str, ...] = ()  #: what was assumed, and what was left out
    placement: Placement | None = None
    on_gpus: tuple[OnGPU, ...] = ()  #: those of the placement, in order; none where something else plays them
    asked: bool = True  #: whether somebody wants a GPU; else a failure is no more than a note
    slots: int | None = None  #: for states of sequences, where the placement has fewer than the CPU alone

    def apply_to(self, plan: MemoryPlan) -> MemoryPlan:
        """Returns a plan for the CPU alone as it is with this placement. Where the CPU computes nothing, no
        block drafts tokens."""
        if self.placement is None:
            return plan
        config = plan.config if self.placement.cpu_computes else replace(plan.config, draft=None)
        slots = plan.slots if self.slots is None else self.slots
        on_gpus = [each.nbytes for each in self.on_gpus if not each.gpu.shares_memory]
        return replace(plan, config=config, placement=self.placement, slots=slots, gpu_bytes=on_gpus)

    def open(self, options: AllOptions, layers: int) -> Devices:
        """GPUMemoryError: a GPU has no room for this. GPUError: it cannot be used."""
        cold = open_backend(options["backend"], options["threads"], options["prompt_math"])
        if self.placement is None:
            return Devices.of(cold, layers)
        if self.on_gpus:
            gpus = [each.open() for each in self.on_gpus]
            return SplitDevices.place(self.placement, cold, dict(zip(self.placement.gpus, gpus, strict=True)))
        played = {gpu: self._open_hot(options, cold) for gpu in self.placement.gpus or [0]}
        return SplitDevices.place(self.placement, cold, played)

    def _open_hot(self, options: AllOptions, cold: Backend) -> Backend:
        assert options["hot_backend"] is not None
        threads = options["hot_threads"]
        if threads is None and options["hot_backend"] == "cpu":
            threads = cold.threads  # as many: threads that wait offer their cores to the other side's
        return open_backend(options["hot_backend"], threads, options["prompt_math"])


def decide(model: ToLoad, most: Mapping[GPU, int] = MappingProxyType({})) -> Decision:
    """Decides where each part of the model lies, as the options ask. ``most``: bytes to allocate on GPUs that
    had no room for more.

    UserError: options that do not go together, a placement or profile that is not right, or a GPU that is not
    there."""
    options = model.options
    if options["ram_budget"] is not None:
        return _in_ram(options)
    wanted = options["placement"] is not None or options["vram_budget"] is not None
    _check(options, wanted=wanted)
    gpu_asked = None if options["gpu"] is None else str(options["gpu"])
    if options["hot_backend"] is not None:
        if options["placement"] is not None:
            found = _read(model, Path(options["placement"]), gpu=False)
        else:
            budgets = _budgets(options, [0])
            model = replace(model, plan=model.plan.within(budgets))
            found = _solve(model, [find_hardware(DEFAULT)] * len(budgets), budgets, gpu=False)
        if apart := _apart(model.plan.config, found.placement):
            raise UserError(f"`hot_backend`: {apart}: a placement with all layers or none is needed")
        return Decision(found.notes, found.placement, slots=model.plan.slots)
    asked = wanted or wished(gpu_asked) is not None
    if options["backend"] != "cpu" and not asked:
        return Decision()  # who checks the other backend wants that alone
    gpus, note = choose_gpus(gpu_asked, needed=wanted)
    if len(gpus) > MOST_GPUS:
        raise UserError(f"`gpu={gpu_asked}` names {len(gpus)} GPUs: {MOST_GPUS} are the most")
    if gpus:
        return _on_gpus(model, gpus, most, asked=asked)
    if wanted:
        raise UserError(f"`placement` and `vram_budget` are for a GPU, and {ENVIRONMENT} is {OFF}")
    return Decision((note,) if note else ())


def beside_ram_budget(options: AllOptions) -> str | None:
    """Names an option that does not go with a budget of RAM; None where there is none."""
    if options["backend"] != "cpu":
        return "backend"
    others = ("placement", "vram_budget", "hot_backend", "hot_threads")
    given = next((name for name in others if options[name] is not None), None)  # type: ignore[literal-required]
    if given is None and options["gpu"] not in (None, OFF):
        given = "gpu"
    return given


def _in_ram(options: AllOptions) -> Decision:
    """The CPU alone, whose memory has a budget."""
    given = beside_ram_budget(options)
    if given == "backend":
        raise UserError(f"`ram_budget` needs the backend cpu, not {options['backend']}")
    if given is not None:
        raise UserError(f"`ram_budget` is for the CPU alone today: leave out `{given}`")
    note = "no GPU is used: `ram_budget` is for the CPU alone today"
    return Decision(() if options["gpu"] == OFF else (note,))


def _check(options: AllOptions, *, wanted: bool) -> None:
    hot = options["hot_backend"]
    if options["placement"] is not None and options["vram_budget"] is not None:
        raise UserError("`placement` and `vram_budget`: give one of them")
    if hot is None and options["hot_threads"] is not None:
        raise UserError(f"`hot_threads` needs `hot_backend={' or '.join(BACKENDS)}`")
    if hot is not None and not wanted:
        raise UserError("`hot_backend` and `hot_threads` need `placement` or `vram_budget`")
    if hot is not None and options["gpu"] not in (None, OFF):
        raise UserError(f"`gpu={options['gpu']}` and `hot_backend={hot}`: give one of them")
    if hot is None and options["gpu"] == OFF and wanted:
        raise UserError("`placement` and `vram_budget` are for a GPU: leave them out, or `gpu=off`")


@dataclass(frozen=True)
class _Found:
    """A placement, and what it is worth."""

    placement: Placement
    sizes: Sizes
    profile: Profile
    ratio: float  #: time of a token, to that of the CPU alone
    source: str  #: of the figures that say so
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether GPUs get nothing."""
        return not self.placement.gpus


def _read(model: ToLoad, path: Path, *, gpu: bool) -> _Found:
    sizes = model.sizes(gpu=gpu)
    profile = find_profile(sizes, None, model.file.path)
    return _Found(read_placement(path, sizes), sizes, profile, 0.0, "", ())


def _solve(
    model: ToLoad, machines: Sequence[Hardware], budgets: Sequence[int], *, gpu: bool, asked: bool = True
) -> _Found:
    """UserError: the profile beside the model is another model's, say, and a GPU was ``asked`` for."""
    sizes = model.sizes(gpu=gpu)
    profile, unfit = profile_beside(sizes, model.file.path, asked=asked)
    costs = Costs.expected(sizes, profile, *machines)
    placement = Solver(sizes, profile, costs).solve(*budgets)
    ratio = costs.token(placement) / costs.token(last_layers(sizes, 0))
    sources = (each.source if each.machine else f"the preset {each.name}" for each in machines)
    source = " and ".join(dict.fromkeys(sources))
    assumed = f"{source}, and {profile.source}"
    measured = all(each.machine for each in machines)
    measure = "" if measured or not gpu else "; hotcold doctor measures this machine"
    note = f"neurons are placed for {assumed}: hotcold plan takes others (`hardware`){measure}"
    return _Found(placement, sizes, profile, ratio, source, (unfit, note) if unfit else (note,))


def _assumed() -> Hardware:
    """Assumed figures of a GPU that was not measured: a preset, with reported times of handshakes and
    kernels."""
    name = f"{DEFAULT} with {1e6 * _BESIDES_S:.0f} us a layer"
    preset = find_hardware(DEFAULT)
    return replace(preset, name=name, handshake_s=_BESIDES_S, step_s=_BESIDES_S, layer_s=_BESIDES_S)


def _favourable() -> Hardware:
    """A machine on which a GPU is always worth its while: for those who ask for one that is not, and for
    software drivers, which are for checks."""
    return replace(find_hardware(DEFAULT), name=f"{DEFAULT} without handshakes", handshake_s=1e-9)


def _budgets(options: AllOptions, free: Sequence[int]) -> list[int]:
    """Returns the budget of each GPU; ``free`` is what each has where no budget is given."""
    asked: Any = options["vram_budget"]
    each = asked if isinstance(asked, Sequence) else free if asked is None else [asked] * len(free)
    if len(each) != len(free):
        seen = f"`vram_budget` has {len(each)} sizes, and GPUs that are used are {len(free)}"
        raise UserError(f"{seen}: give one size for each, or one for all")
    return [*each]


def _on_gpus(model: ToLoad, gpus: Sequence[GPU], most: Mapping[GPU, int], *, asked: bool) -> Decision:
    options, measured = model.options, [measured_hardware(gpu) for gpu in gpus]
    name = ",".join(str(gpu.index) for gpu in gpus)
    unused = f"GPU {titles(gpus)} is not used"
    unread = unread_types(info.type.name for info in model.file.tensors.values() if info.type.supported)
    if unread:
        why = (
            f"it does not compute with block type {' or '.join(unread)} yet, which {model.file.path.name} has"
        )
        if asked:
            raise UserError(f"{unused}: {why}: leave out what asks for a GPU, or `gpu={OFF}`")
        return Decision((f"{unused}: {why}",))
    if (reason := unsupported(model.plan.config.state_ops)) is not None:
        if asked:
            raise UserError(f"{unused}: {reason}: leave out what asks for a GPU, or `gpu={OFF}`")
        return Decision((f"{unused}: {reason}",))
    if not asked and any(gpu.shares_memory for gpu in gpus) and None in measured:
        shares = "it shares the processor's memory, and need not be faster"
        return Decision((f"{unused}: {shares}: hotcold doctor measures it, and `gpu={name}` uses it",))
    budgets = _budgets(options, [gpu.default_budget for gpu in gpus])
    for gpu, budget in zip(gpus, budgets, strict=True):
        if budget > gpu.memory_bytes:
            seen = f"`vram_budget` is {exact_size(budget)}, and GPU {gpu.title} has {size(gpu.memory_bytes)}"
            raise UserError(f"{seen}: at most {exact_size(round_size(gpu.memory_bytes))} are allowed")
    budgets = [min(budget, most.get(gpu, budget)) for gpu, budget in zip(gpus, budgets, strict=True)]
    buffers = [max(0, budget - slack_bytes(budget)) for budget in budgets]
    model = replace(model, plan=model.plan.within(buffers))
    favourable = [_favourable()] * len(gpus)
    if options["placement"] is not None and not most:
        found = _read(model, Path(options["placement"]), gpu=True)
    elif any(gpu.kind == "software" for gpu in gpus):
        found = _solve(model, favourable, buffers, gpu=True, asked=asked)
    else:
        found = _solve(model, [each or _assumed() for each in measured], buffers, gpu=True, asked=asked)
        if not asked and found.ratio > _PAYS:
            why = f"it is expected not to be faster than the CPU ({found.source})"
            return Decision((f"{unused}: {why}: `gpu={name}` uses it",))
        if found.is_empty:
            slower = f"the CPU alone (`gpu={OFF}`) is expected to be faster ({found.source})"
            found = _solve(model, favourable, buffers, gpu=True, asked=asked)
            found = replace(found, notes=(slower, *found.notes))
    if found.is_empty:
        return Decision((f"{unused}: within {exact_size(max(budgets))} there is room for nothing",))
    if apart := _apart(model.plan.config, found.placement):
        why = f"{apart}: a placement with all layers or none on the GPU is needed"
        if asked:
            raise UserError(f"{unused}: {why}: leave out what asks for a GPU, or `gpu={OFF}`")
        return Decision((f"{unused}: {why}",))
    used = found.placement.gpus
    if used[-1] >= len(gpus):
        seen = f"{options['placement']} places parts on GPU {used[-1]}, counted from 0"
        raise UserError(f"{seen}: name {used[-1] + 1} GPUs (`gpu`), not {len(gpus)}")
    spins = [each is not None and each.spins for each in measured]
    on_gpus = tuple(_on(i, gpus[i], found, budgets[i], spin=spins[i]) for i in used)
    idle = [gpu for i, gpu in enumerate(gpus) if i not in used]
    notes = (f"GPU {titles(idle)} has no part: that is expected to be faster",) if idle else ()
    notes = (*map(str, on_gpus), *notes, *found.notes)
    return Decision(notes, found.placement, on_gpus, asked, model.plan.slots)


def _apart(config: Config, placement: Placement) -> str | None:
    """Says which layer reads what lies on another device: keys and values, or neurons whose gates all decide
    together which are 0."""
    for i, mixer in enumerate(config.mixers):
        if config.cut_of(i) is not None and placement.where[i] is not None and not placement.hot[i].all():
            return f"layer {i} needs the gates of all of its neurons, some of which would lie elsewhere"
        if (source := mixer.pages_of) is not None and placement.where[i] != placement.where[source]:
            return f"layer {i} reads keys and values of layer {source}, which would lie elsewhere"
    return None


def _on(number: int, gpu: GPU, found: _Found, budget: int, *, spin: bool) -> OnGPU:
    """``number`` is the GPU's in the placement."""
    part = found.placement.part_of(number)
    nbytes = {kind: part.gpu_bytes(found.sizes, kind) for kind in KINDS}
    needed = sum(nbytes.values())
    return OnGPU(
        gpu=gpu,
        budget_bytes=max(budget, needed + slack_bytes(needed)),  # a placement that is given may need more
        nbytes=nbytes,
        layers=part.layers_of(number),
        all_layers=len(part.hot),
        head=part.head is not None,
        hot_share=part.hot_share,
        hot_activation_share=part.share_of(found.profile.firing),
        spin=spin,
    )
