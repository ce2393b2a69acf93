"""Adapts Gemma 3n's ``config.json``, and lists the tensors of its layers, as ``gemma4`` does."""

import math
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from hotcold.convert.adapting import Facts, check_nested, refuse_others, windows_of
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.gemma4 import GELU, NORMS, attention, layers_with_keys, unread_keys
from hotcold.convert.settings import Settings
from hotcold.convert.source import Source, loaded
from hotcold.convert.stateful import Sizes, down_source
from hotcold.convert.tensor_files import Array

#: Tensors of a layer that keep the checkpoint's shape: its name, GGUF's name, and sizes by letter. S streams,
#: T their square, R the rank of the branch parallel to attention, P values that a layer gets for each token.
_OWN = (
    ("altup.correct_output_scale", "altup_correct_scale", "D"),
    ("altup.correction_coefs.weight", "altup_correct_coef", "SS"),
    ("altup.prediction_coefs.weight", "altup_predict_coef", "TS"),
    ("altup.modality_router.weight", "altup_router", "SD"),
    ("altup.router_norm.weight", "altup_router_norm", "D"),
    ("laurel.linear_left.weight", "laurel_l", "RD"),
    ("laurel.linear_right.weight", "laurel_r", "DR"),
    ("laurel.post_laurel_norm.weight", "laurel_post_norm", "D"),
    ("per_layer_input_gate.weight", "inp_gate", "PD"),
    ("per_layer_projection.weight", "proj", "DP"),
    ("post_per_layer_input_norm.weight", "post_norm", "D"),
    ("mlp.gate_proj.weight", "ffn_gate", "ND"),
    ("mlp.up_proj.weight", "ffn_up", "ND"),
)


def gemma3n(text: Settings) -> Facts:
    check_nested(text)
    needed = {"attention_bias": False, "altup_correct_scale": True, "altup_active_idx": 0}
    refuse_others(text, **needed, hidden_activation=GELU)
    layers, vocab = text.integer("num_hidden_layers"), text.integer("vocab_size")
    windows = windows_of(text, [(i + 1) % 5 != 0 for i in range(layers)])
    with_keys = layers_with_keys(text, windows)
    rows = text.integer("vocab_size_per_layer_input")
    if rows > vocab:
        raise text.error("vocab_size_per_layer_input", f"at most vocab_size {vocab}")
    neurons = _neurons(text, layers)
    return {
        "local_head_dim": text.integer("head_dim"),
        "intermediate_size": max(neurons),
        "neurons": neurons,
        "kv_heads": [text.integer("num_key_value_heads")] * layers,
        "layers_with_keys": with_keys,
        "values_of_keys": [False] * layers,
        "layer_input": text.integer("hidden_size_per_layer_input"),
        "input_rows": rows,
        "cuts": _cuts(text, layers),
        "streams": text.integer("altup_num_inputs"),
        "laurel": text.integer("laurel_rank"),
        "hidden_act": GELU,
        "windows": windows,
        "unread": unread_keys(with_keys, layers),
    }


def _neurons(config: Settings, layers: int) -> list[int]:
    value = config.get("intermediate_size")
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or any(type(n) is not int or n < 1 for n in values):
        raise config.error("intermediate_size", f"an integer above 0, or {layers} of them")
    return list(values)


def _cuts(config: Settings, layers: int) -> list[float]:
    """The cut of each layer's gates, in standard deviations above their mean. config.json has the share of
    normally distributed gates below the cut."""
    key = "activation_sparsity_pattern"
    value: Any = config.get(key)
    if value is None:
        value = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else 0.0
    values = value if isinstance(value, list) else [value] * layers
    if len(values) < layers or not all(type(each) in (int, float) and 0 <= each < 1 for each in values):
        raise config.error(key, f"{layers} shares from 0 to 1")
    return [NormalDist().inv_cdf(each) if each else -math.inf for each in values[:layers]]


def gemma3n_keys(config: Settings) -> Facts:
    values = config.values
    local = config.section("rope_parameters").section("sliding_attention")
    keys: Facts = {
        "activation_sparsity_scale": np.array(values["cuts"], np.float32),
        "altup.active_idx": 0,
        "altup.num_inputs": values["streams"],
        "attention.shared_kv_layers": len(values["windows"]) - values["layers_with_keys"],
        "embedding_length_per_layer_input": values["layer_input"],
        "rope.freq_base_swa": np.float32(local.number("rope_theta", config.number("rope_local_base_freq"))),
    }
    if len({*values["neurons"]}) > 1:
        keys["feed_forward_length"] = np.array(values["neurons"], np.int32)
    # Readers take 30 where a file has none.
    keys["final_logit_softcapping"] = np.float32(config.number("final_logit_softcapping"))
    return keys


def layer_tensors(checkpoint: Checkpoint, layer: int, sizes: Sizes, down_layout: str) -> list[Source]:
    """A layer's tensors."""
    values, streams = checkpoint.config.values, checkpoint.config.values["streams"]
    dims = {**sizes, "S": streams, "T": streams * streams, "R": values["laurel"], "P": values["layer_input"]}
    dims["N"] = values["neurons"][layer]
    hf, blk = f"model.layers.{layer}.", f"blk.{layer}."
    names = [*_OWN, *((f"{origin}.weight", target, "D") for origin, target in NORMS.items())]
    sources = [
        loaded(checkpoint, f"{blk}{target}.weight", [hf + origin], tuple(dims[letter] for letter in letters))
        for origin, target, letters in names
    ]
    sources += attention(checkpoint, layer, sizes)
    down = f"{blk}ffn_down.weight", f"{hf}mlp.down_proj.weight"
    sources.append(down_source(checkpoint, *down, (dims["D"], dims["N"]), down_layout))
    return sources if layer else [*sources, *_of_no_layer(checkpoint, dims)]


def _of_no_layer(checkpoint: Checkpoint, sizes: Sizes) -> list[Source]:
    dim, whole, rows = sizes["D"], sizes["L"] * sizes["P"], checkpoint.config.values["input_rows"]
    sources = []
    for target, origin in (
        ("altup_proj", "altup_projections"),
        ("altup_unembd_proj", "altup_unembed_projections"),
    ):
        names = [f"model.{origin}.{i}.weight" for i in range(sizes["S"] - 1)]
        sources.append(loaded(checkpoint, f"{target}.weight", names, (dim, dim)))
    table = "per_layer_token_embd.weight", ["model.embed_tokens_per_layer.weight"], (rows, whole)
    longer = partial(_with_first_rows, rows=sizes["V"])
    sources.append(loaded(checkpoint, *table, longer, (sizes["V"], whole)))
    for target, origin, shape in (
        ("per_layer_model_proj", "per_layer_model_projection", (whole, dim)),
        ("per_layer_proj_norm", "per_layer_projection_norm", (sizes["P"],)),
    ):
        sources.append(loaded(checkpoint, f"{target}.weight", [f"model.{origin}.weight"], shape))
    return sources


def _with_first_rows(values: Array, rows: int) -> Array:
    """The table with ``rows`` rows: tokens beyond its end get its first row, as in the class."""
    added: Array = np.repeat(values[:1], rows - len(values), axis=0)
    return np.concatenate([values, added]) if len(added) else values
