"""Converts BitNet b1.58 (arXiv 2402.17764): a matrix has the values -1, 0 and 1, times one factor.

A checkpoint holds these values, four in a byte, or the weights of training, which each step rounds to them.
Both become blocks of TQ2_0. Without a declared method the weights stay as they are."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from hotcold.convert.adapting import Facts, refuse_others
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.quantised import Quantised
from hotcold.convert.settings import ConvertError, Settings
from hotcold.convert.source import Source, check_shape, loaded
from hotcold.convert.tensor_files import Array
from hotcold.formats.blocks import Tensor, block_type

_PACKED = 4  # ternary numbers in a byte
_BLOCK = 256  # weights of TQ2_0
_MOST = 65504.0  # the largest float16
#: Names, and the shape in letters of ``metadata.dimensions``.
_MATRICES = (
    ("self_attn.q_proj", "attn_q", "QD"),
    ("self_attn.k_proj", "attn_k", "KD"),
    ("self_attn.v_proj", "attn_v", "KD"),
    ("self_attn.o_proj", "attn_output", "DQ"),
    ("mlp.gate_proj", "ffn_gate", "ND"),
    ("mlp.up_proj", "ffn_up", "ND"),
    ("mlp.down_proj", "ffn_down", "DN"),
)
_NORMS = (("self_attn.attn_sub_norm", "attn_sub_norm", "Q"), ("mlp.ffn_sub_norm", "ffn_sub_norm", "N"))


def bitnet(config: Settings) -> Facts:
    refuse_others(config, attention_bias=False)
    stored = config.section("quantization_config")
    if not stored.values:
        return {}
    kind = _kind(stored)
    types = () if kind == "online" else ("U8",)
    return {"quantization_config": None, "ternary": kind, "quantised": Quantised("bitnet", types)}


def _kind(stored: Settings) -> str:
    """The kind of storage: weights to be rounded (``online``), or packed with a factor or its inverse."""
    if stored.text("quant_method", "") != "bitnet":
        raise stored.error("quant_method", "bitnet")
    refuse_others(stored, use_rms_norm=False)
    others = stored.get("modules_to_not_convert")
    if others not in (None, [], ["lm_head"]):
        raise stored.error("modules_to_not_convert", "null or ['lm_head']")
    mode, kind = stored.text("quantization_mode", "offline"), stored.text("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise stored.error("linear_class", "bitlinear or autobitlinear")
    if mode not in ("online", "offline") or (mode == "online" and kind == "bitlinear"):
        raise stored.error(
            "quantization_mode", "offline" + ", or online with autobitlinear" * (mode != "offline")
        )
    if mode == "online":
        return mode
    return "factor" if kind == "autobitlinear" else "inverse"


def layer_tensors(
    checkpoint: Checkpoint, layer: int, sizes: Mapping[str, int], down_layout: str
) -> list[Source]:
    """A layer's matrices, and the norms inside it."""
    hf, blk, sources = f"model.layers.{layer}.", f"blk.{layer}.", []
    for origin, target, letters in _MATRICES:
        shape = sizes[letters[0]], sizes[letters[1]]
        names = f"{blk}{target}.weight", f"{hf}{origin}.weight"
        if "ternary" in checkpoint.config:
            sources.append(_ternary(checkpoint, *names, shape))
        else:
            sources.append(loaded(checkpoint, names[0], [names[1]], shape))
    for origin, target, letter in _NORMS:
        sources.append(
            loaded(checkpoint, f"{blk}{target}.weight", [f"{hf}{origin}.weight"], (sizes[letter],))
        )
    return sources


def _ternary(checkpoint: Checkpoint, target: str, origin: str, shape: tuple[int, int]) -> Source:
    kind, origins = checkpoint.config.text("ternary"), [origin]
    if kind == "online":
        check_shape(checkpoint, origin, shape)
        load = partial(_rounded, checkpoint, origin)
    else:
        origins.append(f"{origin}_scale")
        if shape[0] % _PACKED:
            raise ConvertError(f"tensor {origin!r} packs rows by {_PACKED}: config.json implies {shape[0]}")
        check_shape(checkpoint, origin, (shape[0] // _PACKED, shape[1]))
        check_shape(checkpoint, origins[1], (1,))
        load = partial(_unpacked, checkpoint, origins[0], origins[1], kind == "inverse")
    whole = shape[1] % _BLOCK == 0

    def read() -> Array | Tensor:
        codes, factor = load()
        _check_factor(origin, factor)
        if whole:
            return Tensor(block_type("TQ2_0"), shape, pack_tq2_0(codes, factor))
        return np.float32(factor) * (codes.astype(np.float32) - 1)

    return Source(target, shape, tuple(origins), read, "TQ2_0" if whole else None)


def _rounded(checkpoint: Checkpoint, name: str) -> tuple[Array, float]:
    """Codes 0, 1 and 2 for the weights -1, 0 and 1, and their factor: the mean of all magnitudes."""
    values = checkpoint.load(name).astype(np.float32)
    factor = max(float(np.abs(values).mean(dtype=np.float64)), 1e-5)
    return (np.clip(np.round(values * np.float32(1 / factor)), -1, 1) + 1).astype(np.uint8), factor


def _unpacked(checkpoint: Checkpoint, name: str, scale: str, inverse: bool) -> tuple[Array, float]:
    """Codes and factor of packed weights. A row's two bits follow from its quarter of all rows."""
    packed, factor = checkpoint.load_bytes(name), float(checkpoint.load(scale)[0])
    codes = np.concatenate([packed >> 2 * quarter & 3 for quarter in range(_PACKED)])
    if codes.max(initial=0) > 2:
        raise ConvertError(f"tensor {name!r} holds a code of 3: 0, 1 and 2 are -1, 0 and 1")
    if inverse:
        if not factor:
            raise ConvertError(f"tensor {scale!r} is 0: weights are divided by it")
        factor = 1 / factor
    return codes, factor


def _check_factor(name: str, factor: float) -> None:
    if not abs(factor) <= _MOST:
        got = f"tensor {name!r} has the factor {factor:g}"
        raise ConvertError(f"{got}: blocks of TQ2_0 hold one up to {_MOST:g}")


def pack_tq2_0(codes: Array, factor: float) -> Array:
    """Packs codes ``[rows, columns]`` as rows of TQ2_0. Byte m of a half block has codes m, m + 32, m + 64
    and m + 96 of that half, the first in its lowest bits."""
    rows, columns = codes.shape
    parts = codes.reshape(rows, columns // _BLOCK, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed = np.bitwise_or.reduce(parts << shifts, axis=-2).reshape(rows, -1, 64)
    scale = np.full((rows, columns // _BLOCK, 1), factor, "<f2").view(np.uint8)
    return np.concatenate([packed, scale], axis=-1).reshape(rows, -1)
