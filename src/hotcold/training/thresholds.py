"""Chooses thresholds of gates on held-out text, within a bound on the divergence they cause (FATReLU)."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hotcold.errors import UserError
from hotcold.training.libraries import torch
from hotcold.training.sparse_model import (
    Batch,
    WatchedActivation,
    evaluating,
    inputs_of,
    sparse_layers,
    sum_of_processes,
)

#: Thresholds to try, in units of the root mean square of a layer's positive gates.
SHARES = (0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64)
MAX_DIVERGENCE = 1e-3  #: default bound, nats; about the rise of the log of the perplexity
_SHRUNK = 0.7  # factor of the budget after a choice that exceeds the bound
_TRIES = 12

Mode = Literal["one", "per-layer", "none"]


@dataclass(frozen=True)
class Thresholds:
    """The chosen thresholds, and the curve of common thresholds that were tried."""

    thresholds: list[float]  #: by layer
    divergence: float  #: nats a token, from the model without thresholds
    zeros: float  #: share of activations that are zero
    curve: list[tuple[float, float, float]]  #: share of the gates' scale, divergence, zeros

    def report(self) -> dict[str, Any]:
        return asdict(self)


def choose_thresholds(
    model: Any, held_out: Iterable[Batch], mode: Mode = "per-layer", max_divergence: float = MAX_DIVERGENCE
) -> Thresholds:
    """Sets the largest thresholds within a Kullback-Leibler divergence from the model without thresholds.

    ``one`` sets the same threshold in all layers. ``per-layer`` sets one for each layer, by the zeros that it
    gains for the divergence that it causes. ``none`` sets 0. Measure the model on another text than
    ``held_out``, since the choice fits this text. In a distributed run each process passes its own batches.

    UserError: the model is not sparse, or a value is not allowed."""
    layers = sparse_layers(model)
    if mode not in ("one", "per-layer", "none"):
        raise UserError(f"threshold {mode!r}: choose from one, per-layer, none")
    if not max_divergence > 0:
        raise UserError(f"max_divergence {max_divergence:g}: a number above 0 is needed")
    search = _Search(model, layers, list(held_out))
    if mode == "none":
        chosen = search.at([[0.0] * len(layers)])[0]
        return Thresholds([0.0] * len(layers), *chosen, [(0.0, *chosen)])
    scales = search.scales()
    common = [float(torch.tensor(scales).square().mean().sqrt())] * len(layers)
    units = common if mode == "one" else scales
    curve = search.at([_times(share, units) for share in SHARES])
    within = [share for share, (kl, _) in zip(SHARES, curve, strict=True) if kl <= max_divergence]
    best = _times(max(within), units)
    if mode == "per-layer":
        best = search.greedy(scales, max_divergence, best)
    search.set(best)
    divergence, zeros = search.at([best])[0]
    points = [(share, *point) for share, point in zip(SHARES, curve, strict=True)]
    return Thresholds(best, divergence, zeros, points)


def _times(share: float, units: Sequence[float]) -> list[float]:
    return [float(torch.tensor(share * unit, dtype=torch.float32)) for unit in units]


class _Search:
    """Tries thresholds on a text: for each batch one pass without thresholds, then one for each candidate."""

    def __init__(self, model: Any, layers: list[list[WatchedActivation]], batches: list[Batch]) -> None:
        self._model, self._layers, self._batches = model, layers, batches
        self._device = next(model.parameters()).device

    def set(self, thresholds: Sequence[float]) -> None:
        for layer, threshold in zip(self._layers, thresholds, strict=True):
            for each in layer:
                each.threshold = threshold

    def scales(self) -> list[float]:
        """By layer, the root mean square of positive gates."""
        sums = torch.zeros(2, len(self._layers), dtype=torch.float64, device=self._device)
        self.set([0.0] * len(self._layers))
        with evaluating(self._model, counting=True), torch.no_grad():
            for batch in self._batches:
                self._logits(batch)
                for number, layer in enumerate(self._layers):
                    for each in layer:
                        sums[:, number] += torch.stack([value.double() for value in each.gates])
        squares, counts = sum_of_processes(sums)
        return [float(scale) for scale in (squares / counts.clamp_min(1)).sqrt()]

    def at(self, candidates: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        """Mean divergence and share of zeros of each candidate, a list of one threshold for each layer."""
        totals = self._totals(candidates)
        return [(float(row[0] / row[1]), float(row[2:-1].sum() / row[-1])) for row in totals]

    def _totals(self, candidates: Sequence[Sequence[float]]) -> Any:
        """Sums by candidate: divergence, tokens, zeros of each layer, and values."""
        totals = torch.zeros(len(candidates), 3 + len(self._layers), dtype=torch.float64, device=self._device)
        with evaluating(self._model, counting=True), torch.no_grad():
            for batch in self._batches:
                self.set([0.0] * len(self._layers))
                aim = self._logits(batch)
                for number, candidate in enumerate(candidates):
                    self.set(candidate)
                    totals[number] += self._compared(aim, self._logits(batch))
        totals = sum_of_processes(totals)
        if not bool((totals[:, 1] > 0).all()):
            raise UserError("there is no held-out token to choose thresholds with: give at least one batch")
        return totals

    def _logits(self, batch: Batch) -> Any:
        inputs, _ = inputs_of(batch, self._device)
        return self._model(**inputs, use_cache=False).logits

    def _compared(self, aim: Any, logits: Any) -> Any:
        row = torch.zeros(3 + len(self._layers), dtype=torch.float64, device=self._device)
        for first, second in zip(aim, logits, strict=True):  # a window at a time: logits in float32 are large
            logs = [torch.log_softmax(each.float(), dim=-1) for each in (second, first)]
            row[0] += torch.nn.functional.kl_div(*logs, log_target=True, reduction="sum")
        row[1] = aim.shape[0] * aim.shape[1]
        for number, layer in enumerate(self._layers):
            row[2 + number] = sum(each.zeros for each in layer)
            row[-1] += sum(each.values for each in layer)
        return row

    def greedy(self, scales: Sequence[float], bound: float, common: list[float]) -> list[float]:
        """Raises the threshold of the layer that gains most zeros for its divergence, until the bound.

        Each layer is tried alone. The divergences nearly add up; if all layers cause more than the sum, the
        budget shrinks. ``common`` is the result if nothing better is within the bound."""
        count = len(scales)
        alone = []
        for layer in range(count):
            steps = [[0.0] * count for _ in SHARES]
            for step, share in zip(steps, SHARES, strict=True):
                step[layer] = _times(share, [scales[layer]])[0]
            alone.append(self.at(steps))
        budget, best = bound, common
        best_zeros = self.at([common])[0][1]
        for _ in range(_TRIES):
            levels = _filled(alone, budget)
            chosen = [_times(SHARES[level], [scales[layer]])[0] for layer, level in enumerate(levels)]
            divergence, zeros = self.at([chosen])[0]
            if divergence <= bound:
                return chosen if zeros > best_zeros else best
            budget *= _SHRUNK
        return best


def _filled(alone: Sequence[Sequence[tuple[float, float]]], budget: float) -> list[int]:
    """The level of each layer, by the best gain of zeros for its divergence, while the sum fits a budget."""
    levels, used = [0] * len(alone), 0.0
    while True:
        steps = []
        for layer, (level, curve) in enumerate(zip(levels, alone, strict=True)):
            for higher in range(level + 1, len(curve)):
                cost = max(curve[higher][0] - curve[level][0], 1e-12)
                gain = curve[higher][1] - curve[level][1]
                if gain > 0 and used + cost <= budget:
                    steps.append((gain / cost, cost, layer, higher))
        if not steps:
            return levels
        _, cost, layer, higher = max(steps)
        levels[layer] = higher
        used += cost
