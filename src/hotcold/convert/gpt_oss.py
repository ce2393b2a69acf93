"""Converts gpt-oss's experts: one tensor per layer, gate and up alternating, in MXFP4 or as numbers.

OCP's MXFP4 has a byte of exponent and 32 floats of 4 bits. A checkpoint keeps neighbours in a byte. GGUF
keeps value i with value i + 16, after the exponent. The codes are the same: nothing is lost."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.source import Source, check_shape, loaded
from hotcold.convert.tensor_files import Array
from hotcold.formats.blocks import Tensor, block_type

_HF, _GGUF = "model.layers.{}.", "blk.{}."


def expert_sources(checkpoint: Checkpoint, layer: int, sizes: Mapping[str, int]) -> list[Source]:
    """A layer's attention sinks and its experts, with biases; ConvertError as :func:`loaded`."""
    mlp, blk = f"{_HF.format(layer)}mlp.experts.", _GGUF.format(layer)
    e, n, d = sizes["E"], sizes["M"], sizes["D"]
    sinks = f"{_HF.format(layer)}self_attn.sinks"
    sources = [loaded(checkpoint, f"{blk}attn_sinks.weight", [sinks], (sizes["H"],))]
    for part, name, rows, columns, step in (
        ("gate", "gate_up_proj", n, d, slice(0, None, 2)),
        ("up", "gate_up_proj", n, d, slice(1, None, 2)),
        ("down", "down_proj", d, n, slice(None)),
    ):
        stored = rows * (2 if step.step else 1)
        target, shape = f"{blk}ffn_{part}_exps", (e, rows, columns)
        if checkpoint.config.flag("mxfp4", False):
            sources.append(_blocks(checkpoint, f"{target}.weight", mlp + name, shape, stored, step))
        else:
            turn = partial(_transposed, step=step)
            source = loaded(checkpoint, f"{target}.weight", [mlp + name], (e, columns, stored), turn, shape)
            sources.append(source)
        bias = partial(_every, step=step)
        sources.append(
            loaded(checkpoint, f"{target}.bias", [f"{mlp}{name}_bias"], (e, stored), bias, (e, rows))
        )
    return sources


def _every(values: Array, step: slice) -> Array:
    return values[:, step]


def _transposed(values: Array, step: slice) -> Array:
    return values[:, :, step].swapaxes(1, 2)


def _blocks(
    checkpoint: Checkpoint, target: str, origin: str, shape: tuple[int, ...], stored: int, step: slice
) -> Source:
    names = f"{origin}_blocks", f"{origin}_scales"
    experts, _, columns = shape
    check_shape(checkpoint, names[0], (experts, stored, columns // 32, 16))
    check_shape(checkpoint, names[1], (experts, stored, columns // 32))

    def load() -> Tensor:
        blocks, scales = (checkpoint.load_bytes(name)[:, step] for name in names)
        return Tensor(block_type("MXFP4"), shape, pack_mxfp4(blocks, scales))

    return Source(target, shape, names, load, "MXFP4")


def pack_mxfp4(blocks: Array, scales: Array) -> Array:
    """GGUF rows ``[rows, blocks * 17]`` from codes ``[..., blocks, 16]`` and exponents ``[..., blocks]``, all
    uint8. A byte of codes has two neighbours, the first in its low half."""
    first, second = blocks & 15, blocks >> 4
    codes = np.stack([first, second], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    rows = np.concatenate([scales[..., None], packed], axis=-1)
    return rows.reshape(-1, scales.shape[-1] * 17)
