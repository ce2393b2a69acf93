"""Quantises a model file: each tensor to the block type that a mixture or the user chooses."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hotcold.formats.blocks import BlockType, Bytes, Floats, Tensor
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, TensorInfo, open_gguf
from hotcold.kernels.quantising import quantise_rows
from hotcold.quantize.imatrix import ImportanceMatrix
from hotcold.quantize.mixtures import (
    ALIASES,
    MIXTURES,
    NEED_IMPORTANCE,
    PREDICTOR,
    Choice,
    Facts,
    Mixture,
    Wishes,
    choose_types,
    in_file_order,
    kind_of,
)
from hotcold.quantize.rewriting import Plan, Progress, QuantizeError, changed, copied, kept_metadata, rewrite
from hotcold.values import printable, shown

#: ``COPY`` changes no tensor; it sorts them, and joins a split model.
COPY = "COPY"
TYPES = (*MIXTURES, COPY)

QUANTIZATION_VERSION = 2  # ggml's number of the layouts of its blocks


@dataclass(frozen=True)
class QuantizeOptions:
    type: str  #: one of :data:`TYPES` or :data:`ALIASES`, in upper or lower case
    wishes: Wishes = field(default_factory=Wishes)
    importance: ImportanceMatrix | None = None
    importance_file: str = ""  #: name of the importance matrix for the new file's metadata
    allow_requantize: bool = False  #: also convert quantised tensors, which lose precision twice
    measure: bool = False  #: measure the error; takes longer
    threads: int | None = None  #: None: one per core
    force: bool = False  #: replace an existing file


@dataclass(frozen=True)
class Share:
    """The tensors of one type in the new file."""

    type: str
    tensors: int
    weights: int
    before: int  #: bytes in the old file
    after: int  #: bytes in the new one
    #: root mean square error of the converted weights, relative to their root mean square; None: not measured
    error: float | None

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.after / self.weights


@dataclass(frozen=True)
class Quantization:
    output: Path
    type: str
    shares: list[Share]  #: the largest first
    notes: list[str]  #: for the user
    seconds: float

    @property
    def before(self) -> int:
        return sum(share.before for share in self.shares)

    @property
    def after(self) -> int:
        return sum(share.after for share in self.shares)

    @property
    def bits(self) -> float:
        return 8 * self.after / sum(share.weights for share in self.shares)


def quantize(
    model: Path, output: Path, options: QuantizeOptions, progress: Progress | None = None
) -> Quantization:
    """Writes ``output``, ``model`` with other block types, completely or not at all.

    ``progress`` is called with the bytes written so far and their total. The bytes do not depend on the
    number of threads. ``QuantizeError``: the options do not fit the file, and errors of
    :func:`~hotcold.quantize.rewriting.rewrite`; ``GGUFError``: a file cannot be read or written."""
    start = time.perf_counter()
    with open_gguf(model) as source:
        with naming(model, QuantizeError):
            choices, notes = plan_types(source, options)
        errors = _Errors()
        tensors = {
            name: _planned(source, name, choices.get(name), options, errors)
            for name in sorted(source.tensors, key=in_file_order)
        }
        plan = Plan(_metadata(source, options), tensors, source.magic)
        rewrite(source, output, plan, progress, force=options.force, threads=options.threads)
        shares = _shares(source.tensors, {name: each.type for name, each in tensors.items()}, errors)
    return Quantization(output, _name(options.type), shares, notes, time.perf_counter() - start)


def plan_types(source: GGUFFile, options: QuantizeOptions) -> tuple[dict[str, Choice], list[str]]:
    """The new type of each tensor that changes, and notes for the user. ``QuantizeError``, without the path:
    the type does not exist, an option fits no tensor, or a tensor cannot or may not be converted."""
    name, wishes = _name(options.type), options.wishes
    if name == COPY:
        return {}, []
    facts = Facts.from_metadata(source.metadata, importance=options.importance is not None)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    if name in NEED_IMPORTANCE and options.importance is None:
        needed = "`imatrix`, an importance matrix, such as hotcold imatrix makes"
        raise QuantizeError(f"type {name} has so few bits that it needs {needed}")
    choices = choose_types(shapes, MIXTURES[name], facts, wishes)
    _check_wishes(choices, wishes)
    choices = {key: each for key, each in choices.items() if each.type != source.tensors[key].type}
    for key, choice in choices.items():
        _check_source(source.tensors[key], options)
        _check_factor(source, key, choice)
    notes = _notes(source, choices, MIXTURES[name])
    if options.importance is not None:
        notes += _unknown(source, choices, options.importance)
    return choices, notes


def _name(type: str) -> str:
    name = ALIASES.get(type.upper(), type.upper())
    if name not in TYPES:
        raise QuantizeError(f"type {shown(type)} is not one of {', '.join(TYPES)}")
    return name


def _check_wishes(choices: Mapping[str, Choice], wishes: Wishes) -> None:
    for pattern, type in wishes.patterns:
        if not any(pattern.search(name) for name in choices):
            got = f"`tensor_type` {printable(pattern.pattern, 60)}={type}"
            raise QuantizeError(f"{got} matches none of the {len(choices)} tensors that can be quantised")
    if wishes.predictor and not any(PREDICTOR.fullmatch(name) for name in choices):
        raise QuantizeError("`predictor_type`: the file has no predictors, blk.N.fc1.weight and fc2.weight")


def _check_factor(source: GGUFFile, name: str, choice: Choice) -> None:
    """Refuses a type without row factors for a matrix that has a factor, as in files of NVFP4."""
    factor = f"{name.removesuffix('.weight')}.scale"
    if factor in source.tensors and not source.tensors[name].type.panels and choice.type.panels:
        got = f"tensor {factor} multiplies {name}, which would become {choice.type.name}"
        raise QuantizeError(f"{got}, and that has no factors: start from an F16, BF16 or F32 file")


def _check_source(info: TensorInfo, options: QuantizeOptions) -> None:
    if info.type.decode is None:
        got = f"tensor {info.name} is {info.type.name}"
        raise QuantizeError(f"{got}, which cannot be decoded: start from an F16, BF16 or F32 file")
    if info.type.weights > 1 and not options.allow_requantize:
        better = "start from an F16, BF16 or F32 file, or allow it with `allow_requantize`"
        raise QuantizeError(
            f"tensor {info.name} is {info.type.name} already, and would lose accuracy twice: {better}"
        )


def _notes(source: GGUFFile, choices: Mapping[str, Choice], mixture: Mixture) -> list[str]:
    """Notes on tensors that did not get their chosen type, and on types that PowerInfer cannot compute."""
    notes = []
    narrow: dict[tuple[BlockType, BlockType, int], list[str]] = {}
    for name, choice in choices.items():
        if choice.type != choice.wanted:
            key = (choice.type, choice.wanted, source.tensors[name].shape[-1])
            narrow.setdefault(key, []).append(name)
    for (type, wanted, row), names in narrow.items():
        others = f" and {len(names) - 1} others are" if len(names) > 1 else " is"
        rows = f"rows of {row} weights, where {wanted.name} needs a multiple of {wanted.weights}"
        notes.append(f"{names[0]}{others} {type.name}: {rows}")
    if source.magic == "PWRI" and mixture.base not in ("F16", "Q4_0"):
        notes.append("PowerInfer's own programs compute only F16 and Q4_0; Hotcold computes this file")
    return notes


def _planned(
    source: GGUFFile, name: str, choice: Choice | None, options: QuantizeOptions, errors: "_Errors"
) -> Any:
    if choice is None:
        return copied(source, name)
    type, shape = choice.type, source.tensors[name].shape
    importance = None
    if options.importance is not None and type.weights > 1:
        importance = importance_of(source, name, options.importance)

    def code(values: Floats, first: int) -> Bytes:
        data = np.empty((len(values), type.row_bytes(values.shape[1])), np.uint8)
        for start, stop, weights in _by_expert(first, len(values), shape, importance):
            data[start:stop] = quantise_rows(values[start:stop], type, weights, threads=1)
        if options.measure:
            errors.add(type, values, data)
        return data

    return changed(source, name, type, code)


def importance_of(source: GGUFFile, name: str, matrix: ImportanceMatrix) -> Floats | None:
    """The weight of each column of a tensor, float32 ``[experts, n]``; None if the matrix lacks the tensor.
    ``ImatrixError``: it has a tensor of another shape.

    A down matrix by neuron has a row for each neuron. The importance of a neuron is one number for its whole
    row, so the columns of a row count equally, also with an importance matrix."""
    shape = source.tensors[name].shape
    by_neuron = source.says("hotcold.ffn.down_layout", "by_neuron") or "ffn_down_t" in name
    if not by_neuron or (kind_of(name) != "ffn_down" and "channel_mix_value" not in name):
        known = matrix.get(name)
        return known.mean_squares(shape, name) if known else None
    known = matrix.get(name.replace("ffn_down_t", "ffn_down"))
    if known:
        known.mean_squares((*shape[:-2], shape[-1], shape[-2]), name)  # refuses a matrix of another model
    return np.ones((math.prod(shape[:-2]), shape[-1]), np.float32)


def _unknown(source: GGUFFile, choices: Mapping[str, Choice], matrix: ImportanceMatrix) -> list[str]:
    """A note on tensors that the matrix lacks, except the embeddings, whose columns are not inputs.
    ``QuantizeError``: the matrix lacks all tensors."""
    packed = [name for name, choice in choices.items() if choice.type.weights > 1]
    if packed and matrix.keys().isdisjoint(packed):
        got = f"the importance matrix has {len(matrix)} tensors, and none is quantised here"
        raise QuantizeError(f"{got}: it belongs to another model")
    unknown = [name for name in packed if importance_of(source, name, matrix) is None]
    missing = [name for name in unknown if kind_of(name) != "token_embd"]
    if not missing:
        return []
    others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
    return [f"the importance matrix lacks {missing[0]}{others}: their columns count equally"]


def _by_expert(
    first: int, rows: int, shape: tuple[int, ...], importance: Floats | None
) -> Iterator[tuple[int, int, Floats | None]]:
    """Runs of rows of one expert, and the weights of its columns; rows are counted from ``first``."""
    if importance is None:
        yield 0, rows, None
        return
    expert_rows, at = shape[-2], 0
    while at < rows:
        expert = (first + at) // expert_rows
        stop = min(rows, (expert + 1) * expert_rows - first)
        yield at, stop, importance[expert]
        at = stop


def _metadata(source: GGUFFile, options: QuantizeOptions) -> dict[str, Any]:
    """The metadata in llama.cpp's order: new keys come last."""
    metadata = kept_metadata(source)
    name = _name(options.type)
    new: dict[str, Any] = {}
    if name != COPY:
        new["general.quantization_version"] = np.uint32(QUANTIZATION_VERSION)
        new["general.file_type"] = np.uint32(MIXTURES[name].file_type)
    if options.importance is not None:
        new["quantize.imatrix.file"] = options.importance_file
        if options.importance.datasets:
            new["quantize.imatrix.dataset"] = options.importance.datasets[0]
        new["quantize.imatrix.entries_count"] = np.uint32(len(options.importance))
        if options.importance.chunks:
            new["quantize.imatrix.chunks_count"] = np.uint32(options.importance.chunks)
    return {key: value for key, value in metadata.items() if key not in new} | new


