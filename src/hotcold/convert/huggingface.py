"""Hugging Face layouts -> GGUF names, metadata and tensors. A layout is data; what it says is checked.

Names and keys are those of llama.cpp's files. Facts that GGUF has no key for go to ``hotcold.ffn.*``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Checkpoint, ConvertError, Settings, clip
from hotcold.formats.safetensors import Array


@dataclass(frozen=True)
class Rule:
    """One tensor of a layer: HF's name, GGUF's name, and the shape in letters of :func:`dimensions`.

    ``rotary`` names the dimension that counts its heads when rotary positions apply to its rows. ``flag`` is
    the config key that must be true for the tensor to exist.
    """

    source: str
    target: str
    shape: str
    rotary: str | None = None
    flag: str | None = None


@dataclass(frozen=True)
class Layout:
    """A ``model_type``: the class that implements it, GGUF's architecture, and hidden_act -> activation."""

    model_type: str
    implementation: str
    architecture: str
    activations: Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """Where a GGUF tensor comes from: ``load`` its values with :func:`load_source`.

    ``name`` and ``shape`` are GGUF's (NumPy order); ``origin`` is the checkpoint's name.
    """

    name: str
    shape: tuple[int, ...]
    origin: str
    rotary_heads: int = 0
    transpose: bool = False


LAYOUTS = (
    # FATReLU (arXiv 2402.13516) is a ReLU whose threshold is hidden_act_param.
    Layout("llama", "LlamaForCausalLM", "llama", {"silu": "silu", "relu": "relu", "fatrelu": "relu"}),
    # Bamboo's code applies hidden_act to gate and up alike.
    Layout("bamboo", "BambooForCausalLM", "bamboo", {"relu": "drelu"}),
)

_LAYER_RULES = (
    Rule("input_layernorm.weight", "attn_norm.weight", "D"),
    Rule("self_attn.q_proj.weight", "attn_q.weight", "QD", rotary="H"),
    Rule("self_attn.q_proj.bias", "attn_q.bias", "Q", rotary="H", flag="attention_bias"),
    Rule("self_attn.k_proj.weight", "attn_k.weight", "KD", rotary="G"),
    Rule("self_attn.k_proj.bias", "attn_k.bias", "K", rotary="G", flag="attention_bias"),
    Rule("self_attn.v_proj.weight", "attn_v.weight", "KD"),
    Rule("self_attn.v_proj.bias", "attn_v.bias", "K", flag="attention_bias"),
    Rule("self_attn.o_proj.weight", "attn_output.weight", "DQ"),
    Rule("self_attn.o_proj.bias", "attn_output.bias", "D", flag="attention_bias"),
    Rule("post_attention_layernorm.weight", "ffn_norm.weight", "D"),
    Rule("mlp.gate_proj.weight", "ffn_gate.weight", "ND"),
    Rule("mlp.gate_proj.bias", "ffn_gate.bias", "N", flag="mlp_bias"),
    Rule("mlp.up_proj.weight", "ffn_up.weight", "ND"),
    Rule("mlp.up_proj.bias", "ffn_up.bias", "N", flag="mlp_bias"),
    Rule("mlp.down_proj.weight", "ffn_down.weight", "DN"),
    Rule("mlp.down_proj.bias", "ffn_down.bias", "D", flag="mlp_bias"),
)

#: Tensors that hold nothing which config.json does not say.
_REDUNDANT = re.compile(r"\.rotary_emb\.inv_freq$")


def find_layout(config: Settings) -> Layout:
    """The layout that ``model_type`` and ``architectures`` name; else the error lists those supported."""
    choices = ", ".join(f"{layout.model_type} ({layout.implementation})" for layout in LAYOUTS)
    model_type = config.text("model_type")
    for layout in LAYOUTS:
        if layout.model_type == model_type:
            break
    else:
        raise ConvertError(
            f"{config.path}: model_type {clip(model_type)} is not supported: choose from {choices}"
        )
    implementations = config.values.get("architectures") or [layout.implementation]
    if implementations != [layout.implementation]:
        raise ConvertError(
            f"{config.path}: architectures {clip(implementations)} is not supported: choose from {choices}"
        )
    if "quantization_config" in config:
        raise ConvertError(f"{config.path} describes quantised weights: convert the original checkpoint")
    return layout


def activation(config: Settings, layout: Layout) -> tuple[str, float]:
    """The FFN's activation, and the threshold that a gate must exceed."""
    hidden_act = config.text("hidden_act")
    if hidden_act not in layout.activations:
        raise config.error("hidden_act", f"for {layout.model_type} one of {', '.join(layout.activations)}")
    threshold = config.number("hidden_act_param") if hidden_act == "fatrelu" else 0.0
    return layout.activations[hidden_act], threshold


