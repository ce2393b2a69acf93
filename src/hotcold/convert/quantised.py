"""Reads how a checkpoint's weights are quantised, and dequantises FP8 and NVFP4 while they are converted.

A tensor of codes comes with a tensor of scales, one for each block of rows and columns. FP8 has a float of 8
bits (E4M3) for each weight. NVFP4 has two floats of 4 bits in a byte, and one factor for all scales."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.convert.checkpoint import LOADABLE, Checkpoint
from hotcold.convert.settings import ConvertError, Settings
from hotcold.convert.tensor_files import Array, Stored
from hotcold.formats.opened_blocks import FP4
from hotcold.values import printable, shown

Floats: TypeAlias = npt.NDArray[np.float32]
Block: TypeAlias = tuple[int, int]  #: the rows and columns that share a scale; 0 means all of them

_TENSOR, _CHANNEL, _PUBLISHED, _NVFP4 = (0, 0), (1, 0), (128, 128), (1, 16)
_FP8, _BYTES = "F8_E4M3", "U8"
_QUANTISED_BY = "the weights are quantised by"
_CHUNK = 1 << 18  # weights that are computed at a time

#: Keys about the rounding of activations, which are not rounded here, and about modules that are not
#: quantised, which is clear from the type of each stored tensor.
_WITHOUT_EFFECT = (
    "activation_scheme", "config_groups", "dequantize", "global_compression_ratio", "ignore",
    "ignored_layers", "kv_cache_quant_algo", "kv_cache_scheme", "modules_to_convert",
    "modules_to_not_convert", "producer", "quantization_status", "scale_fmt", "version",
)  # fmt: skip
#: Suffixes of names of scales for activations and caches.
_OF_ACTIVATIONS = tuple(
    f"{mark}{name}"
    for mark in "._"
    for name in ("input_scale", "activation_scale", "output_scale", "input_global_scale")
) + (".q_scale", ".k_scale", ".v_scale")
#: Suffixes of names of scales for weights.
_OF_WEIGHTS = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale")


@dataclass(frozen=True)
class Quantised:
    """A method of quantisation: its name for messages, the storage types of its codes, and the blocks that
    share a scale if this module reads it."""

    name: str
    stored: tuple[str, ...]
    blocks: tuple[Block, ...] = ()


class UnreadMethodError(ConvertError):
    """Raised for a method of quantisation that this module does not read; the message names it."""


def read_method(config: Settings) -> Mapping[str, Any]:
    """The method that config.json declares, as the fact ``quantised``; ConvertError: it is not supported."""
    for key in ("quantization_config", "compression_config"):
        stated = config.section(key)
        if stated.values:
            method = stated.text("quant_method", "")
            for name in _WITHOUT_EFFECT:
                _mark_read(stated, name)
            try:
                return {key: None, "quantised": _METHODS.get(method, _other)(stated)}
            except UnreadMethodError:
                raise
            except ConvertError as error:
                raise ConvertError(f"{error} ({_QUANTISED_BY} {printable(method, 40)})") from None
    return {}


def _mark_read(config: Settings, key: str) -> None:
    """Marks a key as read, and all keys of the objects in it."""
    if isinstance(value := config.get(key), dict):
        section = config.section(key)
        for name in value:
            _mark_read(section, name)


def _other(stated: Settings) -> Quantised:
    kind = next((str(stated.get(each)) for each in ("quant_algo", "format") if stated.get(each)), "")
    raise _refused(stated, kind)


def _refused(stated: Settings, kind: str) -> UnreadMethodError:
    method = stated.text("quant_method", "") or "a method without a name"
    named = printable(f"{method} ({kind})" if kind else method, 80)
    needed = "convert the checkpoint with the original weights (BF16 or F16)"
    return UnreadMethodError(f"{stated.path}: {_QUANTISED_BY} {named}, which is not supported: {needed}")


def _fp8(stated: Settings) -> Quantised:
    """FP8 of DeepSeek, Kimi, MiniMax and Qwen. Without a block size, one scale for a tensor is allowed."""
    for key, allowed in {"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)}.items():
        if stated.text(key, allowed[0]) not in allowed:
            raise stated.error(key, allowed[0])
    key = "weight_block_size"
    if key in stated:
        blocks: tuple[Block, ...] = (_block_size(stated, key),)
    else:
        blocks = (_TENSOR,) if key in stated.values else (_PUBLISHED, _TENSOR)
    return Quantised("fp8", (_FP8,), blocks)


def _block_size(stated: Settings, key: str) -> Block:
    match stated.get(key):
        case [int(rows), int(columns)] if 1 <= rows < 1 << 31 and 1 <= columns < 1 << 31:
            return rows, columns
    raise stated.error(key, "a list of two numbers, the rows and columns of a block,")


def _compressed(stated: Settings) -> Quantised:
    kind = stated.text("format", "")
    for key in ("sparsity_config", "transform_config"):
        changes = stated.section(key)
        if changes.values and changes.get("format") != "dense":
            raise _refused(stated, f"{kind} with {key}")
    blocks: list[Block] = []
    for group in stated.section("config_groups").values.values():
        if not isinstance(group, dict):
            raise stated.error("config_groups", "an object of objects")
        if (weights := Settings(stated.path, group).section("weights")).values:
            blocks.append(_block_of(stated, weights))
    if not blocks:
        raise stated.error("config_groups", "an object that describes weights")
    return Quantised(f"compressed-tensors ({printable(kind, 40)})", _types_of(blocks), tuple(blocks))


def _block_of(stated: Settings, weights: Settings) -> Block:
    """The block size of a group of compressed-tensors; ConvertError: its codes are neither FP8 nor NVFP4."""
    type, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if (type, bits, strategy, weights.get("group_size")) == ("float", 4, "tensor_group", 16):
        return _NVFP4
    if (type, bits, strategy) == ("float", 8, "block"):
        return _block_size(weights, "block_structure")
    if (type, bits) == ("float", 8) and strategy in ("tensor", "channel"):
        return _TENSOR if strategy == "tensor" else _CHANNEL
    raise _refused(stated, f"{stated.text('format', '')}: {bits} bits of type {type}, strategy {strategy}")


def _modelopt(stated: Settings) -> Quantised:
    algorithm = stated.get("quant_algo")
    blocks = {"FP8": _TENSOR, "NVFP4": _NVFP4}.get(str(algorithm))
    if blocks is None:
        return _other(stated)
    return Quantised(f"modelopt ({algorithm})", _types_of([blocks]), (blocks,))


def _types_of(blocks: Iterable[Block]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_BYTES if block == _NVFP4 else _FP8 for block in blocks))


_METHODS: dict[str, Callable[[Settings], Quantised]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with quantised tensors as float32, under the names of their weights.

    ConvertError: no tensor has the storage type of its method's codes, a tensor of codes lacks its scales,
    scales lack their tensor, a type or shape is wrong, or 8-bit floats have no declared method."""
    method: Quantised = checkpoint.config.get("quantised") or Quantised("", ())
    types = {name: stored.file.dtype(stored.name) for name, stored in checkpoint.files.items()}
    if method.stored and not {*method.stored} & {*types.values()}:
        got = f"{_QUANTISED_BY} {method.name}, but no tensor is {' or '.join(method.stored)}"
        needed = "download all files, or remove the key if the weights are not quantised"
        raise ConvertError(f"{checkpoint.config.path}: {got}: {needed}")
    files = dict(checkpoint.files)
    if method.blocks:
        files = {name: stored for name, stored in files.items() if not name.endswith(_OF_ACTIVATIONS)}
    for name, type in types.items():
        if parts := _parts(name, type, method, files):
            stored = [files.pop(part) for part in parts]
            weight = name.removesuffix("_packed")
            files[weight] = Stored(_matrix(weight, parts, stored, method.blocks), weight)
    for name, kept in files.items():
        if not isinstance(kept.file, Dequantised):
            _check_plain(name, types[name], method)
    return replace(checkpoint, files=files)


