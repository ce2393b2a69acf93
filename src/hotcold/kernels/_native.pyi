"""The C++ extension: csrc/bind/bind_stub.py wrote this. Arrays must be C-contiguous."""

from collections.abc import Mapping, Sequence

import numpy
from numpy.typing import NDArray

import hotcold.kernels.backend
import hotcold.kernels.gpu

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def share_cores(self) -> None: ...

class Memory:
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...

class Arena:
    def __init__(self, nodes: Sequence[int] = [], huge: bool = True) -> None: ...
    def take(self, nbytes: int) -> Memory: ...

class WeightRows:
    def __init__(
        self, memory: Memory, offset: int, stride: int, count: int, cols: int, type: int
    ) -> None: ...
    @staticmethod
    def panels(memory: Memory, dim: int, neurons: int, type: int) -> WeightRows: ...
    def part(self, first: int, count: int) -> WeightRows: ...
    def multiplied(self, factors: NDArray[numpy.float32]) -> WeightRows: ...
    def pack(
        self,
        tensor: NDArray[numpy.uint8],
        pool: Pool,
        by_output: bool = False,
        chosen: NDArray[numpy.int64] | None = None,
    ) -> None: ...
    def read(
        self,
        file: int,
        offset: int,
        rows: int,
        row_bytes: int,
        pool: Pool,
        by_output: bool = False,
        chosen: NDArray[numpy.int64] | None = None,
    ) -> None: ...
    def packed(self) -> bytes: ...

def row_size(type: int, cols: int) -> int: ...
def panels_size(dim: int, neurons: int, type: int) -> int: ...

class DiskError(RuntimeError):
    pass

class Disk:
    def __init__(self, pieces: int, direct: bool, rings: bool | None = None) -> None: ...
    def add(self, file: int) -> int: ...
    def direct(self, number: int) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def rings(self) -> bool: ...
    def hold(self, holds: bool) -> None: ...
    def give_at_most(self, bytes: int) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...
    @staticmethod
    def staging_bytes(row_bytes: int, by_output: bool) -> int: ...
    @staticmethod
    def at_once(pieces: int, bytes: int, rings: bool) -> int: ...

def why_no_rings() -> int: ...

DISK_READ_BYTES: int = 2097152

def probe_disk(
    file: int, bytes: int, depth: int, seconds: float, sequential: bool, rings: bool | None = None
) -> tuple[float, bool]: ...

class ExpertCache:
    def __init__(self, disk: Disk, name: str, experts: int, places: int) -> None: ...
    def add(
        self,
        disk: Disk,
        weights: WeightRows,
        by_output: bool,
        file: int,
        offsets: Sequence[int],
        rows: int,
        row_bytes: int,
        each: int = 1,
        pitch: int = 1,
    ) -> None: ...
    def fill(self, experts: Sequence[int], kept: int) -> None: ...
    @property
    def slots(self) -> int: ...
    def counts(self) -> tuple[int, int, int, int]: ...

class ColdRows:
    def __init__(
        self, disk: Disk, name: str, neurons: int, hot: Sequence[int], neurons_at_once: int, gates: bool
    ) -> None: ...
    def add(
        self,
        disk: Disk,
        weights: WeightRows,
        file: int,
        offsets: Sequence[int],
        rows: int,
        row_bytes: int,
        each: int = 1,
        pitch: int = 1,
    ) -> None: ...
    def fill(self) -> None: ...
    def counts(self) -> tuple[int, int, int, int]: ...

