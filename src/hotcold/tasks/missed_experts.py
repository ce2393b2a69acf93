"""Measures what missed experts add to a token's time: layers of the model's experts, a part of which lies in
memory, are computed token after token while the others are read of its file, as generation reads them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import Tensor, block_type
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import _native
from hotcold.kernels.backend import Batch, BatchLimits, Chosen, Program
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.model.weights import ffn_tensors
from hotcold.placement.measuring import mean_time
from hotcold.placement.shelves import Shelves
from hotcold.values import printable

Floats = npt.NDArray[np.float64]

_LAYERS = 4  # whose experts are read
_PLACES = 4  # of a layer, as many times as a token chooses experts, at most
_ROUNDS = 5
_HITS_S, _MISSES_S = 0.3, 1.3  # of a round
_LEAST_TOKENS = 3
_REST_BYTES = 1 << 20  # of what stands for all that is no expert
_FILLER_S = 0.2
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class MissTime:
    """Seconds of the layers of a token of which experts may be missed, with what lies between them."""

    hits_s: float  #: with all of its experts at hand
    misses_s: float  #: with those missed that are expected to be
    missed: float  #: experts of a token that were

    def __str__(self) -> str:
        each = 1e3 * self.more_s / max(self.missed, 1e-9)
        return f"{self.missed:.1f} missed experts a token add {1e3 * self.more_s:.1f} ms, {each:.2f} ms each"

    @property
    def more_s(self) -> float:
        """Seconds that missed experts add to a token."""
        return max(0.0, self.misses_s - self.hits_s)


@dataclass(frozen=True)
class Between:
    """Seconds of computing with all in memory, which lie between a token's reads."""

    layer_s: float  #: of a layer
    experts_s: float  #: the part of it that its experts take
    besides_s: float  #: of a token besides its layers


class Places:
    """The experts that lie in a layer's places, which are those of csrc/disk/shelf.h; draws the experts of
    tokens so that each token misses as many as is asked for."""

    def __init__(self, experts: int, places: int, chosen: int, seed: int = 0) -> None:
        self._named = {expert: -1 - expert for expert in range(places)}
        self._experts, self._places, self._chosen = experts, places, chosen
        self._random, self._step = np.random.default_rng(seed), 0

    def token(self, missed: int) -> list[int]:
        """The experts of the next token, ascending, of which so many are missed: as far as there are so many
        absent ones, and so many others at hand."""
        absent = [expert for expert in range(self._experts) if expert not in self._named]
        missed = min(max(missed, self._chosen - len(self._named)), len(absent))
        hits = self._drawn([*self._named], self._chosen - missed)
        read = self._drawn(absent, missed)
        self._step += 1
        for expert in hits:
            self._named[expert] = self._step
        for expert in sorted(read):
            if len(self._named) == self._places:
                used = [each for each in self._named if each in hits]
                others = [each for each in self._named if each not in hits and each not in read]
                others = others or used or [*self._named]  # what the first wave used makes room last
                del self._named[min(others, key=lambda each: (self._named[each], each))]
            self._named[expert] = self._step
        return sorted([*hits, *read])

    @property
    def holds_a_token(self) -> bool:
        return self._places >= self._chosen

    def _drawn(self, some: Sequence[int], count: int) -> list[int]:
        found: list[int] = self._random.choice(some, count, replace=False).tolist() if count else []
        return found


class Numbers:
    """Draws whole numbers 0, 1, 2, ... with given likelihoods, evenly: any run of them has about its share
    of each."""

    def __init__(self, spread: Floats) -> None:
        self._ends, self._at = np.cumsum(spread) / np.sum(spread), 0.5

    def next(self) -> int:
        self._at = (self._at + _GOLDEN) % 1
        return int(np.searchsorted(self._ends, self._at, side="right"))


@dataclass(frozen=True)
class _Layer:
    program: Program
    ids: npt.NDArray[np.int32]
    places: Places

    def run(self, missed: int) -> None:
        self.ids[0] = self.places.token(missed)
        self.program.run()


