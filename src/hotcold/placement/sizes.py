"""Bytes of a model by the parts that a placement moves as a whole, for a file or an entry of ``shapes.json``.

The entries have the dimensions of public configurations, and activity as published in arXiv 2312.12456
(tables 3 and 6, figure 5) and 2406.05955. The power law ``min(1, scale * rank ** -exponent)`` is fitted to
both ``active`` and ``skew``; ``source`` states assumptions."""

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, block_type
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import DECODE_ROWS, PAGE, SPARSE_ACTIVATIONS, BatchLimits
from hotcold.kernels.gpus import held_bytes, unsupported
from hotcold.model.config import Config
from hotcold.model.mixers.attention import AttentionShape
from hotcold.model.mixers.mixer import MixerShape
from hotcold.model.weights import is_drafting
from hotcold.placement.step_memory import GPU_LAYER_BYTES, GPUStep, buffer_bytes, scratch_bytes
from hotcold.sparse.predictor import check_predictors, predictor_names

Ints = npt.NDArray[np.int64]

CHUNK = 128  #: default prompt rows in the buffers of a step

#: Tensors of a layer's FFN. All others count as attention, including routers and shared experts.
_FFN_TENSOR = re.compile(
    r"ffn_(gate|up)(_exps)?\.|ffn_gate_up_exps\.|ffn_down(_t)?\.weight|ffn_down_exps\.(weight|bias)"
    r"|channel_mix_(key|value)\."
)
#: Tensors of an ordinary FFN, which in a layer with experts is computed with attention.
_ORDINARY = re.compile(r"ffn_(gate|up|down|down_t)\.")
#: Tensors that add a value to each layer for each token; one row per token is read.
_INPUT_TENSOR = re.compile(r"per_layer_")
_FIRST = re.compile(r"predictor\.first|fc1\.")
_PREDICTOR_TENSOR = re.compile(r"predictor\.|fc[12]\.")


@dataclass(frozen=True)
class Shape:
    """A public model without a file: its dimensions and its published activity."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int  #: neurons of one expert
    vocab: int
    gated: bool
    experts: int
    routed: int  #: experts of a token
    predictors: float  #: bytes of the predictors, as a part of all others
    active: float  #: mean share of active neurons in the routed experts
    skew: float  #: share of neurons with 80 % of all activations
    scale: float
    exponent: float
    source: str  #: source of the activity

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def neurons(self) -> tuple[int, ...]:
        return (self.ffn * self.experts,) * self.layers

    @property
    def mixers(self) -> tuple[AttentionShape, ...]:
        return (AttentionShape(self.heads, self.kv_heads, self.head_dim),) * self.layers

    @property
    def expert_share(self) -> float:
        """Share of the neurons in the experts of a token."""
        return self.routed / self.experts


SHAPES: dict[str, Shape] = {
    name: Shape(**facts)
    for name, facts in json.loads(Path(__file__).with_name("shapes.json").read_bytes()).items()
}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model. Arrays have one number per layer."""

    name: str
    fingerprint: str
    always_read: float  #: part of a neuron's bytes that is also read if the neuron is inactive
    expert_share: float  #: share of the neurons in the experts of a token
    dim: int
    attention: Ints  #: matrices, norms, and all else besides predictors and neurons
    kv: Ints  #: keys and values of the whole context
    predictor: Ints
    neuron_bytes: Ints  #: one neuron's rows of gate, up and down
    neurons: Ints  #: number of neurons N, of all experts together
    head: int  #: head with the norm before it
    embedding: int
    tied: bool  #: head and embedding are one tensor
    buffers: int  #: buffers of a step on the CPU
    #: buffers of a step on a GPU. Argument: the hot neurons of its hottest layer, None without layers
    gpu_step: Callable[[int | None], int]
    gpu_layer: int = 0  #: bytes of a layer on a GPU besides weights, keys and values
    block_neurons: int = 1  #: neurons placed together: in many files, blocks of down span several neurons
    experts: int = 1  #: experts of a layer; their neurons are contiguous
    #: layers without experts in a model of experts, each with the number of neurons placed together
    ordinary: Mapping[int, int] = field(default_factory=dict)
    #: layers that read another layer's keys and values, each with that layer: both are on one device
    shared: Mapping[int, int] = field(default_factory=dict)
    inputs: int = 0  #: tables and matrices that add values to each layer for each token, on the CPU
    states: Ints | None = None  #: states of sequences, with copies; None if no layer keeps states
    state: Ints | None = None  #: state of one sequence, which a token reads and writes
    down_share: float = 0.0  #: part of a neuron's bytes that is its down row
    #: share of bytes in float types, by part: attention, predictor, rows (gate and up), down, head
    floats: Mapping[str, float] = field(default_factory=dict)
    streams: bool = False  #: whether GPUs compute the cold neurons of prompts, from streamed weights
    neuron_rows: int = 3  #: rows of one neuron: up, down, and a gate if the FFN has gates

    def kind_of(self, layer: int) -> str:
        """Returns the kind of a layer's FFN on a GPU, one of ``LAYER_KINDS`` in hardware.py."""
        if self.experts_of(layer) > 1:
            return "experts"
        return {0.0: "predicted", 1.0: "dense"}.get(self.always_read, "exact")

    def experts_of(self, layer: int) -> int:
        """Returns the experts of a layer; 1 if it has none."""
        return 1 if layer in self.ordinary else self.experts

    def share_of(self, layer: int) -> float:
        """Returns the share of a layer's neurons in the experts of a token."""
        return 1.0 if layer in self.ordinary else self.expert_share

    def block_of(self, layer: int) -> int:
        """Returns how many neurons of a layer are placed together."""
        return self.ordinary.get(layer, self.block_neurons)

    def streamed_bytes(self, layer: int, cold: int) -> int:
        """Returns the bytes that prompts stream to a GPU for a layer with ``cold`` cold neurons."""
        return cold * int(self.neuron_bytes[layer]) + self.gpu_layer if self.streams and cold else 0

    @property
    def staging_bytes(self) -> int:
        """Limit for the streamed bytes of one layer, which are on a GPU at the same time."""
        layers = enumerate(self.neurons.tolist())
        return max((self.streamed_bytes(i, neurons) for i, neurons in layers), default=0)

    @property
    def dense(self) -> Ints:
        """Bytes that a layer reads for each token, all on one device."""
        whole = self.attention + self.kv + self.predictor
        return whole if self.state is None else whole + 2 * self.state

    @property
    def gpu_dense(self) -> Ints:
        """Bytes of a layer on a GPU without hot neurons."""
        whole = self.attention + self.kv + self.predictor + self.gpu_layer
        return whole if self.states is None else whole + self.states


