"""Choice of devices at loading: which backend computes which part of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import BACKENDS, open_backend
from hotcold.kernels.backend import Backend, BatchLimits
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
from hotcold.placement.costs import Costs, prompt_s, streaming_s
from hotcold.placement.hardware import DEFAULT, Hardware, find_hardware
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.placement.placement import KINDS, MOST_GPUS, WEIGHTS, Placement, read_placement
from hotcold.placement.profiles import Profile, find_profile, profile_beside
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import Solver
from hotcold.placement.split import SplitDevices
from hotcold.runtime import memory
from hotcold.runtime.machine import measured_hardware
from hotcold.runtime.options import AllOptions, streams_prompts
from hotcold.values import exact_size, round_size, size

_BESIDES_S = 5e-5  # assumed time of a handshake, of a step's overhead, and of a layer's kernels
_PAYS = 0.95  # by default, a GPU is used if a token takes at most this part of the CPU's time
_PROMPTS_PAY = 1.1  # by default, weights are streamed if prompts are faster by more than this factor
_TOKENS_LOSE = 1.05  # limit for how much slower tokens become, since streamed weights take a GPU's memory


@dataclass(frozen=True)
class ToLoad:
    """A model's file, its options, and its plan."""

    file: GGUFFile
    options: AllOptions
    plan: MemoryPlan  #: for the CPU alone
    predictors: Path | None  #: the file of the predictors that sessions use; None: no predictors
    streams: bool = False  #: whether GPUs compute the cold neurons of prompts, from streamed weights

    def sizes(self, *, gpu: bool) -> Sizes:
        sessions = 2 if self.options["second_sparsity"] else 1
        sizes = self.plan.sizes(self.file, self.predictors, sessions=sessions, gpu=gpu)
        return replace(sizes, streams=self.streams)


@dataclass(frozen=True)
class OnGPU:
    """The part of a model on a GPU, and the form of its handshake with the CPU."""

    gpu: GPU
    budget_bytes: int  #: limit for allocation
    nbytes: Mapping[str, int]  #: bytes of the placement within the budget, by the kinds of its bill
    layers: Sequence[int]
    all_layers: int
    head: bool
    hot_share: float  #: share of the neurons
    hot_activation_share: float  #: share of the activations, by the profile
    spin: bool  #: True: shaders wait for the CPU's answers; False: each answer submits the next segment

    def open(self) -> Backend:
        """Opens the GPU. GPUMemoryError: its free memory does not suffice. GPUError: it is not usable."""
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
        hot = f"{self.hot_share:.1%} of the neurons, {self.hot_activation_share:.1%} of the activations"
        memory = f"{size(self.planned_bytes)} of {exact_size(self.budget_bytes)}"
        form = "a waiting shader" if self.spin else "submits"
        return f"GPU {self.gpu.name} ({self.gpu.driver}): {parts}; {hot}; {memory}; synchronised by {form}"

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
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
    """The backends of a model's parts; without a placement the CPU has all of them."""

    notes: tuple[str, ...] = ()  #: assumptions and omissions, for the user
    placement: Placement | None = None
    on_gpus: tuple[OnGPU, ...] = ()  #: the placement's GPUs in order; empty if another backend replaces them
    asked: bool = True  #: whether the user asked for a GPU; otherwise a failure is only a note
    slots: int | None = None  #: state slots, if the placement has fewer than the CPU alone
    limits: BatchLimits | None = None  #: of a step, if the placement has larger ones than the CPU alone
    streamed_bytes: int = 0  #: weights that each step with prompts copies to GPUs
    token_ratio: float = 0.0  #: predicted time of a token, relative to the CPU alone
    prompt_s: float | None = None  #: predicted seconds of a full step of a prompt; None: unknown

    def apply_to(self, plan: MemoryPlan) -> MemoryPlan:
        """Applies the placement to a plan for the CPU alone; drops the draft block if the CPU computes
        nothing."""
        if self.placement is None:
            return plan
        config = plan.config if self.placement.cpu_computes else replace(plan.config, draft=None)
        slots = plan.slots if self.slots is None else self.slots
        request = plan.request if self.limits is None else replace(plan.request, limits=self.limits)
        on_gpus = [each.nbytes for each in self.on_gpus if not each.gpu.shares_memory]
        decided = replace(plan, config=config, request=request, placement=self.placement, slots=slots)
        return replace(decided, gpu_bytes=on_gpus, streamed_bytes=self.streamed_bytes)

    def open(self, options: AllOptions, layers: int) -> Devices:
        """Opens the backends. GPUMemoryError: a GPU's memory does not suffice. GPUError: a GPU is not
        usable."""
        cold = open_backend(options["backend"], options["threads"], options["prompt_math"])
        if self.placement is None:
            return Devices.from_backend(cold, layers)
        if self.on_gpus:
            gpus = dict(zip(self.placement.gpus, [each.open() for each in self.on_gpus], strict=True))
        else:
            gpus = {gpu: self._open_hot(options, cold) for gpu in self.placement.gpus or [0]}
        return SplitDevices.place(self.placement, cold, gpus, streams=self.streamed_bytes > 0)

    def _open_hot(self, options: AllOptions, cold: Backend) -> Backend:
        assert options["hot_backend"] is not None
        threads = options["hot_threads"]
        if threads is None and options["hot_backend"] == "cpu":
            # waiting threads offer their cores to the other side's, so both may have all
            threads = cold.threads
        return open_backend(options["hot_backend"], threads, options["prompt_math"])


