"""Finds the draft blocks of a checkpoint (multi-token prediction), which follow the last layer.

They get the names of DeepSeek and GLM: ``model.layers.N.``, with N from the number of layers on. GGUF's names
are llama.cpp's: ``nextn``. Nemotron 3's draft block is two layers of the checkpoint, attention and experts;
here they become one layer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import Settings

#: Qwen's prefix, which its draft block has instead of ``model.``.
_BESIDE = "mtp."
_QWEN = {
    "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}  # fmt: skip

#: Names in Nemotron 3's layers ``backbone.layers.N.``, and the names that replace them.
_NEMOTRON = {
    "mtp.layers.0.enorm.": "model.layers.{}.enorm.", "mtp.layers.0.hnorm.": "model.layers.{}.hnorm.",
    "mtp.layers.0.eh_proj.": "model.layers.{}.eh_proj.",
    "mtp.layers.1.norm.": "backbone.layers.{}.post_attention_layernorm.",
    "mtp.layers.1.final_layernorm.": "model.layers.{}.shared_head.norm.",
    "mtp.layers.0.": "backbone.layers.{}.", "mtp.layers.1.": "backbone.layers.{}.",
}  # fmt: skip

#: Lists with one truth value for each layer, and the value of a draft block.
_KINDS = {"attention_layers": True, "state_layers": False, "dense_layers": False, "expert_layers": True}


def numbered(checkpoint: Checkpoint, layers: int) -> tuple[Checkpoint, int]:
    """The checkpoint with its draft blocks named as layers, and the number of these blocks."""
    if "mtp.layers.0.eh_proj.weight" in checkpoint.files:
        return checkpoint.renamed({old: new.format(layers) for old, new in _NEMOTRON.items()}, ()), 1
    prefixes = {old: f"model.layers.{layers}.{new}" for old, new in _QWEN.items()}
    for name in checkpoint.files:
        if match := re.match(r"mtp\.layers\.(\d{1,4})\.", name):
            prefixes[match[0]] = f"model.layers.{layers + int(match[1])}."
    checkpoint = checkpoint.renamed(prefixes, ())
    count = 0
    while f"model.layers.{layers + count}.eh_proj.weight" in checkpoint.files:
        count += 1
    return checkpoint, count


def prefixes_of(layers: int, count: int) -> tuple[str, ...]:
    """The prefixes of the names of ``count`` blocks. For 0 blocks they are the prefixes of one."""
    joined = (f"backbone.layers.{layers + i}." for i in range(count))
    return (_BESIDE, *(f"model.layers.{layers + i}." for i in range(max(count, 1))), *joined)


def with_blocks(config: Settings, count: int) -> Settings:
    """The facts with ``count`` blocks as further layers."""
    lists = {key: [*config.values[key], *[each] * count] for key, each in _KINDS.items() if key in config}
    return replace(config, values={**config.values, **lists})


def shared(checkpoint: Checkpoint, name: str) -> bool:
    """True if a block's embedding or head has the bytes of the model's, so that the file needs no copy."""
    embeds = name.endswith(".embed_tokens.weight") or not checkpoint.config.flag("own_head", True)
    model = "model.embed_tokens.weight" if embeds else "lm_head.weight"
    return model in checkpoint.files and checkpoint.same(name, model)


def block_keys(keys: dict[str, Any], architecture: str, count: int) -> dict[str, Any]:
    """A model's keys in a file with ``count`` blocks."""
    if not count:
        return keys
    blocks, states = f"{architecture}.block_count", f"{architecture}.attention.recurrent_layers"
    extended: dict[str, Any] = {blocks: keys[blocks] + count, f"{architecture}.nextn_predict_layers": count}
    if states in keys:
        extended[states] = [*keys[states], *[False] * count]
    for key in (f"{architecture}.{name}" for name in ("attention.head_count_kv", "feed_forward_length")):
        if isinstance(by_layer := keys.get(key), list):  # a block has attention and an FFN
            extended[key] = [*by_layer, *[max(by_layer)] * count]
    return {**keys, **extended}


def count_blocks(names: Sequence[str]) -> int:
    """The number of draft blocks in a file."""
    return sum(name.endswith(".nextn.eh_proj.weight") for name in names)
