"""The expert cache's plan: how many experts of each layer are in memory, for models larger than a budget.
Other experts stay in the model's file and are read when a step needs them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import ExpertSlots, FFNTensors, FFNWeights, Residency
from hotcold.kernels.file_reads import reading_bytes, way_of_reading
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.placement.profiles import Profile
from hotcold.values import enough_size, exact_size, printable, sizes

LEAST_SLOTS = 2  #: slots of a layer: one expert is read while another is used

#: Share of a layer's slots with pinned hot experts; the other slots change. Measured with synthetic routing,
#: up to tokens that share 80 % of their experts with the previous token (docs/results.md).
_PINNED = 3 / 4

_EXPERT_SCALE = re.compile(r"blk\.\d+\.ffn_\w+_exps\.scale")
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")


class NoExpertsError(UserError):
    """The model has no experts that could stay in the file."""


class BudgetTooSmallError(UserError):
    """The budget cannot hold :data:`LEAST_SLOTS` experts of each layer."""


@dataclass(frozen=True)
class ExpertCachePlan:
    """The experts of a model within a budget of memory. Tuples have one entry for each layer."""

    budget_bytes: int
    bill: Mapping[str, int]  #: bytes of everything but experts, by purpose
    experts: int  #: experts of a layer
    unit_bytes: tuple[int, ...]  #: bytes of one expert; 0 in layers without experts
    slots: tuple[int, ...]  #: expert slots in memory
    hot: tuple[tuple[int, ...], ...] = ()  #: experts preloaded, hottest first; empty without a profile
    pinned: tuple[int, ...] = ()  #: number of preloaded experts that are pinned
    profile: str = ""  #: source of the profile

    @classmethod
    def fit(cls, budget: int, bill: Mapping[str, int], file: GGUFFile, config: Config) -> "ExpertCachePlan":
        """Gives each layer the same number of slots, and the first layers one more if it still fits.
        ``bill``: bytes of everything else. BudgetTooSmallError: :data:`LEAST_SLOTS` of each layer do not
        fit."""
        experts, units = config.experts, expert_bytes(file, config)
        if experts is None or not any(units):
            raise NoExpertsError("`ram_budget` is for MoE models: this model has no experts, so leave it out")
        if experts.count <= LEAST_SLOTS:
            raise NoExpertsError(
                f"`ram_budget` is for MoE models with more than {LEAST_SLOTS} experts: leave it out"
            )
        whole = {**bill, "reading": 0}
        if sum(whole.values()) + experts.count * sum(units) <= budget:
            return cls(budget, whole, experts.count, units, tuple(experts.count * bool(n) for n in units))
        if scales := [name for name in file.tensors if _EXPERT_SCALE.fullmatch(name) and not experts.beside]:
            got = f"tensor {scales[0]} multiplies experts, so all experts must be in memory"
            raise NoExpertsError(
                f"`ram_budget` of {exact_size(budget)}: {got}: leave it out, or give enough for all experts"
            )
        bill = {**bill, "reading": reading_bytes(_row_bytes(file, config))}
        free_bytes = budget - sum(bill.values())
        per_layer = free_bytes // sum(units)
        if per_layer < LEAST_SLOTS:
            least = enough_size(sum(bill.values()) + LEAST_SLOTS * sum(units))
            needs = (
                f"this model needs {least} ({sizes(bill.items())}, and {LEAST_SLOTS} experts of each layer)"
            )
            fix = "give as much, or use a smaller context (`context`)"
            raise BudgetTooSmallError(f"`ram_budget` of {exact_size(budget)}: {needs}: {fix}")
        left, slots = free_bytes - per_layer * sum(units), []
        for unit in units:
            extra = 0 < unit <= left
            left -= unit * extra
            slots.append(min(experts.count, per_layer + extra) * bool(unit))
        return cls(budget, bill, experts.count, units, tuple(slots))

    def by_profile(self, profile: Profile, chosen: int) -> "ExpertCachePlan":
        """Returns the plan with a profile's hot experts preloaded, and most of them pinned; the same plan if
        the profile has no routing. ``chosen``: experts per token."""
        if profile.routing is None or self.all_fit:
            return self
        hot, pinned = [], []
        for layer, (n, routing) in enumerate(zip(self.slots, profile.routing, strict=True)):
            if not n or n == self.experts:
                hot.append(())
                pinned.append(0)
                continue
            order = np.argsort(-np.asarray(routing), kind="stable")
            if len(order) != self.experts:
                raise ValueError(f"the profile has {len(order)} experts in layer {layer}, not {self.experts}")
            hot.append(tuple(order[:n].tolist()))
            pinned.append(max(0, min(int(n * _PINNED), n - max(LEAST_SLOTS, chosen))))
        return replace(self, hot=tuple(hot), pinned=tuple(pinned), profile=profile.source)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the expert slots."""
        return sum(n * unit for n, unit in zip(self.slots, self.unit_bytes, strict=True))

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the expert slots and of the read buffers."""
        return self.expert_bytes + self.bill["reading"]

    @property
    def unit(self) -> str:
        """Unit name for reports."""
        return "experts that a token chooses"

    @property
    def all_fit(self) -> bool:
        return all(n == self.experts for n, unit in zip(self.slots, self.unit_bytes, strict=True) if unit)

    @property
    def share(self) -> float:
        """Share of the experts' bytes in memory."""
        return self.expert_bytes / (self.experts * sum(self.unit_bytes))

    @property
    def fitting(self) -> str:
        return f"{self._range(self.slots)} of {self.experts} experts of each layer"

    def _range(self, counts: Sequence[int]) -> str:
        """Returns the least and the largest of one count for each layer with experts."""
        with_experts = {n for n, unit in zip(counts, self.unit_bytes, strict=True) if unit}
        least, most = min(with_experts), max(with_experts)
        return f"{least}" if least == most else f"{least} to {most}"

    def devices(self, one: Devices, name: str) -> Devices:
        """Adds the expert slots to the backends of ``one``; ``name``: file name in errors."""
        if self.all_fit:
            return one
        hot, pinned = self.hot or ((),) * len(self.slots), self.pinned or (0,) * len(self.slots)
        layers = zip(self.slots, hot, pinned, strict=True)
        slots = [
            None if n in (0, self.experts) else ExpertSlots(n, first, stay, layer_label(name, layer))
            for layer, (n, first, stay) in enumerate(layers)
        ]
        return PartlyLoaded(one.embedding, one.layers, one.head, slots)

    def __str__(self) -> str:
        bill = sizes([*self.bill.items(), ("experts", self.expert_bytes)])
        if self.all_fit:
            return f"all experts fit in {exact_size(self.budget_bytes)}: {bill}"
        got = f"{self.fitting} ({self.share:.0%} of their bytes)"
        if self.profile:
            got += f", of them {self._range(self.pinned)} pinned ({printable(self.profile)}),"
        others = f"others are read when a token needs them ({way_of_reading()})"
        return f"{got} fit in {exact_size(self.budget_bytes)}, {others}: {bill}"

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return {
            "budget_bytes": self.budget_bytes,
            "bill_bytes": dict(self.bill),
            "expert_bytes": self.expert_bytes,
            "unit_bytes": list(self.unit_bytes),
            "places": list(self.slots),
            "experts": self.experts,
            "share": self.share,
            "kept": list(self.pinned),
            "profile": self.profile or None,
        }