def decide(model: ToLoad, most: Mapping[GPU, int] = MappingProxyType({})) -> Decision:
    """Chooses the device of each part of the model by the options. ``most``: limits for GPUs whose memory ran
    out. UserError: incompatible options, an invalid placement or profile, or an unknown GPU."""
    if model.options["cold_prompts"] != "auto":
        return _decide(replace(model, streams=streams_prompts(model.options)), most)
    on_both = _decide(model, most)
    if on_both.prompt_s is None:
        return on_both
    try:
        # Streamed weights take memory on the GPU, so fewer neurons are hot: the placement is another one.
        on_gpu = _decide(replace(model, streams=True), most)
    except UserError:  # the first placement is possible, and the user did not ask for this one
        return on_both
    return on_gpu if _streaming_pays(model.plan, on_both, on_gpu) else on_both


def _streaming_pays(plan: MemoryPlan, on_both: Decision, on_gpu: Decision) -> bool:
    """Returns True if prompts are clearly faster with streamed weights, tokens about as fast, and main memory
    holds a second copy of the cold neurons."""
    if on_both.prompt_s is None or on_gpu.prompt_s is None:
        return False
    faster = _PROMPTS_PAY * on_gpu.prompt_s < on_both.prompt_s
    if not faster or on_gpu.token_ratio > _TOKENS_LOSE * on_both.token_ratio:
        return False
    free = memory.available_memory()
    return free is None or not on_gpu.apply_to(plan).shortage(free)


def _decide(model: ToLoad, most: Mapping[GPU, int]) -> Decision:
    """Chooses devices with or without streamed prompts, as ``model`` has them; errors as in
    :func:`decide`."""
    options = model.options
    if options["ram_budget"] is not None:
        return _in_ram(options)
    wanted = options["placement"] is not None or options["vram_budget"] is not None
    _check(options, wanted=wanted)
    if streams_prompts(options):
        _check_streaming(model)
        wanted = True
    gpu_asked = None if options["gpu"] is None else str(options["gpu"])
    if options["hot_backend"] is not None:
        if options["placement"] is not None:
            rated = _read(model, Path(options["placement"]), gpu=False)
        else:
            budgets = _budgets(options, [0])
            model = replace(model, plan=model.plan.within(budgets))
            rated = _solve(model, [find_hardware(DEFAULT)] * len(budgets), budgets, gpu=False)
        if apart := _apart(model.plan.config, rated.placement):
            raise UserError(f"`hot_backend`: {apart}: use a placement with all layers or none")
        streamed, stream_notes = _streamed(rated)
        notes = (*stream_notes, *rated.notes)
        return Decision(notes, rated.placement, slots=model.plan.slots, streamed_bytes=streamed)
    asked = wanted or wished(gpu_asked) is not None
    if options["backend"] != "cpu" and not asked:
        return Decision()  # a backend for checks computes alone
    gpus, note = choose_gpus(gpu_asked, needed=wanted)
    if len(gpus) > MOST_GPUS:
        raise UserError(f"`gpu={gpu_asked}` names {len(gpus)} GPUs: {MOST_GPUS} are the most")
    if gpus:
        return _on_gpus(model, gpus, most, asked=asked)
    if wanted:
        given = _given_for_gpu(options)
        raise UserError(f"{given} for a GPU, and {ENVIRONMENT} is {OFF}")
    return Decision((note,) if note else ())


