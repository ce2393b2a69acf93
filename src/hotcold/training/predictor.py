"""Trains one low-rank predictor by gradients: two factors in their block type, and a bias for each neuron.

A neuron is marked if its score ``second @ act(first @ x) + bias`` is at least 0. Marking an idle neuron costs
``softplus(score)``; missing an active one costs ``price * added * softplus(-score)``, with ``added`` = |h|
times the norm of its down row, over the mean of active neurons. The price follows the recall (dual ascent):
it rises while marked neurons contribute less than the target, and falls while they contribute more. So the
factors spend their rank on scores near 0.

Every step rounds the factors to their block type, so that training accounts for the rounding; the gradient
ignores it (the straight-through estimator, arXiv 1308.3432). Every number depends only on the epoch: the
epoch seeds the order of tokens, and a file has the state after each epoch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockTypeError, quantise
from hotcold.formats.files import FileError, replacing
from hotcold.kernels.backend import Floats
from hotcold.sparse.fitting import FitOptions, bound_for, log_odds
from hotcold.training.examples import Examples
from hotcold.training.libraries import torch
from hotcold.training.options import TrainOptions

_BATCH = 256  # tokens a step
_WARM_UP = 20  # steps until the full learning rate
_BIAS_RATE = 3  # learning rate of biases, relative to factors
_PRICE_RATE = 0.02  # step of the price's logarithm per share of missed contribution, at most 5 steps
_CALIBRATED = 4096  # tokens of each expert that set the first biases
_MOST_PRICE = 12.0  # logarithm; without this limit, a text without active neurons would raise it forever
_STRICTER = 0.8  # share of the allowed misses that training aims at, since new text has more misses
_PATIENCE = 3  # epochs without a gain that end the training
_GAIN = 0.002  # smallest part by which the marked share must fall to count as a gain
_FIGURES = ("best", "price", "epoch", "waited", "marked")  # attributes that an epoch changes


@dataclass(frozen=True)
class Learned:
    first: Floats  #: ``(R, D)``, not yet in its block type
    second: Floats  #: ``(E * N, R)``
    bias: Floats  #: ``[E * N]``
    marked: float  #: share of pairs marked on the check part, with the bound that reaches the recall there


@contextmanager
def reproducible(threads: int | None) -> Iterator[None]:
    """Selects deterministic algorithms and a number of threads inside the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads or before[1])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])


def train(
    first: Floats,
    second: Floats,
    options: FitOptions,
    training: TrainOptions,
    examples: Examples,
    check: Examples,
    state: Path,
) -> Learned:
    """Trains from factors ``(R, D)`` and ``(E * N, R)`` until ``training.epochs``, or until the marked share
    that the check part needs for the target recall stops falling; the best epoch counts.

    ``state`` is a file that every epoch replaces; training continues from it. UserError: the loss is not
    finite, or the file cannot be written. It then has the last good epoch."""
    run = _Run(first, second, options, training, examples)
    if state.exists():
        run.load(torch.load(state, weights_only=True))
    while run.epoch < training.epochs and run.waited < _PATIENCE:
        run.learn(examples)
        run.judge(check)
        run.epoch += 1
        try:
            with replacing(state) as file:
                torch.save(run.state(), file)
        except (FileError, RuntimeError) as error:  # RuntimeError: torch's own writer
            raise UserError(f"{state}: {error}") from None
    return Learned(**{name: values.numpy() for name, values in run.best.items()}, marked=run.marked)


