"""A model's shape and arithmetic, read from GGUF metadata that nobody has vouched for."""

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.files import shown
from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import ACTIVATIONS
from hotcold.kernels.checks import DOWN_LAYOUTS as DOWN_LAYOUTS  # convert, too, has it from here
from hotcold.kernels.checks import check_activation
from hotcold.model.families import FAMILIES, Family
from hotcold.model.rope import Rope

#: More than any model has; what lies beyond is a broken file, refused before anything is sized by it.
MAX_LAYERS, MAX_DIM, MAX_HEADS, MAX_HEAD_DIM = 1024, 1 << 17, 4096, 1024
MAX_NEURONS, MAX_VOCAB, MAX_CONTEXT = 1 << 20, 1 << 24, 1 << 24

#: Keys that ask for arithmetic that is not implemented, and the value of each that asks for nothing.
_NOT_COMPUTED = {
    "attention.causal": True, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "attention.scale": 0,
    "attn_logit_softcapping": 0, "embedding_scale": 1, "expert_count": 0, "final_logit_softcapping": 0,
    "logit_scale": 1, "residual_scale": 1,
}  # fmt: skip


class ModelError(UserError):
    """A model file whose metadata or tensors are wrong, or ask for what is not supported."""


@dataclass(frozen=True)
class Config:
    """Shapes: D ``dim``, H ``heads``, K ``kv_heads``, V ``vocab``."""

    family: Family
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    neurons: tuple[int, ...]  #: N of each layer
    vocab: int
    context: int  #: positions that the model was trained for, or those of its attention window
    norm_eps: float
    rope: Rope
    activation: str
    threshold: float  #: a gate fires when it is greater than this (FATReLU)
    gated: bool
    down_layout: str  #: of ``ffn_down``: ``by_output`` (D, N), or ``by_neuron`` as ``ffn_down_t`` always is
    notes: tuple[str, ...] = ()  #: what the user should know, a line each

    @property
    def architecture(self) -> str:
        return self.family.name

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], magic: str, tensors: Mapping[str, TensorInfo]
    ) -> Self:
        """Reads and checks the metadata of a GGUF file; ModelError has the key, the value, those allowed.
        ``magic`` is ``PWRI`` for PowerInfer's files; ``tensors`` say whether the FFN has a gate."""
        family = _family(metadata)
        keys = _Keys(metadata, family.name)
        for key, harmless in _NOT_COMPUTED.items():
            value = keys.get(key, harmless)
            if isinstance(value, np.ndarray | list) or value != harmless:
                raise ModelError(f"{keys.name(key)} is {shown(value)}: this is not supported yet")
        layers = keys.whole("block_count", 1, MAX_LAYERS)
        dim = keys.whole("embedding_length", 1, MAX_DIM)
        heads, kv_heads, head_dim = _heads(keys, dim)
        context, notes = _context(keys)
        gated = "blk.0.ffn_gate.weight" in tensors
        activation, threshold, down_layout = _ffn(_Keys(metadata, "hotcold"), family, magic, gated)
        norm_eps = keys.number(f"attention.layer_norm_{'rms_' * (family.norm == 'rms')}epsilon", 0, 0.1)
        return cls(
            family=family,
            layers=layers,
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            neurons=_neurons(keys, layers),
            vocab=_vocab(metadata, tensors),
            context=context,
            norm_eps=norm_eps,
            rope=_rope(keys, head_dim, family),
            activation=activation,
            threshold=threshold,
            gated=gated,
            down_layout=down_layout,
            notes=notes,
        )