def sizes_of_shape(name: str, type: BlockType, context: int, cache: str) -> Sizes:
    """Returns the sizes of one of :data:`SHAPES`, with all matrices of one type; ``cache``: see
    ``CACHE_TYPES``."""
    shape = SHAPES[name]
    row = type.row_bytes(shape.dim)
    table = shape.vocab * row  # the embedding; the head has the same size
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * row
    ffn = (2 + shape.gated) * shape.neurons[0] * row
    predictor = int(shape.predictors * (attention + ffn + 2 * table / shape.layers))
    return Sizes(
        name=f"{name} {type.name}",
        fingerprint=f"{name} {type.name}",
        always_read=0.0,
        expert_share=shape.expert_share,
        dim=shape.dim,
        attention=np.full(shape.layers, attention),
        kv=_kv_bytes(shape.mixers, context, cache),
        predictor=np.full(shape.layers, predictor),
        neuron_bytes=np.full(shape.layers, ffn // shape.neurons[0]),
        neurons=np.array(shape.neurons, np.int64),
        head=table,
        embedding=table,
        tied=False,
        buffers=_published_buffer_bytes(shape),
        gpu_step=lambda hot: _published_buffer_bytes(shape),
        experts=shape.experts,
        down_share=1 / (2 + shape.gated),
        neuron_rows=2 + shape.gated,
        floats=dict.fromkeys(("attention", "predictor", "rows", "down", "head"), float(type.weights == 1)),
    )


def sizes_of_file(
    file: GGUFFile,
    config: Config,
    limits: BatchLimits,
    cache: str,
    *,
    predictors: Path | None = None,
    pages: int | None = None,
    slots: int = 0,
    sessions: int = 1,
    gpu: bool = True,
) -> Sizes:
    """Returns the sizes of a model as it will run, with the predictors of a file (the model's own or a
    sidecar), or without any.

    ``pages``: pages of each session's KV cache; None: enough for all sequences of ``limits``. ``slots``:
    state slots of each session. Without ``gpu``, another backend takes the GPU's role, and its steps need as
    much memory as on the CPU. The tensors must be checked before. PredictorError: an invalid sidecar."""
    pages = limits.sequences * limits.pages_per_sequence if pages is None else pages
    kv = _kv_bytes(config.mixers, pages * PAGE, cache)
    state = np.array([mixer.slot_bytes for mixer in config.mixers], np.int64) if config.slot_bytes else None
    powerinfer = predictor_names(file)
    fingerprint = file.fingerprint()
    tensors = {
        name: held_bytes(info.type, info.nbytes) if gpu else info.nbytes
        for name, info in file.tensors.items()
        if name not in powerinfer and not is_drafting(name, config)
    }
    floats = {name for name, info in file.tensors.items() if info.type.weights == 1}
    always_read, rank = 1.0, 0
    if config.whole is None:
        always_read = 1 / (2 + config.gated)  # gates, or ups of models without gates
        if predictors is not None:
            with open_gguf(predictors) as sidecar:
                check_predictors(sidecar, config, fingerprint)
                tensors |= {name: info.nbytes for name, info in sidecar.tensors.items()}
                floats |= {name for name, info in sidecar.tensors.items() if info.type.weights == 1}
                rank = max(info.shape[0] for name, info in sidecar.tensors.items() if _FIRST.search(name))
            always_read = 0.0
    dense = bool(config.normed) or (config.experts is not None and config.experts.beside)
    layers = _LayerBytes.from_tensors(tensors, floats, config.layers, beside=dense)
    made = [
        nbytes + mixer.made_bytes(f"blk.{i}.", file.tensors)
        for i, (nbytes, mixer) in enumerate(zip(config.made_bytes, config.mixers, strict=True))
    ]
    inputs = sum(nbytes for name, nbytes in tensors.items() if _INPUT_TENSOR.match(name))
    embedding, tied = tensors["token_embd.weight"], "output.weight" not in tensors
    neurons = np.array(config.neurons, np.int64)
    buffers = buffer_bytes(config, limits, split=True) + scratch_bytes(config, limits)
    gpu_step = GPUStep(config, limits, _ffn_types(file, beside=dense), rank)
    return Sizes(
        name=file.path.stem,
        fingerprint=fingerprint,
        always_read=always_read,
        expert_share=_expert_share(config),
        dim=config.dim,
        attention=layers.attention + np.array(made, np.int64),
        kv=sessions * kv,
        predictor=layers.predictor,
        neuron_bytes=-(-layers.ffn // np.maximum(neurons, 1)),
        neurons=neurons,
        head=layers.outside - inputs - (0 if tied else embedding),
        embedding=embedding,
        inputs=inputs,
        tied=tied,
        buffers=buffers,
        gpu_step=lambda hot: sessions * (gpu_step.nbytes(hot) if gpu else buffers),
        gpu_layer=GPU_LAYER_BYTES if gpu else 0,
        block_neurons=_block_neurons(file, config),
        experts=1 if config.experts is None else config.experts.count,
        ordinary=_ordinary(file, config),
        shared={i: each.pages_of for i, each in enumerate(config.mixers) if each.pages_of is not None},
        states=None if state is None else sessions * slots * state,
        state=state,
        down_share=layers.down_share,
        floats=layers.floats,
        neuron_rows=2 + config.gated,
    )


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes of a file's tensors by layer and use."""

    attention: Ints
    predictor: Ints
    ffn: Ints
    outside: int  #: bytes outside layers
    down_share: float  #: as in :class:`Sizes`, like ``floats``
    floats: Mapping[str, float]

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, int], floats: Container[str], layers: int, *, beside: bool = False
    ) -> "_LayerBytes":
        """Adds up ``tensors``, bytes by name. ``floats``: names of the tensors of float types. ``beside``: an
        ordinary FFN counts as attention."""
        parts = {part: np.zeros(layers, np.int64) for part in ("attention", "predictor", "rows", "down")}
        outside, of_floats = 0, Counter[str]()
        for name, nbytes in tensors.items():
            match = re.match(r"blk\.(\d+)\.", name)
            if match is None:
                outside += nbytes
                continue
            part = _part_of(name[match.end() :], beside=beside)
            parts[part][int(match[1])] += nbytes
            of_floats[part] += nbytes * (name in floats)
        total = {part: int(nbytes.sum()) for part, nbytes in parts.items()}
        shares = {part: of_floats[part] / max(1, nbytes) for part, nbytes in total.items()}
        head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
        ffn = parts["rows"] + parts["down"]
        down_share = total["down"] / max(1, total["rows"] + total["down"])
        shares["head"] = float(head in floats)
        return cls(parts["attention"], parts["predictor"], ffn, outside, down_share, shares)


