"""Decides which neurons of a sparse model's experts have their rows in memory, where a model is larger than a
budget. Those of others are read of the model's file when a step needs them: rows of up and down of neurons
whose gates fire, where all gates lie in memory; rows of gate, up and down of those that a predictor names.

The model's file has the neurons of each expert in the order in which they fire, the most active first
(`hotcold convert --hot-first`), so that each expert's hot ones are its first."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.formats.gguf import GGUFFile
from hotcold.formats.words import HOT_FIRST_KEY
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, HotRows
from hotcold.kernels.file_reads import reading_bytes, way_of_reading
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.placement.expert_cache import PartlyLoaded, layer_label
from hotcold.placement.profiles import Profile
from hotcold.values import exact_size, printable, size

_PAGE = 4096  #: bytes that memory is given and taken by
_MATRIX = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")


#: Neurons that a predictor names for each that fires, where its file does not say how many.
_NAMED = 1.5


@dataclass(frozen=True)
class HotNeurons:
    """The neurons of a model of experts in a budget of memory: hot ones' rows and, of layers without a
    predictor, all gates."""

    budget_bytes: int
    bill: Mapping[str, int]  #: bytes of all that is neither a gate nor a hot row, by what takes them
    experts: int  #: of a layer
    neurons: tuple[int, ...]  #: of one expert, by layer; 0 in layers without experts
    #: how many neurons a layer's predictor names for each that fires; None: it has none, and all gates stay
    named: tuple[float | None, ...]
    gate_bytes: tuple[int, ...]  #: of all gates, by layer, where they stay
    row_bytes: tuple[int, ...]  #: of a neuron's rows that are read if it is cold, by layer
    reads: tuple[int, ...]  #: in which they are read
    neurons_at_once: tuple[
        int, ...
    ]  #: cold neurons that are read at a time, by layer, unless one expert has more
    hot: tuple[tuple[int, ...], ...]  #: by layer, how many of each expert's first neurons are hot
    source: str = ""  #: of how often neurons fire

    @classmethod
    def fit(
        cls,
        budget: int,
        bill: Mapping[str, int],
        file: GGUFFile,
        config: Config,
        profile: Profile,
        candidates: Sequence[float | None] = (),
    ) -> "HotNeurons | None":
        """Takes the neurons that fire most, of all layers together, as long as they fit. ``bill`` has what
        else is in memory; ``candidates`` says of each layer which share of its chosen experts' neurons a
        predictor names, 0 where that is not known, None where there is no predictor. None: not even the gates
        fit that have to stay."""
        assert config.experts is not None
        count, parts = config.experts.count, _parts(file, config)
        firing = [np.asarray(each, np.float64) for each in profile.firing]
        gates, rows, neurons = [0] * config.layers, [0] * config.layers, [0] * config.layers
        read: list[set[str]] = [set() for _ in gates]
        predicted = [each is not None for each in candidates] or [False] * config.layers
        for layer, kind, name in parts:
            info = file.tensors[name]
            neurons[layer] = int(np.prod(info.shape[:-1])) // count
            if kind == "gate" and not predicted[layer]:
                gates[layer] = info.nbytes
                continue
            rows[layer] += info.nbytes // (count * neurons[layer])
            read[layer].add(file.side_by_side.get(name, name))
        named = [
            None
            if share is None
            else max(1.0, share * n * config.experts.chosen / max(1e-9, own.sum()))
            if share
            else _NAMED
            for share, n, own in zip(candidates or [None] * config.layers, neurons, firing, strict=True)
        ]
        # Read at a time: one expert's, or as many neurons of several as take no more with the pages in which
        # each begins and ends. Other layers' experts each have such pages where hot rows end.
        cold = [count * 2 * _PAGE + n * row for n, row in zip(neurons, rows, strict=True) if n]
        neurons_at_once = [
            n * row // (row + 2 * _PAGE) if n else 0 for n, row in zip(neurons, rows, strict=True)
        ]
        whole = {
            **bill,
            "reading": reading_bytes([file.stored(name).row_bytes for _, _, name in parts]),
            "cold rows": max(cold) + (len(cold) - 1) * count * 2 * _PAGE,
        }
        left = budget - sum(whole.values()) - sum(gates)
        if left < 0:
            return None
        hot = _hottest(firing, rows, [n * count for n in neurons], count, left)
        return cls(
            budget_bytes=budget,
            bill=whole,
            experts=count,
            neurons=tuple(neurons),
            named=tuple(named),
            gate_bytes=tuple(gates),
            row_bytes=tuple(rows),
            reads=tuple(len(each) for each in read),
            neurons_at_once=tuple(neurons_at_once),
            hot=hot,
            source=profile.source,
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes that gates and hot rows take."""
        pairs = zip(self.hot, self.row_bytes, strict=True)
        return sum(self.gate_bytes) + sum(sum(hot) * each for hot, each in pairs)

    @property
    def loaded_bytes(self) -> int:
        """Bytes that those take, and reading others."""
        return self.expert_bytes + self.bill["reading"] + self.bill["cold rows"]

    @property
    def all_fit(self) -> bool:
        return False

    @property
    def share(self) -> float:
        """The part of the experts' bytes that is in memory."""
        every = zip(self.neurons, self.row_bytes, strict=True)
        return self.expert_bytes / (sum(self.gate_bytes) + sum(self.experts * n * each for n, each in every))

    def cold_per_token(self, profile: Profile) -> list[float]:
        """By layer, the neurons that are read for a token, on average: those that fire, or that are named,
        and are not hot. Every neuron is expected to be named wrongly equally often."""
        found = []
        layers = zip(self.hot, self.neurons, profile.firing, self.named, strict=True)
        for hot, n, firing, named in layers:
            one = np.asarray(firing, np.float64).reshape(len(hot), n) if n else np.zeros((0, 0))
            cold = sum(each[count:].sum() for each, count in zip(one, hot, strict=True))
            in_vain = 0.0 if named is None else (named - 1) * one.sum() * (1 - sum(hot) / max(1, one.size))
            found.append(float(cold + in_vain))
        return found

    def disk_bytes(self, layer: int, neurons: float) -> float:
        """Bytes that are read for so many cold neurons, whole blocks in each read."""
        return neurons * (self.row_bytes[layer] + self.reads[layer] * _PAGE)

    @property
    def unit(self) -> str:
        """The neurons that a token needs."""
        return f"neurons that {'predictors choose' if any(self.named) else 'are active'} for a token"

    @property
    def fitting(self) -> str:
        share = f"{sum(map(sum, self.hot)) / (self.experts * sum(self.neurons)):.1%} of neurons"
        if not any(self.gate_bytes):
            return f"gate, up and down of {share}"
        return f"all gates, and up and down of {share}"

    def devices(self, one: Devices, name: str) -> Devices:
        """The backends of ``one``, with cold rows left in the file; ``name`` is the file's, for errors."""
        layers = enumerate(zip(self.hot, self.neurons_at_once, self.named, strict=True))
        rows = [
            HotRows(hot, neurons_at_once, named is not None, layer_label(name, layer)) if hot else None
            for layer, (hot, neurons_at_once, named) in layers
        ]
        return PartlyLoaded(one.embedding, one.layers, one.head, rows)

    def __str__(self) -> str:
        parts = [*self.bill.items(), ("gates and hot rows", self.expert_bytes)]
        bill = ", ".join(f"{what} {size(n)}" for what, n in parts if n)
        seen = f"{self.fitting} ({printable(self.source)}), {self.share:.0%} of the experts' bytes,"
        others = f"the rest is read when a token needs it ({way_of_reading()})"
        return f"{seen} fit in {exact_size(self.budget_bytes)}; {others}: {bill}"

    def report(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return {
            "budget_bytes": self.budget_bytes,
            "bill_bytes": dict(self.bill),
            "expert_bytes": self.expert_bytes,
            "row_bytes": list(self.row_bytes),
            "reads": list(self.reads),
            "named_of_firing": list(self.named),
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
    firing: Sequence[Any],
    row_bytes: Sequence[int],
    neurons: Sequence[int],
    experts: int,
    neurons_at_once: int,
) -> tuple[tuple[int, ...], ...]:
    """How many of each expert's first neurons fit, by layer, those first that fire most for their bytes."""
    layers = [layer for layer, n in enumerate(neurons) if n]
    worth = np.concatenate([firing[layer] / row_bytes[layer] for layer in layers])
    owner = np.concatenate(
        [layer * experts + np.arange(neurons[layer]) // (neurons[layer] // experts) for layer in layers]
    )
    order = np.argsort(-worth, kind="stable")
    taken = np.cumsum(np.asarray(row_bytes)[owner[order] // experts]) <= neurons_at_once
    counts = np.bincount(owner[order][taken], minlength=len(neurons) * experts).reshape(-1, experts)
    return tuple(tuple(each.tolist()) if neurons[i] else () for i, each in enumerate(counts))