def beside_ram_budget(options: AllOptions) -> str | None:
    """Returns the name of an option that excludes a budget of RAM; None if there is none."""
    if options["backend"] != "cpu":
        return "backend"
    others = ("placement", "vram_budget", "hot_backend", "hot_threads")
    given = next((name for name in others if options[name] is not None), None)  # type: ignore[literal-required]
    if given is None and options["gpu"] not in (None, OFF):
        given = "gpu"
    if given is None and streams_prompts(options):
        given = "cold_prompts"
    return given


def _in_ram(options: AllOptions) -> Decision:
    """Returns the decision for a CPU with a budget of RAM."""
    given = beside_ram_budget(options)
    if given == "backend":
        raise UserError(f"`ram_budget` needs the backend cpu, not {options['backend']}")
    if given is not None:
        raise UserError(f"`ram_budget` works only without a GPU today: leave out `{given}`")
    note = "no GPU is used: `ram_budget` works only without a GPU today"
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
    if hot is None and options["gpu"] == OFF and (wanted or streams_prompts(options)):
        given = _given_for_gpu(options)
        raise UserError(f"{given} for a GPU: leave them out, or leave out `gpu=off`")


def _given_for_gpu(options: AllOptions) -> str:
    """Returns the beginning of a message about options that need a GPU."""
    others = ", `vram_budget` and `cold_prompts=gpu`" if streams_prompts(options) else " and `vram_budget`"
    return f"`placement`{others} are"


def _check_streaming(model: ToLoad) -> None:
    """Raises UserError if a model's cold neurons cannot be streamed."""
    if model.plan.config.experts is not None:
        got = f"{model.file.path.name} has experts, whose weights are not streamed"
        raise UserError(f"`cold_prompts=gpu`: {got}: use `cold_prompts=cpu`")


def _streamed(
    rated: "_RatedPlacement", measured: Sequence[Hardware | None] = ()
) -> tuple[int, tuple[str, ...]]:
    """Returns the bytes that a step with prompts copies to GPUs, and the note about them. ``measured``: the
    figures of each GPU, for the time of the copies."""
    nbytes = sum(rated.placement.streamed_bytes(rated.sizes))
    note = f"prompts run on the GPU: each of their steps copies {size(nbytes)} of cold neurons to it"
    machines = [each for each in measured if each is not None]
    if not nbytes:
        note = "`cold_prompts=gpu` has no effect: no layer on the GPU has cold neurons"
    elif machines and len(machines) == len(measured):
        seconds = streaming_s(rated.sizes, rated.placement, machines)
        note += f", which takes {seconds:.2g} s at the measured speed of the link"
    return nbytes, (note,) if rated.sizes.streams else ()


@dataclass(frozen=True)
class _RatedPlacement:
    """A placement and its predicted speed."""

    placement: Placement
    sizes: Sizes
    profile: Profile
    ratio: float  #: time of a token relative to the CPU alone
    source: str  #: source of the hardware figures
    notes: tuple[str, ...]
    #: predicted seconds of a full step of a prompt; None: not measured, or the model has experts
    prompt_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """True if GPUs get nothing."""
        return not self.placement.gpus


def _read(model: ToLoad, path: Path, *, gpu: bool) -> _RatedPlacement:
    sizes = model.sizes(gpu=gpu)
    profile = find_profile(sizes, None, model.file.path)
    return _RatedPlacement(read_placement(path, sizes), sizes, profile, 0.0, "", ())


