"""What a machine reads, and how fast: measured (``measuring.py``), or a preset, from published data."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.files import RegularFile, shown

DEFAULT = "rtx4090-i9"  #: the preset that plans are for, if nothing is said
PRESETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("machines.json").read_bytes())


@dataclass(frozen=True)
class Hardware:
    """Bandwidths are in 1e9 bytes a second, as decoding gets them; a ValueError names a wrong field.

    Without a GPU its memory and all that is measured on it are 0."""

    name: str
    source: str  #: where the figures come from
    vram_bytes: int
    cpu_stream_gb_s: float
    cpu_gather_gb_s: list[list[float]]  #: of scattered runs: pairs of their bytes and the bandwidth
    gpu_stream_gb_s: float
    gpu_rows_gb_s: float  #: of rows that a mask picks
    link_pinned_gb_s: float
    link_pageable_gb_s: float
    handshake_s: float  #: from the GPU to the CPU and back, without what is sent
    machine: dict[str, Any] | None = None  #: what doctor adds: when, where, and all that it measured

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            numbers = np.array(value, object)
            right = all(type(n) in (int, float) and 0 < n < 1e18 for n in numbers.flat)
            needed = "a number above 0"
            if name in ("name", "source"):
                right, needed = isinstance(value, str), "text"
            elif name == "machine":
                right, needed = value is None or isinstance(value, dict), "an object"
            elif name == "cpu_gather_gb_s":
                right, needed = right and numbers.shape[1:] == (2,), "a list of pairs of numbers above 0"
            elif not name.startswith("cpu") and self.vram_bytes == 0:
                right, needed = value == 0 and type(value) in (int, float), "0, without a GPU (vram_bytes),"
            if not right or isinstance(value, list) != (name == "cpu_gather_gb_s"):
                raise UserError(f"{name} is {shown(value)}: {needed} is needed")

    def gather_gb_s(self, nbytes: float) -> float:
        """Of scattered runs of ``nbytes``, by logarithms between the lengths that are known."""
        lengths, speeds = np.array(sorted(self.cpu_gather_gb_s)).T
        return float(np.interp(np.log(nbytes), np.log(lengths), speeds))


def find_hardware(name: str) -> Hardware:
    """A preset, or a JSON file with the fields of Hardware; ValueError where it is neither, or wrong."""
    try:
        file = None if name in PRESETS else RegularFile(Path(name))
        data = json.loads(file.read(0, min(file.size, 1 << 20))) if file else PRESETS[name]
        names = [field.name for field in fields(Hardware)][:-1]
        if not isinstance(data, dict) or data.keys() - {"machine"} != set(names):
            raise UserError(f"an object with exactly {', '.join(names)} is needed; machine may be added")
        return Hardware(**data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"hardware {shown(name)}: {error}; presets: {', '.join(PRESETS)}") from None
