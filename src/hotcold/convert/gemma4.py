"""Adapts Gemma 4's ``config.json``, and lists the tensors of its layers, whose shapes differ by kind.

As in ``adapting``, a function for Llama's keys returns the changed keys, and one for GGUF's keys returns the
keys that only this family has. ``head_dim`` belongs to layers with full attention."""

from collections.abc import Sequence

import numpy as np

from hotcold.convert.adapting import Facts, check_nested, expert_keys, refuse_others, windows_of
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import ConvertError, Settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.stateful import Sizes, down_source

GELU = "gelu_pytorch_tanh"
PER_LAYER = "per_layer_config"  #: keys of single layers; these are allowed:
_BY_LAYER = ("head_dim", "num_key_value_heads")

#: Norms of each layer, and those of layers with experts.
NORMS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT_NORMS = {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip


def gemma4(text: Settings) -> Facts:
    check_nested(text)
    refuse_others(text, attention_bias=False)
    if text.get("use_bidirectional_attention") == "all":
        raise text.error("use_bidirectional_attention", "null or 'vision'")
    layers, vocab = text.integer("num_hidden_layers"), text.integer("vocab_size")
    windows = windows_of(text, [(i + 1) % 6 != 0 for i in range(layers)])
    if not windows or windows[-1]:
        raise text.error("layer_types", "full_attention in the last layer")
    lengths, kv_heads = _heads(text, windows)
    alike = text.flag("attention_k_eq_v", False)
    width, wide = count(text, "hidden_size_per_layer_input"), text.flag("use_double_wide_mlp", False)
    text.skip("vocab_size_per_layer_input")  # without effect where that width is 0
    if width and text.integer("vocab_size_per_layer_input", vocab) != vocab:
        raise text.error("vocab_size_per_layer_input", f"vocab_size {vocab}")
    if width and text.text("hidden_activation") != GELU:
        # The class has one activation for the FFN and for layer inputs, GGUF only a key for the FFN's.
        raise text.error("hidden_activation", f"{GELU} in a model of hidden_size_per_layer_input {width}")
    with_keys = layers_with_keys(text, windows)
    facts: Facts = {
        "head_dim": lengths[-1],
        "local_head_dim": lengths[windows.index(True)] if any(windows) else text.integer("head_dim"),
        "kv_heads": kv_heads,
        "layers_with_keys": with_keys,
        "values_of_keys": [alike and not window for window in windows],
        "layer_input": width,
        "wide": [i >= with_keys and wide for i in range(layers)],
        "hidden_act": text.text("hidden_activation"),
        "windows": windows,
        "unread": unread_keys(with_keys, layers),
        PER_LAYER: None,
    }
    if text.flag("enable_moe_block", False):
        facts |= {
            "num_local_experts": text.integer("num_experts"),
            "num_experts_per_tok": text.integer("top_k_experts"),
            "moe_intermediate_size": text.integer("moe_intermediate_size"),
        }
    return facts


def _heads(text: Settings, windows: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Returns by layer the length of a head and the number of heads of keys.

    Files of transformers 5.23 state both in ``per_layer_config``, and published ones in ``global_head_dim``
    and ``num_global_key_value_heads``. ConvertError: lengths differ within one kind of layers."""
    length, kv_heads = text.integer("head_dim"), text.integer("num_key_value_heads")
    if PER_LAYER in text:
        layers = _layers_of(text, len(windows))
        lengths = [layer.integer("head_dim", length) for layer in layers]
        heads = [layer.integer("num_key_value_heads", kv_heads) for layer in layers]
        for kind in (True, False):
            if len({each for each, window in zip(lengths, windows, strict=True) if window is kind}) > 1:
                raise text.error(PER_LAYER, "one head_dim for each kind of layer_types")
        return lengths, heads
    alike = text.flag("attention_k_eq_v", False)
    full = text.integer("global_head_dim", 512)
    full_heads = text.integer("num_global_key_value_heads", kv_heads) if alike else kv_heads
    return [length if each else full for each in windows], [
        kv_heads if each else full_heads for each in windows
    ]


def _layers_of(text: Settings, layers: int) -> list[Settings]:
    """Returns the keys that each layer sets for itself; numbers of layers may begin with zeros."""
    stated = text.section(PER_LAYER)
    numbers = {str(i).zfill(digits): i for i in range(layers) for digits in range(1, 6)}
    settings = [Settings(text.path, {}) for _ in range(layers)]
    for name in stated.values:
        if name not in numbers or not stated.section(name).values.keys() <= {*_BY_LAYER}:
            needed = f"an object with numbers of layers below {layers}, each with {' or '.join(_BY_LAYER)},"
            raise text.error(PER_LAYER, needed)
        settings[numbers[name]] = stated.section(name)
    return settings


def layers_with_keys(text: Settings, windows: Sequence[bool]) -> int:
    """Returns the number of layers that compute keys and values. Later layers read the keys of the last
    such layer of their kind. ConvertError: there is none."""
    with_keys = len(windows) - count(text, "num_kv_shared_layers")
    if with_keys < 1 or {*windows} - {*windows[:with_keys]}:
        raise text.error("num_kv_shared_layers", "fewer than have a layer of each kind before them")
    return with_keys


def unread_keys(with_keys: int, layers: int) -> list[str]:
    """Returns the prefixes of stored key and value weights that no layer uses."""
    return [
        f"model.{part}layers.{i}.self_attn.{name}"
        for part in ("", "language_model.")
        for i in range(with_keys, layers)
        for name in ("k_", "v_")
    ]


def count(config: Settings, key: str) -> int:
    """A whole number, which may be 0."""
    value = config.get(key)
    if type(value) is not int or not 0 <= value <= 1 << 16:
        raise config.error(key, "an integer from 0")
    return value


def gemma4_keys(config: Settings) -> Facts:
    values, neurons = config.values, config.integer("intermediate_size")
    local = config.section("rope_parameters").section("sliding_attention")
    keys: Facts = {
        "attention.head_count_kv": np.array(values["kv_heads"], np.int32),
        "attention.key_length_swa": values["local_head_dim"],
        "attention.value_length_swa": values["local_head_dim"],
        "attention.shared_kv_layers": len(values["windows"]) - values["layers_with_keys"],
        "embedding_length_per_layer_input": values["layer_input"],
        "rope.dimension_count_swa": values["local_head_dim"],
        "rope.freq_base_swa": np.float32(local.number("rope_theta")),
    }
    if any(values["wide"]):
        counts = [neurons * (1 + wide) for wide in values["wide"]]
        keys["feed_forward_length"] = np.array(counts, np.int32)
    if "final_logit_softcapping" in config:
        keys["final_logit_softcapping"] = np.float32(config.number("final_logit_softcapping"))
    return keys | (expert_keys(config) if "num_local_experts" in config else {})


def layer_tensors(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """A layer's tensors."""
    values, dim = checkpoint.config.values, sizes["D"]
    hf, blk = f"model.layers.{layer}.", f"blk.{layer}."
    n = sizes["N"] * (1 + values["wide"][layer])

    def one(target: str, origin: str, *shape: int) -> Source:
        return loaded(checkpoint, blk + target, [hf + origin], shape)

    tensors = [one(f"{target}.weight", f"{origin}.weight", dim) for origin, target in NORMS.items()]
    tensors += attention(checkpoint, layer, sizes)
    tensors += [one(f"ffn_{part}.weight", f"mlp.{part}_proj.weight", n, dim) for part in ("gate", "up")]
    down = f"{blk}ffn_down.weight", f"{hf}mlp.down_proj.weight"
    tensors.append(down_source(checkpoint, *down, (dim, n), down_layout))
    if f"{hf}layer_scalar" in checkpoint.files:
        tensors.append(one("layer_output_scale.weight", "layer_scalar", 1))
    if width := values["layer_input"]:
        tensors.append(one("inp_gate.weight", "per_layer_input_gate.weight", width, dim))
        tensors.append(one("proj.weight", "per_layer_projection.weight", dim, width))
        tensors.append(one("post_norm.weight", "post_per_layer_input_norm.weight", dim))
        if not layer:
            tensors += _tables(checkpoint, sizes, width)
    if "E" in sizes:
        e, m = sizes["E"], sizes["M"]
        tensors += [
            one(f"{target}.weight", f"{origin}.weight", dim) for origin, target in _EXPERT_NORMS.items()
        ]
        tensors.append(one("ffn_gate_inp.weight", "router.proj.weight", e, dim))
        tensors.append(one("ffn_gate_inp.scale", "router.scale", dim))
        tensors.append(one("ffn_gate_up_exps.weight", "experts.gate_up_proj", e, 2 * m, dim))
        down = f"{blk}ffn_down_exps.weight", f"{hf}experts.down_proj"
        tensors.append(down_source(checkpoint, *down, (e, dim, m), down_layout))
        tensors.append(one("ffn_down_exps.scale", "router.per_expert_scale", e))
    return tensors


def attention(checkpoint: Checkpoint, layer: int, sizes: Sizes) -> list[Source]:
    """The tensors of a layer's attention."""
    values, dim = checkpoint.config.values, sizes["D"]
    length = values["local_head_dim"] if values["windows"][layer] else sizes["d"]
    if length % 2:
        raise ConvertError(f"{checkpoint.folder} has heads of {length}: an even number is needed")
    q, kv = sizes["H"] * length, values["kv_heads"][layer] * length
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "q_proj": ("attn_q", (q, dim)),
        "o_proj": ("attn_output", (dim, q)),
        "q_norm": ("attn_q_norm", (length,)),
    }
    if layer < values["layers_with_keys"]:
        shapes |= {"k_proj": ("attn_k", (kv, dim)), "k_norm": ("attn_k_norm", (length,))}
        if not values["values_of_keys"][layer]:
            shapes["v_proj"] = "attn_v", (kv, dim)
    hf, blk = f"model.layers.{layer}.self_attn.", f"blk.{layer}."
    return [
        loaded(checkpoint, f"{blk}{target}.weight", [f"{hf}{origin}.weight"], shape)
        for origin, (target, shape) in shapes.items()
    ]


def _tables(checkpoint: Checkpoint, sizes: Sizes, width: int) -> list[Source]:
    """The tensors that give all layers their values of each token."""
    whole, dim = sizes["L"] * width, sizes["D"]
    return [
        loaded(checkpoint, f"{target}.weight", [f"model.{origin}.weight"], shape)
        for target, origin, shape in (
            ("per_layer_token_embd", "embed_tokens_per_layer", (sizes["V"], whole)),
            ("per_layer_model_proj", "per_layer_model_projection", (whole, dim)),
            ("per_layer_proj_norm", "per_layer_projection_norm", (width,)),
        )
    ]
