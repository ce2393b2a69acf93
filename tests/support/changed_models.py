"""Copies of model files with other keys and tensors, and what their metadata say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotcold.formats.blocks import Tensor
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.model.config import Config
from hotcold.model.weights import check_tensors


def changed(
    path: Path, out: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor | None] | None = None
) -> Path:
    """Writes a copy with these keys and tensors in place of its own; None takes one away. Returns ``out``."""
    with open_gguf(path) as file:
        metadata = file.metadata | keys
        arrays: dict[str, Tensor | None] = {name: file.load(name) for name in file.tensors}
    arrays |= tensors or {}
    kept = {name: tensor for name, tensor in arrays.items() if tensor is not None}
    write_gguf(out, {key: value for key, value in metadata.items() if value is not None}, kept)
    return out


def config_of(path: Path) -> Config:
    """The configuration of a file that has all tensors it needs, and no others."""
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        check_tensors(file, config)
    return config