Sums: TypeAlias = tuple[float, float]


class _Errors:
    """Sums of squared errors and of squared weights for each type; threads add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Sums] = {}

    def add(self, type: BlockType, values: Floats, data: Bytes) -> None:
        error = Tensor(type, values.shape, data).dequantise()
        error -= values
        squares = [float(np.vdot(each, each)) for each in (error, values)]
        with self._lock:
            sums = self._sums.get(type.name, (0.0, 0.0))
            self._sums[type.name] = (sums[0] + squares[0], sums[1] + squares[1])

    def of(self, type: str) -> float | None:
        wrong, whole = self._sums.get(type, (0.0, 0.0))
        return float(np.sqrt(wrong / whole)) if whole else None


def _shares(old: Mapping[str, TensorInfo], new: Mapping[str, BlockType], errors: _Errors) -> list[Share]:
    names: dict[BlockType, list[str]] = {}
    for name, type in new.items():
        names.setdefault(type, []).append(name)
    shares = []
    for type, members in names.items():
        weights = sum(int(np.prod(old[name].shape, dtype=np.int64)) for name in members)
        before = sum(old[name].nbytes for name in members)
        after = weights // type.weights * type.nbytes
        shares.append(Share(type.name, len(members), weights, before, after, errors.of(type.name)))
    return sorted(shares, key=lambda share: -share.after)