def _part_of(name: str, *, beside: bool) -> str:
    """Returns the part of a layer that has a tensor: attention, predictor, rows (gate and up) or down."""
    if _FFN_TENSOR.match(name) and not (beside and _ORDINARY.match(name)):
        return "down" if name.startswith(("ffn_down", "channel_mix_value")) else "rows"
    return "predictor" if _PREDICTOR_TENSOR.match(name) else "attention"


def _ffn_types(file: GGUFFile, *, beside: bool) -> tuple[BlockType, BlockType, BlockType]:
    """Returns the block types of gate, up and down in the first layer that has them. ``beside``: ignores an
    ordinary FFN that is computed with attention."""
    types: dict[str, BlockType] = {}
    for name, info in file.tensors.items():
        if beside and _ORDINARY.search(name):
            continue
        if match := re.match(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_t|_exps)?\.weight", name):
            types.setdefault(match[1], block_type(info.type))
        elif match := re.match(r"blk\.\d+\.channel_mix_(key|value)\.weight", name):  # RWKV
            types.setdefault({"key": "up", "value": "down"}[match[1]], block_type(info.type))
    up = types.get("up", types.get("gate_up", block_type("F32")))  # any type does without an FFN
    return types.get("gate", up), up, types.get("down", up)


def _expert_share(config: Config) -> float:
    """Returns the share of experts that a token chooses, as the mean over layers with experts."""
    experts = [layer for i in range(config.layers) if (layer := config.experts_of(i))]
    return sum(layer.chosen / layer.count for layer in experts) / len(experts) if experts else 1.0