class Program:
    def __init__(self, isa: str, pool: Pool, batch: hotcold.kernels.backend.Batch, math: int = 0) -> None: ...
    def embed(self, table: WeightRows, out: NDArray[numpy.float32], by: int, accumulate: bool) -> None: ...
    def norm(
        self,
        x: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        weight: NDArray[numpy.float32] | None,
        bias: NDArray[numpy.float32] | None,
        eps: float,
        centre: bool,
        rows: int,
    ) -> None: ...
    def linear(
        self,
        x: NDArray[numpy.float32],
        weights: Sequence[WeightRows],
        biases: Sequence[NDArray[numpy.float32] | None],
        outs: Sequence[NDArray[numpy.float32]],
        accumulate: bool,
        rows: int,
        where: NDArray[numpy.float32] | None,
        stats: NDArray[numpy.int64] | None,
    ) -> None: ...
    def linear_heads(
        self, x: NDArray[numpy.float32], weights: WeightRows, out: NDArray[numpy.float32]
    ) -> None: ...
    def join_heads(
        self, x: NDArray[numpy.float32], y: NDArray[numpy.float32], out: NDArray[numpy.float32]
    ) -> None: ...
    def rope(
        self,
        x: NDArray[numpy.float32],
        cos: NDArray[numpy.float32],
        sin: NDArray[numpy.float32],
        interleaved: bool,
    ) -> None: ...
    def store_kv(
        self,
        k: NDArray[numpy.float32],
        v: NDArray[numpy.float32],
        k_cache: NDArray[numpy.generic],
        v_cache: NDArray[numpy.generic],
    ) -> None: ...
    def attention(
        self,
        q: NDArray[numpy.float32],
        k_cache: NDArray[numpy.generic],
        v_cache: NDArray[numpy.generic],
        out: NDArray[numpy.float32],
        scale: float,
        window: int | None,
        chunked: bool,
        sinks: NDArray[numpy.float32] | None,
        softcap: float | None,
    ) -> None: ...
    def add(
        self, x: NDArray[numpy.float32], y: NDArray[numpy.float32], keep: float, scale: float
    ) -> None: ...
    def gather(self, x: NDArray[numpy.float32], out: NDArray[numpy.float32]) -> None: ...
    def softcap(self, logits: NDArray[numpy.float32], cap: float) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def steps(self) -> int: ...
    def run(self, nanoseconds: NDArray[numpy.int64] | None = None) -> None: ...
    def predict(
        self,
        x: NDArray[numpy.float32],
        first: WeightRows,
        second: WeightRows,
        relu: bool,
        threshold: NDArray[numpy.float32],
        mask: NDArray[numpy.uint64],
        ends: Sequence[int],
        chosen: int,
        ids: NDArray[numpy.int32] | None,
    ) -> None: ...
    def ffn(
        self,
        x: NDArray[numpy.float32],
        weights: FfnWeights,
        out: NDArray[numpy.float32],
        skip: bool,
        mask: NDArray[numpy.uint64] | None,
        active: NDArray[numpy.uint64] | None,
        stats: NDArray[numpy.int64] | None,
        accumulate: bool,
        ids: NDArray[numpy.int32] | None,
        factors: NDArray[numpy.float32] | None,
        gates: NDArray[numpy.float32] | None,
        strongest: NDArray[numpy.uint64] | None,
    ) -> None: ...
    def post(
        self,
        link: FlagLink,
        layer: int,
        box_x: NDArray[numpy.float32],
        box_y: NDArray[numpy.float32],
        box_mask: NDArray[numpy.uint64] | None,
        counts: NDArray[numpy.int32],
        x: NDArray[numpy.float32],
        mask: NDArray[numpy.uint64] | None,
        box_ids: NDArray[numpy.int32] | None,
        box_factors: NDArray[numpy.float32] | None,
        ids: NDArray[numpy.int32] | None,
        factors: NDArray[numpy.float32] | None,
    ) -> None: ...
    def collect(
        self,
        link: FlagLink,
        layer: int,
        box_x: NDArray[numpy.float32],
        box_y: NDArray[numpy.float32],
        box_mask: NDArray[numpy.uint64] | None,
        counts: NDArray[numpy.int32],
        out: NDArray[numpy.float32],
    ) -> None: ...
    def router(
        self,
        x: NDArray[numpy.float32],
        weights: WeightRows,
        bias: NDArray[numpy.float32] | None,
        ids: NDArray[numpy.int32],
        factors: NDArray[numpy.float32],
        k: int,
        softmax: bool,
        selection_bias: NDArray[numpy.float32] | None,
        normalise: bool,
        scale: float,
        expert_scale: NDArray[numpy.float32] | None,
        groups: int,
        used_groups: int,
        best: int,
    ) -> None: ...
    def short_conv(
        self,
        x: NDArray[numpy.float32],
        weight: NDArray[numpy.float32],
        bias: NDArray[numpy.float32] | None,
        state: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        silu: bool,
    ) -> None: ...
    def gated_delta(
        self,
        mixed: NDArray[numpy.float32],
        decay: NDArray[numpy.float32],
        beta: NDArray[numpy.float32],
        state: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        keys: int,
        key_dim: int,
        tiled: bool,
        eps: float,
    ) -> None: ...
    def decay(
        self,
        x: NDArray[numpy.float32],
        bias: NDArray[numpy.float32],
        factor: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
    ) -> None: ...
    def ssm_scan(
        self,
        mixed: NDArray[numpy.float32],
        dt: NDArray[numpy.float32],
        dt_bias: NDArray[numpy.float32],
        a: NDArray[numpy.float32],
        d: NDArray[numpy.float32],
        state: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        groups: int,
    ) -> None: ...
    def multiply(
        self,
        x: NDArray[numpy.float32],
        gate: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        activation: int,
    ) -> None: ...
    def activate(self, x: NDArray[numpy.float32], out: NDArray[numpy.float32], activation: int) -> None: ...
    def token_shift(
        self,
        x: NDArray[numpy.float32],
        mixes: NDArray[numpy.float32],
        state: NDArray[numpy.float32],
        outs: Sequence[NDArray[numpy.float32]],
    ) -> None: ...
    def wkv7(
        self,
        r: NDArray[numpy.float32],
        k: NDArray[numpy.float32],
        v: NDArray[numpy.float32],
        decay: NDArray[numpy.float32],
        rate: NDArray[numpy.float32],
        first: NDArray[numpy.float32] | None,
        share: NDArray[numpy.float32] | None,
        vectors: NDArray[numpy.float32],
        state: NDArray[numpy.float32],
        out: NDArray[numpy.float32],
        eps: float,
    ) -> None: ...