def _solve(
    model: ToLoad, machines: Sequence[Hardware], budgets: Sequence[int], *, gpu: bool, asked: bool = True
) -> _RatedPlacement:
    """Solves for the fastest placement. UserError: a GPU was ``asked`` for, and the model's profile is
    unusable."""
    sizes = model.sizes(gpu=gpu)
    profile, unfit = profile_beside(sizes, model.file.path, asked=asked)
    costs = Costs.expected(sizes, profile, *machines)
    placement = Solver(sizes, profile, costs).solve(*budgets)
    ratio = costs.token(placement) / costs.token(last_layers(sizes, 0))
    prompt = None
    if model.plan.config.experts is None and all(each.knows_prompts for each in machines):
        prompt = prompt_s(sizes, placement, machines, model.plan.request.limits.chunk)
    sources = (each.source if each.machine else f"the preset {each.name}" for each in machines)
    source = " and ".join(dict.fromkeys(sources))
    measured = all(each.machine for each in machines)
    measure = "" if measured or not gpu else "; hotcold doctor measures this machine"
    planned = f"the division between CPU and GPU is planned for {source} (profile: {profile.source})"
    note = f"{planned}: hotcold plan takes other figures (`hardware`){measure}"
    notes = (unfit, note) if unfit else (note,)
    return _RatedPlacement(placement, sizes, profile, ratio, source, notes, prompt)


def _assumed() -> Hardware:
    """Returns assumed figures of a GPU without measurements: a preset, with reported times of handshakes and
    kernels."""
    name = f"{DEFAULT} with {1e6 * _BESIDES_S:.0f} us a layer"
    preset = find_hardware(DEFAULT)
    return replace(preset, name=name, handshake_s=_BESIDES_S, step_s=_BESIDES_S, layer_s=_BESIDES_S)


def _favourable() -> Hardware:
    """Returns figures with which a GPU always pays: for users who ask for a GPU that does not, and for
    software drivers, which serve for checks."""
    return replace(find_hardware(DEFAULT), name=f"{DEFAULT} without handshakes", handshake_s=1e-9)


