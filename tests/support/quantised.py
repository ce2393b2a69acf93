"""Checkpoints in FP8 and NVFP4, written after the published layouts, and what their codes stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from support.checkpoints import DTYPES, change_config, tensors_of, write_safetensors

Array: TypeAlias = npt.NDArray[Any]
Parts: TypeAlias = dict[str, Array]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def spread(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The scale of each weight."""
    each = np.kron(np.asarray(scales, np.float32), np.ones(block, np.float32))
    return each[..., : shape[-2], : shape[-1]]


def in_fp8(values: Array, block: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Codes and scales of a matrix whose blocks may be cut at its ends, and their values."""
    rows, columns = (size or length for size, length in zip(block, values.shape[-2:], strict=True))
    counts = -(-values.shape[-2] // rows), -(-values.shape[-1] // columns)
    scales = np.empty((*values.shape[:-2], *counts), np.float32)
    for i, j in np.ndindex(*counts):
        part = values[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[..., i, j] = np.abs(part).max(axis=(-1, -2)) / 448
    each = spread(scales, (rows, columns), values.shape)
    codes = (values / each).astype(FP8)
    return codes, scales, codes.astype(np.float32) * each


def in_nvfp4(values: Array, factor: float) -> tuple[Array, Array, Array]:
    """Codes, scales (E4M3) and values of a matrix of NVFP4."""
    rows, columns = values.shape
    blocks = values.reshape(rows, -1, 16)
    scales = (np.abs(blocks).max(axis=-1) / 6 / factor).astype(FP8)
    each = scales.astype(np.float32) * np.float32(factor)
    with np.errstate(all="ignore"):
        ratios = np.nan_to_num(blocks / each[..., None])
    codes = np.abs(np.abs(ratios)[..., None] - FP4).argmin(axis=-1)
    signs = np.where(ratios < 0, 8, 0)
    dequantised = np.where(signs, -1, 1).astype(np.float32) * FP4[codes] * each[..., None]
    flat = (codes | signs).astype(np.uint8).reshape(rows, columns)
    return flat[:, 0::2] | flat[:, 1::2] << 4, scales, dequantised.reshape(rows, columns)


Quantise: TypeAlias = Callable[[str, Array], tuple[Parts, Array]]


def fp8(block: tuple[int, int], end: str = "_scale_inv", type: Any = np.float32) -> Quantise:
    """Writes a matrix as FP8; ``end`` is that of the scales' names, ``block`` has 0 for all rows or columns.
    Scales of a whole tensor are one number."""

    def quantise(name: str, values: Array) -> tuple[Parts, Array]:
        codes, scales, _ = in_fp8(values, block)
        scales = scales.astype(type)
        size = tuple(each or length for each, length in zip(block, values.shape[-2:], strict=True))
        dequantised = codes.astype(np.float32) * spread(scales, size, values.shape)
        stored = scales.reshape(scales.shape[:-2]) if block == (0, 0) else scales
        return {name: codes, f"{name}{end}": stored}, dequantised

    return quantise


def compressed(strategy: str, format: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def quantised_pair(
    folder: Path, quantise: Quantise, config: Mapping[str, Any], names: str = r"_proj|\.w[123]\."
) -> tuple[Path, Path]:
    """Rewrites the matrices of these names: the folder becomes quantised, a copy beside it has their values
    in float32."""
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    for file in folder.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    stored: Parts = {}
    values: Parts = {}
    for name, each in tensors_of(folder).items():
        if each.ndim > 1 and re.search(names, name):
            parts, values[name] = quantise(name, each.astype(np.float32))
            stored |= parts
        else:
            stored[name] = values[name] = each
    write_safetensors(folder / "model.safetensors", stored)
    write_safetensors(plain / "model.safetensors", values)
    change_config(folder, quantization_config=dict(config))
    return folder, plain


def rewrite(folder: Path, change: Callable[[Parts], None]) -> None:
    """Changes the tensors of a checkpoint of any types in place."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    arrays = {}
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = (start + at for at in entry["data_offsets"])
        arrays[name] = np.frombuffer(raw[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    change(arrays)
    write_safetensors(path, arrays)
