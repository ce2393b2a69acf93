"""Sizes of a model's file for sequences of a given length."""

from __future__ import annotations

from typing import Any

from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import BatchLimits
from hotcold.model.config import Config
from hotcold.placement.sizes import CHUNK, Sizes, sizes_of_file


def file_sizes(
    file: GGUFFile, config: Config, context: int, cache: str, *, sequences: int = 1, **more: Any
) -> Sizes:
    return sizes_of_file(file, config, BatchLimits.from_context(context, sequences, CHUNK), cache, **more)
