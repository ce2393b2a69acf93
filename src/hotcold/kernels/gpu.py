"""Description of a GPU, whatever its interface: its facts, its backend, its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType
from hotcold.kernels.backend import Backend, BatchLimits
from hotcold.values import round_size

#: Alignment of every buffer, and of every range that a shader takes.
ALIGNMENT = 256

_GIB = 1 << 30


class GPUError(UserError):
    """Error of a GPU that cannot be used, or that failed; the message names the fix."""


class GPUMemoryError(GPUError):
    """Error of an allocation for which a GPU has too little memory, with ``allocated`` bytes in use."""

    allocated: int = 0


@dataclass(frozen=True)
class GPU:
    """A device, and the driver that reaches it."""

    index: int  #: position in the list of all devices
    name: str
    kind: str  #: ``discrete``, ``integrated``, ``virtual``, ``software`` (the processor), ``other``
    driver: str  #: name and version
    api: str  #: the interface that reaches it, and its version
    uuid: str
    memory_bytes: int
    free_bytes: int | None  #: free memory; None if the driver does not report it
    unified: bool  #: whether it shares the processor's memory
    problem: str = ""  #: reason that it cannot be used

    @property
    def title(self) -> str:
        """The name that users know, with the GPU's index in the list."""
        return f"{self.index} ({self.name})"

    @property
    def shares_memory(self) -> bool:
        """True if it shares the processor's memory, so that allocations on it are host memory."""
        return self.unified or self.kind == "software"

    @property
    def default_budget(self) -> int:
        """Free bytes, less 1 GiB, or less an eighth if that is smaller."""
        free = self.memory_bytes if self.free_bytes is None else min(self.free_bytes, self.memory_bytes)
        return round_size(free - min(_GIB, free // 8))


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of the link between the processor and a GPU. GB/s are 10^9 bytes; all are medians."""

    to_gpu_gb_s: float  #: from memory that the driver allocated
    from_gpu_gb_s: float  #: to memory that the driver allocated
    pageable_gb_s: float  #: to the GPU, from any memory
    step_s: float  #: submitting and awaiting an empty program
    handshake_submit_s: float  #: from the GPU to the CPU and back, if the answer submits the next commands
    handshake_spin_s: float | None  #: if a shader waits for the answer; None: not possible here

    @property
    def spins(self) -> bool:
        """True if a waiting shader is the faster form."""
        return self.handshake_spin_s is not None and self.handshake_spin_s < self.handshake_submit_s

    @property
    def handshake_s(self) -> float:
        """Seconds of a handshake in its faster form."""
        return self.handshake_spin_s if self.spins and self.handshake_spin_s else self.handshake_submit_s


class GPUBackend(Backend, Protocol):
    """A backend that computes in a GPU's memory."""

    @property
    def allocated_bytes(self) -> int: ...  # of the GPU's memory
    @property
    def host_bytes(self) -> int: ...  # of the processor's memory, for the exchange

    def check_memory(self, nbytes: int) -> None:
        """Allocates ``nbytes`` and frees them at once. GPUMemoryError: that fails."""

    def check_budget(self) -> None:
        """Raises GPUMemoryError if the driver gave more memory than the GPU has: some is not the GPU's."""

    def link_speed(self, nbytes: int, runs: int) -> LinkSpeed:
        """Measures the link with copies of ``nbytes``."""


@dataclass(frozen=True)
class StepShape:
    """Numbers that determine a step's scratch memory, for a model with equal layers."""

    limits: BatchLimits
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int  #: of the widest layer
    hot: int | None  #: neurons of a layer on the GPU; None: it has no layer
    types: tuple[BlockType, BlockType, BlockType]  #: of gate, up and down; without a gate, up twice
    gated: bool
    down_layout: str
    activation: str
    rank: int  #: of the largest predictor; 0 without any
    experts: int = 1  #: of a layer; they divide its neurons
    chosen: int = 1  #: experts that a row chooses
    shared: int = 0  #: neurons of the shared expert
    head_columns: tuple[int, ...] = ()  #: columns of matrices with rows for each head (latent attention)
    inner: int = 0  #: columns of the widest other matrix, such as a down that is not an FFN's
