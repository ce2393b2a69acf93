"""Scoring: how well a model predicts a text; every token is computed as in decoding."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.kernels.backend import Floats
from hotcold.model.kv_cache import PagePool, Reservation
from hotcold.runtime.counters import Figures
from hotcold.runtime.session import Session

Doubles = npt.NDArray[np.float64]

#: Tokens that are resampled together, since neighbours in a text are not independent.
_BOOTSTRAP_BLOCK = 32
_BOOTSTRAP_ROUNDS = 2000

#: 20 blocks. A 95 % interval from fewer covers less: .89 of the time from 10 blocks, .85 from 5, .47 from 2.
LEAST_TOKENS = 20 * _BOOTSTRAP_BLOCK

#: Quantiles of the KL divergence in a summary: the median and the upper ones that llama-perplexity prints.
KL_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
_KL_LABELS = {"median": "median", "p90": "P90", "p95": "P95", "p99": "P99", "p999": "P99.9", "max": "maximum"}


def cut_windows(ids: Sequence[int], size: int, bos: int | None) -> list[list[int]]:
    """Cuts tokens into consecutive windows of ``size`` tokens, each with BOS first, if given. Drops an
    incomplete last window, unless it is the only one. UserError: no token is left to predict."""
    first = [] if bos is None else [bos]
    step = size - len(first)
    windows = [first + list(ids[start : start + step]) for start in range(0, len(ids), step)]
    if len(windows) > 1 and len(windows[-1]) < size:
        windows.pop()
    if not windows or len(windows[0]) < 2:
        raise UserError(f"the text has {len(ids)} tokens: at least {2 - len(first)} needed")
    return windows


class _Scoring:
    """The scoring of one window: uses the session until its iterator ends or is closed."""

    def __init__(self, cache: PagePool) -> None:
        self._cache = cache

    @property
    def in_use(self) -> str:
        return "a scoring that has not come to the end of its window" if self._cache.owns(self) else ""


class Scorer:
    """Runs windows of tokens through a model as decode rows, several consecutive positions per step.
    Causality is by position, so the logits are the same as with one row per step. ``prompt``: runs them as
    prompt rows instead, to measure `prompt_math`."""

    def __init__(self, session: Session, prompt: bool = False) -> None:
        self.session = session
        self._prompt = prompt
        self._before = session.counters.copy()

    def logits(self, window: Sequence[int]) -> Iterator[Floats]:
        """Yields logits ``[rows, V]`` after each token of the window except the last, 16 rows at a time. They
        are a view of the model's buffer, valid until the next iteration. UserError: the window is longer than
        the model's context."""
        session, context = self.session, self.session.model.context
        if len(window) > context:
            raise UserError(f"a window of {len(window)} tokens: the context holds {context}")
        batch = session.transformer.batch
        use = _Scoring(session.cache)

        def begin() -> Reservation:
            session.claim(use)
            return session.state.take(use, len(window))

        reservation = session.lock.run(begin)
        try:
            for start in range(0, len(window) - 1, batch.limits.decode):
                stop = min(start + batch.limits.decode, len(window) - 1)
                rows = reservation.put(batch, start, window[start:stop])
                batch.logits_rows[:rows] = range(rows)
                batch.counts[:] = (rows, 0 if self._prompt else rows, rows, 1)
                session.lock.run(session.run)
                yield session.transformer.read_logits(0, rows)
        finally:
            session.lock.run_soon(partial(session.state.release, use))

    @property
    def figures(self) -> Figures:
        """The costs of the decode rows so far, without times."""
        return Figures.from_counters(self.session.counters.since(self._before), self.session.footprint)