def step_scratch_bytes(
    *,
    isa: str,
    tokens: int,
    logits: int,
    pages_per_sequence: int,
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    neurons: int,
    experts: int,
    chosen: int,
    shared: int,
    by_output: bool,
    math: int,
) -> int: ...

class FfnWeights:
    def __init__(
        self,
        gate: WeightRows | None,
        up: WeightRows,
        down: WeightRows,
        gate_bias: NDArray[numpy.float32] | None,
        up_bias: NDArray[numpy.float32] | None,
        down_bias: NDArray[numpy.float32] | None,
        by_output: bool,
        activation: int,
        threshold: float,
        limit: float,
        alpha: float,
        ends: Sequence[int],
        chosen: int,
        cache: ExpertCache | None = None,
        cold: ColdRows | None = None,
    ) -> None: ...

class LinkError(RuntimeError):
    pass

class Link:
    def wait_posted(self, layer: int) -> bool: ...
    def answer(self, layer: int) -> None: ...
    def fail(self, reason: str) -> None: ...
    def stop(self) -> None: ...
    @property
    def ended(self) -> bool: ...
    def start_marks(self, capacity: int) -> None: ...
    def stop_marks(self) -> None: ...
    def mark(self, moment: int, layer: int) -> None: ...
    def marks(self) -> list[tuple[int, int, int]]: ...

class FlagLink(Link):
    def __init__(self, timeout_seconds: float) -> None: ...
    def wait_idle(self, layer: int) -> None: ...
    def post(self, layer: int) -> None: ...
    def wait_answered(self, layer: int) -> bool: ...

def serve(link: Link, layers: Sequence[tuple[int, Program]]) -> None: ...
def quantise_rows(
    isa: str,
    type: int,
    values: NDArray[numpy.float32],
    importance: NDArray[numpy.float32] | None,
    out: NDArray[numpy.uint8],
    pool: Pool,
) -> None: ...
def can_quantise(type: int) -> bool: ...

class VulkanError(hotcold.kernels.gpu.GPUError):
    pass

