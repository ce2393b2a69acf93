"""Loading of a GGUF file's tensors as a backend's weights, layer by layer.

Every name and shape is checked before any tensor is read. The backend gets the file's own blocks."""

import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from hotcold.formats.blocks import BlockTypeError, block_type
from hotcold.formats.gguf import GGUFFile
from hotcold.kernels.backend import Backend, FFNTensors, FFNWeights, Floats, Matrix, Norm
from hotcold.model.config import Config, ModelError
from hotcold.model.devices import Devices
from hotcold.model.ffn.feed_forward import FeedForward
from hotcold.model.ffn.reading import (
    ffn_shapes,
    read_feed_forward,
    read_router,
    read_shared_tensors,
    read_tensors,
)
from hotcold.model.hidden_input import HiddenInput
from hotcold.model.layer import Block, LayerWeights
from hotcold.model.layer_inputs import LayerInputs, input_shapes, read_input, read_inputs
from hotcold.model.mixers.mixer import NO_MIXER, MixerWeights
from hotcold.model.mixers.rope import FACTORS
from hotcold.model.reading import Progress, Shape, TensorReader, check_scaled, norm_tensor, scale_shapes
from hotcold.model.streams import (
    Streams,
    read_all_streams,
    read_correct,
    read_laurel,
    read_predict,
    stream_shapes,
)
from hotcold.values import printable

#: Precomputed tables of old converters, recomputed here from the metadata; and the token predictor in
#: PowerInfer's files of SmallThinker, without which the head is exact.
_IGNORED = re.compile(r"(blk\.\d+\.)?attn_rot_embd(\.weight)?|rope\.inv_freq|lm_head_profiler\.weight")


_EMBEDDING_NORM = "token_embd_norm"


@dataclass(frozen=True)
class Weights:
    """A whole model. Without ``output.weight`` in the file, ``head`` is ``embedding`` or a copy of it."""

    embedding: Matrix  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix  # (V, D)
    rope_factors: Mapping[str, Floats]  # [rotary_dim / 2] each, by the names of rope.FACTORS
    norm_values: int  # weights and biases of all norms
    positions: Matrix | None = None  # (P, D), learned positions
    inputs: LayerInputs | None = None
    streams: Streams | None = None
    hidden: HiddenInput | None = None  #: of a draft block
    embedding_norm: Norm | None = None  #: of embeddings
    draft: "Weights | None" = None  #: the model's draft block, if it is used

    def own_bytes(self, other: "Weights") -> int:
        """Returns bytes of its matrices, without an embedding and a head that ``other`` shares."""
        own_ends = {each for each in (self.embedding, self.head) if each not in (other.embedding, other.head)}
        hidden = [self.hidden.of_token, self.hidden.of_hidden] if self.hidden else []
        layers = sum(each.dense_bytes + each.shared_bytes + each.ffn.nbytes for each in self.layers)
        return layers + sum(each.nbytes for each in (*own_ends, *hidden))


def check_tensors(file: GGUFFile, config: Config, others: Container[str] = ()) -> int:
    """Checks that the file has exactly the tensors of the model, in the right shapes. Returns their bytes.

    ``others`` are names of further tensors that may be present. ModelError: a tensor is missing, has a wrong
    shape or an unsupported type, or is unknown, and would have changed the model's results."""
    required, optional = expected_shapes(config, file.tensors)
    for name, shape in required.items():
        if name not in file.tensors:
            raise ModelError(f"tensor {name} is missing: {config.architecture} needs it, shape {shape}")
    total = 0
    scales = scale_shapes(required | optional)
    shapes = required | optional | scales
    for name, info in file.tensors.items():
        if name not in shapes:
            if name in others or _IGNORED.fullmatch(name) or is_drafting(name, config):
                continue
            raise ModelError(f"tensor {printable(name, 80)} is unknown in a {config.architecture} model")
        if not fits(info.shape, shapes[name]):
            raise ModelError(f"tensor {name} has shape {info.shape}: the metadata asks for {shapes[name]}")
        try:
            block_type(info.type)
        except BlockTypeError as error:
            raise ModelError(f"tensor {name}: {error}") from None
        if name in scales:
            check_scaled(file, name)
        total += info.nbytes
    return total


