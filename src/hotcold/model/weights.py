"""From the tensors of a GGUF file to a backend's weights, layer by layer.

Every name and shape is checked before anything is read. Tensors reach the backend with the file's own blocks.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import numpy as np

from hotcold.formats.blocks import BlockTypeError, block_type
from hotcold.formats.gguf import GGUFFile, printable
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import Backend, Buffer, FFNTensors, FFNWeights, Floats, Matrix, Norm
from hotcold.model.config import Config, ModelError
from hotcold.model.devices import Devices

#: Called with the bytes read so far and in all.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]

#: Precomputed tables that old converters wrote; recomputed here from the metadata.
_IGNORED = re.compile(r"(blk\.\d+\.)?attn_rot_embd(\.weight)?|rope\.inv_freq")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``ffn_norm`` is None where the FFN shares ``attn_norm`` (some parallel blocks)."""

    attn_norm: Norm
    q: Matrix  # (H * head_dim, D)
    k: Matrix  # (K * head_dim, D)
    v: Matrix  # (K * head_dim, D)
    o: Matrix  # (D, H * head_dim)
    q_norm: Norm | None  # over head_dim
    k_norm: Norm | None
    ffn_norm: Norm | None
    ffn: FFNWeights


@dataclass(frozen=True)
class Weights:
    """A whole model. Without ``output.weight`` in the file, ``head`` is ``embedding`` or a copy of it."""

    embedding: Matrix  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix  # (V, D)
    rope_factors: Floats | None  # [rotary_dim / 2]


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
        if info.shape != shapes[name]:
            raise ModelError(f"tensor {name} has shape {info.shape}: the metadata asks for {shapes[name]}")
        try:
            block_type(info.type)
        except BlockTypeError as error:
            raise ModelError(f"tensor {name}: {error}") from None
        total += info.nbytes
    return total


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
    return Weights(embedding, tuple(layers), reader.norm("output_norm"), head, reader.rope_factors())


def ffn_tensors(file: GGUFFile, config: Config, backend: Backend, layer: int) -> FFNTensors:
    """One layer's FFN as ``backend`` is given it; errors as in :func:`load_weights`."""
    return _Reader(file, backend, config, lambda done, total: None, 0).ffn(f"blk.{layer}.")


def _expected(config: Config, present: Container[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes by name of what the model needs, and of what it may have."""
    d, v = config.dim, config.vocab
    required: dict[str, Shape] = {"token_embd.weight": (v, d), "output_norm.weight": (d,)}
    optional: dict[str, Shape] = {"output.weight": (v, d), "output_norm.bias": (d,)}
    optional["rope_freqs.weight"] = (config.rope.dim // 2,)
    for i, n in enumerate(config.neurons):
        blk = f"blk.{i}."
        down, layout = _down(config, blk, present)
        matrices = {f"attn_{part}": (rows, d) for part, rows in _attention_inputs(config, blk, present)}
        matrices |= {"attn_output": (d, config.heads * config.head_dim), "ffn_up": (n, d)}
        if config.gated:
            matrices["ffn_gate"] = (n, d)
        required |= {f"{blk}{name}.weight": shape for name, shape in matrices.items()}
        required[f"{blk}{down}.weight"] = (n, d) if layout == "by_neuron" else (d, n)
        optional |= {f"{blk}{name}.bias": (shape[0],) for name, shape in matrices.items()}
        attn_norm, ffn_norm = _norms(config, blk, present)
        required[f"{blk}{attn_norm}.weight"] = (d,)
        (optional if config.family.parallel else required)[f"{blk}{ffn_norm}.weight"] = (d,)
        optional |= {f"{blk}{name}.bias": (d,) for name in (down, attn_norm, ffn_norm)}
        optional |= {f"{blk}attn_{part}_norm.weight": (config.head_dim,) for part in "qk"}
    return required, optional


def _attention_inputs(config: Config, blk: str, present: Container[str]) -> list[tuple[str, int]]:
    """The matrices that q, k and v come from, and their rows: one each, or one for all (Falcon)."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = f"{blk}attn_qkv.weight" in present
    return [("qkv", q + 2 * kv)] if fused else [("q", q), ("k", kv), ("v", kv)]


def _norms(config: Config, blk: str, present: Container[str]) -> tuple[str, str]:
    """Names of the norms before attention and before the FFN; Falcon 40B has them the other way round."""
    swapped = config.family.parallel and f"{blk}attn_norm_2.weight" in present
    return ("attn_norm_2", "attn_norm") if swapped else ("attn_norm", "ffn_norm")


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

    def layer(self, blk: str, ffn_weights: Callable[[FFNTensors], FFNWeights]) -> LayerWeights:
        attn_norm, ffn_norm = _norms(self.config, blk, self.file.tensors)
        q, k, v = self._attention_inputs(blk)
        own = (blk + name for name in ("attn_q_norm", "attn_k_norm", ffn_norm))
        present = (self.norm(name) if f"{name}.weight" in self.file.tensors else None for name in own)
        q_norm, k_norm, ffn_own = present
        norm, o = self.norm(blk + attn_norm), self.matrix(blk + "attn_output")
        tensors = self.ffn(blk)
        ffn = ffn_weights(tensors)
        self._count(*(each for each in (tensors.gate, tensors.up, tensors.down) if each is not None))
        return LayerWeights(norm, q, k, v, o, q_norm, k_norm, ffn_own, ffn)

    def matrix(self, name: str) -> Matrix:
        bias, tensor = self._vector(f"{name}.bias"), self.file.stored(f"{name}.weight")
        matrix = self.backend.matrix(tensor, bias)
        self._count(tensor)
        return matrix

    def norm(self, name: str) -> Norm:
        weight = self._vector(f"{name}.weight")
        assert weight is not None  # check_tensors() saw it
        bias = self._vector(f"{name}.bias")
        centre = self.config.family.norm == "layer"
        uploaded = None if bias is None else upload(self.backend, bias)
        return Norm(upload(self.backend, weight), uploaded, self.config.norm_eps, centre)

    def rope_factors(self) -> Floats | None:
        factors = self._vector("rope_freqs.weight")
        if factors is not None and not (factors > 0).all():
            raise ModelError(f"rope_freqs.weight holds {factors.min():g}: numbers above 0 are needed")
        return factors

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
        config = self.config
        """Still in the file: whoever reads them counts them."""
        gate = self.file.stored(f"{blk}ffn_gate.weight") if config.gated else None
        up = self.file.stored(f"{blk}ffn_up.weight")
        name, layout = _down(config, blk, self.file.tensors)
        down = self.file.stored(f"{blk}{name}.weight")
        biases = (self._vector(f"{blk}{part}.bias") for part in ("ffn_gate", "ffn_up", name))
        return FFNTensors(gate, up, down, layout, config.activation, config.threshold, *biases)

    def _count(self, *tensors: AnyTensor) -> None:
        self.done += sum(tensor.nbytes for tensor in tensors)
        self.progress(self.done, self.total)

    def _vector(self, name: str) -> Floats | None:
        if name not in self.file.tensors:
            return None
        tensor = self.file.load(name)
        self._count(tensor)
        values = tensor.dequantise()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {name} holds values that are not finite: the file is damaged")
        return values


def upload(backend: Backend, values: Floats) -> Buffer:
    """A buffer of the backend with these values."""
    buffer = backend.zeros(values.shape, values.dtype)
    backend.write(buffer, values)
    return buffer
