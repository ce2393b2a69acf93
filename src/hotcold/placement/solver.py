"""Finds the placement with the least predicted time of a token that fits a budget of GPU memory.

The GPU gets attention, keys and values and predictors of a run of layers, the hot neurons of these layers,
and maybe the head. Neurons go in groups of 64, the most active first. A layer of the run takes ``dense +
max(hot, cold) + handshake``, without the last where all its neurons are hot. But for that step its time is
convex in its hot groups: for a given run, and given layers that are wholly hot, it is optimal, up to the last
group, to take groups by seconds saved per byte. Runs and numbers of wholly hot layers are searched by their
Lagrangian bounds, until none is better than what is found: a larger budget is never slower."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hotcold.placement.costs import Costs
from hotcold.placement.placement import INDEX_BYTES, Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes

GROUP = 64  #: neurons that are placed together
_PRICES = 48  # number of multipliers, in seconds per byte, for which bounds are computed

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Groups:
    """A layer's neurons in the order in which they become hot."""

    order: Array  #: ``[N]`` neurons, the most active first
    edges: Array  #: number of neurons in 0, 1, 2, ... hot groups; the last is N

    @classmethod
    def of(cls, firing: Array, block_neurons: int) -> Self:
        """The groups of a layer; neurons whose down weights share a block stay together."""
        sums = np.add.reduceat(firing, np.arange(0, len(firing), block_neurons))
        by_block = np.repeat(sums, block_neurons)[: len(firing)]
        starts = np.arange(0, len(firing), -(-GROUP // block_neurons) * block_neurons)
        return cls(np.argsort(-by_block, kind="stable"), np.append(starts, len(firing)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def hot(self, groups: int) -> npt.NDArray[np.bool_]:
        """The mask of the first ``groups`` groups."""
        mask = np.zeros(len(self.order), np.bool_)
        mask[self.order[: self.edges[groups]]] = True
        return mask


@dataclass(frozen=True)
class _Tables:
    """Time and bytes of the run's layers by the number of their hot groups, ``[layers, 1 + most groups]``, up
    to the number at which the GPU becomes the slower side; and the same for wholly hot layers."""

    split_bytes: Array
    split_seconds: Array  #: infinite beyond
    whole_bytes: Array  #: ``[layers]``
    whole_seconds: Array

    @classmethod
    def of(cls, sizes: Sizes, costs: Costs, groups: Sequence[_Groups]) -> Self:
        shape = len(groups), 1 + max(map(len, groups))
        split_bytes, split_seconds = np.zeros(shape), np.full(shape, np.inf)
        whole_bytes, whole_seconds = np.zeros((2, len(groups)))
        for i, each in enumerate(groups):
            hot = np.append(0, costs.gpu.neurons[i][each.order].cumsum())[each.edges]
            done = np.append(0, costs.cpu.neurons[i][each.order].cumsum())[each.edges]
            cold = done[-1] - done
            seconds = costs.gpu.dense[i] + costs.handshake + np.maximum(hot, cold)
            useful = int(seconds[:-1].argmin()) + 1
            split_seconds[i, :useful] = seconds[:useful]
            nbytes = sizes.gpu_dense[i] + each.edges * float(sizes.neuron_bytes[i] + INDEX_BYTES)
            split_bytes[i, : len(nbytes)] = nbytes
            whole_bytes[i] = nbytes[-1]
            whole_seconds[i] = costs.gpu.dense[i] + hot[-1]
        return cls(split_bytes, split_seconds, whole_bytes, whole_seconds)

    @property
    def exists(self) -> Array:
        return np.isfinite(self.split_seconds)

    def worth_of_groups(self) -> Array:
        """Seconds that each further group saves per byte, ``[layers, most groups]``; -inf where there is
        none. Falling in each layer: rounding must not put a group before the more active ones."""
        with np.errstate(invalid="ignore", divide="ignore"):
            worth = -np.diff(self.split_seconds, axis=1) / np.diff(self.split_bytes, axis=1)
        return np.minimum.accumulate(np.where(self.exists[:, 1:], worth, -np.inf), axis=1)

    def worth_of_whole(self) -> Array:
        """Seconds per byte that a layer saves by becoming wholly hot from the number of groups for which that
        is least, ``[layers]``: at a lower price it is better than any group."""
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = self.split_seconds - self.whole_seconds[:, None]
            worth = seconds / (self.whole_bytes[:, None] - self.split_bytes)
        return np.asarray(np.where(self.exists, worth, np.inf).min(axis=1))


class _Steps(NamedTuple):
    """Groups of all layers in the order of what they save per byte."""

    layer: Array
    nbytes: Array


class _Runs(NamedTuple):
    """Runs of layers on the GPU, with or without the head, as columns."""

    bound: Array  # seconds that no placement with this run can beat
    start: Array
    stop: Array
    head: Array
    outside: Array  # seconds of the layers of the CPU, of the head and of visits to the GPU
    room: Array  # bytes for the layers of the run


class _Run(NamedTuple):
    """One row of :class:`_Runs`."""

    bound: float
    start: int
    stop: int
    head: bool
    outside: float
    room: int


_NOTHING = _Run(bound=np.inf, start=0, stop=0, head=False, outside=np.inf, room=0)


class Solver:
    """One model, profile and machine, for any budget of GPU memory in bytes."""

    def __init__(self, sizes: Sizes, profile: Profile, costs: Costs) -> None:
        self._sizes = sizes
        self._costs = costs
        self._groups = [_Groups.of(firing, sizes.block_neurons) for firing in profile.firing]
        self._tables = tables = _Tables.of(sizes, costs, self._groups)
        worth = tables.worth_of_groups()
        layer, group = np.nonzero(np.isfinite(worth))
        ranked = np.argsort(-worth[layer, group], kind="stable")
        nbytes = np.diff(tables.split_bytes, axis=1)[layer, group]
        self._steps = _Steps(layer[ranked], nbytes[ranked])
        worth_of_whole = tables.worth_of_whole()
        self._whole_first = np.argsort(-worth_of_whole, kind="stable")  # the order of becoming wholly hot
        self._price = _prices(np.append(worth[layer, group], worth_of_whole))
        # By layer and price: least seconds, with what the bytes cost.
        by_price = [(tables.split_seconds + price * tables.split_bytes).min(1) for price in self._price]
        self._split_bound = np.stack(by_price, axis=1)
        self._whole_bound = tables.whole_seconds[:, None] + tables.whole_bytes[:, None] * self._price

    def solve(self, budget: int) -> Placement:
        """The fastest placement within ``budget`` bytes, on the CPU alone if need be."""
        best = np.inf
        run, groups = _NOTHING, np.zeros(len(self._groups), np.int64)
        for each in self._likely_runs(budget):
            if each.bound >= best:
                break
            layers = self._whole_first[(self._whole_first >= each.start) & (self._whole_first < each.stop)]
            bounds = self._bounds(layers, each)
            for n_whole in np.argsort(bounds, kind="stable"):
                if bounds[n_whole] >= best:
                    break
                seconds, filled = self._fill(layers[:n_whole], layers[n_whole:], each.room)
                if each.outside + seconds < best:
                    best = each.outside + seconds
                    run, groups = each, filled
        hot = [layer.hot(n) for layer, n in zip(self._groups, groups.tolist(), strict=True)]
        return Placement(hot, range(run.start, run.stop), run.head)

    def _likely_runs(self, budget: int) -> Iterator[_Run]:
        """Runs whose dense parts fit, the one with the least bound first."""
        without, with_head = self._runs(budget, head=False), self._runs(budget, head=True)
        runs = _Runs(*(np.concatenate(columns) for columns in zip(without, with_head, strict=True)))
        for at in np.argsort(runs.bound, kind="stable"):
            bound, start, stop, head, outside, room = (column[at] for column in runs)
            yield _Run(float(bound), int(start), int(stop), bool(head), float(outside), int(room))

    def _runs(self, budget: int, *, head: bool) -> _Runs:
        start, stop = np.triu_indices(len(self._groups) + 1)
        useful = (stop > start) | (stop == 0)  # no layers are one run, not many
        start, stop = start[useful], stop[useful]

        def inside(values: Array) -> Array:
            sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
            return np.asarray(sums[stop] - sums[start])

        on_cpu = self._costs.cpu.layers
        outside = on_cpu.sum() - inside(on_cpu) + self._costs.ends(start, stop, head)
        room = budget - self._sizes.head * head - self._step_bytes(stop > start, head)
        least = inside(np.minimum(self._split_bound, self._whole_bound))
        bound = outside + (least - np.outer(room, self._price)).max(1)
        fits = inside(self._sizes.gpu_dense) <= room
        columns = _Runs(bound, start, stop, np.full(len(stop), head), outside, room)
        return _Runs(*(column[fits] for column in columns))

    def _step_bytes(self, layers: Array, head: bool) -> Array:
        """Bytes of a step on the GPU, as if all neurons of a layer were hot, if it has layers."""
        most = max(map(int, self._sizes.neurons))
        alone = self._sizes.gpu_step(None, True) if head else 0
        return np.where(layers, self._sizes.gpu_step(most, head), alone)

    def _bounds(self, layers: Array, run: _Run) -> Array:
        """Seconds of a token that no placement can beat in which the first 0, 1, 2, ... of ``layers``, which
        are those of the run, are wholly hot."""
        split = self._split_bound[layers].sum(0)
        more = np.cumsum(self._whole_bound[layers] - self._split_bound[layers], axis=0)
        by_price = split + np.vstack([0 * self._price, more])
        return np.asarray(run.outside + (by_price - self._price * run.room).max(1))

    def _fill(self, whole: Array, split: Array, room: int) -> tuple[float, Array]:
        """Seconds of the layers of a run, those of ``whole`` wholly hot, and hot groups of every layer; the
        seconds are infinite where there is no room for this."""
        tables = self._tables
        room -= int(tables.whole_bytes[whole].sum() + tables.split_bytes[split, 0].sum())
        possible = np.isin(self._steps.layer, split)
        layer, nbytes = self._steps.layer[possible], self._steps.nbytes[possible]
        taken = layer[: np.searchsorted(nbytes.cumsum(), room, side="right")]
        groups = np.bincount(taken, minlength=len(self._groups))
        seconds = tables.whole_seconds[whole].sum() + tables.split_seconds[split, groups[split]].sum()
        groups[whole] = [len(self._groups[i]) for i in whole]
        return float(seconds) if room >= 0 else np.inf, groups


def _prices(worth: Array) -> Array:
    """Multipliers spread over the worth of parts, and 0."""
    return np.append(0, np.maximum(np.quantile(worth, np.linspace(0, 1, _PRICES)), 0))
