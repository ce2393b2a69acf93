"""Decides which neurons of a sparse model's experts have their rows of up and down in memory, where a model
is larger than a budget. Those of others are read of the model's file when a step needs them.

The model's file has the neurons of each expert in the order in which they fire, the most active first
(`hotcold convert --hot-first`), so that each expert's hot ones are its first."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotcold.formats.gguf import GGUFFile
from hotcold.formats.words import HOT_FIRST_KEY
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, FFNTensors, FFNWeights
from hotcold.kernels.cpu_disk import reading_bytes, way_of_reading
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.placement.profiles import Profile
from hotcold.values import printable, size

_PAGE = 4096  #: bytes that memory is given and taken by
_MATRIX = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")


@dataclass(frozen=True)
class HotNeurons:
    """The neurons of a model of experts in a budget of memory: all gates, and hot ones' rows of up and
    down."""

    budget_bytes: int
    bill: Mapping[str, int]  #: bytes of all that is neither a gate nor a hot row, by what takes them
    experts: int  #: of a layer
    neurons: tuple[int, ...]  #: of one expert, by layer; 0 in layers without experts
    gate_bytes: tuple[int, ...]  #: of all gates, by layer
    row_bytes: tuple[int, ...]  #: of a neuron's rows of up and down, by layer
    hot: tuple[tuple[int, ...], ...]  #: by layer, how many of each expert's first neurons are hot
    source: str = ""  #: of how often neurons fire

    @classmethod
    def fit(
        cls, budget: int, bill: Mapping[str, int], file: GGUFFile, config: Config, profile: Profile
    ) -> "HotNeurons | None":
        """Takes the neurons that fire most, of all layers together, as long as they fit. ``bill`` has what
        else is in memory. None: not even the gates fit."""
        assert config.experts is not None
        count, parts = config.experts.count, _parts(file, config)
        gates, pairs, neurons = [0] * config.layers, [0] * config.layers, [0] * config.layers
        for layer, kind, name in parts:
            info = file.tensors[name]
            each = int(np.prod(info.shape[:-1])) // count
            if kind == "gate":
                gates[layer] = info.nbytes
            else:
                neurons[layer] = each
                pairs[layer] += info.nbytes // (count * each)
        # Read at a time: one expert's, or as many of several. Rows that lie alone take whole pages.
        cold = [
            count * 2 * _PAGE + n * min(pair + 2 * _PAGE, count * pair)
            for n, pair in zip(neurons, pairs, strict=True)
            if n
        ]
        whole = {
            **bill,
            "reading": reading_bytes([file.stored(name).row_bytes for _, _, name in parts]),
            "cold rows": max(cold) + (len(cold) - 1) * count * 2 * _PAGE,
        }
        left = budget - sum(whole.values()) - sum(gates)
        if left < 0:
            return None
        firing = [np.asarray(each, np.float64) for each in profile.firing]
        hot = _hottest(firing, pairs, [n * count for n in neurons], count, left)
        sizes = tuple(neurons), tuple(gates), tuple(pairs)
        return cls(budget, whole, count, *sizes, hot, profile.source)

    @property
    def expert_bytes(self) -> int:
        """Bytes that gates and hot rows take."""
        pairs = zip(self.hot, self.row_bytes, strict=True)
        return sum(self.gate_bytes) + sum(sum(hot) * each for hot, each in pairs)

    @property
    def all_fit(self) -> bool:
        return False

    @property
    def share(self) -> float:
        """The part of the experts' bytes that is in memory."""
        every = zip(self.neurons, self.row_bytes, strict=True)
        return self.expert_bytes / (sum(self.gate_bytes) + sum(self.experts * n * each for n, each in every))

    def cold_per_token(self, profile: Profile) -> list[float]:
        """By layer, the neurons that fire for a token, on average, and are not hot."""
        found = []
        for hot, n, firing in zip(self.hot, self.neurons, profile.firing, strict=True):
            one = np.asarray(firing, np.float64).reshape(len(hot), n) if n else np.zeros((0, 0))
            found.append(float(sum(each[count:].sum() for each, count in zip(one, hot, strict=True))))
        return found

    def disk_bytes(self, layer: int, neurons: float) -> float:
        """Bytes that are read for so many cold neurons, whole blocks for each row."""
        return neurons * (self.row_bytes[layer] + 2 * _PAGE)

    @property
    def fitting(self) -> str:
        every = self.experts * sum(self.neurons)
        return f"all gates, and up and down of {sum(map(sum, self.hot)) / every:.1%} of neurons"

    def devices(self, one: Devices, name: str) -> Devices:
        """The backends of ``one``, with cold rows left in the file; ``name`` is the file's, for errors."""
        room = max(self.neurons)
        return _HotDevices(one.embedding, one.layers, one.head, self.hot, room, name)

    def __str__(self) -> str:
        parts = [*self.bill.items(), ("gates and hot rows", self.expert_bytes)]
        bill = ", ".join(f"{what} {size(n)}" for what, n in parts if n)
        seen = f"{self.fitting} ({printable(self.source)}), {self.share:.0%} of the experts' bytes,"
        others = f"others' are read when they fire ({way_of_reading()})"
        return f"{seen} fit in {size(self.budget_bytes)}; {others}: {bill}"

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            "budget_bytes": self.budget_bytes,
            "bill_bytes": dict(self.bill),
            "expert_bytes": self.expert_bytes,
            "row_bytes": list(self.row_bytes),
            "experts": self.experts,
            "share": self.share,
            "hot": [sum(each) for each in self.hot],
            "profile": self.source,
        }


