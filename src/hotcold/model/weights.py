"""From the tensors of a GGUF file to a backend's weights, layer by layer.

Every name and shape is checked before anything is read. Tensors reach the backend with the file's own blocks.
"""

import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from hotcold.formats.blocks import BlockTypeError, block_type
from hotcold.formats.gguf import GGUFFile
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import Backend, Buffer, FFNTensors, FFNWeights, Floats, Matrix, Norm
from hotcold.model.config import Config, ModelError
from hotcold.model.devices import Devices
from hotcold.model.experts import Router, SharedExpert, expert_shapes, expert_tensors
from hotcold.model.rope import FACTORS
from hotcold.values import printable

#: Called with the bytes read so far and in all.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]

#: Precomputed tables that old converters wrote, recomputed here from the metadata; and the predictor of
#: tokens in PowerInfer's files of SmallThinker, without which the head is exact.
_IGNORED = re.compile(r"(blk\.\d+\.)?attn_rot_embd(\.weight)?|rope\.inv_freq|lm_head_profiler\.weight")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``ffn_norm`` is None where the FFN shares ``attn_norm`` (some parallel blocks), and with
    ``attn_norm`` where only what attention and the FFN give is normalised (``..._post_norm``)."""

    attn_norm: Norm | None
    q: Matrix  # (H * head_dim, D)
    k: Matrix  # (K * head_dim, D)
    v: Matrix  # (K * head_dim, D)
    o: Matrix  # (D, H * head_dim)
    q_norm: Norm | None  # over head_dim, or over H * head_dim
    k_norm: Norm | None
    ffn_norm: Norm | None
    ffn: FFNWeights
    attn_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    sinks: Buffer | None = None  # [H] float32
    router: Router | None = None  # where there are experts
    shared: SharedExpert | None = None

    @property
    def matrices(self) -> list[Matrix]:
        """Those that a step reads whole, beside a shared expert's FFN."""
        router = self.router.weights if self.router else None
        gate = self.shared.gate if self.shared else None
        return [each for each in (self.q, self.k, self.v, self.o, router, gate) if each is not None]

    @property
    def dense_bytes(self) -> int:
        """Of what a step reads whole."""
        return sum(each.nbytes for each in self.matrices) + (self.shared.ffn.nbytes if self.shared else 0)


@dataclass(frozen=True)
class Weights:
    """A whole model. Without ``output.weight`` in the file, ``head`` is ``embedding`` or a copy of it."""

    embedding: Matrix  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix  # (V, D)
    rope_factors: Mapping[str, Floats]  # [rotary_dim / 2] each, by the names of rope.FACTORS
    positions: Matrix | None = None  # (P, D), learned ones


def check_tensors(file: GGUFFile, config: Config, others: Container[str] = ()) -> int:
    """Checks that the file has exactly the tensors that the model needs, in the right shapes; their bytes.

    ``others`` belong to someone else and may be there. ModelError: a tensor is missing, has a wrong shape or
    an unsupported type, or is not known here: it would have changed what the model computes."""
    required, optional = _expected(config, file.tensors)
    for name, shape in required.items():
        if name not in file.tensors:
            raise ModelError(f"tensor {name} is missing: {config.architecture} needs it, shape {shape}")
    total = 0
    shapes = required | optional
    for name, info in file.tensors.items():
        if name not in shapes:
            if name in others or _IGNORED.fullmatch(name):
                continue
            raise ModelError(f"tensor {printable(name, 80)} has no place in a {config.architecture} model")
        if not _fits(info.shape, shapes[name]):
            raise ModelError(f"tensor {name} has shape {info.shape}: the metadata asks for {shapes[name]}")
        try:
            block_type(info.type)
        except BlockTypeError as error:
            raise ModelError(f"tensor {name}: {error}") from None
        total += info.nbytes
    return total


def _fits(shape: Shape, expected: Shape) -> bool:
    """Whether a tensor of this shape is one of the other: a vector may have further dimensions of 1."""
    return shape == expected or (len(expected) == 1 and math.prod(shape) == max(shape) == expected[0])


