"""The plan of hot neurons in memory, for sparse models of experts larger than a budget.

Rows of other neurons are read from the model's file when a step needs them. With all gates in memory, a step
needs up and down rows of active neurons; with a predictor, gate, up and down rows of its candidates.

The file must have the neurons of each expert in order of activity, the most active first (`hotcold convert
--hot-first`). So an expert's hot neurons are its first ones."""

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
from hotcold.values import exact_size, printable, sizes

_PAGE = 4096  #: bytes of a memory page
_MATRIX = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")

#: Candidates of a predictor for each active neuron, if its file does not say how many.
_NAMED = 1.5


@dataclass(frozen=True)
class HotNeurons:
    """The neurons of a model of experts within a budget of memory: rows of hot neurons, and all gates of
    layers without a predictor. Tuples have one entry for each layer."""

    budget_bytes: int
    bill: Mapping[str, int]  #: bytes of everything but gates and hot rows, by purpose
    experts: int  #: experts of a layer
    neurons: tuple[int, ...]  #: neurons of one expert; 0 in layers without experts
    named: tuple[float | None, ...]  #: the predictor's candidates per active neuron; None: no predictor
    gate_bytes: tuple[int, ...]  #: bytes of all gates that stay in memory
    row_bytes: tuple[int, ...]  #: bytes that are read for a cold neuron
    reads: tuple[int, ...]  #: number of reads for a cold neuron
    neurons_at_once: tuple[int, ...]  #: cold neurons that are read at a time, unless one expert has more
    hot: tuple[tuple[int, ...], ...]  #: number of hot neurons of each expert, its first ones
    source: str = ""  #: source of the neurons' activity

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
        """Chooses the most active neurons of all layers together that fit. Returns None if the gates that
        must stay in memory do not fit. ``bill``: bytes of everything else in memory. ``candidates``: by
        layer, the share of the chosen experts' neurons that a predictor selects; 0: unknown; None: no
        predictor."""
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
            else max(1.0, share * n * config.experts.chosen / max(1e-9, rates.sum()))
            if share
            else _NAMED
            for share, n, rates in zip(candidates or [None] * config.layers, neurons, firing, strict=True)
        ]
        # Read at a time: one expert, or as many neurons of several experts as take the same memory, with the
        # pages in which each begins and ends. Every expert of other layers has such pages at the end of its
        # hot rows.
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
        """Bytes of gates and hot rows."""
        pairs = zip(self.hot, self.row_bytes, strict=True)
        return sum(self.gate_bytes) + sum(sum(hot) * each for hot, each in pairs)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of gates, hot rows, and the buffers for cold rows."""
        return self.expert_bytes + self.bill["reading"] + self.bill["cold rows"]

    @property
    def all_fit(self) -> bool:
        return False

    @property
    def share(self) -> float:
        """Share of the experts' bytes in memory."""
        every = zip(self.neurons, self.row_bytes, strict=True)
        return self.expert_bytes / (sum(self.gate_bytes) + sum(self.experts * n * each for n, each in every))

    def cold_per_token(self, profile: Profile) -> list[float]:
        """Returns the mean number of neurons read per token, by layer: cold neurons that are active or
        candidates. Wrong candidates are assumed to be equally frequent among all neurons."""
        counts = []
        layers = zip(self.hot, self.neurons, profile.firing, self.named, strict=True)
        for hot, n, firing, named in layers:
            rates = np.asarray(firing, np.float64).reshape(len(hot), n) if n else np.zeros((0, 0))
            cold = sum(activity[count:].sum() for activity, count in zip(rates, hot, strict=True))
            wasted = 0.0 if named is None else (named - 1) * rates.sum() * (1 - sum(hot) / max(1, rates.size))
            counts.append(float(cold + wasted))
        return counts

    def disk_bytes(self, layer: int, neurons: float) -> float:
        """Returns the bytes read for a number of cold neurons, in whole blocks."""
        return neurons * (self.row_bytes[layer] + self.reads[layer] * _PAGE)

    @property
    def unit(self) -> str:
        """Unit name for reports."""
        return f"neurons that {'predictors choose' if any(self.named) else 'are active'} for a token"

    @property
    def fitting(self) -> str:
        share = f"{sum(map(sum, self.hot)) / (self.experts * sum(self.neurons)):.1%} of neurons"
        if not any(self.gate_bytes):
            return f"gate, up and down of {share}"
        return f"all gates, and up and down of {share}"

    def devices(self, one: Devices, name: str) -> Devices:
        """Returns the backends of ``one``, with cold rows left in the file; ``name``: file name in errors."""
        layers = enumerate(zip(self.hot, self.neurons_at_once, self.named, strict=True))
        rows = [
            HotRows(hot, neurons_at_once, named is not None, layer_label(name, layer)) if hot else None
            for layer, (hot, neurons_at_once, named) in layers
        ]
        return PartlyLoaded(one.embedding, one.layers, one.head, rows)

    def __str__(self) -> str:
        bill = sizes([*self.bill.items(), ("gates and hot rows", self.expert_bytes)])
        got = f"{self.fitting} ({printable(self.source)}), {self.share:.0%} of the experts' bytes,"
        others = f"the rest is read when a token needs it ({way_of_reading()})"
        return f"{got} fit in {exact_size(self.budget_bytes)}; {others}: {bill}"

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
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
    """Returns whether a model's cold neurons can stay in its file: the file orders them, the model is sparse,
    and the system frees single pages of memory."""
    if not file.metadata.get(HOT_FIRST_KEY, False) or not sys.platform.startswith("linux"):
        return False
    sparse = config.experts is not None and config.gated and config.activation in SPARSE_ACTIVATIONS
    names = {name for _, _, name in _parts(file, config)}
    whole = all(name in names or "_exps." not in name for name in file.tensors)
    return sparse and config.down_layout == "by_neuron" and whole


def _parts(file: GGUFFile, config: Config) -> list[tuple[int, str, str]]:
    """Returns layers, kinds and names of the experts' matrices, without draft blocks."""
    matches = [match for match in map(_MATRIX.fullmatch, file.tensors) if match]
    return [(int(match[1]), match[2], match[0]) for match in matches if int(match[1]) < config.layers]


def _hottest(
    firing: Sequence[Any],
    row_bytes: Sequence[int],
    neurons: Sequence[int],
    experts: int,
    neurons_at_once: int,
) -> tuple[tuple[int, ...], ...]:
    """Returns how many first neurons of each expert fit, by layer; the most active ones per byte come
    first."""
    layers = [layer for layer, n in enumerate(neurons) if n]
    worth = np.concatenate([firing[layer] / row_bytes[layer] for layer in layers])
    owner = np.concatenate(
        [layer * experts + np.arange(neurons[layer]) // (neurons[layer] // experts) for layer in layers]
    )
    order = np.argsort(-worth, kind="stable")
    taken = np.cumsum(np.asarray(row_bytes)[owner[order] // experts]) <= neurons_at_once
    counts = np.bincount(owner[order][taken], minlength=len(neurons) * experts).reshape(-1, experts)
    return tuple(tuple(each.tolist()) if neurons[i] else () for i, each in enumerate(counts))