def suits(file: GGUFFile, config: Config) -> bool:
    """Whether a model's cold neurons can be left in its file: their order says which those are, zeros make it
    worth it, and the system takes memory back by the page."""
    if not file.metadata.get(HOT_FIRST_KEY, False) or not sys.platform.startswith("linux"):
        return False
    sparse = config.experts is not None and config.gated and config.activation in SPARSE_ACTIVATIONS
    names = {name for _, _, name in _parts(file, config)}
    whole = all(name in names or "_exps." not in name for name in file.tensors)
    return sparse and config.down_layout == "by_neuron" and whole


def _parts(file: GGUFFile, config: Config) -> list[tuple[int, str, str]]:
    """Layers, kinds and names of the experts' matrices, but for those of blocks that only draft."""
    found = [match for match in map(_MATRIX.fullmatch, file.tensors) if match]
    return [(int(match[1]), match[2], match[0]) for match in found if int(match[1]) < config.layers]


def _hottest(
    firing: Sequence[Any], row_bytes: Sequence[int], neurons: Sequence[int], experts: int, room: int
) -> tuple[tuple[int, ...], ...]:
    """How many of each expert's first neurons fit, by layer, those first that fire most for their bytes."""
    layers = [layer for layer, n in enumerate(neurons) if n]
    worth = np.concatenate([firing[layer] / row_bytes[layer] for layer in layers])
    owner = np.concatenate(
        [layer * experts + np.arange(neurons[layer]) // (neurons[layer] // experts) for layer in layers]
    )
    order = np.argsort(-worth, kind="stable")
    taken = np.cumsum(np.asarray(row_bytes)[owner[order] // experts]) <= room
    counts = np.bincount(owner[order][taken], minlength=len(neurons) * experts).reshape(-1, experts)
    return tuple(tuple(each.tolist()) if neurons[i] else () for i, each in enumerate(counts))


@dataclass(frozen=True)
class _HotDevices(Devices):
    """One backend, in whose memory not all rows lie."""

    hot: Sequence[tuple[int, ...]]  #: of each layer
    room: int
    name: str

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        label = f"{printable(self.name)}, layer {layer}"
        some = replace(tensors, hot_neurons=self.hot[layer], room=self.room, label=label)
        return super().ffn_weights(layer, some)