def made_bytes(file: GGUFFile, config: Config) -> int:
    """Returns the bytes of weights in memory beyond the file's tensors, after :func:`check_tensors`: computed
    matrices, and a factor of each row of matrices with factors."""
    mixers = sum(each.made_bytes(f"blk.{i}.", file.tensors) for i, each in enumerate(config.mixers))
    required, optional = expected_shapes(config, file.tensors)
    scales = [name for name in scale_shapes(required | optional) if name.endswith(".scale")]
    scaled = [f"{name.removesuffix('.scale')}.weight" for name in scales if name in file.tensors]
    rows = sum(math.prod(file.tensors[name].shape[:-1]) for name in scaled)
    return sum(config.made_bytes) + mixers + 4 * rows


def is_drafting(name: str, config: Config) -> bool:
    """Returns whether a tensor belongs to a block that only drafts tokens (multi-token prediction)."""
    block = re.match(r"blk\.(\d{1,9})\.", name)
    return block is not None and config.layers <= int(block[1]) < config.layers + config.drafting


def fits(shape: Shape, expected: Shape) -> bool:
    """Returns whether a tensor of this shape can serve as the expected one. If at most one dimension exceeds
    1, either may have further dimensions of 1. Of four dimensions, those of 1 may be missing."""
    if shape == expected:
        return True
    if len(expected) == 4:
        return [n for n in shape if n > 1] == [n for n in expected if n > 1]
    narrow = math.prod(expected) == max(expected)
    return narrow and math.prod(shape) == max(shape) == max(expected)


def load_weights(
    file: GGUFFile,
    config: Config,
    backend: Backend | Devices,
    progress: Progress | None = None,
    total: int | None = None,
) -> Weights:
    """Reads the model into the backend; ``cpu`` needs little memory beyond the model's. ``total``: bytes that
    :func:`check_tensors` returned; None checks the tensors now.

    ModelError: see :func:`check_tensors`; also a norm or bias that is not finite. GGUFError: the file cannot
    be read, or has changed."""
    total = check_tensors(file, config) if total is None else total
    devices = Devices.from_backend(backend, config.layers)
    reader = ModelReader.from_file(
        file, config, devices.embedding, progress or (lambda done, total: None), total
    )
    embedding, layers = reader.matrix("token_embd"), []
    for i, reader.backend in enumerate(devices.layers):
        layers.append(reader.layer(i, partial(devices.ffn_weights, i)))
    reader.backend, tied = devices.head, "output.weight" not in file.tensors
    same = tied and devices.head is devices.embedding
    head = embedding if same else reader.matrix("token_embd" if tied else "output")
    norm = reader.norm(output_norm(file.tensors), 1 / config.scales.logits)
    reader.backend = devices.embedding
    positions = reader.positions()
    factors = reader.rope_factors()
    width, inputs = config.layer_input, None
    if width:
        inputs = read_inputs(reader, config.layers, width, config.dim)
    streams = None
    if config.streams > 1:
        streams = read_all_streams(reader, config.streams, config.dim, devices.head)
    first = reader.norm(_EMBEDDING_NORM) if config.family.embedding_norm else None
    values = reader.norm_values
    return Weights(
        embedding,
        tuple(layers),
        norm,
        head,
        factors,
        values,
        positions,
        inputs,
        streams,
        embedding_norm=first,
    )


def ffn_tensors(file: GGUFFile, config: Config, backend: Backend, layer: int) -> FFNTensors:
    """Returns a layer's FFN as ``backend`` takes it; errors as in :func:`load_weights`."""
    return read_tensors(ModelReader.from_file(file, config, backend), config, layer)


