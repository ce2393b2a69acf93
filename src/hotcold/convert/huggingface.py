"""Hugging Face layouts -> GGUF names, metadata and tensors. A layout is data; what it says is checked.

Names and keys are those of llama.cpp's files. Facts that GGUF has no key for go to ``hotcold.ffn.*``."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.checkpoint import Array, Checkpoint, ConvertError, Rearrange, Settings
from hotcold.formats.files import shown
from hotcold.model.families import FAMILIES
from hotcold.model.rope import frequencies, llama3_factors


@dataclass(frozen=True)
class Rule:
    """A weight with its bias: HF's name, GGUF's name, and the shape in letters of :func:`dimensions`.

    ``{}`` in a name is the layer. ``heads`` is the letter that counts the rows' heads where rotary positions
    apply to them. ``bias`` and ``when`` say whether the bias exists, and the two: a bool, or the key of one.
    """

    source: str
    target: str
    shape: str
    heads: str = ""
    bias: bool | str = False
    when: bool | str = True


@dataclass(frozen=True)
class Layout:
    architecture: str  #: GGUF's
    activations: Mapping[str, str]  #: hidden_act -> ours
    rules: tuple[Rule, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: config.json's facts under Llama's keys, where the publishers chose others or left them to the class
    adapt: Callable[[Settings], Mapping[str, Any]] = lambda config: {}
    #: Norms scale by weight + 1 (Gemma up to 3, Nemotron): GGUF files hold the sum, and readers add nothing.
    norms_less_one: bool = False


@dataclass(frozen=True)
class Source:
    """A GGUF tensor, its shape in NumPy order, and the checkpoint's name for it."""

    name: str
    shape: tuple[int, ...]
    origin: str
    load: Callable[[], Array] = field(compare=False)  #: as :meth:`Checkpoint.load`, in GGUF's order


def _rules(name: str, **flags: bool | str) -> tuple[Rule, ...]:
    """Those of ``layouts.json``, where ``bias`` and ``when`` may also name one of ``flags``."""
    rows = json.loads(Path(__file__).with_name("layouts.json").read_bytes())[name]
    rules = (Rule(*row) for row in rows)
    return tuple(
        replace(rule, bias=flags.get(str(rule.bias), rule.bias), when=flags.get(str(rule.when), rule.when))
        for rule in rules
    )


def _falcon(config: Settings) -> dict[str, Any]:
    for key, needed in (("alibi", False), ("parallel_attn", True)):
        if config.flag(key, needed) is not needed:
            raise config.error(key, str(needed).lower())
    grouped, heads = config.flag("new_decoder_architecture", False), config.integer("num_attention_heads")
    shared = config.flag("multi_query", True) and not grouped
    two_norms = grouped and config.integer("num_ln_in_parallel_attn", 2) == 2
    return {
        "num_key_value_heads": 1 if shared else config.integer("num_kv_heads", heads),
        "intermediate_size": config.integer("ffn_hidden_size", 4 * config.integer("hidden_size")),
        "max_position_embeddings": config.integer("max_position_embeddings", 2048),
        "hidden_act": config.text("activation", "gelu"),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "one_norm": not two_norms,
        "two_norms": two_norms,
    }