def time_misses(
    file: GGUFFile,
    config: Config,
    shelves: Shelves,
    missing: Sequence[Floats],
    seconds: Between,
    threads: int | None = None,
) -> MissTime:
    """``missing`` is by layer the share of tokens that miss 0, 1, 2, ... experts. UserError: the file cannot
    be read."""
    try:
        return _time_misses(file, config, shelves, missing, seconds, threads)
    except _native.DiskError as error:
        raise UserError(f"{printable(file.path.name)}: {error}") from None


def _time_misses(
    file: GGUFFile,
    config: Config,
    shelves: Shelves,
    missing: Sequence[Floats],
    seconds: Between,
    threads: int | None,
) -> MissTime:
    partly = [i for i, n in enumerate(shelves.places) if 0 < n < shelves.experts]
    backend, numbers = CPUBackend(threads), Numbers(mean_spread([missing[i] for i in partly]))
    batch = Batch(BatchLimits(1, 1, 1, 1))
    batch.counts[:] = 1, 1, 0, 1
    picked = sorted({partly[i * len(partly) // _LAYERS] for i in range(_LAYERS)})
    layers = [_layer(file, config, shelves, i, backend, batch) for i in picked]
    compute = _filler(backend, batch, config.dim)
    unit = mean_time(compute, _FILLER_S, _LEAST_TOKENS)[0]  # as times of layers are: a busy machine's, too
    rest = round((seconds.layer_s - seconds.experts_s) / unit)
    between = round((seconds.layer_s * (config.layers - len(partly)) + seconds.besides_s) / unit)

    def token(draw: Callable[[], int]) -> None:
        for i in range(len(partly)):
            layers[i % len(layers)].run(draw())
            for _ in range(rest):
                compute()
        for _ in range(between):
            compute()

    def at_hand() -> int:
        return 0

    hits, misses = [], []
    read = tokens = 0
    for _ in range(_ROUNDS):
        hits.append(mean_time(lambda: token(at_hand), _HITS_S, _LEAST_TOKENS)[0])
        before = _misses(backend)
        each, count = mean_time(lambda: token(numbers.next), _MISSES_S, _LEAST_TOKENS)
        misses.append(each)
        tokens += count
        read += _misses(backend) - before
    # Fewer places than a token chooses experts: some are always missed.
    whole = seconds.layer_s * config.layers + seconds.besides_s
    without = statistics.median(hits) if all(each.places.holds_a_token for each in layers) else whole
    return MissTime(without, statistics.median(misses), read / tokens)


def mean_spread(spreads: Sequence[Floats]) -> Floats:
    """The mean of several such shares."""
    widest = max(len(each) for each in spreads)
    found: Floats = np.mean([np.pad(each, (0, widest - len(each))) for each in spreads], axis=0)
    return found


def _misses(backend: CPUBackend) -> int:
    counts = backend.disk_counts()
    assert counts is not None
    return counts.misses


def _layer(
    file: GGUFFile, config: Config, shelves: Shelves, layer: int, backend: CPUBackend, batch: Batch
) -> _Layer:
    chosen = config.chosen_of(layer)
    places = min(shelves.places[layer], max(2, _PLACES * chosen))
    tensors = ffn_tensors(file, config, backend, layer)
    some = replace(tensors, places=places, hot_experts=tuple(range(places)), label=file.path.name)
    weights = backend.ffn_weights(some)
    dim = tensors.up.shape[1]
    x, out = np.random.default_rng(layer).standard_normal((1, dim), np.float32), backend.zeros((1, dim))
    ids, factors = backend.zeros((1, chosen), np.int32), np.full((1, chosen), 1 / chosen, np.float32)
    program = backend.record(
        lambda: backend.ffn(x, weights, batch, out, skip=False, chosen=Chosen(ids, factors))
    )
    return _Layer(program, ids, Places(shelves.experts, places, chosen, seed=layer))


def _filler(backend: CPUBackend, batch: Batch, dim: int) -> Callable[[], None]:
    """Something to compute for the time in which generation computes what is no expert."""
    kind = block_type("F32")
    rows = max(1, _REST_BYTES // kind.row_bytes(dim))
    matrix = backend.matrix(Tensor(kind, (rows, dim), np.zeros((rows, kind.row_bytes(dim)), np.uint8)))
    x, out = backend.zeros((1, dim)), backend.zeros((1, rows))
    program = backend.record(lambda: backend.linear(x, [matrix], batch, [out]))
    program.run()
    return program.run
