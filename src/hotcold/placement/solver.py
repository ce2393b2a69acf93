"""The solver: finds the placement with the shortest predicted time of a token within the GPUs' memory
budgets.

A GPU gets attention, keys and values, and predictors of a run of layers, the layers' hot neurons, and perhaps
the head. Neurons are placed in groups of 64, the most active first. A layer of the run takes ``dense +
max(hot, cold) + handshake``, without the handshake if all its neurons are hot.

Apart from that step, a layer's time is convex in its hot groups. So for a given run and given wholly hot
layers, taking groups by seconds saved per byte is optimal up to the last group. The number of wholly hot
layers is searched with Lagrangian bounds, and so are runs: the seconds of different GPUs' runs add up. The
solver finds the best disjoint runs by their bounds and computes them, until all of the best are computed. So
a larger budget is never slower."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hotcold.placement.costs import Costs, GPUCosts, SideCosts
from hotcold.placement.placement import INDEX_BYTES, Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes

GROUP = 64  #: neurons that are placed together
_PRICES = 48  # number of Lagrange multipliers, in seconds per byte, for which bounds are computed

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Groups:
    """A layer's neurons in the order in which they become hot."""

    order: Array  #: ``[N]`` neurons, the most active first
    edges: Array  #: number of neurons in 0, 1, 2, ... hot groups; the last is N

    @classmethod
    def from_firing(cls, firing: Array, block_neurons: int) -> Self:
        """Makes the groups of a layer; neurons whose down weights share a block stay together."""
        if not firing.size:
            return cls(np.zeros(0, np.int64), np.zeros(1, np.int64))
        sums = np.add.reduceat(firing, np.arange(0, len(firing), block_neurons))
        by_block = np.repeat(sums, block_neurons)[: len(firing)]
        starts = np.arange(0, len(firing), -(-GROUP // block_neurons) * block_neurons)
        return cls(np.argsort(-by_block, kind="stable"), np.append(starts, len(firing)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def hot(self, groups: int) -> npt.NDArray[np.bool_]:
        """Returns the mask of the first ``groups`` groups."""
        mask = np.zeros(len(self.order), np.bool_)
        mask[self.order[: self.edges[groups]]] = True
        return mask


@dataclass(frozen=True)
class _Tables:
    """Time and bytes of the layers of a run on a GPU, split and wholly hot. Tables of split layers are by the
    number of hot groups, ``[layers, 1 + most groups]``. They end where the GPU becomes the slower side."""

    split_bytes: Array
    split_seconds: Array  #: infinite beyond that number
    whole_bytes: Array  #: ``[layers]``
    whole_seconds: Array

    @classmethod
    def from_sizes(cls, sizes: Sizes, cpu: SideCosts, gpu: GPUCosts, groups: Sequence[_Groups]) -> Self:
        shape = len(groups), 1 + max(map(len, groups))
        split_bytes, split_seconds = np.zeros(shape), np.full(shape, np.inf)
        whole_bytes, whole_seconds = np.zeros((2, len(groups)))
        for i, group in enumerate(groups):
            hot = np.append(0, gpu.neurons[i][group.order].cumsum())[group.edges]
            done = np.append(0, cpu.neurons[i][group.order].cumsum())[group.edges]
            cold = done[-1] - done
            handshake = gpu.handshake if len(group) else 0.0  # a layer without neurons is never split
            seconds = gpu.dense[i] + handshake + np.maximum(hot, cold)
            useful = int(seconds[:-1].argmin()) + 1 if len(group) else 1
            split_seconds[i, :useful] = seconds[:useful]
            nbytes = sizes.gpu_dense[i] + group.edges * float(sizes.neuron_bytes[i] + INDEX_BYTES)
            split_bytes[i, : len(nbytes)] = nbytes
            whole_bytes[i] = nbytes[-1]
            whole_seconds[i] = gpu.dense[i] + hot[-1]
        return cls(split_bytes, split_seconds, whole_bytes, whole_seconds)

    @property
    def exists(self) -> Array:
        return np.isfinite(self.split_seconds)

    def worth_of_groups(self) -> Array:
        """Returns the seconds that each further group saves per byte, ``[layers, most groups]``; -inf if
        there is none. Values never rise within a layer, so that rounding cannot change the order of
        groups."""
        with np.errstate(invalid="ignore", divide="ignore"):
            worth = -np.diff(self.split_seconds, axis=1) / np.diff(self.split_bytes, axis=1)
        return np.minimum.accumulate(np.where(self.exists[:, 1:], worth, -np.inf), axis=1)

    def worth_of_whole(self) -> Array:
        """Returns the least seconds per byte that a layer saves by becoming wholly hot, over all numbers of
        groups, ``[layers]``: at a lower price, a wholly hot layer is better than any group."""
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = self.split_seconds - self.whole_seconds[:, None]
            worth = seconds / (self.whole_bytes[:, None] - self.split_bytes)
        worth[seconds == 0] = 0  # a layer without neurons is whole in any case
        return np.asarray(np.where(self.exists, worth, np.inf).min(axis=1))


class _Steps(NamedTuple):
    """Groups of all layers in descending order of seconds saved per byte."""

    layer: Array
    nbytes: Array


class _Run(NamedTuple):
    """Layers ``start`` to ``stop`` on a GPU, with (1) or without (0) the head."""

    gpu: int
    head: int
    start: int
    stop: int


class _OnGPU:
    """One GPU, for any budget."""

    def __init__(self, sizes: Sizes, cpu: SideCosts, gpu: GPUCosts, groups: Sequence[_Groups]) -> None:
        self._sizes, self._cpu, self._gpu, self._groups = sizes, cpu, gpu, groups
        self._tables = tables = _Tables.from_sizes(sizes, cpu, gpu, groups)
        worth = tables.worth_of_groups()
        layer, group = np.nonzero(np.isfinite(worth))
        ranked = np.argsort(-worth[layer, group], kind="stable")
        nbytes = np.diff(tables.split_bytes, axis=1)[layer, group]
        self._steps = _Steps(layer[ranked], nbytes[ranked])
        worth_of_whole = tables.worth_of_whole()
        self._whole_first = np.argsort(-worth_of_whole, kind="stable")  # order of becoming wholly hot
        self._price = _prices(np.append(worth[layer, group], worth_of_whole))
        # By layer and price: the least seconds, including the price of the bytes.
        by_price = [(tables.split_seconds + price * tables.split_bytes).min(1) for price in self._price]
        self._split_bound = np.stack(by_price, axis=1)
        self._whole_bound = tables.whole_seconds[:, None] + tables.whole_bytes[:, None] * self._price

    def bounds(self, budget: int) -> Array:
        """Returns lower bounds for the seconds of each run, relative to the CPU (negative: faster), ``[2,
        layers + 1, layers + 1]`` by head, start and stop. Infinite if the run's dense parts do not fit, or if
        the run separates a layer from the layer whose keys and values it reads."""
        layers = len(self._groups)
        bounds = np.full((2, layers + 1, layers + 1), np.inf)
        start, stop = np.triu_indices(layers + 1)
        useful = (stop > start) | (stop == 0)  # an empty run occurs once only
        start, stop = start[useful], stop[useful]

        def inside(values: Array) -> Array:
            sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
            return np.asarray(sums[stop] - sums[start])

        least = inside(np.minimum(self._split_bound, self._whole_bound))
        dense = inside(self._sizes.gpu_dense)
        for head in (0, 1):
            free_bytes = np.where(
                stop > start, self._free_bytes(budget, 1, head), self._free_bytes(budget, 0, head)
            )
            seconds = (least - np.outer(free_bytes, self._price)).max(1) - inside(self._cpu.layers)
            seconds += self._ends(start, stop, head)
            bounds[head, start, stop] = np.where(dense <= free_bytes, seconds, np.inf)
        bounds[0, 0, 0] = np.inf  # no run
        for layer, source in self._sizes.shared.items():
            within = [(start <= i) & (i < stop) for i in (layer, source)]
            apart = within[0] != within[1]
            bounds[:, start[apart], stop[apart]] = np.inf
        return bounds

    def fill(self, run: _Run, budget: int) -> tuple[float, Array]:
        """Returns the seconds of a run, relative to the CPU, and the hot groups of every layer."""
        free_bytes = self._free_bytes(budget, run.stop - run.start, run.head)
        layers = self._whole_first[(self._whole_first >= run.start) & (self._whole_first < run.stop)]
        bounds, best = self._bounds(layers, free_bytes), (np.inf, np.zeros(len(self._groups), np.int64))
        for n_whole in np.argsort(bounds, kind="stable"):
            if bounds[n_whole] >= best[0]:
                break
            filled = self._fill(layers[:n_whole], layers[n_whole:], free_bytes)
            best = filled if filled[0] < best[0] else best
        ends = self._ends(np.array(run.start), np.array(run.stop), run.head)
        return best[0] - self._cpu.layers[run.start : run.stop].sum() + float(ends), best[1]

    def _ends(self, start: Array, stop: Array, head: int) -> Array:
        """Returns the seconds of the head relative to the CPU, of a step on the GPU, and of visits to it: two
        visits if other layers are between the run and the head."""
        visits = 1 + (head * (stop > start) & (stop < len(self._groups)))
        return np.asarray(
            head * (self._gpu.head - self._cpu.head) + self._gpu.step + self._gpu.handshake * visits
        )

    def _free_bytes(self, budget: int, layers: int, head: int) -> int:
        """Returns the bytes for layers. With layers, a step counts as if all neurons of one were hot, and all
        of one were streamed."""
        most = max(map(int, self._sizes.neurons)) if layers else None
        needed = self._sizes.gpu_step(most) if layers or head else 0
        needed += self._sizes.staging_bytes if layers else 0
        return budget - self._sizes.head * head - needed

    def _bounds(self, layers: Array, free_bytes: int) -> Array:
        """Returns lower bounds for the seconds of a run's ``layers`` if the first 0, 1, 2, ... of them are
        wholly hot."""
        split = self._split_bound[layers].sum(0)
        extra = np.cumsum(self._whole_bound[layers] - self._split_bound[layers], axis=0)
        by_price = split + np.vstack([0 * self._price, extra])
        return np.asarray((by_price - self._price * free_bytes).max(1))

    def _fill(self, whole: Array, split: Array, free_bytes: int) -> tuple[float, Array]:
        """Returns the seconds of the layers of a run, with the layers in ``whole`` wholly hot, and the hot
        groups of every layer. The seconds are infinite if the layers do not fit."""
        tables = self._tables
        free_bytes -= int(tables.whole_bytes[whole].sum() + tables.split_bytes[split, 0].sum())
        possible = np.isin(self._steps.layer, split)
        layer, nbytes = self._steps.layer[possible], self._steps.nbytes[possible]
        taken = layer[: np.searchsorted(nbytes.cumsum(), free_bytes, side="right")]
        groups = np.bincount(taken, minlength=len(self._groups))
        seconds = tables.whole_seconds[whole].sum() + tables.split_seconds[split, groups[split]].sum()
        groups[whole] = [len(self._groups[i]) for i in whole]
        return float(seconds) if free_bytes >= 0 else np.inf, groups


class Solver:
    """Finds placements of one model, profile and machine, for any budgets of GPU memory in bytes."""

    def __init__(self, sizes: Sizes, profile: Profile, costs: Costs) -> None:
        self._groups = [
            _Groups.from_firing(firing, sizes.block_of(i)) for i, firing in enumerate(profile.firing)
        ]
        self._gpus = [_OnGPU(sizes, costs.cpu, gpu, self._groups) for gpu in costs.gpus]

    def solve(self, *budgets: int) -> Placement:
        """Returns the fastest placement within the budget of each GPU, if need be on the CPU alone."""
        seconds = [gpu.bounds(budget) for gpu, budget in zip(self._gpus, budgets, strict=True)]
        computed: dict[_Run, Array] = {}
        while unsure := set(runs := _least(seconds)) - computed.keys():
            for run in unsure:
                at = run.head, run.start, run.stop
                seconds[run.gpu][at], computed[run] = self._gpus[run.gpu].fill(run, budgets[run.gpu])
        groups = sum((computed[run] for run in runs), np.zeros(len(self._groups), np.int64))
        hot = [layer.hot(n) for layer, n in zip(self._groups, groups.tolist(), strict=True)]
        has = {i: run.gpu for run in runs for i in range(run.start, run.stop)}
        head = next((run.gpu for run in runs if run.head), None)
        return Placement(hot, tuple(has.get(i) for i in range(len(hot))), head)


def _least(seconds: Sequence[Array]) -> list[_Run]:
    """Returns the disjoint runs, at most one for each GPU, with the least sum of ``seconds`` (as from
    :meth:`_OnGPU.bounds`). Dynamic programming finds the least sum of each set of GPUs by the layer at which
    its last run ends."""
    best, runs = 0.0, list[_Run]()
    n, stops = seconds[0].shape[1], np.arange(seconds[0].shape[1])
    for head_on in range(-1, len(seconds)):  # -1 is the CPU
        sums = {0: np.zeros(n)}  # by bit set of GPUs: least seconds of runs that end by each layer
        last: dict[int, list[_Run]] = {}
        for gpus in range(1, 1 << len(seconds)):
            least, run_to = np.full(n, np.inf), [_Run(-1, 0, 0, 0)] * n
            for gpu in (i for i in range(len(seconds)) if gpus >> i & 1):
                head = int(gpu == head_on)
                both = sums[gpus ^ 1 << gpu][:, None] + seconds[gpu][head]
                start = both.argmin(0)
                for stop in np.flatnonzero(both[start, stops] < least):
                    least[stop] = both[start[stop], stop]
                    run_to[stop] = _Run(gpu, head, int(start[stop]), int(stop))
            if least.min() < best and (head_on < 0 or gpus >> head_on & 1):
                best, runs = float(least.min()), _behind(gpus, int(least.argmin()), last | {gpus: run_to})
            best_stop = np.maximum.accumulate(np.where(least <= np.minimum.accumulate(least), stops, 0))
            sums[gpus], last[gpus] = least[best_stop], [run_to[i] for i in best_stop]
    return runs


def _behind(gpus: int, stop: int, last: dict[int, list[_Run]]) -> list[_Run]:
    """Returns the runs of a set of GPUs that end by layer ``stop``."""
    if not gpus:
        return []
    run = last[gpus][stop]
    return [run, *_behind(gpus ^ 1 << run.gpu, run.start, last)]


def _prices(worth: Array) -> Array:
    """Returns multipliers at quantiles of the parts' worth, and 0."""
    return np.append(0, np.maximum(np.quantile(worth, np.linspace(0, 1, _PRICES)), 0))