@dataclass(frozen=True)
class _Keys:
    metadata: Mapping[str, Any]
    prefix: str

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(self.name(key), default)

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        return _whole(self.name(key), self._value(key, default), low, high)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number above ``low`` and at most ``high``."""
        value = self._value(key, default)
        if not _is_number(value) or not low < value <= high:
            seen = f"{self.name(key)} is {shown(value)}"
            raise ModelError(f"{seen}: above {low:g} and at most {high:g} is needed")
        return float(value)

    def choice(self, key: str, allowed: Iterable[str], default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise ModelError(f"{self.name(key)} is {shown(value)}: choose from {', '.join(allowed)}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.name(key)} is missing: the model file must give a number")
        return value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ModelError(f"{name} is {shown(value)}: a whole number from {low} to {high} is needed")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _family(metadata: Mapping[str, Any]) -> Family:
    name = metadata.get("general.architecture")
    if name is None:
        raise ModelError("general.architecture is missing: this file holds no model")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"architecture {shown(name)} is not supported: choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _heads(keys: _Keys, dim: int) -> tuple[int, int, int]:
    heads = keys.whole("attention.head_count", 1, MAX_HEADS)
    kv_heads = keys.whole("attention.head_count_kv", 1, MAX_HEADS, default=heads)
    if heads % kv_heads:
        key = keys.name("attention.head_count_kv")
        raise ModelError(f"{key} is {kv_heads}: it must divide {heads} heads")
    if keys.get("attention.key_length") is None and dim % heads:
        raise ModelError(f"{keys.name('attention.head_count')} is {heads}: it must divide {dim} dimensions")
    head_dim = keys.whole("attention.key_length", 1, MAX_HEAD_DIM, default=dim // heads)
    if keys.whole("attention.value_length", 1, MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise ModelError(f"{keys.name('attention.value_length')} differs from the keys' length {head_dim}")
    return heads, kv_heads, head_dim


def _neurons(keys: _Keys, layers: int) -> tuple[int, ...]:
    value = keys.get("feed_forward_length")
    if not hasattr(value, "__len__") or isinstance(value, str):
        return (keys.whole("feed_forward_length", 1, MAX_NEURONS),) * layers
    name = keys.name("feed_forward_length")
    if len(value) != layers:
        raise ModelError(f"{name} is an array of {len(value)}: one number or {layers} are needed")
    return tuple(_whole(f"{name}[{i}]", n, 1, MAX_NEURONS) for i, n in enumerate(value))


def _vocab(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding table; the tokenizer must have as many tokens."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelError("tensor token_embd.weight is missing: this file holds no model (a vocabulary only?)")
    vocab = _whole("rows of token_embd.weight", table.shape[0], 1, MAX_VOCAB)
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    if hasattr(tokens, "__len__") and len(tokens) != vocab:
        seen = f"tokenizer.ggml.tokens has {len(tokens)} tokens"
        raise ModelError(f"{seen}: token_embd.weight has {vocab} rows")
    return vocab


def _context(keys: _Keys) -> tuple[int, tuple[str, ...]]:
    """Positions, and a note where a window limits them: up to it attention with one is attention without."""
    context = keys.whole("context_length", 1, MAX_CONTEXT)
    window = keys.whole("attention.sliding_window", 0, 1 << 32, default=0)
    if not 0 < window < context:
        return context, ()
    note = f"context is {window} of {context} positions: attention beyond its window is not supported"
    return window, (note,)


def _ffn(keys: _Keys, family: Family, magic: str, gated: bool) -> tuple[str, float, str]:
    """Activation, threshold and down layout: our own keys if a file has them, else what its magic implies."""
    implied = family.powerinfer_activation if magic == "PWRI" else family.activation
    activation = keys.choice("ffn.activation", ACTIVATIONS, implied)
    threshold = keys.get("ffn.threshold", 0.0)
    if not _is_number(threshold):
        raise ModelError(f"{keys.name('ffn.threshold')} is {shown(threshold)}: a number is needed")
    try:
        check_activation(activation, float(threshold), gated=gated)
    except ValueError as error:
        raise ModelError(f"{keys.name('ffn')}: {error}") from None
    return activation, float(threshold), keys.choice("ffn.down_layout", DOWN_LAYOUTS, "by_output")


def _rope(keys: _Keys, head_dim: int, family: Family) -> Rope:
    dim = keys.whole("rope.dimension_count", 2, head_dim, default=head_dim)
    if dim % 2:
        raise ModelError(f"{keys.name('rope.dimension_count')} is {dim}: an even number is needed")
    base = keys.number("rope.freq_base", 1, 1e12, default=10000.0)
    linear = keys.number("rope.scale_linear", 0, 1e6, default=1.0)  # an old name of the linear factor
    if keys.choice("rope.scaling.type", ("none", "linear"), "none") == "linear":
        linear = keys.number("rope.scaling.factor", 0, 1e6, default=linear)
    return Rope(dim, base, family.rope_interleaved, linear)