def shared_tensors(file: GGUFFile, config: Config, backend: Backend, layer: int) -> FFNTensors:
    """Returns a layer's shared expert, or the FFN parallel to its experts; see :func:`ffn_tensors`."""
    return read_shared_tensors(ModelReader.from_file(file, config, backend), config, layer)


def expected_shapes(config: Config, present: Container[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns shapes by name of the model's required and of its optional tensors."""
    d, v = config.dim, config.vocab
    last = output_norm(present)
    required: dict[str, Shape] = {"token_embd.weight": (v, d), f"{last}.weight": (d,)}
    optional: dict[str, Shape] = {"output.weight": (v, d), f"{last}.bias": (d,)}
    turned = [rope for rope in config.ropes if rope.factored]
    optional |= {f"{name}.weight": (rope.dim // 2,) for rope in turned for name in FACTORS}
    if config.family.embedding_norm:
        required[f"{_EMBEDDING_NORM}.weight"] = (d,)
        optional[f"{_EMBEDDING_NORM}.bias"] = (d,)
    if config.layer_input:
        required |= input_shapes(config.layers, config.layer_input, d, v)
    if config.streams > 1:
        required |= stream_shapes(config.streams, config.layers, d, config.laurel)
    if (offset := config.family.learned_positions) is not None:
        required["position_embd.weight"] = (config.context + offset, d)
    for i, mixer in enumerate(config.mixers):
        blk = f"blk.{i}."
        shapes = mixer.tensors(d, blk, present)
        for tensors, ffn_part in zip(shapes, ffn_shapes(config, i, present), strict=True):
            tensors |= ffn_part
        required |= shapes[0]
        optional |= shapes[1]
        norms, optional_norms = _norms(config, blk, present)
        required |= {norm_tensor(f"{blk}{name}", present): (d,) for name in norms}
        optional |= {f"{blk}{name}.weight": (d,) for name in optional_norms}
        optional[f"{blk}layer_output_scale.weight"] = (1,)
        optional |= {f"{blk}{name}.bias": (d,) for name in (*norms, *optional_norms)}
    return required, optional


def output_norm(present: Container[str]) -> str:
    """Returns the name of the norm before the head; in files of LFM2 it is another norm's name."""
    names = "output_norm", _EMBEDDING_NORM
    return next((name for name in names if f"{name}.weight" in present), names[0])


def _norms(config: Config, blk: str, present: Container[str]) -> tuple[list[str], list[str]]:
    """Returns names of a layer's required norms and of its optional norms."""
    if config.family.one_part:
        return ["attn_norm"], []
    before, after = (config.family.norms in (kind, "both") for kind in ("before", "after"))
    attn_norm, ffn_norm = input_norms(config, blk, present)
    required = [attn_norm] * before + ["post_attention_norm", "post_ffw_norm"] * after
    shared = [ffn_norm] * (before and config.family.parallel)
    return required + [ffn_norm] * (before and not shared), shared


def input_norms(config: Config, blk: str, present: Container[str]) -> tuple[str, str]:
    """Returns names of the norms before attention and before the FFN; Falcon 40B swaps them. Without a norm
    after attention, the FFN's norm may have that norm's name. RWKV's has a third name."""
    if config.family.parallel and f"{blk}attn_norm_2.weight" in present:
        return "attn_norm_2", "attn_norm"
    names = ["ffn_norm"] + ["post_attention_norm", "attn_norm_2"] * (config.family.norms == "before")
    present_names = (name for name in names if norm_tensor(f"{blk}{name}", present) in present)
    return "attn_norm", next(present_names, names[0])


@dataclass
class ModelReader(TensorReader):
    """Reads the parts of a model."""

    config: Config = field(kw_only=True)

    @classmethod
    def from_file(cls, file: GGUFFile, config: Config, backend: Backend, *progress: Any) -> Self:
        required, optional = expected_shapes(config, file.tensors)
        centre = config.family.norm == "layer"
        shapes = required | optional
        return cls(
            file, backend, shapes | scale_shapes(shapes), config.norm_eps, centre, *progress, config=config
        )

    def layer(self, index: int, ffn_weights: Callable[[FFNTensors], FFNWeights]) -> LayerWeights:
        """Reads a layer's blocks, in the order of computing."""
        blk, family = f"blk.{index}.", self.config.family
        attn_norm, ffn_norm = input_norms(self.config, blk, self.file.tensors)
        has_renamed_norm = ffn_norm == "post_attention_norm"  # some files' name of the FFN's norm
        if family.one_part:
            return LayerWeights((Block(self.own_norm(blk + attn_norm), self._part(index, ffn_weights)),))
        before = self.own_norm(blk + attn_norm)
        between = self.own_norm(blk + ffn_norm)
        if between is None and family.parallel:
            between = before
        router = read_router(self, self.config, index)
        late = None if family.router_early else router
        mixer: Block[MixerWeights | FeedForward] = Block(
            norm=before,
            part=self.config.mixers[index].read(self, blk),
            post_norm=None if has_renamed_norm else self.own_norm(f"{blk}post_attention_norm"),
            beside=family.parallel,
        )
        ffn: Block[MixerWeights | FeedForward] = Block(
            norm=between,
            part=read_feed_forward(self, self.config, index, ffn_weights, late),
            post_norm=self.own_norm(f"{blk}post_ffw_norm"),
        )
        blocks = [ffn, mixer] if family.parallel else [mixer, ffn]
        if self.config.streams > 1:
            blocks = self._among_streams(index, mixer, ffn)
        elif self.config.layer_input:
            blocks.append(Block(None, read_input(self, index), self.norm(f"{blk}post_norm")))
        scale = self.vector(f"{blk}layer_output_scale.weight")
        early = router if family.router_early else None
        return LayerWeights(tuple(blocks), early, 1.0 if scale is None else float(scale[0]))

    def _among_streams(
        self,
        index: int,
        mixer: Block[MixerWeights | FeedForward],
        ffn: Block[MixerWeights | FeedForward],
    ) -> list[Block[MixerWeights | FeedForward]]:
        """Returns a layer's blocks in a model with several residual streams."""
        config, blk = self.config, f"blk.{index}."
        predict = read_predict(self, blk, config.streams, config.dim)
        correct = read_correct(self, blk, predict, read_input(self, index))
        laurel = Block[MixerWeights | FeedForward](mixer.norm, read_laurel(self, blk), beside=True)
        return [Block(None, predict), mixer, laurel, ffn, Block(None, correct)]

    def _part(
        self, index: int, ffn_weights: Callable[[FFNTensors], FFNWeights]
    ) -> MixerWeights | FeedForward:
        """Reads the only part of a one-part layer."""
        if self.config.mixers[index] is NO_MIXER:
            router = read_router(self, self.config, index)
            return read_feed_forward(self, self.config, index, ffn_weights, router)
        return self.config.mixers[index].read(self, f"blk.{index}.")

    def rope_factors(self) -> dict[str, Floats]:
        vectors = {name: self.vector(f"{name}.weight") for name in FACTORS}
        present = {name: factors for name, factors in vectors.items() if factors is not None}
        for name, factors in present.items():
            if not (factors > 0).all():
                raise ModelError(f"{name}.weight holds {factors.min():g}: numbers above 0 are needed")
        return present

    def positions(self) -> Matrix | None:
        """Reads the learned positions, from position 0 on, if the family has them."""
        if (offset := self.config.family.learned_positions) is None:
            return None
        table = self.file.stored("position_embd.weight")
        self.count(table)
        return self.backend.matrix(table.take_rows(slice(offset, None)))
