"""Checkpoints of models that have other parts with a text model, made of golden ones of the text model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.checkpoints import copy_checkpoint, tensors_of, write_safetensors

_VISION: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "image_size": 4, "patch_size": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 24,
    "num_position_embeddings": 4, "patch_size": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Wrapper:
    golden: str  #: folder of the text model's checkpoint
    model_type: str
    implementation: str
    prefix: str  #: published names have it in place of ``model.``
    head: str  #: the published name of the head
    vision: dict[str, Any]


_GEMMA4 = {
    "model_type": "gemma4", "implementation": "Gemma4ForConditionalGeneration",
    "prefix": "model.language_model.", "head": "lm_head.weight",
    "vision": {**_VISION, "model_type": "gemma4_vision", "num_key_value_heads": 1, "head_dim": 8,
               "position_embedding_size": 16},
}  # fmt: skip
_MISTRAL3 = {
    "model_type": "mistral3", "implementation": "Mistral3ForConditionalGeneration",
    "prefix": "language_model.model.", "head": "language_model.lm_head.weight",
    "vision": {**_VISION, "model_type": "pixtral", "head_dim": 8},
}  # fmt: skip

WRAPPERS = {
    "wrapped-gemma3": Wrapper(
        "tiny-gemma3", "gemma3", "Gemma3ForConditionalGeneration", "language_model.model.",
        "language_model.lm_head.weight", {**_VISION, "model_type": "siglip_vision_model"},
    ),
    "wrapped-gemma4-31b": Wrapper("tiny-gemma4", **_GEMMA4),
    "wrapped-gemma4-26b": Wrapper("tiny-gemma4-moe", **_GEMMA4),
    "wrapped-mistral-small": Wrapper("tiny-mistral", **_MISTRAL3),
    "wrapped-ministral": Wrapper("tiny-mistral3", **_MISTRAL3),
    "wrapped-qwen35": Wrapper(
        "tiny-qwen35", "qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.",
        "lm_head.weight", {**_QWEN, "model_type": "qwen3_5"},
    ),
    "wrapped-qwen35moe": Wrapper(
        "tiny-qwen35moe", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model.",
        "lm_head.weight", {**_QWEN, "model_type": "qwen3_5_moe"},
    ),
}  # fmt: skip


def make_wrapper(parent: Path, name: str) -> Path:
    """Makes the folder of one of :data:`WRAPPERS`, as it is published but without tensors of images."""
    wrapper = WRAPPERS[name]
    folder = copy_checkpoint(parent, wrapper.golden).rename(parent / name)
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = {
        "architectures": [wrapper.implementation], "model_type": wrapper.model_type, **tied,
        "text_config": text, "vision_config": wrapper.vision,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {
        wrapper.head if key == "lm_head.weight" else key.replace("model.", wrapper.prefix, 1): values
        for key, values in tensors_of(folder).items()
    }
    write_safetensors(folder / "model.safetensors", arrays)
    return folder