def _calibrated(
    first: Floats, second: Floats, relu: bool, target: float, examples: Examples
) -> tuple[Floats, Floats, float]:
    """The second factor, the biases ``[E * N]``, and the bound that reaches the target, which the biases
    already contain. Scores are then logarithms of the values that :func:`~hotcold.sparse.fitting.thresholds`
    bounds: a neuron's odds of being active, times its contribution."""
    hidden = examples.x @ first.T
    if relu:
        hidden = np.maximum(hidden, 0)
    seconds, biases, scores, added = [], [], [], []
    unit = examples.mean_added()
    for place, rows, adds in examples.by_expert():
        part = second[place]
        sample = slice(None, None, -(-len(rows) // _CALIBRATED) or 1)
        values, adds = hidden[rows[sample]] @ part.T, adds[sample]
        if not len(values):
            seconds.append(part)
            biases.append(np.zeros(len(part)))
            continue
        mean, spread = values.mean(axis=0), values.std(axis=0) + np.float32(1e-9)
        active = adds > 0
        slope, odds = log_odds((values - mean) / spread, active)
        odds += np.log((adds.sum(axis=0) / unit + 1) / (active.sum(axis=0) + 1))
        seconds.append(part * (slope / spread)[:, None])
        biases.append(odds - slope / spread * mean)
        scores.append((values * (slope / spread) + biases[-1])[active])
        added.append(adds[active].astype(np.float64))
    least = float(bound_for(np.concatenate(scores), np.concatenate(added), target)) if scores else 0.0
    least = max(-_MOST_PRICE, min(least, _MOST_PRICE))
    factor, bias = (np.concatenate(parts).astype(np.float32) for parts in (seconds, biases))
    return factor, bias - np.float32(least), least


class _Run:
    """A training run; :meth:`state` has everything that an epoch changes, and nothing else."""

    def __init__(
        self, first: Floats, second: Floats, options: FitOptions, training: TrainOptions, examples: Examples
    ) -> None:
        assert options.target is not None
        self.training, self.target, self.type = training, options.target, options.stored_type
        self.unit = examples.mean_added()
        if training.relu:  # a pair of opposite rows for each of half as many directions
            half = -(-len(first) // 2)
            first = np.concatenate([first[:half], -first[: len(first) - half]])
            second = np.concatenate([second[:, :half], -second[:, : len(first) - half]], axis=1)
        second, bias, least = _calibrated(first, second, training.relu, self.target, examples)
        self.parameters = {
            name: torch.tensor(np.ascontiguousarray(values, np.float32), requires_grad=True)
            for name, values in (("first", first), ("second", second), ("bias", bias))
        }
        factors, biases = list(self.parameters.values())[:2], [self.parameters["bias"]]
        self.optimizer = torch.optim.Adam([{"params": factors}, {"params": biases}], lr=training.rate)
        self.price = -least
        self.epoch, self.waited, self.marked = 0, 0, math.inf
        self.best: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        parameters = {name: values.detach() for name, values in self.parameters.items()}
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {"parameters": parameters, "optimizer": self.optimizer.state_dict(), **figures}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, values in state["parameters"].items():
                self.parameters[name].copy_(values)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _FIGURES:
            setattr(self, name, state[name])

    def learn(self, examples: Examples) -> None:
        """Makes one pass over the tokens, in an order that depends on the epoch."""
        random = np.random.default_rng([len(self.parameters["first"]), self.epoch])
        order = random.permutation(examples.tokens)
        size = min(_BATCH, examples.tokens)
        steps = examples.tokens // size
        for step in range(steps):
            self._set_rate(self.epoch * steps + step, self.training.epochs * steps)
            loss, recall = self._loss(examples, np.sort(order[step * size : (step + 1) * size]))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            allowed = _STRICTER * max(1 - self.target, 1e-4)
            self.price += _PRICE_RATE * min(5.0, (1 - recall) / allowed - 1)

    def _set_rate(self, step: int, steps: int) -> None:
        part = min(1, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        for group, times in zip(self.optimizer.param_groups, (1, _BIAS_RATE), strict=True):
            group["lr"] = part * times * self.training.rate

    def _loss(self, examples: Examples, tokens: Any) -> tuple[Any, float]:
        """The mean loss of a pair, and the marked neurons' share of all active neurons' contribution."""
        softplus = torch.nn.functional.softplus
        loss, pairs, added, added_by_marked = torch.zeros(()), 0, 0.0, 0.0
        price = math.exp(self.price) / self.unit
        for scores, adds in self._scores(examples, tokens):
            misses = price * adds * softplus(-scores)
            loss = loss + torch.where(adds > 0, misses, softplus(scores)).sum()
            pairs += adds.numel()
            added += float(adds.sum())
            added_by_marked += float((adds * (scores.detach() >= 0)).sum())
        loss = loss / max(1, pairs)
        if not torch.isfinite(loss):
            raise self._diverged(f"the loss is {float(loss.detach())}")
        return loss, added_by_marked / added if added else 1.0

    def _scores(self, examples: Examples, tokens: Any) -> Iterator[tuple[Any, Any]]:
        """By expert, scores ``[rows, N]`` of its tokens (ascending), and the neurons' contributions."""
        first, second, bias = (self.parameters[name] for name in ("first", "second", "bias"))
        hidden = torch.from_numpy(np.ascontiguousarray(examples.x[tokens])) @ self._stored(first).T
        if self.training.relu:
            hidden = hidden.relu()
        for place, rows, adds in examples.by_expert():
            _, where, places = np.intersect1d(tokens, rows, assume_unique=True, return_indices=True)
            if len(places):
                scores = hidden[torch.from_numpy(where)] @ self._stored(second[place]).T + bias[place]
                yield scores, torch.from_numpy(np.ascontiguousarray(adds[places]))

    def _stored(self, factor: Any) -> Any:
        """The factor rounded to its block type, with the gradient of the unrounded factor."""
        if self.type in (None, "F32"):
            return factor
        values = factor.detach()
        try:
            rounded = quantise(values.numpy(), self.type).dequantise()
        except BlockTypeError as error:
            raise self._diverged(str(error)) from None
        return factor + (torch.from_numpy(rounded) - values)

    def _diverged(self, got: str) -> UserError:
        where = f"rank {len(self.parameters['first'])}, epoch {self.epoch + 1}"
        return UserError(f"{where}: {got}; the state before it is kept: continue with a smaller `rate`")

    def judge(self, check: Examples) -> None:
        """Keeps the epoch if it marks the smallest share so far at the target recall."""
        with torch.no_grad():
            parts = list(self._scores(check, np.arange(check.tokens)))
        active = [(scores[adds > 0].numpy(), adds[adds > 0].numpy()) for scores, adds in parts]
        values, weights = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*active, strict=True))
        least = bound_for(values, weights, self.target)
        marked = sum(int((scores.numpy() >= least).sum()) for scores, _ in parts) / max(1, check.pairs)
        self.waited = 0 if marked < (1 - _GAIN) * self.marked else self.waited + 1
        if marked < self.marked:
            self.marked = marked
            self.best = {name: values.detach().clone() for name, values in self.parameters.items()}
