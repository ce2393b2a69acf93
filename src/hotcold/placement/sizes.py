"""Counts the bytes of a model by the parts that are placed as one, for a file or an entry of ``shapes.json``.

These have the dimensions of public configurations, and activity as arXiv 2312.12456 (tables 3 and 6,
figure 5) and 2406.05955 publish it. The power law ``min(1, scale * rank ** -exponent)`` is fitted to both
``active`` and ``skew``; ``source`` says what is assumed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
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

CHUNK = 128  #: prompt rows that the buffers of a step hold, if nobody says otherwise

#: Tensors of a layer's FFN; all others, routers and shared experts among them, are attention.
_FFN_TENSOR = re.compile(
    r"ffn_(gate|up)(_exps)?\.|ffn_gate_up_exps\.|ffn_down(_t)?\.weight|ffn_down_exps\.(weight|bias)"
    r"|channel_mix_(key|value)\."
)
#: Those of an ordinary FFN, which beside experts is computed where attention is.
_ORDINARY = re.compile(r"ffn_(gate|up|down|down_t)\.")
#: What gives each layer values of each token: one row a token is read.
_INPUT_TENSOR = re.compile(r"per_layer_")
_FIRST = re.compile(r"predictor\.first|fc1\.")
_PREDICTOR_TENSOR = re.compile(r"predictor\.|fc[12]\.")


@dataclass(frozen=True)
class Shape:
    """A public model without a file: its dimensions, and what is published of its activity."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int  #: neurons of one expert
    vocab: int
    gated: bool
    experts: int
    routed: int  #: experts that a token gets
    predictors: float  #: their bytes, as a part of all others
    active: float  #: mean share of the routed experts' neurons that fire
    skew: float  #: share of neurons with 80 % of all firings
    scale: float
    exponent: float
    source: str  #: of the activity

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
        """Part of the neurons that the router leaves for a token."""
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
    always_read: float  #: part of a neuron that is read whether it fires or not
    expert_share: float  #: part of the neurons that a router leaves
    dim: int
    attention: Ints  #: matrices, norms, and all else that is neither predictor nor neuron
    kv: Ints  #: keys and values of the whole context
    predictor: Ints
    neuron_bytes: Ints  #: of one neuron's rows of gate, up and down
    neurons: Ints  #: how many, N, of all experts together
    head: int  #: with the norm before it
    embedding: int
    tied: bool  #: head and embedding are one tensor
    buffers: int  #: of a step, on the CPU
    #: of a step, on a GPU: by the most hot neurons of one of its layers, None without any, and whether it
    #: has the head
    gpu_step: Callable[[int | None, bool], int]
    gpu_layer: int = 0  #: what a layer takes on a GPU beyond its weights, keys and values
    block_neurons: int = 1  #: that cannot be placed apart: in many files blocks of down lie along neurons
    experts: int = 1  #: of a layer, whose neurons lie one expert after another
    #: layers of a model of experts that have none, and how many of their neurons cannot be placed apart
    ordinary: Mapping[int, int] = field(default_factory=dict)
    #: layers that read keys and values of another layer, and which: both lie on one side
    shared: Mapping[int, int] = field(default_factory=dict)
    inputs: int = 0  #: tables and matrices that give layers values of each token, on the CPU
    states: Ints | None = None  #: states of sequences and copies of them; None where no layer keeps any
    state: Ints | None = None  #: of one sequence, which a token reads and writes

    def experts_of(self, layer: int) -> int:
        """The experts of a layer; 1 where it has none."""
        return 1 if layer in self.ordinary else self.experts

    def share_of(self, layer: int) -> float:
        """The part of a layer's neurons that a router leaves."""
        return 1.0 if layer in self.ordinary else self.expert_share

    def block_of(self, layer: int) -> int:
        """How many neurons of a layer cannot be placed apart."""
        return self.ordinary.get(layer, self.block_neurons)

    @property
    def dense(self) -> Ints:
        """Bytes that a layer reads for each token, all of it on one side."""
        whole = self.attention + self.kv + self.predictor
        return whole if self.state is None else whole + 2 * self.state

    @property
    def gpu_dense(self) -> Ints:
        """Bytes that a layer takes of a GPU without any hot neuron."""
        whole = self.attention + self.kv + self.predictor + self.gpu_layer
        return whole if self.states is None else whole + self.states


def sizes_of_shape(name: str, type: BlockType, context: int, cache: str) -> Sizes:
    """Sizes of one of :data:`SHAPES`, all matrices of one type; ``cache`` is one of ``CACHE_TYPES``."""
    shape = SHAPES[name]
    row = type.row_bytes(shape.dim)
    table = shape.vocab * row  # the embedding, and as much for the head
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
        gpu_step=lambda hot, head: _published_buffer_bytes(shape),
        experts=shape.experts,
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
    """Sizes of a model as it will run: with the predictors in a file, the model's own or a sidecar, or
    without any. ``pages`` are those of the KV cache, None as many as the sequences of ``limits`` have
    together; each of so many sessions has one, and ``slots`` for states. Without ``gpu`` another backend
    plays its part, whose steps take what they take on the CPU. The tensors were checked. PredictorError: a
    sidecar is not right."""
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
    always_read, rank = 1.0, 0
    if config.whole is None:
        always_read = 1 / (2 + config.gated)  # gates, or ups where there are none
        if predictors is not None:
            with open_gguf(predictors) as beside:
                check_predictors(beside, config, fingerprint)
                tensors |= {name: info.nbytes for name, info in beside.tensors.items()}
                rank = max(info.shape[0] for name, info in beside.tensors.items() if _FIRST.search(name))
            always_read = 0.0
    dense = bool(config.normed) or (config.experts is not None and config.experts.beside)
    layers = _LayerBytes.of(tensors, config.layers, beside=dense)
    made = [
        own + mixer.made_bytes(f"blk.{i}.", file.tensors)
        for i, (own, mixer) in enumerate(zip(config.made_bytes, config.mixers, strict=True))
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
        gpu_step=lambda hot, head: sessions * (gpu_step.nbytes(hot, head) if gpu else buffers),
        gpu_layer=GPU_LAYER_BYTES if gpu else 0,
        block_neurons=_block_neurons(file, config),
        experts=1 if config.experts is None else config.experts.count,
        ordinary=_ordinary(file, config),
        shared={i: each.pages_of for i, each in enumerate(config.mixers) if each.pages_of is not None},
        states=None if state is None else sessions * slots * state,
        state=state,
    )


