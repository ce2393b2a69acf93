"""Plans what of a model of experts lies in a budget of RAM, and predicts the speed: from tokens of its
first layers and reads of its experts, which are measured here, or from rates of memory and of a disk."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.cores import available_cores
from hotcold.kernels.cpu_disk import READ_BYTES, WAVE, reads_at_once
from hotcold.model.config import Config
from hotcold.placement.disk_speed import DiskSpeed, measure_disk
from hotcold.placement.expert_speed import ExpertSpeed, measure_experts
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.placement.hot_neurons import HotNeurons
from hotcold.placement.profiles import Profile, find_profile
from hotcold.placement.routes import how_many, mean, missed_by_token
from hotcold.placement.shelves import Shelves
from hotcold.placement.sizes import Sizes, sizes_of_file
from hotcold.runtime.loading import shelves_of
from hotcold.runtime.opening import file_of
from hotcold.runtime.options import Progress
from hotcold.tasks.first_layers import TokenTime, sizes_to_time, time_tokens
from hotcold.tasks.missed_experts import Between, MissTime, time_misses
from hotcold.values import integer, printable, size

Floats = npt.NDArray[Any]

_PARTS = 3  # reads of an expert: gate, up and down


@dataclass(frozen=True)
class RAMPlan:
    """A plan: what lies in memory, and the speed that follows; ``str()`` gives what ``hotcold plan`` prints.

    The speed is of one sequence whose context is full. A profile has the experts that the tokens of a text
    chose, one after another; without one, tokens are expected to choose independently of each other."""

    model: str
    context: int  #: positions
    routing: str  #: where the experts' shares come from
    memory: str  #: where its rate comes from
    memory_gb_s: float  #: at which weights in memory are computed
    packing_gb_s: float  #: at which experts that were read are packed
    disk: DiskSpeed | None  #: None where no rate of it was needed
    shelves: Shelves | HotNeurons
    #: of the experts that tokens choose, or of the neurons that fire: those that are in memory
    hit_share: float
    disk_bytes_per_token: float
    #: what they add to a token's time; of a known disk, the time of reading, in which others are computed
    disk_s_per_token: float
    predicted_tok_s: float
    resident_tok_s: float  #: with all experts in memory
    token: TokenTime | None = None  #: of the model's first layers, where they were measured
    misses: MissTime | None = None  #: where the file's disk was measured with experts

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        own = {key: value for key, value in vars(self).items() if key not in _WITH_FIELDS}
        parts = {key: getattr(self, key) for key in _WITH_FIELDS}
        told = {key: each if each is None else asdict(each) for key, each in parts.items()}
        return own | told | {"shelves": self.shelves.report()}

    def __str__(self) -> str:
        shelves = self.shelves
        bill = [*shelves.bill.items(), ("experts", shelves.expert_bytes)]
        fit = f"{shelves.fitting}, {shelves.share:.1%} of the experts' bytes"
        hits = f"{self.hit_share:.1%} of the {shelves.unit} are in memory (expected)"
        return "\n".join(
            [
                printable(f"{'model':<12}{self.model}", 80),
                printable(f"{'routing':<12}{self.routing}", 80),
                f"{'memory':<12}{self.memory_gb_s:.1f} GB/s, {self.memory}",
                *([] if self.disk is None else [str(self.disk)]),
                "",
                f"{'context':<12}{self.context}",
                f"{'budget':<12}{size(shelves.budget_bytes)}",
                *(f"{what:<12}{size(n):>12}" for what, n in bill if n),
                f"{'total':<12}{size(sum(n for _, n in bill)):>12}",
                f"{'':<12}{fit}",
                "",
                *([] if self.token is None else [str(self.token)]),
                *([] if self.misses is None else [str(self.misses)]),
                hits,
                f"{size(round(self.disk_bytes_per_token))} from disk per token, "
                f"{1e3 * self.disk_s_per_token:.1f} ms",
                "",
                f"{'predicted':<12}{self.predicted_tok_s:>9.2f} tok/s",
                f"{'all in RAM':<12}{self.resident_tok_s:>9.2f} tok/s",
            ]
        )


_WITH_FIELDS = ("disk", "token", "misses")


def plan_ram(
    model: Model,
    ram_budget: int,
    *,
    context: int | None = None,
    cache_type: str | None = None,
    sparsity: str | None = None,
    profile: str | os.PathLike[str] | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    disk: DiskSpeed | None = None,
    progress: Progress | None = None,
) -> RAMPlan:
    """Decides which experts of a model lie in a budget of memory, and predicts the speed.

    >>> print(plan_ram("model.gguf", 12 << 30))

    Args:
        model: a GGUF file of a model of experts, or what was loaded from one.
        ram_budget: bytes, as the option of :class:`LLM`.
        context: positions; None: the file's, at most 4096; 0: all that the model has.
        cache_type: type of keys and values; None: ``f16``.
        sparsity: as the option of :class:`LLM`, for files whose cold neurons can be left there.
        profile: a file of :func:`hotcold.profile`, for how often experts are chosen; None finds
            ``MODEL.profile.gguf`` beside the model, else assumes that all are chosen alike.
        hardware: a file of ``hotcold doctor`` or a preset, for the rate of computing; None loads the model's
            first layers, whole, and measures tokens of them for some seconds.
        disk: what is known of the disk; None reads and computes some of the model's experts, for some
            seconds.
        progress: is told of the phases of measuring.

    UserError: the model has no experts, the budget does not hold two of each layer, or a file is damaged."""
    budget = integer("ram_budget", ram_budget)
    path, told = file_of(source_of(model)), progress or _nobody
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        how = {"context": context, "cache_type": cache_type, "sparsity": sparsity}
        shelves = shelves_of(file, config, how | {"ram_budget": budget})
        positions = min(config.context, 4096) if context is None else context or config.context
        sizes = sizes_of_file(file, config, positions, cache_type or "f16", gpu=False)
        given = find_profile(sizes, None if profile is None else Path(profile), path)
        if config.experts is None:
            raise UserError(f"{printable(file.path.name)} has no experts: all of it lies in memory")
        speed, memory = _speed(file, config, hardware)
        known: dict[str, Any] = {
            "model": sizes.name,
            "context": positions,
            "routing": "all experts are chosen alike (assumed)" if given.routing is None else given.source,
            "memory_gb_s": speed.gb_s,
            "packing_gb_s": speed.packing_gb_s,
            "shelves": shelves,
        }
        if isinstance(shelves, HotNeurons):
            if disk is None:
                disk = measure_disk(path, lambda *n: told("measuring the disk", *n))
            by_neuron = _by_neuron(shelves, given, sizes, speed, disk)
            return RAMPlan(**known | {"memory": memory, "disk": disk} | by_neuron)
        costs = _Costs(sizes, shelves, speed, disk)
        token, lacking, resident = None, "", costs.resident_s(routing_shares(config, given))
        if hardware is None:
            token, lacking = _time_tokens(file, config, positions, how, told)
        if token is not None:
            rest = sizes.kv.sum() * max(0.0, 1 - token.position / positions)  # of the whole context
            resident = token.token_s(config.layers) + float(rest) / (speed.gb_s * 1e9)
        known |= {"memory": memory + lacking, "disk": disk, "token": token}
        return RAMPlan(**known | _by_expert(file, config, given, costs, token, resident, told))


def _by_expert(
    file: GGUFFile,
    config: Config,
    profile: Profile,
    costs: "_Costs",
    token: TokenTime | None,
    resident_s: float,
    told: Progress,
) -> dict[str, Any]:
    """The figures of a plan that leaves whole experts in the file; ``resident_s`` are seconds of a token with
    all in memory."""
    shelves, shares = costs.shelves, routing_shares(config, profile)
    missing = [missed_experts(shelves, layer, profile, each) for layer, each in enumerate(shares)]
    units, missed = shelves.unit_bytes, [mean(each) for each in missing]
    chosen = sum(float(each.sum()) for each, unit in zip(shares, units, strict=True) if unit)
    misses = None
    if costs.disk is None and not shelves.all_fit:
        told(_READING, 0, 1)
        misses = time_misses(file, config, shelves, missing, costs.between(config, token))
        told(_READING, 1, 1)
        waits = more = misses.more_s * sum(missed) / max(misses.missed, 1e-9)
    else:
        more = costs.token(shares, missing) - costs.resident_s(shares)
        waits = sum(costs.disk_s(layer, each) for layer, each in enumerate(missing))
    return {
        "hit_share": 1 - sum(missed) / chosen,
        "disk_bytes_per_token": sum(n * unit for n, unit in zip(missed, units, strict=True)),
        "disk_s_per_token": waits,
        "predicted_tok_s": 1 / (resident_s + more),
        "resident_tok_s": 1 / resident_s,
        "misses": misses,
    }


_READING = "reading experts"


def _nobody(phase: str, done: int, total: int) -> None:
    """Is told, where nobody else is."""


def _time_tokens(
    file: GGUFFile, config: Config, context: int, how: Mapping[str, Any], told: Progress
) -> tuple[TokenTime | None, str]:
    """Times tokens of the first layers; or why not, for what is printed."""
    sizes = sizes_to_time(file, config)
    if sizes is None:
        return None, ", experts alone: the model has too few layers to time some of them"
    told("timing tokens", 0, 1)
    options = {**how, "context": min(context, 512), "gpu": "off", "draft_max": 0}
    try:
        return time_tokens(file, sizes, options), ""
    except UserError as error:
        return None, f", experts alone: its first layers cannot be loaded ({printable(str(error), 300)})"
    finally:
        told("timing tokens", 1, 1)


def _by_neuron(
    hot: HotNeurons, profile: Profile, sizes: Sizes, speed: ExpertSpeed, disk: DiskSpeed
) -> dict[str, float]:
    """The figures of a plan that leaves cold neurons in the file: nothing is computed while they are read,
    but processors are as busy as reading and packing keep them."""
    fired = [float(np.sum(each)) if n else 0.0 for each, n in zip(profile.firing, hot.neurons, strict=True)]
    needed = [n * (named or 1.0) for n, named in zip(fired, hot.named, strict=True)]
    cold = hot.cold_per_token(profile)
    read = [hot.disk_bytes(layer, n) for layer, n in enumerate(cold)]
    cores = available_cores()
    reading = 0.0
    for layer, nbytes in enumerate(read):
        if nbytes and (each := hot.disk_bytes(layer, 1) / hot.reads[layer]):
            at_once = reads_at_once(each)
            busy = disk.cpu_s_gb(each, at_once) / cores
            packed = cold[layer] * hot.row_bytes[layer] / speed.packing_gb_s
            reading += max(nbytes / disk.gb_s(each, at_once), nbytes * busy + packed) / 1e9
    computed = float(sizes.head + sizes.dense.sum())
    for layer, n in enumerate(hot.neurons):
        if not n:
            computed += int(sizes.neuron_bytes[layer]) * int(sizes.neurons[layer])
            continue
        computed += hot.gate_bytes[layer] * sizes.share_of(layer) + fired[layer] * hot.row_bytes[layer]
        # Of neurons that are named in vain, gates alone: a third.
        computed += (needed[layer] - fired[layer]) * hot.row_bytes[layer] / _PARTS
    memory = computed / (speed.gb_s * 1e9)
    return {
        "hit_share": 1 - sum(cold) / max(sum(needed), 1e-9),
        "disk_bytes_per_token": sum(read),
        "disk_s_per_token": reading,
        "predicted_tok_s": 1 / (memory + reading),
        "resident_tok_s": 1 / memory,
    }


def routing_shares(config: Config, profile: Profile) -> list[Floats]:
    """By layer, the share of tokens that choose each expert; all alike where that was not counted."""
    experts = config.experts
    assert experts is not None
    alike: list[Floats] = [
        np.full(experts.count, config.chosen_of(i) / experts.count) for i in range(config.layers)
    ]
    if profile.routing is None:
        return alike
    return [
        assumed if len(each) == 1 else _steadied(each, profile.counted)
        for each, assumed in zip(profile.routing, alike, strict=True)
    ]


def missed_experts(shelves: Shelves, layer: int, profile: Profile, shares: Floats) -> Floats:
    """The share of tokens that miss 0, 1, 2, ... of a layer's experts: as the profile's text did, where the
    profile has the experts that its tokens chose, else with tokens that choose by ``shares`` alone."""
    places = shelves.places[layer]
    if not shelves.unit_bytes[layer] or places == shelves.experts:
        return np.ones(1)
    if profile.routes is None:
        return how_many(missing_shares(shelves, layer, shares))
    kept = shelves.kept[layer] if shelves.kept else 0
    return missed_by_token(profile.routes[layer], shelves.experts, places, kept)


def _steadied(shares: Floats, tokens: int | None) -> Floats:
    """Shares of so many tokens, nearer to their mean by what chance alone has spread them: the hottest of a
    short text are not as hot in another."""
    found: Floats = np.asarray(shares, np.float64)
    spread, mean = float(found.var()), float(found.mean())
    if tokens is None or not spread:
        return found
    chance = float((found * (1 - found)).mean()) / tokens
    return mean + (found - mean) * max(0.0, 1 - chance / spread)


def missing_shares(shelves: Shelves, layer: int, shares: Floats) -> Floats:
    """The share of tokens that choose each expert and do not find it in memory. Those that no place is kept
    for come and go by the last token that named them: one is there if one of the last T tokens chose it, and
    T is as long as fills the places."""
    missing = np.zeros(len(shares))
    places = shelves.places[layer]
    if not shelves.unit_bytes[layer] or places == shelves.experts:
        return missing
    kept = [*shelves.hot[layer][: shelves.kept[layer]]] if shelves.hot else []
    come = np.delete(np.arange(len(shares)), kept)
    others = np.clip(shares[come], 0, 1 - 1e-9)
    free = float(places - len(kept))
    low, high = 0.0, 1.0
    while _there(others, high).sum() < min(free, float(np.count_nonzero(others))) - 1e-6 and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _there(others, middle).sum() < free else (low, middle)
    missing[come] = others * (1 - _there(others, high))
    return missing


def _there(shares: Floats, tokens: float) -> Floats:
    found: Floats = 1 - (1 - shares) ** tokens
    return found


@dataclass(frozen=True)
class _Costs:
    """Seconds that follow from rates."""

    sizes: Sizes
    shelves: Shelves
    speed: ExpertSpeed
    disk: DiskSpeed | None  #: None where what is missed was measured

    def read_s(self, layer: int, count: int) -> float:
        """Seconds of reading so many experts, as many reads at once as a model's are."""
        unit = self.shelves.unit_bytes[layer]
        if not count or self.disk is None:
            return 0.0
        piece = min(unit / _PARTS, READ_BYTES)
        depth = max(1.0, min(reads_at_once(piece), count * max(_PARTS, unit / READ_BYTES)))
        return count * unit / (self.disk.gb_s(piece, depth) * 1e9)

    def between(self, config: Config, token: TokenTime | None) -> Between:
        """Gives the times of computing between two reads."""
        assert config.experts is not None
        memory = self.speed.gb_s * 1e9
        experts = config.experts.chosen * max(self.shelves.unit_bytes) / memory
        if token is not None:
            return Between(token.layer_s, experts, token.besides_s)
        layer = float(self.sizes.dense.mean()) / memory + experts
        return Between(layer, experts, self.sizes.head / memory)

    def resident_s(self, shares: Sequence[Floats]) -> float:
        """Seconds of a token with all in memory."""
        return self.token(shares, [np.ones(1)] * len(shares))

    def disk_s(self, layer: int, missing: Floats) -> float:
        """Seconds of reading for a token, of which so many miss 0, 1, 2, ... experts."""
        return float(sum(p * self.read_s(layer, count) for count, p in enumerate(missing)))

    def layer(self, layer: int, chosen: float, count: int) -> float:
        """Seconds of a layer's experts, of which so many are missed. Those at hand are computed while others
        are read. Reads that are under way at the same time end at about the same time, so the last ones are
        packed and the last wave is computed when nothing is read any more."""
        unit, memory = self.shelves.unit_bytes[layer], self.speed.gb_s * 1e9
        hits = max(0.0, chosen - count)
        total = max(hits * unit / memory, self.read_s(layer, count))
        piece = min(unit / _PARTS, READ_BYTES)
        packed = min(count * unit, reads_at_once(piece) * piece)
        return total + packed / (self.speed.packing_gb_s * 1e9) + min(count, WAVE) * unit / memory

    def token(self, shares: Sequence[Floats], missing: Sequence[Floats]) -> float:
        """Seconds of a token."""
        memory = self.speed.gb_s * 1e9
        total = float(self.sizes.head + self.sizes.dense.sum()) / memory
        for layer, (chosen, missed) in enumerate(zip(shares, missing, strict=True)):
            if not self.shelves.unit_bytes[layer]:
                total += self.sizes.neuron_bytes[layer] * self.sizes.neurons[layer] / memory
                continue
            some = float(chosen.sum())
            total += sum(p * self.layer(layer, some, count) for count, p in enumerate(missed))
        return float(total)


def _speed(
    file: GGUFFile, config: Config, hardware: str | os.PathLike[str] | Hardware | None
) -> tuple[ExpertSpeed, str]:
    """The rates at which experts are computed and packed, and where they come from."""
    if hardware is None:
        return measure_experts(file, config), "measured now"
    found = hardware if isinstance(hardware, Hardware) else find_hardware(os.fspath(hardware))
    return ExpertSpeed(found.cpu_stream_gb_s, found.cpu_stream_gb_s), found.source
