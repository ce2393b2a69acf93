"""Plans what of a model of experts lies in a budget of RAM, and predicts the speed from the rates of its disk
and of memory. Loads no weights."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.cpu_disk import READ_BYTES, WAVE, reads_at_once
from hotcold.model.config import Config
from hotcold.placement.disk_speed import DiskSpeed, measure_bursts, measure_disk
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
    disk: DiskSpeed
    shelves: Shelves | HotNeurons
    #: of the experts that tokens choose, or of the neurons that fire: those that are in memory
    hit_share: float
    disk_bytes_per_token: float
    disk_s_per_token: float  #: time of reading, of which a part is spent computing, too
    predicted_tok_s: float
    resident_tok_s: float  #: with all experts in memory
    #: seconds of so many reads that begin together after a pause; none where the disk was not measured here
    burst_s: Mapping[int, float] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        own = {key: value for key, value in vars(self).items() if key not in ("disk", "shelves")}
        return own | {"disk": self.disk.report(), "shelves": self.shelves.report()}

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
                str(self.disk),
                "",
                f"{'context':<12}{self.context}",
                f"{'budget':<12}{size(shelves.budget_bytes)}",
                *(f"{what:<12}{size(n):>12}" for what, n in bill if n),
                f"{'total':<12}{size(sum(n for _, n in bill)):>12}",
                f"{'':<12}{fit}",
                "",
                *([_told(self.burst_s)] if self.burst_s else []),
                hits,
                f"{size(round(self.disk_bytes_per_token))} from disk per token, "
                f"{1e3 * self.disk_s_per_token:.1f} ms",
                "",
                f"{'predicted':<12}{self.predicted_tok_s:>9.2f} tok/s",
                f"{'all in RAM':<12}{self.resident_tok_s:>9.2f} tok/s",
            ]
        )


def plan_ram(
    model: Model,
    ram_budget: int,
    *,
    context: int | None = None,
    cache_type: str | None = None,
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
        profile: a file of :func:`hotcold.profile`, for how often experts are chosen; None finds
            ``MODEL.profile.gguf`` beside the model, else assumes that all are chosen alike.
        hardware: a file of ``hotcold doctor`` or a preset, for the rate of computing; None: a measurement of
            a second with experts of this model's shape.
        disk: what is known of the disk; None measures it on the model's file, for some seconds.
        progress: is told of the phase ``measuring the disk``.

    UserError: the model has no experts, the budget does not hold two of each layer, or a file is damaged."""
    budget = integer("ram_budget", ram_budget)
    path = file_of(source_of(model))
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        options = {"ram_budget": budget, "context": context, "cache_type": cache_type}
        shelves = shelves_of(file, config, options)
        positions = min(config.context, 4096) if context is None else context or config.context
        sizes = sizes_of_file(file, config, positions, cache_type or "f16", gpu=False)
        given = find_profile(sizes, None if profile is None else Path(profile), path)
        if config.experts is None:
            raise UserError(f"{printable(file.path.name)} has no experts: all of it lies in memory")
        shares = routing_shares(config, given)
        routing = "all experts are chosen alike (assumed)" if given.routing is None else given.source
        speed, memory = _speed(file, config, hardware)
    measured = disk is None
    if disk is None:
        disk = measure_disk(path, None if progress is None else lambda *n: progress(_MEASURING, *n))
    known: dict[str, Any] = {
        "model": sizes.name,
        "context": positions,
        "routing": routing,
        "memory": memory,
        "memory_gb_s": speed.gb_s,
        "packing_gb_s": speed.packing_gb_s,
        "disk": disk,
        "shelves": shelves,
    }
    if isinstance(shelves, HotNeurons):
        return RAMPlan(**known | _by_neuron(shelves, given, sizes, speed, disk))
    bursts = _bursts(path, shelves, config, speed) if measured and not shelves.all_fit else {}
    costs = _Costs(sizes, shelves, speed, disk, bursts)
    missing = [missed_experts(shelves, layer, given, each) for layer, each in enumerate(shares)]
    units = shelves.unit_bytes
    missed = [mean(each) for each in missing]
    chosen = sum(float(each.sum()) for each, unit in zip(shares, units, strict=True) if unit)
    none = [np.ones(1)] * len(missing)
    return RAMPlan(
        **known,
        burst_s=bursts,
        hit_share=1 - sum(missed) / chosen,
        disk_bytes_per_token=sum(n * unit for n, unit in zip(missed, units, strict=True)),
        disk_s_per_token=sum(costs.disk_s(layer, each) for layer, each in enumerate(missing)),
        predicted_tok_s=1 / costs.token(shares, missing),
        resident_tok_s=1 / costs.token(shares, none),
    )