def _block_neurons(file: GGUFFile, config: Config) -> int:
    if config.down_layout != "by_output":
        return 1
    if config.experts is not None and config.activation not in SPARSE_ACTIVATIONS:
        return config.experts.neurons  # an expert is on one device as a whole
    return _block_of_downs(file, ".ffn_down.weight" if config.experts is None else ".ffn_down_exps.weight")


def _block_of_downs(file: GGUFFile, kind: str = ".ffn_down.weight") -> int:
    """Returns the largest number of neurons that a block of down spans."""
    downs = [info for name, info in file.tensors.items() if name.endswith(kind)]
    return max((block_type(info.type).weights for info in downs), default=1)


def _ordinary(file: GGUFFile, config: Config) -> dict[int, int]:
    if config.experts is None:
        return {}
    block = 1 if config.down_layout != "by_output" else _block_of_downs(file)
    return {i: block for i in range(config.layers) if config.experts_of(i) is None}


def placed_by(config: Config) -> str:
    """Names the units in which a placement on two devices divides a model, and why not smaller ones."""
    if reason := unsupported(config.state_ops):
        return f"nothing: {reason}"
    if config.whole is None:
        return "neurons" if config.experts is None else "neurons inside experts"
    cut = any(config.skips) and not config.normed
    but = f", except in {sum(config.skips)} layers with cut gates" if cut else ""
    why = config.whole if config.normed else f"{config.activation} gives no zeros"
    return f"{'layers' if config.experts is None else 'experts'}: {why}{but}"


def _kv_bytes(mixers: Sequence[MixerShape], positions: int, cache: str) -> Ints:
    """Returns the bytes of whole pages, by layer. ModelError: the type's blocks do not fit the model's
    heads."""
    return -(-positions // PAGE) * np.array([mixer.page_bytes(cache) for mixer in mixers], np.int64)


def _published_buffer_bytes(shape: Shape) -> int:
    """Returns the bytes of activations and logits alone, as the plans in docs/results.md count them."""
    floats = 4 * shape.dim + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return 4 * ((DECODE_ROWS + CHUNK) * floats + DECODE_ROWS * shape.vocab)


def power_law(neurons: int, scale: float, exponent: float) -> npt.NDArray[np.float64]:
    """Returns the shares of tokens ``[neurons]`` for which neurons are active, the most active first."""
    ranks = (np.arange(neurons) + 0.5) / neurons
    return np.asarray(np.minimum(1, scale * ranks**-exponent))