def load_weights(
    file: GGUFFile,
    config: Config,
    backend: Backend | Devices,
    progress: Progress | None = None,
    others: Container[str] = (),
) -> Weights:
    """Reads the model into the backend, which for ``cpu`` takes little memory beyond the model's.

    ModelError: see :func:`check_tensors`; also a norm or bias that is not finite. GGUFError: the file cannot
    be read, or has changed."""
    total = check_tensors(file, config, others)
    devices = Devices.of(backend, config.layers)
    reader = _Reader(file, devices.embedding, config, progress or (lambda done, total: None), total)
    embedding, layers = reader.matrix("token_embd"), []
    for i, reader.backend in enumerate(devices.layers):
        layers.append(reader.layer(f"blk.{i}.", partial(devices.ffn_weights, i)))
    reader.backend, tied = devices.head, "output.weight" not in file.tensors
    same = tied and devices.head is devices.embedding
    head = embedding if same else reader.matrix("token_embd" if tied else "output")
    norm = reader.norm("output_norm", 1 / config.scales.logits)
    reader.backend = devices.embedding
    return Weights(embedding, tuple(layers), norm, head, reader.rope_factors(), reader.positions())


def ffn_tensors(file: GGUFFile, config: Config, backend: Backend, layer: int) -> FFNTensors:
    """One layer's FFN as ``backend`` is given it; errors as in :func:`load_weights`."""
    return _Reader(file, backend, config, lambda done, total: None, 0).ffn(f"blk.{layer}.")