def _budgets(options: AllOptions, free: Sequence[int]) -> list[int]:
    """Returns the budget of each GPU; ``free`` has the defaults."""
    asked: Any = options["vram_budget"]
    budgets = asked if isinstance(asked, Sequence) else free if asked is None else [asked] * len(free)
    if len(budgets) != len(free):
        got = f"`vram_budget` has {len(budgets)} sizes, and {len(free)} GPUs are used"
        raise UserError(f"{got}: give one size for each, or one for all")
    return [*budgets]


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
            raise UserError(f"{unused}: {why}: leave out the options of GPUs, or give `gpu={OFF}`")
        return Decision((f"{unused}: {why}",))
    if (reason := unsupported(model.plan.config.state_ops)) is not None:
        if asked:
            raise UserError(f"{unused}: {reason}: leave out the options of GPUs, or give `gpu={OFF}`")
        return Decision((f"{unused}: {reason}",))
    if not asked and any(gpu.shares_memory for gpu in gpus) and None in measured:
        shares = "it shares the processor's memory, and may not be faster"
        return Decision((f"{unused}: {shares}: hotcold doctor measures it, and `gpu={name}` uses it",))
    budgets = _budgets(options, [gpu.default_budget for gpu in gpus])
    for gpu, budget in zip(gpus, budgets, strict=True):
        if budget > gpu.memory_bytes:
            got = f"`vram_budget` is {exact_size(budget)}, and GPU {gpu.title} has {size(gpu.memory_bytes)}"
            raise UserError(f"{got}: at most {exact_size(round_size(gpu.memory_bytes))} are allowed")
    budgets = [min(budget, most.get(gpu, budget)) for gpu, budget in zip(gpus, budgets, strict=True)]
    buffers = [max(0, budget - slack_bytes(budget)) for budget in budgets]
    model = replace(model, plan=model.plan.within(buffers).with_gpu_chunk(min(buffers)))
    favourable = [_favourable()] * len(gpus)
    if options["placement"] is not None and not most:
        rated = _read(model, Path(options["placement"]), gpu=True)
    elif any(gpu.kind == "software" for gpu in gpus):
        rated = _solve(model, favourable, buffers, gpu=True, asked=asked)
    else:
        rated = _solve(model, [each or _assumed() for each in measured], buffers, gpu=True, asked=asked)
        if not asked and rated.ratio > _PAYS:
            why = f"it is not expected to be faster than the CPU ({rated.source})"
            return Decision((f"{unused}: {why}: `gpu={name}` uses it",))
        if rated.is_empty:
            slower = f"the CPU without a GPU (`gpu={OFF}`) is expected to be faster ({rated.source})"
            rated = _solve(model, favourable, buffers, gpu=True, asked=asked)
            rated = replace(rated, notes=(slower, *rated.notes))
    if rated.is_empty:
        return Decision((f"{unused}: nothing fits in {exact_size(max(budgets))}",))
    if apart := _apart(model.plan.config, rated.placement):
        why = f"{apart}: use a placement with all layers or none on the GPU"
        if asked:
            raise UserError(f"{unused}: {why}: leave out the options of GPUs, or give `gpu={OFF}`")
        return Decision((f"{unused}: {why}",))
    used = rated.placement.gpus
    if used[-1] >= len(gpus):
        got = f"{options['placement']} places layers on GPU {used[-1]}, counted from 0"
        raise UserError(f"{got}: give {used[-1] + 1} GPUs (`gpu`), not {len(gpus)}")
    spins = [each is not None and each.spins for each in measured]
    on_gpus = tuple(_on(i, gpus[i], rated, budgets[i], spin=spins[i]) for i in used)
    idle = [gpu for i, gpu in enumerate(gpus) if i not in used]
    notes = (f"GPU {titles(idle)} is not used: that is expected to be faster",) if idle else ()
    software = [gpu for gpu in gpus if gpu.kind == "software"]
    if software:
        slow = f"expect it to be many times slower than `gpu={OFF}`"
        what = f"GPU {titles(software)} is a software driver, which computes on the CPU"
        notes = (*notes, f"{what}: {slow}")
    streamed, stream_notes = _streamed(rated, measured)
    notes = (*map(str, on_gpus), *stream_notes, *notes, *rated.notes)
    return Decision(
        notes,
        rated.placement,
        on_gpus,
        asked=asked,
        slots=model.plan.slots,
        limits=model.plan.request.limits,
        streamed_bytes=streamed,
        token_ratio=rated.ratio,
        prompt_s=rated.prompt_s,
    )


def _apart(config: Config, placement: Placement) -> str | None:
    """Names the layer that reads data on another device: keys and values, or gates that together decide which
    neurons are zero. None if there is none."""
    for i, mixer in enumerate(config.mixers):
        if config.cut_of(i) is not None and placement.where[i] is not None and not placement.hot[i].all():
            return f"layer {i} needs the gates of all of its neurons, and some would be on another device"
        if (source := mixer.pages_of) is not None and placement.where[i] != placement.where[source]:
            return f"layer {i} reads keys and values of layer {source}, which would be on another device"
    return None


def _on(number: int, gpu: GPU, rated: _RatedPlacement, budget: int, *, spin: bool) -> OnGPU:
    """Returns the part of a placement on one GPU; ``number`` is the GPU's number in the placement."""
    part = rated.placement.part_of(number)
    nbytes = {kind: part.gpu_bytes(rated.sizes, kind) for kind in KINDS}
    needed = sum(nbytes.values())
    return OnGPU(
        gpu=gpu,
        budget_bytes=max(budget, needed + slack_bytes(needed)),  # a placement from a file may need more
        nbytes=nbytes,
        layers=part.layers_of(number),
        all_layers=len(part.hot),
        head=part.head is not None,
        hot_share=part.hot_share,
        hot_activation_share=part.share_of(rated.profile.firing),
        spin=spin,
    )