def _told(bursts: Mapping[int, float]) -> str:
    each = ", ".join(f"{count} in {1e3 * seconds:.1f} ms" for count, seconds in sorted(bursts.items()))
    return f"reads of missed experts, together after a pause: {each}"


_MEASURING = "measuring the disk"


def _by_neuron(
    hot: HotNeurons, profile: Profile, sizes: Sizes, speed: ExpertSpeed, disk: DiskSpeed
) -> dict[str, float]:
    """The figures of a plan that leaves cold neurons in the file: nothing is computed while they are read."""
    fired = [float(np.sum(each)) if n else 0.0 for each, n in zip(profile.firing, hot.neurons, strict=True)]
    needed = [n * (named or 1.0) for n, named in zip(fired, hot.named, strict=True)]
    cold = hot.cold_per_token(profile)
    read = [hot.disk_bytes(layer, n) for layer, n in enumerate(cold)]
    reading = sum(
        nbytes / (disk.gb_s(each, reads_at_once(each)) * 1e9)
        for layer, nbytes in enumerate(read)
        if nbytes and (each := hot.disk_bytes(layer, 1) / hot.reads[layer])
    )
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
    sizes: Sizes
    shelves: Shelves
    speed: ExpertSpeed
    disk: DiskSpeed
    bursts: Mapping[int, float]  #: seconds of so many reads of the largest expert's; none: rates are known

    def read_s(self, layer: int, count: int) -> float:
        """Seconds of reading so many experts, as many reads at once as a model's are."""
        unit = self.shelves.unit_bytes[layer]
        if not count:
            return 0.0
        if self.bursts:
            largest = max(self.shelves.unit_bytes)
            reads, known = count * _reads_of(largest)[0], sorted(self.bursts)
            seconds = float(np.interp(reads, known, [self.bursts[n] for n in known]))
            return seconds * max(1.0, reads / known[-1]) * unit / largest
        piece = min(unit / _PARTS, READ_BYTES)
        depth = max(1.0, min(reads_at_once(piece), count * max(_PARTS, unit / READ_BYTES)))
        return count * unit / (self.disk.gb_s(piece, depth) * 1e9)

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


def _reads_of(unit: int) -> tuple[int, int]:
    """How many reads an expert takes, and the bytes of each."""
    each = -(-unit // _PARTS)
    pieces = -(-each // READ_BYTES)
    return _PARTS * pieces, -(-each // pieces)


def _bursts(path: Path, shelves: Shelves, config: Config, speed: ExpertSpeed) -> dict[int, float]:
    """Seconds of the reads that a layer begins together, by their number."""
    assert config.experts is not None
    largest = max(shelves.unit_bytes)
    reads, nbytes = _reads_of(largest)
    pause = min(1.0, config.experts.chosen * largest / (speed.gb_s * 1e9))  # while a layer is computed
    missed = sorted({min(n, config.experts.chosen) for n in (1, 2, 4, 8)})
    return measure_bursts(path, nbytes, [n * reads for n in missed], pause)


def _speed(
    file: GGUFFile, config: Config, hardware: str | os.PathLike[str] | Hardware | None
) -> tuple[ExpertSpeed, str]:
    """The rates at which experts are computed and packed, and where they come from."""
    if hardware is None:
        return measure_experts(file, config), "measured now"
    found = hardware if isinstance(hardware, Hardware) else find_hardware(os.fspath(hardware))
    return ExpertSpeed(found.cpu_stream_gb_s, found.cpu_stream_gb_s), found.source
