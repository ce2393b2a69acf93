"""Decides what the GPU gets: the placement with the least predicted time of a token that fits a budget.

To the GPU go attention, keys and values and predictors of a run of layers, of their neurons the hot ones, and
perhaps the head. Neurons go in groups of 64, the most active first. A layer of the run takes
``dense + max(hot, cold) + handshake``, without the last where all its neurons are hot. But for that step its
time is convex in its hot groups: for a given run, and given layers that are wholly hot, it is optimal, up to
the last group, to take groups by seconds saved per byte. Runs and numbers of wholly hot layers are searched
by their Lagrangian bounds, until none is better than what is found: a larger budget is never slower."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.sparse.hardware import Hardware
from hotcold.sparse.placement import INDEX_BYTES, Placement, Profile
from hotcold.sparse.sizes import Sizes

GROUP = 64  #: neurons that are placed together
_PRICES = 48  # multipliers, in seconds per byte, for which bounds are computed

Array = npt.NDArray[Any]


class Costs:
    """Expected seconds of a model's parts for one token, on the CPU [0] and the GPU [1]. A neuron is read
    when it fires, or always where that streams faster than rows are gathered."""

    def __init__(self, sizes: Sizes, profile: Profile, hardware: Hardware) -> None:
        def neurons(i: int, stream: float, rows: float) -> Array:
            read = np.minimum(profile.firing[i] / rows, 1 / stream) * (1 - sizes.always)
            return np.asarray(sizes.neuron[i] / 1e9 * (read + sizes.always * sizes.routed / stream))

        streams, layers = (hardware.cpu_stream_gb_s, hardware.gpu_stream_gb_s), range(len(sizes.neurons))
        gather = [hardware.gather_gb_s(n / 2) for n in sizes.neuron]  # up and down lie side by side
        self.neurons = (
            [neurons(i, streams[0], gather[i]) for i in layers],
            [neurons(i, streams[1], hardware.gpu_rows_gb_s) for i in layers],
        )
        self.bytes = sizes.attention + sizes.kv + sizes.predictor  # dense: on one side, read for each token
        self.dense = [self.bytes / stream / 1e9 for stream in streams]
        self.head = [sizes.head / stream / 1e9 for stream in streams]
        self.cpu = self.dense[0] + [each.sum() for each in self.neurons[0]]  # layers outside the run
        self.handshake = hardware.handshake_s + 8 * sizes.dim / (hardware.link_pinned_gb_s * 1e9)

    def token(self, placement: Placement) -> float:
        run = placement.layers
        total = self.ends(np.array(run.start), np.array(run.stop), placement.head) + self.cpu.sum()
        for i in run:
            hot = placement.hot[i]
            sides = self.neurons[0][i][~hot].sum(), self.neurons[1][i][hot].sum()
            total += self.dense[1][i] + max(sides) + self.handshake * (not hot.all()) - self.cpu[i]
        return float(total)

    def ends(self, start: Array, stop: Array, head: bool) -> Array:
        """Seconds of the head, and of visits to the GPU: two if layers of the CPU part run and head."""
        some = stop > start
        visits = 1.0 * (some | head) + (some & head & (stop < len(self.cpu)))
        return np.asarray(self.head[head] + self.handshake * visits)


class Solver:
    """One model, profile and machine, for any budget of GPU memory in bytes."""

    def __init__(self, sizes: Sizes, profile: Profile, costs: Costs) -> None:
        self._sizes, self._costs = sizes, costs
        self._order = [_ranked(firing, sizes.shared) for firing in profile.firing]
        self._edges = [np.append(np.arange(0, n, max(GROUP, sizes.shared)), n) for n in sizes.neurons]
        shape = len(self._edges), max(map(len, self._edges))
        # By layer and hot groups: bytes, and seconds up to where the GPU becomes the slower side.
        self._bytes, self._split = np.zeros(shape), np.full(shape, np.inf)
        self._whole = np.zeros((shape[0], 2))  # bytes and seconds of layers that are wholly hot
        for i, (order, edges) in enumerate(zip(self._order, self._edges, strict=True)):
            cold, hot = (np.append(0, each[i][order].cumsum())[edges] for each in costs.neurons)
            seconds = costs.dense[1][i] + costs.handshake + np.maximum(hot, cold[-1] - cold)
            best = int(seconds[:-1].argmin()) + 1
            self._split[i, :best] = seconds[:best]
            self._bytes[i, : len(edges)] = costs.bytes[i] + edges * float(sizes.neuron[i] + INDEX_BYTES)
            self._whole[i] = self._bytes[i, len(edges) - 1], costs.dense[1][i] + hot[-1]
        # Steps of one group in the order of what they save per byte, and bounds of every layer.
        inside, size = np.isfinite(self._split), np.diff(self._bytes, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            worth = -np.diff(self._split, axis=1) / size
            # A layer becomes wholly hot where that saves more per byte than any of its groups.
            whole = (self._split - self._whole[:, 1:]) / (self._whole[:, :1] - self._bytes)
        # Rounding must not put a group before the more active ones of its layer.
        worth = np.minimum.accumulate(np.where(inside[:, 1:], worth, -np.inf), axis=1)
        layer, group = np.nonzero(np.isfinite(worth))
        ranked = np.argsort(-worth[layer, group], kind="stable")
        self._steps = layer[ranked], size[layer, group][ranked]
        most = np.where(inside, whole, np.inf).min(axis=1)
        self._first = np.argsort(-most, kind="stable")  # layers, in the order of becoming wholly hot
        prices = np.quantile(np.append(worth[layer, group], most), np.linspace(0, 1, _PRICES))
        self._price = np.append(0, np.maximum(prices, 0))
        self._split_bound = np.stack([(self._split + p * self._bytes).min(1) for p in self._price], axis=1)
        self._whole_bound = self._whole[:, 1:] + self._whole[:, :1] * self._price

    def solve(self, budget: int) -> Placement:
        best, found = np.inf, (range(0), False, np.zeros(len(self._order), np.int64))
        bound, *runs = self._runs(budget)
        for at in np.argsort(bound, kind="stable"):
            if bound[at] >= best:
                break
            start, stop, head, rest, room = (each[at] for each in runs)
            layers = self._first[(self._first >= start) & (self._first < stop)]
            more = np.cumsum(self._whole_bound[layers] - self._split_bound[layers], axis=0)
            bounds = self._split_bound[layers].sum(0) + np.vstack([0 * self._price, more])
            bounds = rest + (bounds - self._price * room).max(1)
            for n in np.argsort(bounds, kind="stable"):  # that are wholly hot
                if bounds[n] >= best:
                    break
                seconds, groups = self._fill(layers[:n], layers[n:], room)
                if rest + seconds < best:
                    best, found = rest + seconds, (range(start, stop), bool(head), groups)
        run, head, groups = found
        hot = [np.zeros(len(order), np.bool_) for order in self._order]
        for mask, order, edges, n in zip(hot, self._order, self._edges, groups, strict=True):
            mask[order[: edges[n]]] = True
        return Placement(hot, run, head)

    def _runs(self, budget: int) -> list[Array]:
        """Runs that fit: bounds, first layers, those after the last, head, seconds outside, bytes inside."""
        start, stop = np.triu_indices(len(self._order) + 1)
        start, stop = (each[(stop > start) | (stop == 0)] for each in (start, stop))

        def inside(values: Array) -> Array:
            sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
            return np.asarray(sums[stop] - sums[start])

        costs, least, tables = self._costs, inside(np.minimum(self._split_bound, self._whole_bound)), []
        for head in (False, True):
            rest = costs.cpu.sum() - inside(costs.cpu) + costs.ends(start, stop, head)
            room = budget - self._sizes.head * head - self._sizes.buffers * ((stop > start) | head)
            bound = rest + (least - np.outer(room, self._price)).max(1)
            table = (bound, start, stop, np.full(len(stop), head), rest, room)
            tables.append([each[inside(costs.bytes) <= room] for each in table])
        return [np.concatenate(each) for each in zip(*tables, strict=True)]

    def _fill(self, whole: Array, split: Array, room: int) -> tuple[float, Array]:
        """Seconds of a run, and hot groups of every layer, where those of ``whole`` are wholly hot."""
        room -= int(self._whole[whole, 0].sum() + self._bytes[split, 0].sum())
        layer, size = (each[np.isin(self._steps[0], split)] for each in self._steps)
        taken = layer[: np.searchsorted(size.cumsum(), room, side="right")]
        groups = np.bincount(taken, minlength=len(self._order))
        seconds = self._whole[whole, 1].sum() + self._split[split, groups[split]].sum()
        groups[whole] = [len(self._edges[i]) - 1 for i in whole]
        return float(seconds) if room >= 0 else np.inf, groups


def _ranked(firing: Array, shared: int) -> Array:
    """Neurons, the most active first; those that share a block stay together."""
    sums = np.add.reduceat(firing, np.arange(0, len(firing), shared))
    return np.argsort(-np.repeat(sums, shared)[: len(firing)], kind="stable")


def last_layers(sizes: Sizes, n: int) -> Placement:
    """The head and the last ``n`` layers, whole; without any, the CPU alone."""
    first = len(sizes.neurons) - n
    hot = [np.full(each, i >= first) for i, each in enumerate(sizes.neurons)]
    return Placement(hot, range(first, first + n), n > 0)


def layer_split(sizes: Sizes, budget: int) -> tuple[Sizes, Placement]:
    """What engines without sparsity do: as many whole layers as fit, dense, without predictors."""
    dense = replace(sizes, always=1.0, predictor=0 * sizes.predictor)
    splits = (last_layers(dense, n) for n in range(len(sizes.neurons), 0, -1))
    return dense, next((each for each in splits if each.gpu_bytes(dense) <= budget), last_layers(dense, 0))


def paper_placement(sizes: Sizes, profile: Profile, hardware: Hardware, budget: int) -> Placement:
    """Most firings on the GPU after all that is dense, as PowerInfer has it (arXiv 2312.12456, section 6.3).

    A layer has no hot neurons, or as many as save a handshake's time if all are read; those with too few are
    closed, the least first. The same solver does it, where firings are the cost and dense parts cost more."""
    costs, dear = Costs(sizes, profile, hardware), 1e6 * np.ones(len(sizes.neurons))
    saved = sizes.neuron / 1e9 * (1 / hardware.cpu_stream_gb_s - 1 / hardware.gpu_stream_gb_s)
    least = np.minimum(sizes.neurons, costs.handshake / np.maximum(saved, 1e-300))
    costs.neurons = [1.0 * each for each in profile.firing], [0.0 * each for each in profile.firing]
    costs.dense, costs.head, costs.handshake, few = [dear, 0 * dear], [1e6, 0.0], 0.0, [-1]
    while len(few):
        costs.cpu = dear + [each.sum() for each in costs.neurons[0]]
        placement = Solver(sizes, profile, costs).solve(budget)
        counts = np.array([hot.sum() for hot in placement.hot])
        few = [i for i in np.argsort(counts) if 0 < counts[i] < least[i]][:1]
        for i in few:
            costs.neurons[0][i] *= 0
    return placement
