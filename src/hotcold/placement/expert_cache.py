"""Decides how many experts of each layer lie in memory, where a model is larger than a budget, and tells the
backend. The others stay in the model's file and are read when a step names them."""

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
from hotcold.values import enough_size, exact_size, printable, size

LEAST_SLOTS = 2  #: of a layer: one is read while another is used

#: The part of a layer's places that hot experts keep; others come and go. Measured with made-up routing, from
#: equal tokens to tokens of which 80 % is their predecessor's (docs/results.md).
_PINNED = 3 / 4

_EXPERT_SCALE = re.compile(r"blk\.\d+\.ffn_\w+_exps\.scale")
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")


class NoExpertsError(UserError):
    """A model without experts that could be left in the file."""


class BudgetTooSmallError(UserError):
    """A budget that does not even hold :data:`LEAST_SLOTS` experts of each layer."""


@dataclass(frozen=True)
class ExpertCachePlan:
    """The experts of a model in a budget of memory."""

    budget_bytes: int
    bill: Mapping[str, int]  #: bytes of all that is not an expert, by what takes them
    experts: int  #: of a layer
    unit_bytes: tuple[int, ...]  #: of one expert, by layer; 0 in layers without experts
    slots: tuple[int, ...]  #: how many lie in memory at a time, by layer
    #: those that are read at loading, by layer, the one that is wanted most first; none without a profile
    hot: tuple[tuple[int, ...], ...] = ()
    pinned: tuple[int, ...] = ()  #: how many of these keep their place, by layer
    profile: str = ""  #: that says so

    @classmethod
    def fit(cls, budget: int, bill: Mapping[str, int], file: GGUFFile, config: Config) -> "ExpertCachePlan":
        """Gives each layer as many places as the others, and the first ones one more where that still fits.
        ``bill`` has what else is in memory. BudgetTooSmallError: not even :data:`LEAST_SLOTS` of each layer
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
            seen = f"tensor {scales[0]} multiplies experts, so all experts must be in memory"
            raise NoExpertsError(
                f"`ram_budget` of {exact_size(budget)}: {seen}: leave it out, or give enough for all experts"
            )
        bill = {**bill, "reading": reading_bytes(_row_bytes(file, config))}
        free_bytes = budget - sum(bill.values())
        each = free_bytes // sum(units)
        if each < LEAST_SLOTS:
            least = enough_size(sum(bill.values()) + LEAST_SLOTS * sum(units))
            rest = ", ".join(f"{what} {size(n)}" for what, n in bill.items() if n)
            needs = f"this model needs {least} ({rest}, and {LEAST_SLOTS} experts of each layer)"
            fix = "give as much, or use a smaller context (`context`)"
            raise BudgetTooSmallError(f"`ram_budget` of {exact_size(budget)}: {needs}: {fix}")
        left, slots = free_bytes - each * sum(units), []
        for unit in units:
            more = 0 < unit <= left
            left -= unit * more
            slots.append(min(experts.count, each + more) * bool(unit))
        return cls(budget, bill, experts.count, units, tuple(slots))

    def by_profile(self, profile: Profile, chosen: int) -> "ExpertCachePlan":
        """The experts that a profile finds hot are read at loading, and most of them keep their place;
        ``chosen`` is how many a token chooses. Nothing changes where routing was not counted."""
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
        """Bytes that the places take."""
        return sum(n * unit for n, unit in zip(self.slots, self.unit_bytes, strict=True))

    @property
    def loaded_bytes(self) -> int:
        """Bytes that those take, and reading others."""
        return self.expert_bytes + self.bill["reading"]

    @property
    def unit(self) -> str:
        """The word for that which a token needs."""
        return "experts that a token chooses"

    @property
    def all_fit(self) -> bool:
        return all(n == self.experts for n, unit in zip(self.slots, self.unit_bytes, strict=True) if unit)

    @property
    def share(self) -> float:
        """The part of the experts' bytes that is in memory."""
        return self.expert_bytes / (self.experts * sum(self.unit_bytes))

    @property
    def fitting(self) -> str:
        some = sorted({n for n, unit in zip(self.slots, self.unit_bytes, strict=True) if unit})
        count = f"{some[0]}" if len(some) == 1 else f"{some[0]} to {some[-1]}"
        return f"{count} of {self.experts} experts of each layer"

    def devices(self, one: Devices, name: str) -> Devices:
        """The backends of ``one``, with places for experts; ``name`` is the file's, for errors."""
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
        parts = [*self.bill.items(), ("experts", self.expert_bytes)]
        bill = ", ".join(f"{what} {size(n)}" for what, n in parts if n)
        if self.all_fit:
            return f"all experts fit in {exact_size(self.budget_bytes)}: {bill}"
        seen = f"{self.fitting} ({self.share:.0%} of their bytes)"
        if self.profile:
            own = sorted({n for n, unit in zip(self.pinned, self.unit_bytes, strict=True) if unit})
            most = f"{own[0]}" if len(own) == 1 else f"{own[0]} to {own[-1]}"
            seen += f", of them {most} pinned ({printable(self.profile)}),"
        others = f"others are read when a token needs them ({way_of_reading()})"
        return f"{seen} fit in {exact_size(self.budget_bytes)}, {others}: {bill}"

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
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
    """One backend, in whose memory a part of the experts is."""

    residency: Sequence[Residency | None]  #: of each layer

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        return super().ffn_weights(layer, replace(tensors, residency=self.residency[layer]))


def layer_label(name: str, layer: int) -> str:
    """The name of a layer in errors; ``name`` is its file's."""
    return f"{printable(name)}, layer {layer}"


def expert_bytes(file: GGUFFile, config: Config) -> tuple[int, ...]:
    """Bytes of one expert's matrices, by layer; 0 in layers without experts."""
    found = [0] * config.layers
    for name, layer in _expert_tensors(file, config):
        assert config.experts is not None
        found[layer] += file.tensors[name].nbytes // config.experts.count
    return tuple(found)


def _row_bytes(file: GGUFFile, config: Config) -> list[int]:
    return [file.stored(name).row_bytes for name, _ in _expert_tensors(file, config)]


def _expert_tensors(file: GGUFFile, config: Config) -> list[tuple[str, int]]:
    """Names and layers of the experts' matrices, but for those of blocks that only draft."""
    found = [(match[0], int(match[1])) for match in map(_EXPERT_TENSOR.fullmatch, file.tensors) if match]
    return [(name, layer) for name, layer in found if layer < config.layers]
