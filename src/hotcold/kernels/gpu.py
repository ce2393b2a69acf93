"""Describes a GPU to the rest of Hotcold, whatever its interface: its facts, its backend, its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType
from hotcold.kernels.backend import Backend, BatchLimits
from hotcold.values import round_size

#: Every buffer, and every range that a shader gets, begins at a multiple of so many bytes.
ALIGNMENT = 256

_GIB = 1 << 30


class GPUError(UserError):
    """Raised if a GPU cannot be used, or failed; the message says what to do."""


class GPUMemoryError(GPUError):
    """Raised if a GPU has too little memory left for an allocation beside ``allocated`` bytes."""

    allocated: int = 0


@dataclass(frozen=True)
class GPU:
    """A device, and the driver by which it is reached."""

    index: int  #: position in the list of all devices
    name: str
    kind: str  #: ``discrete``, ``integrated``, ``virtual``, ``software`` (the processor), ``other``
    driver: str  #: name and version
    api: str  #: the interface by which it is reached, and its version
    uuid: str
    memory_bytes: int
    free_bytes: int | None  #: free memory; None if the driver does not say
    unified: bool  #: its memory is the processor's
    problem: str = ""  #: why it cannot be used

    @property
    def title(self) -> str:
        """The name that people know, with the GPU's place in the list."""
        return f"{self.index} ({self.name})"

    @property
    def shares_memory(self) -> bool:
        """True if it shares the processor's memory: what is allocated on it is then the host's memory."""
        return self.unified or self.kind == "software"

    @property
    def default_budget(self) -> int:
        """Bytes that are free, less 1 GiB, or less an eighth where that is smaller."""
        free = self.memory_bytes if self.free_bytes is None else min(self.free_bytes, self.memory_bytes)
        return round_size(free - min(_GIB, free // 8))


@dataclass(frozen=True)
class LinkSpeed:
    """Between the processor and a GPU: GB/s are 10^9 bytes, seconds those of one. Medians."""

    to_gpu_gb_s: float  #: from memory that the driver has given
    from_gpu_gb_s: float  #: to such memory
    pageable_gb_s: float  #: to the GPU, from any memory
    step_s: float  #: of an empty program: to be submitted and waited for
    handshake_submit_s: float  #: from the GPU to the CPU and back, where the answer submits what follows
    handshake_spin_s: float | None  #: where a shader waits for the answer; None: it does not work here

    @property
    def spins(self) -> bool:
        """True if that is the faster form."""
        return self.handshake_spin_s is not None and self.handshake_spin_s < self.handshake_submit_s

    @property
    def handshake_s(self) -> float:
        """Seconds of a handshake in its faster form."""
        return self.handshake_spin_s if self.spins and self.handshake_spin_s else self.handshake_submit_s


class GPUBackend(Backend, Protocol):
    """A backend whose memory is a GPU's."""

    @property
    def allocated_bytes(self) -> int: ...  # of that memory
    @property
    def host_bytes(self) -> int: ...  # of the processor's, for what is exchanged

    def check_memory(self, nbytes: int) -> None:
        """GPUMemoryError: so many bytes, which are let go at once, cannot be allocated now."""

    def check_budget(self) -> None:
        """GPUMemoryError: the driver has given more memory than it has: some of it is not the GPU's."""

    def link_speed(self, nbytes: int, runs: int) -> LinkSpeed:
        """Measured with copies of ``nbytes``."""


@dataclass(frozen=True)
class StepShape:
    """The numbers on which a step's scratch memory depends, for a model whose layers are alike."""

    limits: BatchLimits
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: int  #: of the widest layer
    hot: int | None  #: those of them that the GPU has; None: it has no layer
    types: tuple[BlockType, BlockType, BlockType]  #: of gate, up and down; without a gate up's twice
    gated: bool
    down_layout: str
    activation: str
    rank: int  #: of the largest predictor; 0 without any
    experts: int = 1  #: of a layer, which its neurons are cut into
    chosen: int = 1  #: by a row
    shared: int = 0  #: neurons of the shared expert
    head_columns: tuple[int, ...] = ()  #: of matrices of which each head has its rows (latent attention)
    inner: int = 0  #: columns of the widest matrix besides, such as a down that is no FFN's
