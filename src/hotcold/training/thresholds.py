"""Chooses thresholds of gates on held-out text, within a bound on the divergence they cause (FATReLU)."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hotcold.errors import UserError
from hotcold.training.libraries import torch
from hotcold.training.processes import sum_of_processes
from hotcold.training.sparse_model import (
    Batch,
    WatchedActivation,
    evaluating,
    inputs_of,
    losses,
    set_thresholds,
    sparse_layers,
)

#: Thresholds to try, in units of the root mean square of a layer's positive gates.
SHARES = (0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64)
MAX_DIVERGENCE = 1e-3  #: default bound, nats; about the rise of the log of the perplexity
_PRICES = (1e-4, 1e6)  # lowest and highest price of a nat, as a share of zeros
_TRIES = 10  # prices, and thresholds between those of two prices

Mode = Literal["one", "per-layer", "none"]
MODES: tuple[Mode, ...] = ("one", "per-layer", "none")


@dataclass(frozen=True)
class Thresholds:
    """The chosen thresholds, and the curve of common thresholds that were tried."""

    thresholds: list[float]  #: by layer
    divergence: float  #: nats a token, from the model without thresholds
    zeros: float  #: share of activations that are zero
    curve: list[tuple[float, float, float]]  #: share of the gates' scale, divergence, zeros


def choose_thresholds(
    model: Any, held_out: Iterable[Batch], mode: Mode = "per-layer", max_divergence: float = MAX_DIVERGENCE
) -> Thresholds:
    """Sets the largest thresholds within a Kullback-Leibler divergence from the model without thresholds.

    ``one`` sets the same threshold in all layers. ``per-layer`` sets one for each layer, by the zeros that it
    gains for the divergence that it causes. ``none`` sets 0. Measure the model on another text than
    ``held_out``, since the choice fits this text. In a distributed run each process passes its own batches.

    UserError: the model is not sparse, or a value is not allowed."""
    layers = sparse_layers(model)
    if mode not in MODES:
        raise UserError(f"threshold {mode!r}: choose from {', '.join(MODES)}")
    if not max_divergence > 0:
        raise UserError(f"max_divergence {max_divergence:g}: a number above 0 is needed")
    search = _Search(model, layers, list(held_out))
    shares = SHARES if mode != "none" else SHARES[:1]
    scales = search.scales()
    common = [float(torch.tensor(scales).square().mean().sqrt())] * len(layers)
    units = common if mode == "one" else scales
    curve = search.at([_times(share, units) for share in shares])
    within = [share for share, (kl, _) in zip(shares, curve, strict=True) if kl <= max_divergence]
    best = _times(max(within), units)
    if mode == "per-layer":
        best = search.by_layer(scales, max_divergence, best)
    divergence, zeros = search.at([best])[0]
    points = [(share, *point) for share, point in zip(shares, curve, strict=True)]
    return Thresholds(best, divergence, zeros, points)


def _times(share: float, units: Sequence[float]) -> list[float]:
    return [float(torch.tensor(share * unit, dtype=torch.float32)) for unit in units]


class _Search:
    """Tries thresholds on a text: for each batch one pass without thresholds, then one for each candidate."""

    def __init__(self, model: Any, layers: list[list[WatchedActivation]], batches: list[Batch]) -> None:
        self._model, self._layers, self._batches = model, layers, batches
        self._device = next(model.parameters()).device

    def scales(self) -> list[float]:
        """By layer, the root mean square of positive gates."""
        sums = torch.zeros(2, len(self._layers), dtype=torch.float64, device=self._device)
        set_thresholds(self._layers, [0.0] * len(self._layers))
        with evaluating(self._model, counting=True), torch.no_grad():
            for batch in self._batches:
                self._logits(inputs_of(batch, self._device)[0])
                for number, layer in enumerate(self._layers):
                    for activation in layer:
                        sums[:, number] += torch.stack([value.double() for value in activation.gates])
        squares, counts = sum_of_processes(sums)
        return [float(scale) for scale in (squares / counts.clamp_min(1)).sqrt()]

    def at(self, candidates: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        """Mean divergence and share of zeros of each candidate, a list of one threshold for each layer.

        The last candidate stays set."""
        totals = torch.zeros(len(candidates), 4, dtype=torch.float64, device=self._device)
        with evaluating(self._model, counting=True), torch.no_grad():
            for batch in self._batches:
                inputs, labels = inputs_of(batch, self._device)
                set_thresholds(self._layers, [0.0] * len(self._layers))
                aim = self._logits(inputs)
                for row, candidate in zip(totals, candidates, strict=True):
                    set_thresholds(self._layers, candidate)
                    row[:2] += losses(self._logits(inputs), aim, labels)[1:]
                    for activation in itertools.chain(*self._layers):
                        row[2] += activation.zeros
                        row[3] += activation.values
        rows = sum_of_processes(totals).tolist()
        if not all(tokens for _, tokens, _, _ in rows):
            raise UserError("there is no held-out token to choose thresholds with: give at least one batch")
        return [(divergence / tokens, zeros / values) for divergence, tokens, zeros, values in rows]

    def _logits(self, inputs: dict[str, Any]) -> Any:
        return self._model(**inputs, use_cache=False).logits

    def by_layer(self, scales: Sequence[float], bound: float, common: list[float]) -> list[float]:
        """The thresholds of the layers that give most zeros within the bound.

        Each layer is tried alone, and gets the threshold with the most zeros minus a price for divergence.
        Bisection finds the lowest price with which all layers together stay within the bound, and then
        thresholds between this price's and the next lower one's. ``common`` is the result if it has more
        zeros."""
        units = [_times(share, scales) for share in SHARES]
        alone = []
        for layer in range(len(scales)):
            others = [0.0] * len(scales)
            alone.append(self.at([[*others[:layer], unit[layer], *others[layer + 1 :]] for unit in units]))

        def best_at(price: float) -> list[float]:
            worth = [[zeros - price * divergence for divergence, zeros in curve] for curve in alone]
            return [units[row.index(max(row))][layer] for layer, row in enumerate(worth)]

        low, high = _PRICES
        inside, outside = [0.0] * len(scales), best_at(low)
        for number in range(2 * _TRIES):
            price = math.sqrt(low * high)
            middle = _times(0.5, [sum(pair) for pair in zip(inside, outside, strict=True)])
            tried = best_at(price) if number < _TRIES else middle
            if self.at([tried])[0][0] <= bound:
                inside, high = tried, price
            else:
                outside, low = tried, price
        return max(common, inside, key=lambda thresholds: self.at([thresholds])[0][1])
