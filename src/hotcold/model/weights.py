"""From the tensors of a GGUF file to a backend's weights, layer by layer.

Every name and shape is checked before anything is read. Quantised tensors reach the backend with the file's
own blocks; only float ``ffn_down`` is transposed, which changes no value, where rows by neuron are of use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import numpy as np

from hotcold.formats.blocks import BlockTypeError, Tensor, block_type
from hotcold.formats.gguf import GGUFFile, printable
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, Backend, FFNTensors, FFNWeights, Floats, Matrix, Norm
from hotcold.model.config import Config, ModelError

#: Called with the bytes read so far and in all.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]

#: Precomputed tables that old converters wrote; recomputed here from the metadata.
_IGNORED = re.compile(r"(blk\.\d+\.)?attn_rot_embd(\.weight)?|rope\.inv_freq")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``ffn_norm`` is None where the FFN shares ``attn_norm`` (a parallel block)."""

    attn_norm: Norm
    q: Matrix  # (H * head_dim, D)
    k: Matrix  # (K * head_dim, D)
    v: Matrix  # (K * head_dim, D)
    o: Matrix  # (D, H * head_dim)
    q_norm: Norm | None  # over head_dim
    k_norm: Norm | None
    ffn_norm: Norm | None
    ffn: FFNWeights
    down_layout: str  #: how the backend holds down: ``by_neuron`` or ``by_output``


@dataclass(frozen=True)
class Weights:
    """A whole model in a backend. ``head`` is ``embedding`` where the file has no ``output.weight``."""

    embedding: Matrix  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix  # (V, D)
    rope_factors: Floats | None  # [rotary_dim / 2]

    @property
    def nbytes(self) -> int:
        """Bytes of matrices in the backend (norms, a few kilobytes, not counted)."""
        total = self.embedding.nbytes + (0 if self.head is self.embedding else self.head.nbytes)
        for layer in self.layers:
            total += sum(m.nbytes for m in (layer.q, layer.k, layer.v, layer.o)) + layer.ffn.nbytes
        return total


def check_tensors(file: GGUFFile, config: Config, others: Container[str] = ()) -> int:
    """Checks that the file has exactly the tensors that the model needs, in the right shapes.

    Args:
        file: the model file.
        config: read from its metadata.
        others: names that belong to someone else and may be there.

    Returns:
        Bytes that loading will read, and that the weights will take.

    Raises:
        ModelError: a tensor is missing, has a wrong shape or an unsupported type, or is not known here: it
            would have changed what the model computes.
    """
    shapes = _expected(config, file.tensors)
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelError(f"tensor {name} is missing: {config.architecture} needs it, shape {shape}")
        if info.shape != shape:
            raise ModelError(f"tensor {name} has shape {info.shape}: the metadata asks for {shape}")
        try:
            block_type(info.type)
        except BlockTypeError as error:
            raise ModelError(f"tensor {name}: {error}") from None
    for name in file.tensors:
        if name not in shapes and name not in others and not _IGNORED.fullmatch(name):
            raise ModelError(f"tensor {printable(name, 80)} has no place in a {config.architecture} model")
    return sum(file.tensors[name].nbytes for name in shapes)


def load_weights(
    file: GGUFFile,
    config: Config,
    backend: Backend,
    progress: Progress | None = None,
    others: Container[str] = (),
) -> Weights:
    """Reads the model into the backend; peak memory is the model and the tensors of one layer's FFN.

    Raises:
        ModelError: see :func:`check_tensors`; also a norm or bias that is not finite.
        GGUFError: the file cannot be read, or has changed.
    """
    total = check_tensors(file, config, others)
    reader = _Reader(file, backend, config, progress or (lambda done, total: None), total)
    embedding = reader.matrix("token_embd")
    layers = tuple(reader.layer(i) for i in range(config.layers))
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=reader.norm("output_norm"),
        head=reader.matrix("output") if "output.weight" in file.tensors else embedding,
        rope_factors=reader.rope_factors(),
    )