class VulkanMemoryError(VulkanError, hotcold.kernels.gpu.GPUMemoryError):
    pass

class VulkanDeviceInfo:
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def api(self) -> str: ...
    @property
    def vendor(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def uuid(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int | None: ...
    @property
    def unified(self) -> bool: ...
    @property
    def max_range(self) -> int: ...
    @property
    def max_allocation(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def problem(self) -> str: ...

def vulkan_devices() -> list[VulkanDeviceInfo]: ...
def vulkan_open_rows(
    type: str, data: NDArray[numpy.uint8], codes: NDArray[numpy.uint8], scales: NDArray[numpy.uint8]
) -> None: ...

class VulkanMemory:
    @property
    def nbytes(self) -> int: ...
    @property
    def host(self) -> NDArray[numpy.uint8] | None: ...

class VulkanPipeline:
    pass

class VulkanLinkCounts:
    @property
    def steps(self) -> int: ...
    @property
    def answered(self) -> int: ...
    @property
    def gave_up(self) -> int: ...
    @property
    def spins(self) -> bool: ...

class VulkanLink(Link):
    @property
    def spin(self) -> bool: ...
    @property
    def counts(self) -> VulkanLinkCounts: ...

class VulkanStepCounts:
    @property
    def dispatches(self) -> int: ...
    @property
    def barriers(self) -> int: ...
    @property
    def submits(self) -> int: ...

class VulkanProgram:
    def run(self) -> None: ...
    @property
    def counts(self) -> VulkanStepCounts: ...

class VulkanRecorder:
    def batch(
        self, memory: VulkanMemory, batch: hotcold.kernels.backend.Batch, rows: int, bounds: Mapping[str, int]
    ) -> None: ...
    def dispatch(
        self,
        pipeline: VulkanPipeline,
        ranges: Sequence[tuple[VulkanMemory, int, int, bool]],
        push: bytes,
        x: int,
        y: int,
        z: int,
    ) -> None: ...
    def copy(
        self, source: VulkanMemory, source_offset: int, target: VulkanMemory, target_offset: int, nbytes: int
    ) -> None: ...
    def cut(self) -> None: ...
    def clear(self, memory: VulkanMemory) -> None: ...
    def post(self, link: VulkanLink, layer: int) -> None: ...
    def collect(self, link: VulkanLink, layer: int) -> None: ...
    def finish(self) -> VulkanProgram: ...

class VulkanDevice:
    def __init__(self, index: int, budget: int | None = None) -> None: ...
    @property
    def info(self) -> VulkanDeviceInfo: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    def check_budget(self) -> None: ...
    def allocate(self, nbytes: int, where: str = "device") -> VulkanMemory: ...
    def pipeline(
        self,
        spirv: bytes,
        ranges: int,
        push_bytes: int,
        constants: Sequence[int],
        hardware_halves: bool = False,
    ) -> VulkanPipeline: ...
    def link(
        self, timeout_seconds: float, spin: bool, post: VulkanPipeline, wait: VulkanPipeline
    ) -> VulkanLink: ...
    def recorder(self) -> VulkanRecorder: ...
    def write(self, memory: VulkanMemory, offset: int, data: NDArray[numpy.uint8]) -> None: ...
    def read(self, memory: VulkanMemory, offset: int, data: NDArray[numpy.uint8]) -> None: ...
    def clear(self, memory: VulkanMemory) -> None: ...

def top_k(
    logits: NDArray[numpy.float32],
    bias_ids: NDArray[numpy.int32] | None,
    bias: NDArray[numpy.float32] | None,
    allowed: NDArray[numpy.uint64] | None,
    ids: NDArray[numpy.int32],
    values: NDArray[numpy.float32],
) -> int: ...
def isas() -> list[tuple[str, bool, bool]]: ...
def tile_fault() -> str: ...
def has_tiles(isa: str) -> bool: ...
def fetching() -> tuple[int, int]: ...
def fetching_is_measured() -> bool: ...
def set_fetching(ahead: int, level: int) -> None: ...
def read_bandwidth(isa: str, pool: Pool, memory: Memory, seconds: float, streams: int = 1) -> float: ...
