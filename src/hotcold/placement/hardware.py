"""Description of a machine's memory speeds: measured (``measuring.py``), or a preset from published data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.files import RegularFile
from hotcold.kernels.processor import FETCHING
from hotcold.values import shown

DEFAULT = "rtx4090-i9"  #: the preset of plans, if none is given
PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("machines.json").read_bytes())

#: Kernels of a GPU whose bandwidth is measured: products with a matrix, gate and up rows of all neurons,
#: such rows of active neurons, and down rows of active neurons; then keys and values.
KERNELS = ("matrix", "stream", "rows", "down")
KERNEL_TYPES = ("Q4_0", "F16")  #: measured types; they stand for all quantised and all float types
ATTENTION = "attention"
#: Kinds of a layer on a GPU, by its FFN: all neurons, active gates, predicted neurons, experts.
LAYER_KINDS = ("dense", "exact", "predicted", "experts")
HEAD = "head"

_LAYER_KEYS = tuple(f"{kind} {type}" for kind in (*LAYER_KINDS, HEAD) for type in KERNEL_TYPES)
_KERNEL_KEYS = (*(f"{kernel} {type}" for kernel in KERNELS for type in KERNEL_TYPES), ATTENTION)
_OF_THE_GPU = ("gpu_stream_gb_s", "gpu_rows_gb_s", "link_pinned_gb_s", "link_pageable_gb_s", "handshake_s")


@dataclass(frozen=True)
class Hardware:
    """Figures of a machine. Bandwidths are in 1e9 bytes per second, as decoding gets them. All figures of the
    GPU are 0 if there is none. UserError names a wrong field."""

    name: str
    source: str  #: origin of the figures
    vram_bytes: int
    cpu_stream_gb_s: float
    cpu_gather_gb_s: list[list[float]]  #: pairs: length of scattered runs in bytes, and their bandwidth
    gpu_stream_gb_s: float
    gpu_rows_gb_s: float  #: bandwidth of rows that a mask selects
    link_pinned_gb_s: float  #: bandwidth of the slower direction
    link_pageable_gb_s: float  #: bandwidth to the GPU
    handshake_s: float  #: from the GPU to the CPU and back, without transferred data
    machine: dict[str, Any] | None = None  #: facts that doctor adds: date, place, and all measurements
    spins: bool = False  #: the faster handshake: True: bounded wait in a shader; False: submit on answer
    step_s: float = 0.0  #: overhead of a step on the GPU: submission and waiting
    layer_s: float = 0.0  #: overhead of a layer on the GPU: start and end of its kernels
    #: measured bandwidths by kernel and type: keys such as "rows F16"; a missing one is ``gpu_rows_gb_s`` for
    #: rows and down, else ``gpu_stream_gb_s``
    kernels_gb_s: Mapping[str, float] = field(default_factory=dict)
    #: measured overheads by kind and type: keys such as "dense F16"; a missing one is ``layer_s``, or 0 for
    #: the head
    layers_s: Mapping[str, float] = field(default_factory=dict)
    fetching: str = ""  #: the fastest of processor.FETCHING, if doctor had to measure them
    #: 1e9 multiplications and additions per second of an FFN in Q4_0 with many prompt rows; 0: not measured
    cpu_prompt_gflops: float = 0.0
    gpu_prompt_gflops: float = 0.0

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            self._check(name, isinstance(getattr(self, name), str), "text")
        self._check("machine", self.machine is None or isinstance(self.machine, dict), "an object")
        vram = self.vram_bytes
        self._check("vram_bytes", _zero(vram) or _positive(vram), "a number above 0, or 0 without a GPU,")
        self._check("cpu_stream_gb_s", _positive(self.cpu_stream_gb_s), "a number above 0")
        self._check("fetching", self.fetching in ("", *FETCHING), f"one of {', '.join(FETCHING)}")
        self._check("spins", isinstance(self.spins, bool), "true or false")
        for name in ("step_s", "layer_s", "cpu_prompt_gflops", "gpu_prompt_gflops"):
            value = getattr(self, name)
            self._check(name, _zero(value) or _positive(value), "a number of 0 or more")
        pairs = _positive_pairs(self.cpu_gather_gb_s)
        self._check("cpu_gather_gb_s", pairs, "a list of pairs of numbers above 0")
        for name, keys in (("kernels_gb_s", _KERNEL_KEYS), ("layers_s", _LAYER_KEYS)):
            self._check(name, _figures(getattr(self, name), keys), f"numbers above 0 of {', '.join(keys)}")
        for name in _OF_THE_GPU:
            if vram == 0:
                self._check(name, _zero(getattr(self, name)), "0, without a GPU (vram_bytes),")
            else:
                self._check(name, _positive(getattr(self, name)), "a number above 0")

    def _check(self, name: str, right: bool, needed: str) -> None:
        if not right:
            raise UserError(f"{name} is {shown(getattr(self, name))}: {needed} is needed")

    @property
    def knows_prompts(self) -> bool:
        """True if the speed of prompts was measured on both sides."""
        return self.cpu_prompt_gflops > 0 and self.gpu_prompt_gflops > 0

    def gather_gb_s(self, nbytes: float) -> float:
        """Returns the bandwidth of scattered runs, interpolated on a logarithmic scale of lengths."""
        lengths, speeds = np.array(sorted(self.cpu_gather_gb_s)).T
        return float(np.interp(np.log(nbytes), np.log(lengths), speeds))

    def gpu_s_per_gb(self, kernel: str, floats: float = 0.0) -> float:
        """Returns a GPU's seconds per 1e9 bytes in a kernel. ``floats``: the share of bytes in float
        types."""
        default = self.gpu_rows_gb_s if kernel in ("rows", "down") else self.gpu_stream_gb_s
        keys = [kernel] * 2 if kernel == ATTENTION else [f"{kernel} {type}" for type in KERNEL_TYPES]
        quantised, unquantised = (self.kernels_gb_s.get(key, default) for key in keys)
        return (1 - floats) / quantised + floats / unquantised

    def gpu_layer_s(self, kind: str, floats: float = 0.0) -> float:
        """Returns the overhead on a GPU of a layer, one of :data:`LAYER_KINDS`, or of the head."""
        default = 0.0 if kind == HEAD else self.layer_s
        quantised, unquantised = (self.layers_s.get(f"{kind} {type}", default) for type in KERNEL_TYPES)
        return (1 - floats) * quantised + floats * unquantised


def _zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0


def _positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e18  # type: ignore[operator]


def _figures(value: object, keys: Sequence[str]) -> bool:
    """Returns True for a JSON object with some of these keys, and numbers above 0."""
    return isinstance(value, dict) and value.keys() <= set(keys) and all(map(_positive, value.values()))


def _positive_pairs(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_positive, pair)) for pair in value)


def find_hardware(name: str) -> Hardware:
    """Returns a preset, or the content of a JSON file with the fields of Hardware. UserError: neither, or
    invalid."""
    try:
        file = None if name in PRESETS else RegularFile(Path(name))
        data = json.loads(file.read(0, min(file.size, 1 << 20))) if file else PRESETS[name]
        required = {each.name: each.default is each.default_factory is MISSING for each in fields(Hardware)}
        names, optional = ([name for name in required if required[name] is kind] for kind in (True, False))
        if not isinstance(data, dict) or data.keys() - set(optional) != set(names):
            got = f"an object with exactly {', '.join(names)} is needed"
            raise UserError(f"{got}; {', '.join(optional)} may be added")
        return Hardware(**data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"hardware {shown(name)}: {error}; presets: {', '.join(PRESETS)}") from None