@dataclass(frozen=True)
class _LayerBytes:
    """A file's tensors, added up by layer and use."""

    attention: Ints
    predictor: Ints
    ffn: Ints
    outside: int  #: of no layer

    @classmethod
    def of(cls, tensors: dict[str, int], layers: int, *, beside: bool = False) -> "_LayerBytes":
        """``tensors`` are bytes by name; ``beside``: an ordinary FFN lies beside experts, or it is computed
        as a mixer is."""
        attention, predictor, ffn = np.zeros((3, layers), np.int64)
        outside = 0
        for name, nbytes in tensors.items():
            found = re.match(r"blk\.(\d+)\.", name)
            if found is None:
                outside += nbytes
                continue
            layer, part = int(found[1]), name[found.end() :]
            if _FFN_TENSOR.match(part) and not (beside and _ORDINARY.match(part)):
                ffn[layer] += nbytes
            elif _PREDICTOR_TENSOR.match(part):
                predictor[layer] += nbytes
            else:
                attention[layer] += nbytes
        return cls(attention, predictor, ffn, outside)


def _ffn_types(file: GGUFFile, *, beside: bool) -> tuple[BlockType, BlockType, BlockType]:
    """Block types of gate, up and down in the first layer that has them; those of experts where an ordinary
    FFN lies ``beside`` them, or is computed as a mixer is."""
    found: dict[str, BlockType] = {}
    for name, info in file.tensors.items():
        if beside and _ORDINARY.search(name):
            continue
        if match := re.match(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_t|_exps)?\.weight", name):
            found.setdefault(match[1], block_type(info.type))
        elif match := re.match(r"blk\.\d+\.channel_mix_(key|value)\.weight", name):  # RWKV
            found.setdefault({"key": "up", "value": "down"}[match[1]], block_type(info.type))
    up = found.get("up", found.get("gate_up", block_type("F32")))  # without any FFN it does not matter
    return found.get("gate", up), up, found.get("down", up)


def _expert_share(config: Config) -> float:
    """The share of its experts that a token gets, in the mean of layers that have any."""
    experts = [each for i in range(config.layers) if (each := config.experts_of(i))]
    return sum(each.chosen / each.count for each in experts) / len(experts) if experts else 1.0


def _block_neurons(file: GGUFFile, config: Config) -> int:
    if config.down_layout != "by_output":
        return 1
    if config.experts is not None and config.activation not in SPARSE_ACTIVATIONS:
        return config.experts.neurons  # an expert is on one side, whole
    return _block_of_downs(file, ".ffn_down.weight" if config.experts is None else ".ffn_down_exps.weight")


def _block_of_downs(file: GGUFFile, kind: str = ".ffn_down.weight") -> int:
    """The most weights of a block of down that lie along neurons."""
    downs = [info for name, info in file.tensors.items() if name.endswith(kind)]
    return max((block_type(info.type).weights for info in downs), default=1)


def _ordinary(file: GGUFFile, config: Config) -> dict[int, int]:
    if config.experts is None:
        return {}
    block = 1 if config.down_layout != "by_output" else _block_of_downs(file)
    return {i: block for i in range(config.layers) if config.experts_of(i) is None}


def placed_by(config: Config) -> str:
    """Says which parts of a model a placement on two devices may divide, and why no smaller ones."""
    if reason := unsupported(config.state_ops):
        return f"nothing: {reason}"
    if config.whole is None:
        return "neurons" if config.experts is None else "neurons inside experts"
    cut = any(config.skips) and not config.normed
    but = f", except in {sum(config.skips)} layers with cut gates" if cut else ""
    why = config.whole if config.normed else f"{config.activation} gives no zeros"
    return f"{'layers' if config.experts is None else 'experts'}: {why}{but}"


def _kv_bytes(mixers: Sequence[MixerShape], positions: int, cache: str) -> Ints:
    """Bytes of whole pages, by layer; ModelError: the type's blocks do not fit the model's heads."""
    return -(-positions // PAGE) * np.array([mixer.page_bytes(cache) for mixer in mixers], np.int64)


def _published_buffer_bytes(shape: Shape) -> int:
    """Bytes of activations and logits alone, as the plans in docs/results.md count them."""
    floats = 4 * shape.dim + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return 4 * ((DECODE_ROWS + CHUNK) * floats + DECODE_ROWS * shape.vocab)


def power_law(neurons: int, scale: float, exponent: float) -> npt.NDArray[np.float64]:
    """Shares of tokens ``[neurons]`` for which neurons fire, the most active first."""
    ranks = (np.arange(neurons) + 0.5) / neurons
    return np.asarray(np.minimum(1, scale * ranks**-exponent))
