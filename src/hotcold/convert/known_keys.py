"""Accounts for the keys of config.json: defaults of the publishers' classes, other names of keys, and keys
that change no result."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotcold.convert.settings import Settings
from hotcold.values import printable

DEFAULTS = Path(__file__).with_name("class_defaults.json")  #: written by tools/class_defaults.py

#: Keys that change no result: about files, training, generation and how a class computes. The last two lines
#: are keys of rotations, which are read if the kind of rotation has them.
_OTHERS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path _name_or_path
    add_cross_attention architectures attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens cache_implementation chunk_size chunk_size_feed_forward dense_hidden_act dropout
    dtype embd_pdrop ep_size expand experts_per_token finetuning_task id2label init_method init_std
    initial_context_length initializer_range is_decoder is_encoder_decoder label2id layerdrop mamba_chunk_size
    mamba_expand mamba_ssm_cache_dtype model_type mtp_layers_block_type num_logits_to_keep num_mtp_layers
    num_nextn_predict_layers output_attentions output_hidden_states output_router_logits pretraining_tp
    problem_type qk_head_dim rescale_prenorm_residual resid_pdrop residual_in_fp32 return_dict
    router_jitter_noise seq_aux task_specific_params time_step_floor time_step_max time_step_min
    time_step_rank tokenizer_class torch_dtype torchscript transformers_version unsloth_fixed unsloth_version
    use_cache use_mamba_kernels
    attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor
    mrope_interleaved mscale mscale_all_dim original_max_position_embeddings short_factor truncate type
"""
_WITHOUT_EFFECT = re.compile("|".join([r".*_(token_id|dropout|loss_coef|config)", *_OTHERS.split()]))
_LISTED = 8  #: most names in a note
_TIED = "tie_word_embeddings"

#: Rows by model_type. The row of a model with other parts names its text model's row in ``text``.
_ROWS: dict[str, Any] = json.loads(DEFAULTS.read_bytes()) if DEFAULTS.exists() else {}


def complete(config: Settings) -> Settings:
    """The settings of a checkpoint's text model; a key that config.json lacks has the class's default.

    A model with other parts has the text model's keys in ``text_config``. A class that is not in transformers
    has no defaults here. The head is tied if either part says so, or the outer class implies it."""
    stated, defaults = _text_model(config)
    tied: dict[str, Any] = {}
    if _TIED in config or stated.get(_TIED) is not None or _TIED in defaults:
        whole = config.flag(_TIED, defaults.get(_TIED, False))
        tied = {_TIED: whole or Settings(config.path, stated).flag(_TIED, False)}
    return config.having({**defaults, **stated, **tied, "model_type": config.text("model_type")})


def unread_keys(config: Settings) -> list[str]:
    """A note on the text model's keys that may change results and were not read."""
    names = replace(config, values=_text_model(config)[0]).unread()
    unread = sorted({printable(name, 80) for name in names if has_effect(name.rpartition(".")[-1])})
    if not unread:
        return []
    listed = ", ".join(unread[:_LISTED]) + ", ..." * (len(unread) > _LISTED)
    return [
        f"config.json has keys that are not read: {listed}; if the model computes with them, results differ"
    ]


def assumed_sizes(config: Settings) -> str:
    """The end of a message about a tensor of another shape: the sizes that config.json lacks."""
    stated, defaults = _text_model(config)
    sizes = [
        key for key, value in defaults.items() if type(value) is int and value > 1 and key in config.read
    ]
    missing = ", ".join(key for key in sizes if key not in stated)
    return f"; config.json lacks {missing}, for which the defaults of transformers count" if missing else ""


def has_effect(key: str) -> bool:
    """True if a key may change results."""
    return not _WITHOUT_EFFECT.fullmatch(key)


def _text_model(config: Settings) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The text model's keys in config.json, under their usual names, and its class's defaults."""
    text = config.section("text_config") if "text_config" in config else config
    whole = _ROWS.get(config.text("model_type"), {})
    row = _ROWS.get(text.text("model_type", ""), whole)
    row = _ROWS.get(row.get("text"), row)
    names = row.get("names", {})
    stated = {names.get(key, key): value for key, value in text.values.items()}
    return stated, {**row.get("values", {}), **({_TIED: whole[_TIED]} if "text" in whole else {})}