class Divergence(NamedTuple):
    """Divergence of a candidate's distributions from a base's, by token; all arrays are ``[tokens]``."""

    kl: Doubles  #: Kullback-Leibler divergence KL(base || candidate), nats
    same_top: npt.NDArray[np.bool_]  #: whether both give the same token the highest probability
    nll: Doubles  #: surprise of the text's token under the candidate, nats
    base_nll: Doubles  #: surprise under the base, nats

    @property
    def perplexity_ratio(self) -> float:
        return perplexity(self.nll - self.base_nll)

    def summary(self, seed: int = 0) -> dict[str, float | None]:
        """Returns the figures with their 95 % intervals, whose ends are None for fewer than LEAST_TOKENS."""
        quantiles = np.quantile(self.kl, [*KL_QUANTILES.values()])
        return {
            "ppl": perplexity(self.base_nll),
            "ppl_ratio": self.perplexity_ratio,
            **_ends("ppl_ratio", self.ratio_interval(seed)),
            "kl_mean": float(self.kl.mean()),
            **_ends("kl_mean", mean_interval(self.kl, seed)),
            **{f"kl_{name}": float(each) for name, each in zip(KL_QUANTILES, quantiles, strict=True)},
            "top1_agreement": float(self.same_top.mean()),
            **_ends("top1_agreement", mean_interval(self.same_top, seed)),
        }

    def ratio_interval(self, seed: int = 0, level: float = 0.95) -> tuple[float, float] | None:
        """Returns the interval of the perplexity ratio; None for fewer than LEAST_TOKENS."""
        interval = mean_interval(self.nll - self.base_nll, seed, level)
        return interval and (float(np.exp(interval[0])), float(np.exp(interval[1])))

    def lines(self, subject: str, seed: int = 0) -> list[str]:
        """Returns the lines for people; ``subject`` names what was compared with which base."""
        figures = self.summary(seed)

        def interval(name: str, form: str) -> str:
            low, high = figures[f"{name}_low"], figures[f"{name}_high"]
            return "" if low is None else f" [{low:{form}}, {high:{form}}]"

        if figures["ppl_ratio_low"] is None:
            method = f" (no 95 % interval: it takes {LEAST_TOKENS} tokens or more)"
        else:
            method = " (95 %, paired bootstrap)"
        quantiles = ", ".join(f"{label} {figures[f'kl_{name}']:.3g}" for name, label in _KL_LABELS.items())
        return [
            f"{subject} (perplexity {figures['ppl']:.4f}): ratio {figures['ppl_ratio']:.5f}"
            f"{interval('ppl_ratio', '.5f')}{method}",
            f"KL divergence mean {figures['kl_mean']:.3g}{interval('kl_mean', '.3g')}, {quantiles} nats",
            f"same most likely token {figures['top1_agreement']:.2%}{interval('top1_agreement', '.2%')}",
        ]


def mean_interval(
    values: npt.NDArray[np.floating | np.bool_], seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Returns the interval of the mean of values, one per token, by a bootstrap of blocks of tokens; None for
    fewer than LEAST_TOKENS."""
    if len(values) < LEAST_TOKENS:
        return None
    starts = np.arange(0, len(values), _BOOTSTRAP_BLOCK)
    sums = np.add.reduceat(values.astype(np.float64), starts)
    sizes = np.diff(np.append(starts, len(values)))
    chosen = np.random.default_rng(seed).integers(0, len(starts), (_BOOTSTRAP_ROUNDS, len(starts)))
    means = sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _ends(name: str, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def perplexity(nll: Doubles) -> float:
    return float(np.exp(nll.mean()))


def perplexity_error(nll: Doubles) -> float:
    """Returns the standard error of the perplexity of two or more tokens, taken as independent."""
    return perplexity(nll) * float(nll.std(ddof=1)) / float(np.sqrt(len(nll)))


def log_softmax(logits: npt.NDArray[np.floating]) -> Doubles:
    shifted: Doubles = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def score(scorer: Scorer, window: Sequence[int]) -> Doubles:
    """Returns the surprise of every token of a window except the first, ``[len(window) - 1]`` nats."""
    steps = _steps(scorer, window)
    return np.concatenate([_surprise(log_softmax(logits), targets) for targets, logits in steps])


def compare(scorer: Scorer, base: Scorer, window: Sequence[int]) -> Divergence:
    """Runs one window through two models with the same vocabulary; keeps no logits."""
    parts = []
    for (targets, logits), (_, base_logits) in zip(_steps(scorer, window), _steps(base, window), strict=True):
        log_q, log_p = log_softmax(logits), log_softmax(base_logits)
        kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        same = logits.argmax(axis=-1) == base_logits.argmax(axis=-1)
        parts.append(Divergence(kl, same, _surprise(log_q, targets), _surprise(log_p, targets)))
    return join(parts)


def join(parts: Sequence[Divergence]) -> Divergence:
    return Divergence(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _steps(scorer: Scorer, window: Sequence[int]) -> Iterator[tuple[Sequence[int], Floats]]:
    """Yields the tokens to predict, and logits ``[tokens, V]``."""
    at = 1
    for logits in scorer.logits(window):
        yield window[at : at + len(logits)], logits
        at += len(logits)


def _surprise(log_probabilities: Doubles, targets: Sequence[int]) -> Doubles:
    surprise: Doubles = -log_probabilities[np.arange(len(targets)), targets]
    return surprise
