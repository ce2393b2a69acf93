"""Counts active neurons for a text: each neuron's share of tokens, the overlap with the next token, and the
union over runs of tokens. Also reads PowerInfer's counts. Shapes use L layers, N neurons."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.torch_file import read_vector
from hotcold.kernels.backend import Backend, Chosen, equal_ends, mask_bits, mask_words
from hotcold.sparse.sidecar import SidecarError

Doubles = npt.NDArray[np.float64]
Masks = npt.NDArray[np.uint64]

KEPT_EXPERTS = "kept_experts"
ROUTES = 1024  #: most tokens whose experts are kept, the last ones
SPANS = (2, 4, 8, 16, 32, 64)  #: lengths of runs, in tokens

_ONES = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(1, np.uint8)


class ActivityCounter:
    """Counts active neurons in the masks of all layers, and keeps the masks of the last 63 tokens. In layers
    with experts it also counts the choices of each expert. Layers may have no neurons."""

    def __init__(self, neurons: Sequence[int], experts: int | Sequence[int] = 1) -> None:
        """``experts`` are the numbers of each layer's experts; 1: it has an ordinary FFN, or none."""
        counts = [experts] * len(neurons) if isinstance(experts, int) else [*experts]
        ends = [equal_ends(n, count) for n, count in zip(neurons, counts, strict=True)]
        words = np.array([mask_words(each)[-1] for each in ends])
        self.tokens = 0
        self._neurons = neurons
        self._words = words
        self._bits = [mask_bits(each) for each in ends]
        self._chosen: list[tuple[Backend, Chosen] | None] = []
        self._routed = np.zeros((len(neurons), max(counts)), np.int64)
        self._last: list[npt.NDArray[np.int32] | None] = [None] * len(neurons)  # the last token's experts
        self._routes: list[npt.NDArray[np.int32] | None] = [None] * len(neurons)
        self._kept = np.zeros(len(neurons), np.int64)  # experts that the token before also chose
        self._next = np.zeros(len(neurons), np.int64)  # their total, for tokens with a predecessor
        self._start = words.cumsum() - words  # each layer's first word
        self._counts = np.zeros(64 * words.sum(), np.int64)  # active tokens, by bit of all words
        self._run = np.zeros((0, words.sum()), np.uint64)  # masks of the last tokens
        self._after = np.zeros(len(words), np.int64)  # by layer: active neurons of tokens with a predecessor
        self._again = np.zeros(len(words), np.int64)  # of these, also active for the predecessor
        self._runs = np.zeros(len(SPANS), np.int64)  # runs so far, by length
        self._unions = np.zeros((len(SPANS), len(words)), np.int64)  # neurons in these runs, by layer

    def watch(self, backend: Backend, ffns: list[Any], rows: int) -> list[Any]:
        """Gives each :class:`FFN` a mask for ``rows`` rows, which :meth:`step` then reads."""
        for ffn, words in zip(ffns, self._words.tolist(), strict=True):
            ffn.active = backend.zeros((rows, words), np.uint64)
        self._backend = backend
        self._masks = [ffn.active for ffn in ffns]
        return ffns

    def watch_routers(self, chosen: Sequence[tuple[Backend, Chosen] | None]) -> None:
        """Sets the buffers with the experts that each layer's rows choose, None for layers without experts;
        :meth:`step` reads them."""
        self._chosen = [*chosen]

    def step(self, rows: int) -> None:
        self.add(np.hstack([self._backend.read(mask, 0, rows) for mask in self._masks]))
        for layer, router in enumerate(self._chosen):
            if router is not None:
                backend, chosen = router
                self._route(layer, np.array(backend.read(chosen.ids, 0, rows)))

    def _route(self, layer: int, ids: npt.NDArray[np.int32]) -> None:
        """Counts the experts of the next tokens, ``[tokens, k]``."""
        self._routed[layer] += np.bincount(ids.ravel(), minlength=self._routed.shape[1])
        known = self._routes[layer]
        self._routes[layer] = (ids if known is None else np.concatenate([known, ids]))[-ROUTES:]
        last = self._last[layer]
        run = ids if last is None else np.concatenate([last, ids])
        self._kept[layer] += int((run[1:, :, None] == run[:-1, None, :]).sum())
        self._next[layer] += run[1:].size
        self._last[layer] = run[-1:]

    def restart(self) -> None:
        """Starts a new text: the next token has no predecessor."""
        self._run = self._run[:0]
        self._last = [None] * len(self._last)

    def add(self, masks: Masks) -> None:
        """Counts the next tokens, at most 255: ``[tokens, sum of ceil(N / 64)]``."""
        new = len(masks)
        self.tokens += new
        self._counts += np.unpackbits(masks.view(np.uint8), 1, bitorder="little").sum(0, np.uint8)
        run = np.concatenate([self._run, masks])
        self._after += self._ones(run[1:][-new:])
        self._again += self._ones((run[1:] & run[:-1])[-new:])
        union = run
        for i, span in enumerate(SPANS):
            union = union[: -span // 2] | union[span // 2 :]
            self._unions[i] += self._ones(union[-new:])  # runs that end in a new token
            self._runs[i] += len(union[-new:])
        self._run = run[1 - SPANS[-1] :]

    def _ones(self, masks: Masks) -> npt.NDArray[np.int64]:
        sums = np.append(0, _ONES[masks.view(np.uint16)].sum(0, np.int64).cumsum())
        ends: npt.NDArray[np.int64] = self._start + self._words
        return np.asarray(sums[4 * ends] - sums[4 * self._start])

    @property
    def firing(self) -> list[Doubles]:
        """Returns, by layer, ``[N]``: the share of tokens for which each neuron was active."""
        starts = (64 * self._start).tolist()
        return [self._counts[at + bits] / self.tokens for at, bits in zip(starts, self._bits, strict=True)]

    @property
    def routing(self) -> list[Doubles] | None:
        """Returns, by layer, ``[E]``: the share of tokens that chose each expert; None without experts."""
        return [counts / self.tokens for counts in self._routed] if self._chosen else None

    @property
    def routes(self) -> list[npt.NDArray[np.int32]] | None:
        """Returns, by layer, ``[T, k]``: the experts of each of the last tokens, at most :data:`ROUTES`;
        ``[0, 0]`` for layers without experts. None if no layer has experts."""
        none = np.zeros((0, 0), np.int32)
        return [none if each is None else each for each in self._routes] if self._chosen else None

    def figures(self) -> dict[str, list[float]]:
        """Figures by layer: ``overlap``, the share of a token's active neurons that were also active for the
        last token; ``union_2`` to ``union_64``, the mean share of neurons that are active in runs of 2 to 64
        tokens; with experts, ``kept_experts``, the share of a token's experts that are the last token's."""
        by_name = {"overlap": self._again / np.maximum(1, self._after)}
        if self._chosen:
            by_name |= {KEPT_EXPERTS: self._kept / np.maximum(1, self._next)}
        for span, n, union in zip(SPANS, self._runs, self._unions, strict=True):
            by_name |= {f"union_{span}": union / n / np.maximum(1, self._neurons)} if n else {}
        return {name: shares.tolist() for name, shares in by_name.items()}


def import_counts(folder: Path, neurons: Sequence[int], tokens: int | None = None) -> list[Doubles]:
    """Shares ``[N]`` by layer from PowerInfer's ``activation_{i}.pt``.

    Its files count for each neuron the tokens for which it was active, but lack the number of all tokens.
    Without ``tokens``, counts are divided by the largest one, as if this neuron had always been active.
    Numbers up to 1 are shares already.

    SidecarError: a layer without a file, a file without a layer, another length or range; TorchFileError."""
    needed = [f"activation_{i}.pt" for i in range(len(neurons))]
    names = {path.name for path in folder.iterdir() if re.fullmatch(r"activation_.*\.pt", path.name)}
    if names != set(needed):
        missing = ", ".join(name for name in needed if name not in names) or "none"
        unknown = ", ".join(sorted(names - set(needed))) or "none"
        wanted = f"one file a layer is needed, activation_0.pt to {needed[-1]}"
        raise SidecarError(f"{folder}: {wanted}: missing {missing}, unknown {unknown}")
    counts = [_counts(folder / name, n, tokens) for name, n in zip(needed, neurons, strict=True)]
    most = tokens or max(1.0, *(layer.max() for layer in counts))
    return [layer / most for layer in counts]


def _counts(path: Path, n: int, tokens: int | None) -> Doubles:
    values = read_vector(path).astype(np.float64)
    if len(values) != n:
        raise SidecarError(f"{path} has {len(values)} numbers: the layer has {n} neurons")
    most = tokens or 2**63
    wrong = values[~((values >= 0) & (values <= most))]
    if len(wrong):
        raise SidecarError(f"{path} holds {wrong[0]:g}: numbers from 0 to {most} are needed")
    return values