_SILU = {"silu": "silu"}
#: GGUF's gelu is the tanh form; where a checkpoint means the exact one, conversion notes the difference.
_GELU = {"gelu": "gelu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}

_BIAS: dict[str, bool | str] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": False}
_LLAMA = _rules("llama", **_BIAS)
_JPLOSKI = {"tensor_data_layout": "jploski"}  # llama.cpp's name of how q, k and v follow one another

LAYOUTS = {
    # FATReLU (arXiv 2402.13516) is a ReLU whose threshold is hidden_act_param.
    "llama": Layout("llama", _SILU | {"relu": "relu", "fatrelu": "relu"}, _LLAMA),
    # Bamboo's code applies hidden_act to gate and up alike.
    "bamboo": Layout("bamboo", {"relu": "drelu"}, _LLAMA),
    "mistral": Layout("llama", _SILU | {"relu": "relu"}, _rules("llama", **dict.fromkeys(_BIAS, False))),
    "qwen2": Layout("qwen2", _SILU, _rules("llama", **_BIAS | {"qkv_bias": True, "o_bias": False})),
    "qwen3": Layout("qwen3", _SILU, _rules("llama", **_BIAS | {"qk_norm": True})),
    "falcon": Layout("falcon", _GELU, _rules("falcon"), _JPLOSKI, _falcon),
}

#: Tensors that hold nothing which config.json does not say.
_REDUNDANT = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attention\.masked_bias$")


def find_layout(config: Settings) -> tuple[Layout, Settings]:
    model_type = config.text("model_type")
    if model_type not in LAYOUTS:
        raise config.error("model_type", f"one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[model_type]
    implementation = f"{model_type.capitalize()}ForCausalLM"
    if config.values.get("architectures") not in (None, [implementation]):
        raise config.error("architectures", f"[{implementation!r}]")
    if "quantization_config" in config:
        raise ConvertError(f"{config.path} describes quantised weights: convert the original checkpoint")
    config = Settings(config.path, {**config.values, **layout.adapt(config)})
    own_head = not config.flag("tie_word_embeddings", False)
    return layout, Settings(config.path, {**config.values, "own_head": own_head})


def activation(config: Settings, layout: Layout) -> tuple[str, float]:
    """The FFN's activation, and the threshold that a gate must exceed."""
    hidden_act = config.text("hidden_act")
    if hidden_act not in layout.activations:
        raise config.error("hidden_act", f"one of {', '.join(layout.activations)}")
    threshold = config.number("hidden_act_param") if hidden_act == "fatrelu" else 0.0
    return layout.activations[hidden_act], threshold


def dimensions(config: Settings) -> dict[str, int]:
    """D model dim, H heads, G kv heads, d head_dim, Q, K, F rows of query, of key, of query, key and value, N
    neurons, V vocabulary, L layers. Raises :class:`ConvertError` where they do not fit together."""
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
        "D": dim,
        "H": heads,
        "G": kv_heads,
        "d": head_dim,
        "Q": heads * head_dim,
        "K": kv_heads * head_dim,
        "F": (heads + 2 * kv_heads) * head_dim,
        "N": config.integer("intermediate_size"),
        "V": config.integer("vocab_size"),
        "L": config.integer("num_hidden_layers"),
    }


def model_metadata(config: Settings, layout: Layout) -> dict[str, Any]:
    sizes = dimensions(config)
    rms = FAMILIES[layout.architecture].norm == "rms"
    eps = np.float32(config.number("rms_norm_eps" if rms else "layer_norm_epsilon"))
    metadata: dict[str, Any] = {
        **layout.metadata,
        "vocab_size": sizes["V"],
        "context_length": _context(config),
        "embedding_length": sizes["D"],
        "block_count": sizes["L"],
        "feed_forward_length": sizes["N"],
        "attention.head_count": sizes["H"],
        "attention.head_count_kv": sizes["G"],
        "attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon": eps,
        "rope.dimension_count": sizes["d"],
    }
    if "head_dim" in config:
        metadata["attention.key_length"] = metadata["attention.value_length"] = sizes["d"]
    theta, kind, scaling = _rope(config)
    metadata["rope.freq_base"] = np.float32(theta)
    if kind == "linear":
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = np.float32(scaling.number("factor"))
    return {f"{layout.architecture}.{key}": value for key, value in metadata.items()}


def _context(config: Settings) -> int:
    context = config.integer("max_position_embeddings")
    # Up to its window, attention with one is attention without.
    windowed = config.flag("use_sliding_window", True)
    return min(context, config.integer("sliding_window", context)) if windowed else context


def _rope(config: Settings) -> tuple[float, str, Settings]:
    """Base, kind of scaling, and its settings. Newer files say all of it in ``rope_parameters``."""
    parameters = config.section("rope_parameters")
    scaling = config.section("rope_scaling") if "rope_scaling" in config else parameters
    theta = config.number("rope_theta", parameters.number("rope_theta", 10000.0))
    key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(key, "default")
    if kind not in ("default", "linear", "llama3"):
        raise scaling.error(key, "one of default, linear, llama3")
    for settings in (config, parameters):
        if settings.values.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise settings.error("partial_rotary_factor", "1")
    return theta, kind, scaling


def rope_factors(config: Settings) -> Array | None:
    """``rope_freqs.weight`` ``[head_dim / 2]``, or None without Llama 3's scaling."""
    theta, kind, scaling = _rope(config)
    if kind != "llama3":
        return None
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not low < high:
        raise scaling.error("high_freq_factor", f"a number above low_freq_factor {low:g}")
    factor, original = scaling.number("factor"), scaling.number("original_max_position_embeddings")
    steps = frequencies(dimensions(config)["d"], theta)
    return llama3_factors(steps, factor, low, high, original).astype(np.float32)


def sources(checkpoint: Checkpoint, layout: Layout, down_layout: str) -> list[Source]:
    """Every GGUF tensor in file order. ConvertError where one is missing, of another shape or not known."""
    config = checkpoint.config
    sizes = dimensions(config)
    rules = [rule for rule in layout.rules if _holds(config, rule.when)]
    each = [rule for rule in rules if "{}" in rule.target]
    first, *last = (rule for rule in rules if rule not in each)
    found = []
    for layer, rule in [(0, first), *product(range(sizes["L"]), each), *product([0], last)]:
        rearrange = _rearrangement(rule, layout, sizes, down_layout)
        parts = {"weight": rule.shape} | ({"bias": rule.shape[0]} if _holds(config, rule.bias) else {})
        for part, letters in parts.items():
            origin = f"{rule.source.format(layer)}.{part}"
            shape = tuple(sizes[letter] for letter in letters)
            _check_shape(checkpoint, origin, shape)
            if rearrange is np.transpose:
                shape = shape[::-1]
            norm = part == "weight" and len(letters) == 1  # no other weight is a vector
            load = partial(checkpoint.load, origin, plus_one if norm and layout.norms_less_one else rearrange)
            found.append(Source(f"{rule.target.format(layer)}.{part}", shape, origin, load))
    _refuse_others(checkpoint, {source.origin for source in found})
    if (factors := rope_factors(config)) is not None:
        found.append(Source("rope_freqs.weight", factors.shape, "rope_scaling", lambda: factors))
    return found


def _holds(config: Settings, condition: bool | str) -> bool:
    return config.flag(condition, False) if isinstance(condition, str) else condition


def _rearrangement(rule: Rule, layout: Layout, sizes: Mapping[str, int], down_layout: str) -> Rearrange:
    if rule.shape == "FD":
        return partial(ungroup_heads, kv_heads=sizes["G"], head_dim=sizes["d"])
    if rule.heads and FAMILIES[layout.architecture].rope_interleaved:
        return partial(interleave_rotary, heads=sizes[rule.heads])
    if rule.shape == "DN" and down_layout == "by_neuron":
        return np.transpose
    return lambda values: values


def plus_one(values: Array) -> Array:
    """In float32, where halves would round it."""
    return values.astype(np.float32) + np.float32(1)


def _check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    if name not in checkpoint.files:
        raise ConvertError(f"{checkpoint.folder} has no tensor {name!r}: the checkpoint is not complete")
    if (shape := checkpoint.shape(name)) != expected:
        seen = f"tensor {name!r} has shape {list(shape)}: config.json implies {list(expected)}"
        raise ConvertError(f"{checkpoint.folder}: {seen}")


def _refuse_others(checkpoint: Checkpoint, used: set[str]) -> None:
    if not checkpoint.config.flag("own_head", True):
        used.add("lm_head.weight")
    others = [name for name in checkpoint.files if name not in used and not _REDUNDANT.search(name)]
    if others:
        seen = f"tensors that this layout does not have ({len(others)}, such as {shown(others[0])})"
        raise ConvertError(f"{checkpoint.folder} has {seen}: leaving them out would give another model")


def interleave_rotary(values: Array, heads: int) -> Array:
    """Rows of q or k from Hugging Face's half-split order to GGUF ``llama``'s interleaved one. Within each
    head row i of the first half and row i of the second, which turn together, become neighbours."""
    paired = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def ungroup_heads(values: Array, kv_heads: int, head_dim: int) -> Array:
    """Rows of a fused q, k, v from groups (heads of q, the k and the v they share) to q, then k, then v."""
    groups = values.reshape(kv_heads, -1, head_dim, *values.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