def _parts(name: str, type: str, method: Quantised, files: Mapping[str, Stored]) -> list[str]:
    """The names of a quantised tensor's codes, scales and factor, if ``name`` is a tensor of codes."""
    if type not in method.stored or not method.blocks or name.endswith(_OF_WEIGHTS):
        return []
    weight = name.removesuffix("_packed")
    if weight != name and weight in files:
        raise ConvertError(
            f"tensor {shown(weight)} is stored together with {shown(name)}: remove one of the two"
        )
    wanted = [[f"{weight}_scale_inv", f"{weight}_scale"]]
    if type == _BYTES:
        wanted = [[f"{weight}_scale"], [f"{weight}_global_scale", f"{weight}_scale_2"]]
    parts = [name]
    for names in wanted:
        present = [each for each in names if each in files]
        if not present:
            raise ConvertError(f"tensor {shown(name)} is {type} and has no {' or '.join(map(shown, names))}")
        parts.append(present[0])
    return parts


def _check_plain(name: str, type: str, method: Quantised) -> None:
    """Raises ConvertError if an unquantised tensor has 8-bit floats, or is a scale without its codes."""
    if method.blocks and name.endswith(_OF_WEIGHTS):
        got = f"tensor {shown(name)} holds scales, but the tensor that they belong to is not"
        raise ConvertError(f"{got} stored as {' or '.join(method.stored)}: download all files again")
    if type.startswith("F8_"):
        got = f"tensor {shown(name)} is {type}"
        if not method.stored:
            raise ConvertError(f"{got}, but config.json has no quantization_config: download it again")
        raise ConvertError(f"{got}, which {method.name} does not store: {_FP8} with scales is needed")