@dataclass(frozen=True)
class PartlyLoaded(Devices):
    """One backend, with a part of the experts in its memory."""

    residency: Sequence[Residency | None]  #: by layer

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        return super().ffn_weights(layer, replace(tensors, residency=self.residency[layer]))


def layer_label(name: str, layer: int) -> str:
    """Returns the name of a layer in errors; ``name`` is the file's."""
    return f"{printable(name)}, layer {layer}"


def expert_bytes(file: GGUFFile, config: Config) -> tuple[int, ...]:
    """Returns the bytes of one expert's matrices, by layer; 0 in layers without experts."""
    nbytes = [0] * config.layers
    for name, layer in _expert_tensors(file, config):
        assert config.experts is not None
        nbytes[layer] += file.tensors[name].nbytes // config.experts.count
    return tuple(nbytes)


def _row_bytes(file: GGUFFile, config: Config) -> list[int]:
    return [file.stored(name).row_bytes for name, _ in _expert_tensors(file, config)]


def _expert_tensors(file: GGUFFile, config: Config) -> list[tuple[str, int]]:
    """Returns names and layers of the experts' matrices, without draft blocks."""
    matches = [(match[0], int(match[1])) for match in map(_EXPERT_TENSOR.fullmatch, file.tensors) if match]
    return [(name, layer) for name, layer in matches if layer < config.layers]