def _expected(config: Config, present: Iterable[str]) -> dict[str, Shape]:
    """Shapes by name of what the model needs and of what it may have and the file has."""
    d, v = config.dim, config.vocab
    required: dict[str, Shape] = {"token_embd.weight": (v, d), "output_norm.weight": (d,)}
    optional: dict[str, Shape] = {
        "output.weight": (v, d),
        "output_norm.bias": (d,),
        "rope_freqs.weight": (config.rope.dim // 2,),
    }
    for i, n in enumerate(config.neurons):
        layer_required, layer_optional = _expected_in_layer(
            config, n, f"blk.{i}.ffn_down_t.weight" in present
        )
        required |= {f"blk.{i}.{name}": shape for name, shape in layer_required.items()}
        optional |= {f"blk.{i}.{name}": shape for name, shape in layer_optional.items()}
    return required | {name: optional[name] for name in present if name in optional}


def _expected_in_layer(config: Config, n: int, transposed: bool) -> tuple[dict[str, Shape], dict[str, Shape]]:
    d, head_dim = config.dim, config.head_dim
    q, kv = config.heads * head_dim, config.kv_heads * head_dim
    by_neuron = transposed or config.down_layout == "by_neuron"
    down = "ffn_down_t" if transposed else "ffn_down"
    matrices: dict[str, Shape] = {
        "attn_q": (q, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, q),
        "ffn_up": (n, d),
        down: (n, d) if by_neuron else (d, n),
    }
    if config.gated:
        matrices["ffn_gate"] = (n, d)
    required = {f"{name}.weight": shape for name, shape in matrices.items()} | {"attn_norm.weight": (d,)}
    optional: dict[str, Shape] = {f"{name}.bias": (shape[0],) for name, shape in matrices.items()}
    optional |= {f"{down}.bias": (d,), "attn_norm.bias": (d,), "ffn_norm.bias": (d,)}
    optional |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    (optional if config.family.parallel else required)["ffn_norm.weight"] = (d,)
    return required, optional


class _Reader:
    """Turns named tensors into weights of one backend and reports progress."""

    def __init__(
        self, file: GGUFFile, backend: Backend, config: Config, progress: Progress, total: int
    ) -> None:
        self._file = file
        self._backend = backend
        self._config = config
        self._progress = progress
        self._total = total
        self._done = 0

    def layer(self, i: int) -> LayerWeights:
        blk = f"blk.{i}."
        down = self._down(blk)
        return LayerWeights(
            attn_norm=self.norm(blk + "attn_norm"),
            q=self.matrix(blk + "attn_q"),
            k=self.matrix(blk + "attn_k"),
            v=self.matrix(blk + "attn_v"),
            o=self.matrix(blk + "attn_output"),
            q_norm=self._optional_norm(blk + "attn_q_norm"),
            k_norm=self._optional_norm(blk + "attn_k_norm"),
            ffn_norm=self._optional_norm(blk + "ffn_norm"),
            ffn=self._backend.ffn_weights(
                FFNTensors(
                    gate=self._tensor(blk + "ffn_gate.weight") if self._config.gated else None,
                    up=self._tensor(blk + "ffn_up.weight"),
                    down=down[0],
                    down_layout=down[1],
                    activation=self._config.activation,
                    threshold=self._config.threshold,
                    gate_bias=self._vector(blk + "ffn_gate.bias"),
                    up_bias=self._vector(blk + "ffn_up.bias"),
                    down_bias=down[2],
                )
            ),
            down_layout=down[1],
        )

    def matrix(self, name: str) -> Matrix:
        return self._backend.matrix(self._tensor(f"{name}.weight"), self._vector(f"{name}.bias"))

    def norm(self, name: str) -> Norm:
        weight = self._vector(f"{name}.weight")
        assert weight is not None  # check_tensors() saw it
        return Norm(
            weight=upload(self._backend, weight),
            bias=upload(self._backend, self._vector(f"{name}.bias")),
            eps=self._config.norm_eps,
            centre=self._config.family.norm == "layer",
        )

    def rope_factors(self) -> Floats | None:
        factors = self._vector("rope_freqs.weight")
        if factors is not None and self._config.rope.llama3 is not None:
            raise ModelError(
                "rope_freqs.weight and rope.scaling.type llama3 ask for the same scaling: keep one"
            )
        if factors is not None and not (factors > 0).all():
            raise ModelError(f"rope_freqs.weight holds {factors.min():g}: numbers above 0 are needed")
        return factors

    def _optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if f"{name}.weight" in self._file.tensors else None

    def _down(self, blk: str) -> tuple[Tensor, str, Floats | None]:
        """Down, its layout and its bias."""
        if blk + "ffn_down_t.weight" in self._file.tensors:
            name, layout = blk + "ffn_down_t", "by_neuron"
        else:
            name, layout = blk + "ffn_down", self._config.down_layout
        down, bias = self._tensor(f"{name}.weight"), self._vector(f"{name}.bias")
        if layout == "by_output" and self._config.activation in SPARSE_ACTIVATIONS and down.type.weights == 1:
            return transposed(down), "by_neuron", bias
        return down, layout, bias

    def _tensor(self, name: str) -> Tensor:
        tensor = self._file.load(name)
        self._done += tensor.nbytes
        self._progress(self._done, self._total)
        return tensor

    def _vector(self, name: str) -> Floats | None:
        if name not in self._file.tensors:
            return None
        values = self._tensor(name).dequantise()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {name} holds values that are not finite: the file is damaged")
        return values


def transposed(tensor: Tensor) -> Tensor:
    """A matrix of a float type with rows and columns exchanged; no value changes."""
    rows, columns = tensor.shape
    values = tensor.data.view(f"u{tensor.type.nbytes}")  # one element per weight
    return Tensor(tensor.type, (columns, rows), np.ascontiguousarray(values.T).view(np.uint8))


def upload(backend: Backend, values: Floats | None) -> Floats | None:
    """A buffer of the backend with these values."""
    if values is None:
        return None
    buffer: Floats = backend.zeros(values.shape, values.dtype)
    buffer[:] = values
    return buffer
