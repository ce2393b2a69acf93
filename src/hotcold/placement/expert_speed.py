"""Measures how fast this machine computes experts of a model's shape, and packs those that it has read."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.formats.blocks import Tensor
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels import _native
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, Batch, BatchLimits, FFNTensors
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.placement.measuring import mean_time
from hotcold.placement.sizes import ffn_types

_BYTES = 128 << 20  # of weights that are computed in turns: more than caches hold
_MOST = 16  # of layers
_PACKED = 8 << 20
_SECONDS = 0.4  # of each of the two


@dataclass(frozen=True)
class ExpertSpeed:
    """GB/s are 1e9 bytes of weights, as the file has them, a second."""

    gb_s: float  #: that all threads compute for one token
    packing_gb_s: float  #: that all threads pack


def measure_experts(file: GGUFFile, config: Config, threads: int | None = None) -> ExpertSpeed:
    """Computes made-up weights, as many at once as the experts that a token chooses have, and packs some."""
    assert config.experts is not None
    backend = CPUBackend(threads)
    gate, up, down = ffn_types(file, config)
    dim = config.experts.latent or config.dim
    # Whole blocks of down, which a file may have along the other side.
    width = -(-config.experts.chosen * config.experts.neurons // down.weights) * down.weights
    sparse = config.activation in SPARSE_ACTIVATIONS
    fires = np.ones(width, np.float32) if sparse else None  # else rows would be left out
    shapes = [(up, (width, dim)), (down, (dim, width))] + [(gate, (width, dim))] * config.gated
    nbytes = sum(kind.row_bytes(cols) * rows for kind, (rows, cols) in shapes)
    tensors = [Tensor(kind, shape, _zeros(kind.row_bytes(shape[1]), shape[0])) for kind, shape in shapes]
    of_gate = tensors[2] if config.gated else None
    activation = config.activation
    given = FFNTensors(
        of_gate,
        tensors[0],
        tensors[1],
        "by_output",
        activation,
        gate_bias=fires if of_gate else None,
        up_bias=fires,
    )
    layers = [backend.ffn_weights(given) for _ in range(max(1, min(_MOST, -(-_BYTES // nbytes))))]
    batch = Batch(BatchLimits(1, 1, 1, 1))
    batch.counts[:] = 1, 1, 0, 1
    x, out = (backend.zeros((1, dim)) for _ in range(2))

    def token() -> None:
        for weights in layers:
            backend.ffn(x, weights, batch, out, skip=sparse)

    program = backend.record(token)
    computing = _rate(program.run, nbytes * len(layers))
    size = _native.row_size(up.id, dim)
    rows = max(1, _PACKED // size)
    some = _zeros(up.row_bytes(dim), rows)
    place = _native.WeightRows(_native.Arena().take(rows * size), 0, size, rows, dim, up.id)
    pool = _native.Pool(1)
    return ExpertSpeed(computing, backend.threads * _rate(lambda: place.pack(some, pool), some.nbytes))


def _zeros(row_bytes: int, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.zeros((rows, row_bytes), np.uint8)


def _rate(work: Callable[[], object], nbytes: int) -> float:
    """GB/s, once the first call is over."""
    work()
    return nbytes / mean_time(work, _SECONDS)[0] / 1e9