def _matrix(weight: str, names: list[str], stored: list[Stored], blocks: tuple[Block, ...]) -> "Dequantised":
    """A quantised tensor; ConvertError: the shape of its scales or its factor does not fit its blocks."""
    packed = len(stored) > 2
    shapes = [each.file.shape(each.name) for each in stored]
    if len(shapes[0]) < 2 or 0 in shapes[0]:
        raise ConvertError(f"tensor {shown(names[0])} has shape {list(shapes[0])}: a matrix is needed")
    *stack, rows, columns = shapes[0]
    columns *= 1 + packed
    possible = []
    for block in blocks:
        if (block == _NVFP4) == packed:
            size = block[0] or rows, block[1] or columns
            possible.append(((*stack, -(-rows // size[0]), -(-columns // size[1])), size))
    fitting = [size for shape, size in possible if _fits(shapes[1], shape)]
    if not fitting:
        allowed = " or ".join(str(list(shape)) for shape, _ in possible)
        got = f"tensor {shown(names[1])} has shape {list(shapes[1])}"
        raise ConvertError(f"{got}: {list(shapes[0])} of {shown(names[0])} implies {allowed}")
    if packed and not _fits(shapes[2], (*stack, 1, 1)):
        got = f"tensor {shown(names[2])} has shape {list(shapes[2])}"
        raise ConvertError(f"{got}: one factor of each matrix is needed")
    return Dequantised(tuple(names), tuple(stored), (*stack, rows, columns), fitting[0])


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """True if the shapes are equal; ``shape`` may lack the last dimensions of ``expected`` if they are 1."""
    return shape == expected[: len(shape)] and set(expected[len(shape) :]) <= {1}


@dataclass(frozen=True)
class Dequantised:
    """A quantised tensor as a file that has its values in float32."""

    parts: tuple[str, ...]  #: names of the codes, the scales and, for NVFP4, the factor
    stored: tuple[Stored, ...]
    size: tuple[int, ...]
    block: Block

    @property
    def is_nvfp4(self) -> bool:
        return len(self.parts) > 2

    def names(self) -> Iterable[str]:
        return self.parts[:1]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.size

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str) -> Array:
        """Computes a few rows at a time, so that memory holds the values and little else."""
        *stack, rows, columns = self.size
        codes, scales = self._codes(), self._scales()
        values = np.empty((math.prod(stack), rows, columns), np.float32)
        step = max(1, _CHUNK // columns)
        for matrix, start in itertools.product(range(len(values)), range(0, rows, step)):
            taken = slice(start, start + step)
            part = values[matrix, taken]
            part[:] = self._opened(codes[matrix, taken])
            of_rows = scales[matrix, np.arange(rows)[taken] // self.block[0]]
            part *= np.repeat(of_rows, self.block[1], axis=1)[:, :columns]
        return values.reshape(self.size)

    def blocks(self) -> Array:
        """The rows of a matrix of NVFP4 as GGUF's blocks, ``[rows, bytes]``, with the same codes and scales.
        A block has 4 scales, then for each 16 codes the first 8 in the low halves of 8 bytes, the last 8 in
        the high halves."""
        rows = self.size[0]
        scales = self._scale_codes().reshape(rows, -1, 4)
        codes = _halves(self._codes()[0]).reshape(rows, -1, 4, 2, 8)
        packed = codes[..., 0, :] | codes[..., 1, :] << 4
        return np.concatenate([scales, packed.reshape(rows, -1, 32)], axis=-1).reshape(rows, -1)

    def _codes(self) -> Array:
        codes = self.stored[0].file.read(self.stored[0].name)
        return codes.reshape(-1, *codes.shape[-2:])

    def _opened(self, codes: Array) -> Floats:
        if self.is_nvfp4:
            return _FP4[_halves(codes)]
        if ((codes & 127) == 127).any():
            raise ConvertError(
                f"tensor {shown(self.parts[0])} holds a code that is not a number: the file is damaged"
            )
        return E4M3[codes]

    def _scales(self) -> Floats:
        """The scales of all blocks of each matrix, times its factor."""
        *stack, rows, columns = self.size
        shape = math.prod(stack), -(-rows // self.block[0]), -(-columns // self.block[1])
        if not self.is_nvfp4:
            return _positive(self.parts[1], _numbers(self.parts[1], self.stored[1])).reshape(shape)
        scaled: Floats = E4M3[self._scale_codes()].reshape(shape) * self.factors()[:, None, None]
        return scaled

    def _scale_codes(self) -> Array:
        """The scales of NVFP4 as stored codes; they may be 0."""
        name, stored = self.parts[1], self.stored[1]
        if (type := stored.file.dtype(stored.name)) != _FP8:
            raise ConvertError(f"tensor {shown(name)} is {type}: scales of NVFP4 are {_FP8}")
        codes = stored.file.read(stored.name)
        if (codes >= 127).any():
            raise ConvertError(
                f"tensor {shown(name)} holds a scale that is negative or not a number: the file is damaged"
            )
        return codes

    def factors(self) -> Floats:
        """The factor of each matrix of NVFP4."""
        factors = _positive(self.parts[2], _numbers(self.parts[2], self.stored[2]).reshape(-1))
        return np.float32(1) / factors if self.parts[2].endswith("_global_scale") else factors


def _halves(codes: Array) -> Array:
    """Splits bytes into codes of 4 bits, the low half first."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _numbers(name: str, stored: Stored) -> Floats:
    """Scales of any type as float32."""
    match stored.file.dtype(stored.name):
        case "F8_E8M0":
            exponents = stored.file.read(stored.name).astype(np.int32)
            return np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127)).astype(np.float32)
        case type if type in LOADABLE:
            return stored.file.read(stored.name).astype(np.float32)
        case type:
            raise ConvertError(f"tensor {shown(name)} is {type}: scales are {', '.join(LOADABLE)} or F8_E8M0")


def _positive(name: str, scales: Floats) -> Floats:
    if not (valid := np.isfinite(scales) & (scales > 0)).all():
        got = f"tensor {shown(name)} holds the scale {scales[~valid][0]:g}"
        raise ConvertError(f"{got}: finite numbers above 0 are needed")
    return scales


def _e4m3() -> Floats:
    """The values of all codes: a sign, 4 bits of exponent, 3 of fraction, no infinity."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, codes & 7
    values = np.ldexp(np.where(exponents == 0, fractions, fractions + 8), np.maximum(exponents, 1) - 10)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
_FP4 = FP4.astype(np.float32) / np.float32(2)  # the table holds doubles