def _expected(config: Config, present: Container[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes by name of what the model needs, and of what it may have."""
    d, v = config.dim, config.vocab
    required: dict[str, Shape] = {"token_embd.weight": (v, d), "output_norm.weight": (d,)}
    optional: dict[str, Shape] = {"output.weight": (v, d), "output_norm.bias": (d,)}
    optional |= {f"{name}.weight": (rope.dim // 2,) for rope in config.ropes for name in FACTORS}
    if (offset := config.family.learned_positions) is not None:
        required["position_embd.weight"] = (config.context + offset, d)
    for i, n in enumerate(config.neurons):
        blk = f"blk.{i}."
        down, layout = _down(config, blk, present)
        matrices = {f"attn_{part}": (rows, d) for part, rows in _attention_inputs(config, blk, present)}
        matrices["attn_output"] = d, config.heads * config.head_dim
        if config.experts:
            needed, shared = expert_shapes(config.experts, d, blk, config.down_layout, gated=config.gated)
            required, optional = required | needed, optional | shared
        else:
            matrices["ffn_up"] = 2 * n if config.family.fused_gate else n, d
            if config.gated and not config.family.fused_gate:
                matrices["ffn_gate"] = n, d
            matrices[down] = (n, d) if layout == "by_neuron" else (d, n)
        required |= {f"{blk}{name}.weight": shape for name, shape in matrices.items()}
        optional |= {
            f"{blk}{name}.bias": (d if name == down else shape[0],) for name, shape in matrices.items()
        }
        norms, own = _norms(config, blk, present)
        required |= {f"{blk}{name}.weight": (d,) for name in norms}
        optional |= {f"{blk}{name}.weight": (d,) for name in own}
        optional |= {f"{blk}{name}.bias": (d,) for name in (*norms, *own)}
        optional |= _optional_attention(config, blk)
    return required, optional


def _optional_attention(config: Config, blk: str) -> dict[str, Shape]:
    each = config.family.qk_norm == "head"
    q, k = (config.head_dim * (1 if each else heads) for heads in (config.heads, config.kv_heads))
    shapes = {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (k,), "attn_sinks.weight": (config.heads,)}
    return {blk + name: shape for name, shape in shapes.items()}


def _attention_inputs(config: Config, blk: str, present: Container[str]) -> list[tuple[str, int]]:
    """The matrices that q, k and v come from, and their rows: one each, or one for all (Falcon)."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = f"{blk}attn_qkv.weight" in present
    return [("qkv", q + 2 * kv)] if fused else [("q", q), ("k", kv), ("v", kv)]


def _norms(config: Config, blk: str, present: Container[str]) -> tuple[list[str], list[str]]:
    """Names of a layer's norms: those that it must have, and those that it may have."""
    before, after = (config.family.norms in (kind, "both") for kind in ("before", "after"))
    attn_norm, ffn_norm = _input_norms(config, blk, present)
    needed = [attn_norm] * before + ["post_attention_norm", "post_ffw_norm"] * after
    shared = [ffn_norm] * (before and config.family.parallel)
    return needed + [ffn_norm] * (before and not shared), shared


def _input_norms(config: Config, blk: str, present: Container[str]) -> tuple[str, str]:
    """Names of the norms before attention and before the FFN; Falcon 40B has them the other way round."""
    swapped = config.family.parallel and f"{blk}attn_norm_2.weight" in present
    return ("attn_norm_2", "attn_norm") if swapped else ("attn_norm", config.family.ffn_norm)


def _down(config: Config, blk: str, present: Container[str]) -> tuple[str, str]:
    by_neuron = f"{blk}ffn_down_t.weight" in present
    return ("ffn_down_t", "by_neuron") if by_neuron else ("ffn_down", config.down_layout)


@dataclass
class _Reader:
    """Turns named tensors into weights of a backend, ``backend``, and reports progress."""

    file: GGUFFile
    backend: Backend
    config: Config
    progress: Progress
    total: int
    done: int = 0

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the tensors that the model may have, by name."""
        required, optional = _expected(self.config, self.file.tensors)
        return required | optional

    def layer(self, blk: str, ffn_weights: Callable[[FFNTensors], FFNWeights]) -> LayerWeights:
        attn_norm, ffn_norm = _input_norms(self.config, blk, self.file.tensors)
        q, k, v = self._attention_inputs(blk)
        o, tensors = self.matrix(blk + "attn_output"), self.ffn(blk)
        ffn = ffn_weights(tensors)
        self._count(tensors.gate, tensors.up, tensors.down)
        own = ffn_norm == "post_attention_norm"  # some files' name of the FFN's
        after = None if own else self.own_norm(f"{blk}post_attention_norm")
        return LayerWeights(
            attn_norm=self.own_norm(blk + attn_norm),
            q=q,
            k=k,
            v=v,
            o=o,
            q_norm=self.own_norm(f"{blk}attn_q_norm"),
            k_norm=self.own_norm(f"{blk}attn_k_norm"),
            ffn_norm=self.own_norm(blk + ffn_norm),
            ffn=ffn,
            attn_post_norm=after,
            ffn_post_norm=self.own_norm(f"{blk}post_ffw_norm"),
            sinks=self._buffer(f"{blk}attn_sinks.weight"),
            router=self._router(blk),
            shared=self._shared(blk),
        )

    def _router(self, blk: str) -> Router | None:
        if self.config.experts is None:
            return None
        bias = self._buffer(f"{blk}exp_probs_b.bias")
        return Router(self.config.experts, self.matrix(f"{blk}ffn_gate_inp"), bias)

    def _shared(self, blk: str) -> SharedExpert | None:
        if self.config.experts is None or not self.config.experts.shared:
            return None
        gate, name = None, f"{blk}ffn_gate_inp_shexp.weight"
        if name in self.file.tensors:
            row = self.file.stored(name)
            # One row, whichever way the file has it.
            dim, nbytes = self.config.dim, row.rows * row.row_bytes
            gate = self.backend.matrix(replace(row, shape=(1, dim), rows=1, row_bytes=nbytes))
            self._count(row)
        config = self.config
        own = self.file.stored(f"{blk}ffn_gate_shexp.weight") if config.gated else None
        up, down = (self.file.stored(f"{blk}ffn_{part}_shexp.weight") for part in ("up", "down"))
        tensors = FFNTensors(own, up, down, config.down_layout, config.activation, config.threshold)
        ffn = self.backend.ffn_weights(tensors)
        self._count(own, up, down)
        return SharedExpert(gate, ffn)

    def matrix(self, name: str) -> Matrix:
        bias, tensor = self._vector(f"{name}.bias"), self.file.stored(f"{name}.weight")
        matrix = self.backend.matrix(tensor, bias)
        self._count(tensor)
        return matrix

    def own_norm(self, name: str) -> Norm | None:
        return self.norm(name) if f"{name}.weight" in self.file.tensors else None

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        """``scale`` times what the file's would give."""
        weight, bias = (self._buffer(f"{name}.{part}", scale) for part in ("weight", "bias"))
        assert weight is not None  # check_tensors() saw it
        return Norm(weight, bias, self.config.norm_eps, self.config.family.norm == "layer")

    def rope_factors(self) -> dict[str, Floats]:
        found = {name: self._vector(f"{name}.weight") for name in FACTORS}
        present = {name: factors for name, factors in found.items() if factors is not None}
        for name, factors in present.items():
            if not (factors > 0).all():
                raise ModelError(f"{name}.weight holds {factors.min():g}: numbers above 0 are needed")
        return present

    def positions(self) -> Matrix | None:
        """From position 0 on."""
        if (offset := self.config.family.learned_positions) is None:
            return None
        table = self.file.stored("position_embd.weight")
        self._count(table)
        return self.backend.matrix(table.take_rows(slice(offset, None)))

    def _attention_inputs(self, blk: str) -> list[Matrix]:
        names = [name for name, _ in _attention_inputs(self.config, blk, self.file.tensors)]
        if len(names) == 3:
            return [self.matrix(f"{blk}attn_{name}") for name in names]
        fused, bias = self.file.stored(f"{blk}attn_qkv.weight"), self._vector(f"{blk}attn_qkv.bias")
        kv = self.config.kv_heads * self.config.head_dim
        parts = (slice(0, -2 * kv), slice(-2 * kv, -kv), slice(-kv, None))
        tensors = [fused.take_rows(part) for part in parts]
        biases = (None if bias is None else bias[part] for part in parts)
        matrices = [*map(self.backend.matrix, tensors, biases)]
        self._count(fused)
        return matrices

    def ffn(self, blk: str) -> FFNTensors:
        """Still in the file: whoever reads them counts them."""
        config = self.config
        if config.experts:
            return expert_tensors(
                self.file,
                config.experts,
                blk,
                self._vector,
                gated=config.gated,
                down_layout=config.down_layout,
                activation=config.activation,
                threshold=config.threshold,
            )
        gate, up, gate_bias, up_bias = self._gate_and_up(blk)
        name, layout = _down(config, blk, self.file.tensors)
        down, down_bias = self.file.stored(f"{blk}{name}.weight"), self._vector(f"{blk}{name}.bias")
        biases = gate_bias, up_bias, down_bias
        return FFNTensors(gate, up, down, layout, config.activation, config.threshold, *biases)

    def _gate_and_up(self, blk: str) -> tuple[AnyTensor | None, AnyTensor, Floats | None, Floats | None]:
        """Matrices, then biases."""
        up, bias = self.file.stored(f"{blk}ffn_up.weight"), self._vector(f"{blk}ffn_up.bias")
        if not self.config.family.fused_gate:
            gate = self.file.stored(f"{blk}ffn_gate.weight") if self.config.gated else None
            return gate, up, self._vector(f"{blk}ffn_gate.bias"), bias
        gates, ups = slice(0, up.shape[0] // 2), slice(up.shape[0] // 2, None)
        biases = (None, None) if bias is None else (bias[gates], bias[ups])
        return up.take_rows(gates), up.take_rows(ups), *biases

    def _count(self, *tensors: AnyTensor | None) -> None:
        self.done += sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.progress(self.done, self.total)

    def _vector(self, name: str) -> Floats | None:
        if name not in self.file.tensors:
            return None
        tensor = self.file.load(name)
        self._count(tensor)
        values = tensor.dequantise()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {name} holds values that are not finite: the file is damaged")
        return values.reshape(self.shapes.get(name, values.shape))

    def _buffer(self, name: str, scale: float = 1.0) -> Buffer | None:
        """Of such a vector, times ``scale``; None where the file has none."""
        values = self._vector(name)
        return None if values is None else upload(self.backend, np.float32(scale) * values)


def upload(backend: Backend, values: Floats) -> Buffer:
    """A buffer of the backend with these values."""
    buffer = backend.zeros(values.shape, values.dtype)
    backend.write(buffer, values)
    return buffer
