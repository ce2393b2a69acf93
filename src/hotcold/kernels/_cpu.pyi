"""The C++ extension (csrc/bind.cpp). Arrays must have exactly the dtype named and be C-contiguous."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_F32 = npt.NDArray[np.float32]
_I32 = npt.NDArray[np.int32]
_U64 = npt.NDArray[np.uint64]
_Cache = npt.NDArray[np.uint16] | npt.NDArray[np.uint8] | _F32  # float16 bits, Q8_0 blocks

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Memory:
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...

class Arena:
    def __init__(self) -> None: ...
    def take(self, nbytes: int) -> Memory: ...

class WeightRows:
    def __init__(
        self, memory: Memory, offset: int, stride: int, count: int, cols: int, type: int
    ) -> None: ...
    @staticmethod
    def panels(memory: Memory, dim: int, neurons: int, type: int) -> WeightRows: ...
    def part(self, first: int, count: int) -> WeightRows: ...
    def pack(
        self,
        tensor: npt.NDArray[np.uint8],
        pool: Pool,
        by_output: bool = False,
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    def read(
        self,
        file: int,
        offset: int,
        rows: int,
        row_bytes: int,
        pool: Pool,
        by_output: bool = False,
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    def packed(self) -> bytes: ...

class FfnWeights:
    def __init__(
        self, gate: WeightRows | None, up: WeightRows, down: WeightRows, gate_bias: _F32 | None,
        up_bias: _F32 | None, down_bias: _F32 | None, by_output: bool, activation: int, threshold: float,
        limit: float, alpha: float, ends: Sequence[int], chosen: int,
    ) -> None: ...  # fmt: skip

class Program:
    def __init__(self, isa: str, pool: Pool, batch: Sequence[_I32]) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...  # that the first run allocates for the ops; threads have their own
    def embed(self, table: WeightRows, out: _F32) -> None: ...
    def norm(
        self, x: _F32, out: _F32, weight: _F32, bias: _F32 | None, eps: float, centre: bool, rows: int
    ) -> None: ...
    def linear(
        self, x: _F32, weights: Sequence[WeightRows], biases: Sequence[_F32 | None], outs: Sequence[_F32],
        accumulate: bool, rows: int,
    ) -> None: ...  # fmt: skip
    def rope(self, x: _F32, cos: _F32, sin: _F32, interleaved: bool) -> None: ...
    def store_kv(self, k: _F32, v: _F32, k_cache: _Cache, v_cache: _Cache) -> None: ...
    def attention(
        self, q: _F32, k_cache: _Cache, v_cache: _Cache, out: _F32, scale: float, window: int | None,
        sinks: _F32 | None, softcap: float | None,
    ) -> None: ...  # fmt: skip
    def predict(
        self, x: _F32, first: WeightRows, second: WeightRows, relu: bool, threshold: _F32, mask: _U64,
        ends: Sequence[int], chosen: int, ids: _I32 | None,
    ) -> None: ...  # fmt: skip
    def ffn(
        self, x: _F32, weights: FfnWeights, out: _F32, skip: bool, mask: _U64 | None, fired: _U64 | None,
        stats: npt.NDArray[np.int64] | None, accumulate: bool, ids: _I32 | None, factors: _F32 | None,
    ) -> None: ...  # fmt: skip
    def router(
        self, x: _F32, weights: WeightRows, bias: _F32 | None, ids: _I32, factors: _F32, k: int,
        softmax: bool, selection_bias: _F32 | None, normalise: bool, scale: float,
    ) -> None: ...  # fmt: skip
    def add(self, x: _F32, y: _F32) -> None: ...
    def gather(self, x: _F32, out: _F32) -> None: ...
    def post(
        self, link: FlagLink, layer: int, box_x: _F32, box_y: _F32, box_mask: _U64 | None, counts: _I32,
        x: _F32, mask: _U64 | None,
    ) -> None: ...  # fmt: skip
    def collect(
        self, link: FlagLink, layer: int, box_x: _F32, box_y: _F32, box_mask: _U64 | None, counts: _I32,
        out: _F32,
    ) -> None: ...  # fmt: skip
    def run(self) -> None: ...

class LinkError(RuntimeError): ...

class Link:  # csrc/link.h
    def wait_posted(self, layer: int) -> bool: ...
    def answer(self, layer: int) -> None: ...
    def fail(self, reason: str) -> None: ...
    def stop(self) -> None: ...
    @property
    def ended(self) -> bool: ...
    def start_marks(self, capacity: int) -> None: ...
    def stop_marks(self) -> None: ...
    def mark(self, moment: int, layer: int) -> None: ...
    def marks(self) -> list[tuple[int, int, int]]: ...  # moment, layer, nanoseconds

class FlagLink(Link):
    def __init__(self, timeout_seconds: float) -> None: ...
    def wait_idle(self, layer: int) -> None: ...
    def post(self, layer: int) -> None: ...
    def wait_answered(self, layer: int) -> bool: ...

def serve(link: Link, layers: Sequence[tuple[int, Program]]) -> None: ...
def row_size(type: int, cols: int) -> int: ...
def panels_size(dim: int, neurons: int, type: int) -> int: ...
def top_k(
    logits: _F32, bias_ids: _I32 | None, bias: _F32 | None, allowed: _U64 | None, ids: _I32, values: _F32
) -> int: ...
def has_isa(isa: str) -> bool: ...
def best_isa() -> str: ...
def read_bandwidth(isa: str, pool: Pool, memory: Memory, seconds: float) -> float: ...

__all__: Any
