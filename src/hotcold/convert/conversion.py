"""Converts a checkpoint folder to one GGUF file; memory holds one tensor at a time."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, open_checkpoint
from hotcold.convert.drafting import block_keys, count_blocks
from hotcold.convert.finding import activation, find_layout
from hotcold.convert.known_keys import assumed_sizes, unread_keys
from hotcold.convert.layouts import Layout
from hotcold.convert.metadata import dimensions, model_metadata, rope_notes
from hotcold.convert.pooling import pooling_metadata
from hotcold.convert.predictors import predictor_metadata, predictor_sources
from hotcold.convert.settings import ConvertError
from hotcold.convert.source import Source
from hotcold.convert.tensor_files import Array
from hotcold.convert.tensors import sources
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.formats.blocks import BlockType, BlockTypeError, Bytes, Tensor, block_type, quantise
from hotcold.formats.files import check_output, naming
from hotcold.formats.gguf import TensorInfo, write_gguf
from hotcold.formats.words import DOWN_LAYOUTS
from hotcold.formats.written import NewTensor
from hotcold.model.config import Config, ModelError
from hotcold.values import shown

#: Values of ``--type``, with llama.cpp's number for a file that has mostly this type.
FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "MXFP4": 38,
}  # fmt: skip

#: Activations that make most neurons exactly zero, so that storing down by neuron pays.
_SPARSE = ("relu", "drelu", "relu2")
_UNPACKED = re.compile(
    r"\.bias$|_norm\.weight$|\.ffn_gate_inp(_shexp)?\.|^position_embd\."
    r"|\.ssm_(conv1d|norm|a$|d$)|\.shortconv\.conv\.|\.time_mix_(lerp_fused|w[12])\."
)
#: Small matrices that need at least 16 bits a weight.
_HALF = re.compile(r"\.time_mix_[avg][12]\.")
_CHUNK = 1 << 22  # weights that are held in float32 at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ConvertOptions:
    type: str = "F16"  #: block type of matrices, one of :data:`FILE_TYPES`; vectors stay F32
    down: str | None = None  #: one of :data:`DOWN_LAYOUTS`; None: by neuron for activations with zeros
    dense: bool = False  #: a file for llama.cpp: down by output, no predictors
    predictors: Path | None = None  #: folder of predictors as PowerInfer publishes them
    name: str | None = None  #: ``general.name``; None is the folder's
    license: str | None = None  #: ``general.license``, an SPDX identifier
    no_draft: bool = False  #: leave out draft blocks
    force: bool = False  #: replace an existing file


@dataclass(frozen=True)
class Conversion:
    output: Path
    nbytes: int
    architecture: str
    activation: str
    down_layout: str
    types: dict[str, int]  #: number of tensors of each block type
    notes: list[str]  #: for the user


@dataclass(frozen=True)
class Plan:
    metadata: dict[str, Any]
    sources: dict[str, Source]
    types: dict[str, BlockType]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(type.data_shape(self.sources[name].shape)) for name, type in self.types.items())


def convert(
    folder: Path, output: Path, options: ConvertOptions | None = None, progress: Progress | None = None
) -> Conversion:
    """Converts a Hugging Face checkpoint. ``output`` appears complete or not at all; same input, same bytes.

    ``progress`` is called with the bytes written so far and their total. ConvertError: the checkpoint is not
    complete or not supported, or the options do not fit; GGUFError: the file cannot be written."""
    options = options or ConvertOptions()
    plan = plan_conversion(folder, options)
    _check_output(output, plan, options.force)
    write_gguf(output, plan.metadata, _new_tensors(plan, progress or (lambda done, total: None)))
    return Conversion(
        output=output,
        nbytes=output.stat().st_size,
        architecture=plan.metadata["general.architecture"],
        activation=plan.metadata["hotcold.ffn.activation"],
        down_layout=plan.metadata["hotcold.ffn.down_layout"],
        types=dict(Counter(type.name for type in plan.types.values())),
        notes=plan.notes,
    )


def plan_conversion(folder: Path, options: ConvertOptions) -> Plan:
    """Reads all headers, checks everything but the weights, and decides every tensor's type."""
    if options.type not in FILE_TYPES:
        others = "hotcold quantize makes others, such as the K types, from an F16 file"
        raise ConvertError(f"type {shown(options.type)} is not one of {', '.join(FILE_TYPES)}: {others}")
    if options.down not in (None, *DOWN_LAYOUTS):
        raise ConvertError(f"down layout {options.down!r} is not one of {', '.join(DOWN_LAYOUTS)}")
    checkpoint = open_checkpoint(folder)
    original = checkpoint.config
    layout, config = find_layout(original)
    checkpoint = replace(checkpoint, config=config)
    kind, threshold = activation(config, layout)
    notes = _check_dense(options, layout, kind) if options.dense else []
    if layout.left_out:
        notes += _left_out(checkpoint, layout.left_out)
    if layout.whole_ffn and options.down == "by_neuron":
        raise ConvertError(
            f"`down=by_neuron`: the FFN of {layout.architecture} needs all neurons: use by_output"
        )
    by_neuron = kind in _SPARSE and not (options.dense or layout.whole_ffn)
    down_layout = options.down or ("by_neuron" if by_neuron else "by_output")
    facts = model_metadata(config, layout)
    notes += [*checkpoint.notes, *rope_notes(config)]
    # Check the embedding before the vocabulary: the claimed size decides how long lists become.
    try:
        listed = sources(checkpoint, layout, down_layout, draft=not options.no_draft, notes=notes)
    except ConvertError as error:
        raise ConvertError(f"{error}{assumed_sizes(original)}") from None
    tensors = {source.name: source for source in listed}
    facts = block_keys(facts, layout.architecture, blocks := count_blocks([*tensors]))
    if blocks:
        notes.append("the model has a draft block (multi-token prediction): `no_draft` leaves it out")
    general = {
        "general.architecture": layout.architecture,
        "general.type": "model",
        "general.name": options.name or folder.resolve().name,
    }
    metadata: dict[str, Any] = {
        **general,
        "general.license": options.license or None,
        **facts,
        **pooling_metadata(checkpoint, layout.architecture, notes),
        "general.file_type": FILE_TYPES[options.type],
        "general.quantization_version": 2 if block_type(options.type).weights > 1 else None,
        "hotcold.ffn.activation": kind,
        "hotcold.ffn.threshold": np.asarray(threshold, np.float32)[()] if np.any(threshold) else None,
        "hotcold.ffn.down_layout": down_layout,
        **(predictor_metadata(options.predictors) if options.predictors else {}),
        **vocabulary_metadata(checkpoint, config.integer("vocab_size"), notes, general),
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if options.predictors:
        given = predictor_sources(options.predictors, checkpoint, dimensions(config))
        tensors |= {source.name: source for source in given}
    elif "blk.0.fc1.weight" in tensors:
        notes.append("the model has predictors: its publishers use them, as `sparsity=predicted` does")
    types, type_notes = _choose_types(tensors, block_type(options.type))
    _check_loads(folder, metadata, tensors, types)
    return Plan(metadata, tensors, types, notes + unread_keys(original) + type_notes)


def _check_loads(
    folder: Path, metadata: dict[str, Any], sources: Mapping[str, Source], types: Mapping[str, BlockType]
) -> None:
    """Raises ConvertError if loading would refuse the file."""
    infos = {name: TensorInfo(name, source.shape, types[name], 0, 0) for name, source in sources.items()}
    try:
        Config.from_metadata(metadata, "GGUF", infos)
    except ModelError as error:
        raise ConvertError(f"{folder}: {error}") from None


def _check_dense(options: ConvertOptions, layout: Layout, kind: str) -> list[str]:
    """Notes on results that differ in llama.cpp. ConvertError: llama.cpp cannot load such a file."""
    if layout.llama_cpp is None:
        raise ConvertError(f"`dense`: llama.cpp has no architecture {layout.architecture}: leave `dense` out")
    if options.down == "by_neuron" or options.predictors:
        given = "`down=by_neuron`" if options.down else "`predictors`"
        raise ConvertError(f"`dense` and {given}: llama.cpp loads no such file; give one of the two")
    if kind == layout.llama_cpp:
        return []
    return [f"llama.cpp computes {layout.llama_cpp} for {layout.architecture}; this model needs {kind}"]


def _left_out(checkpoint: Checkpoint, pattern: str) -> list[str]:
    names = [name for name in checkpoint.files if re.search(pattern, name)]
    if not names:
        return []
    return [f"predictors inside experts ({len(names)} tensors, such as {shown(names[0])}) are left out"]


def _choose_types(sources: Mapping[str, Source], wanted: BlockType) -> tuple[dict[str, BlockType], list[str]]:
    """The type of each tensor, and notes on tensors that do not get the wanted type."""
    types = {name: _type_of(source, wanted) for name, source in sources.items()}
    notes: list[str] = []
    head = "output.weight" if "output.weight" in sources else "token_embd.weight"
    if wanted.nbytes < wanted.weights and not sources[head].packed:
        # The head affects every token: less than a byte a weight costs more quality than it saves.
        types[head] = block_type("Q8_0")
        notes.append(f"{head} is Q8_0, since errors in the head change every token")
    narrow = [name for name, type in types.items() if sources[name].shape[-1] % type.weights]
    types |= dict.fromkeys(narrow, block_type("F16"))
    if narrow:
        others = f" and {len(narrow) - 1} others stay" if len(narrow) > 1 else " stays"
        rows = f"rows of {sources[narrow[0]].shape[-1]} weights"
        needed = f"where {wanted.name} needs a multiple of {wanted.weights}"
        notes.append(f"{narrow[0]}{others} F16: {rows}, {needed}")
    return types, notes


def _type_of(source: Source, wanted: BlockType) -> BlockType:
    """The type of a tensor. As in llama.cpp's files, vectors, biases, routers and position tables are F32."""
    if source.packed:
        return block_type(source.packed)
    if len(source.shape) < 2 or _UNPACKED.search(source.name):
        return block_type("F32")
    return block_type("F16") if wanted.weights > 1 and _HALF.search(source.name) else wanted


def _check_output(output: Path, plan: Plan, force: bool) -> None:
    with naming(output, ConvertError):
        check_output(output, plan.nbytes, force=force)


def _new_tensors(plan: Plan, progress: Progress) -> dict[str, NewTensor]:
    """The plan's tensors, each read and packed when :func:`write_gguf` comes to it."""
    done = 0

    def make(source: Source, type: BlockType) -> Iterator[Bytes]:
        nonlocal done
        progress(done, plan.nbytes)
        try:
            values = source.load()
            for part in values if isinstance(values, Iterator) else [values]:
                for tensor in [part] if isinstance(part, Tensor) else _pack(part, type):
                    if not tensor.is_finite():
                        raise BlockTypeError("it holds NaN or infinity: the checkpoint is damaged")
                    done += tensor.nbytes
                    progress(done, plan.nbytes)
                    yield tensor.data
        except BlockTypeError as error:
            raise ConvertError(f"tensor {shown(source.origin)} as {type.name}: {error}") from None

    return {
        name: NewTensor(plan.types[name], source.shape, partial(make, source, plan.types[name]))
        for name, source in plan.sources.items()
    }


def _pack(values: Array, type: BlockType) -> Iterator[Tensor]:
    """Quantises a few rows at a time, so that temporary copies stay small."""
    step = max(1, _CHUNK // math.prod(values.shape[1:])) if values.ndim > 1 else len(values)
    for start in range(0, len(values), step):
        chunk = values[start : start + step].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise BlockTypeError("it holds NaN or infinity: the checkpoint is damaged")
        yield quantise(chunk, type)