def dimensions(config: Settings) -> dict[str, int]:
    """D model dim, H heads, G kv heads, Q and K the rows of query and key, N neurons, V vocabulary, L layers.

    ``head_dim`` is under ``d``. Raises :class:`ConvertError` where they do not fit together.
    """
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if "head_dim" not in config and dim % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size {dim} (or a head_dim)")
    head_dim = config.integer("head_dim", dim // heads)
    if head_dim % 2:
        raise config.error("head_dim", "an even number (rotary positions turn pairs)")
    return {
        "D": dim, "H": heads, "G": kv_heads, "d": head_dim, "Q": heads * head_dim, "K": kv_heads * head_dim,
        "N": config.integer("intermediate_size"), "V": config.integer("vocab_size"),
        "L": config.integer("num_hidden_layers"),
    }  # fmt: skip


def model_metadata(config: Settings, layout: Layout) -> dict[str, Any]:
    """The keys of GGUF that describe the network."""
    sizes = dimensions(config)
    prefix = layout.architecture
    metadata: dict[str, Any] = {
        "vocab_size": sizes["V"],
        "context_length": _context(config),
        "embedding_length": sizes["D"],
        "block_count": sizes["L"],
        "feed_forward_length": sizes["N"],
        "attention.head_count": sizes["H"],
        "attention.head_count_kv": sizes["G"],
        "attention.layer_norm_rms_epsilon": np.float32(config.number("rms_norm_eps")),
        "rope.dimension_count": sizes["d"],
    }
    if "head_dim" in config:
        metadata["attention.key_length"] = metadata["attention.value_length"] = sizes["d"]
    theta, kind, scaling = _rope(config)
    metadata["rope.freq_base"] = np.float32(theta)
    if kind == "linear":
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = np.float32(scaling.number("factor"))
    return {f"{prefix}.{key}": value for key, value in metadata.items()}


def _context(config: Settings) -> int:
    context = config.integer("max_position_embeddings")
    # Up to its window, attention with one is attention without.
    return min(context, config.integer("sliding_window", context))


def _rope(config: Settings) -> tuple[float, str, Settings]:
    """Base, kind of scaling, and its settings. Newer files say all of it in ``rope_parameters``."""
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling") if "rope_scaling" in config else parameters
    theta = config.number("rope_theta", parameters.number("rope_theta", 10000.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise scaling.error(
            "rope_type" if "rope_type" in scaling else "type", "one of default, linear, llama3"
        )
    for settings in (config, parameters):
        if settings.values.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise settings.error("partial_rotary_factor", "1")
    return theta, kind, scaling


def rope_factors(config: Settings) -> Array | None:
    """``rope_freqs.weight``: what Llama 3's scaling divides each pair's frequency by; ``[head_dim / 2]``.

    None without such scaling. Wavelengths beyond ``original / low_freq_factor`` are stretched by
    ``factor``, those below ``original / high_freq_factor`` not at all, those between in proportion (as the
    Llama 3.1 release does).
    """
    theta, kind, scaling = _rope(config)
    if kind != "llama3":
        return None
    factor, original = scaling.number("factor"), scaling.number("original_max_position_embeddings")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", f"a number above low_freq_factor {low:g}")
    head_dim = dimensions(config)["d"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def sources(checkpoint: Checkpoint, down_layout: str) -> list[Source]:
    """Every GGUF tensor that comes from the checkpoint, in file order, with names and shapes checked.

    Raises:
        ConvertError: a tensor is missing, has another shape than config.json implies, or is not known.
    """
    config = checkpoint.config
    sizes = dimensions(config)
    found = [_source(checkpoint, Rule("model.embed_tokens.weight", "token_embd.weight", "VD"), sizes)]
    for layer in range(sizes["L"]):
        for rule in _active(config):
            named = Rule(
                f"model.layers.{layer}.{rule.source}", f"blk.{layer}.{rule.target}", rule.shape, rule.rotary
            )
            transpose = rule.target == "ffn_down.weight" and down_layout == "by_neuron"
            found.append(_source(checkpoint, named, sizes, transpose))
    found.append(_source(checkpoint, Rule("model.norm.weight", "output_norm.weight", "D"), sizes))
    if not config.flag("tie_word_embeddings", False):
        found.append(_source(checkpoint, Rule("lm_head.weight", "output.weight", "VD"), sizes))
    _refuse_others(checkpoint, {source.origin for source in found})
    return found


def _active(config: Settings) -> Iterator[Rule]:
    return (rule for rule in _LAYER_RULES if rule.flag is None or config.flag(rule.flag, False))


def _source(checkpoint: Checkpoint, rule: Rule, sizes: Mapping[str, int], transpose: bool = False) -> Source:
    if rule.source not in checkpoint:
        raise ConvertError(
            f"{checkpoint.folder} has no tensor {rule.source!r}: the checkpoint is not complete"
        )
    shape = checkpoint.info(rule.source).shape
    expected = tuple(sizes[letter] for letter in rule.shape)
    if shape != expected:
        raise ConvertError(
            f"{checkpoint.folder}: tensor {rule.source!r} has shape {list(shape)}: "
            f"config.json implies {list(expected)}"
        )
    heads = sizes[rule.rotary] if rule.rotary else 0
    return Source(rule.target, expected[::-1] if transpose else expected, rule.source, heads, transpose)


def _refuse_others(checkpoint: Checkpoint, used: set[str]) -> None:
    tied = {"lm_head.weight"} if checkpoint.config.flag("tie_word_embeddings", False) else set()
    others = [name for name in checkpoint.files if name not in used | tied and not _REDUNDANT.search(name)]
    if others:
        raise ConvertError(
            f"{checkpoint.folder} has tensors that this layout does not have ({len(others)}, "
            f"such as {clip(others[0])}): leaving them out would give another model"
        )


def load_source(checkpoint: Checkpoint, source: Source) -> Array:
    """The tensor as GGUF wants it, in the checkpoint's own dtype (see :meth:`SafetensorsFile.load`)."""
    values = checkpoint.load(source.origin)
    if source.rotary_heads:
        values = interleave_rotary(values, source.rotary_heads)
    return values.T if source.transpose else values


def interleave_rotary(values: Array, heads: int) -> Array:
    """Rows of q or k from Hugging Face's half-split order to GGUF ``llama``'s interleaved one.

    Within each head row i of the first half and row i of the second, which turn together, become neighbours.
    """
    paired = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)
