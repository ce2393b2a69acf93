"""Gemma 3n's checkpoints: names, keys, tables with fewer rows, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import golden

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf


def test_names_and_keys(tmp_path: Path) -> None:
    with open_gguf(golden("tiny-gemma3n", tmp_path).path) as file:
        known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA3N]}
        plain = {re.sub(r"^blk\.\d+", "blk.{bid}", each.removesuffix(".weight")) for each in file.tensors}
        assert plain <= known
        keys = {key.removeprefix("gemma3n."): value for key, value in file.metadata.items()}
    facts = {
        "attention.sliding_window": 8, "attention.shared_kv_layers": 2, "altup.num_inputs": 4,
        "altup.active_idx": 0, "embedding_length_per_layer_input": 8, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4, "final_logit_softcapping": 3.0, "feed_forward_length": 96,
    }  # fmt: skip
    assert {key: keys[key] for key in facts} == facts
    cuts = [1.6448536, 0.8416212, *[-np.inf] * 4]
    np.testing.assert_allclose(keys["activation_sparsity_scale"], cuts, rtol=1e-6)


def test_tokens_beyond_a_table_have_its_first_row(tmp_path: Path) -> None:
    """As in the class; a model of images and sound has such tokens."""
    folder = copy_checkpoint(tmp_path, "tiny-gemma3n")
    tensors = {
        name.replace("model.", "model.language_model.", 1): each for name, each in tensors_of(folder).items()
    }
    table = tensors["model.language_model.embed_tokens_per_layer.weight"]
    tensors["model.language_model.embed_tokens_per_layer.weight"] = table[:280]
    more = {"model.audio_tower.x.weight": np.zeros((2, 2), "<f2")}
    write_safetensors(folder / "model.safetensors", tensors | more)
    change_config(folder, vocab_size_per_layer_input=280)
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F32"))
    with open_gguf(tmp_path / "out.gguf") as file:
        rows = file.load("per_layer_token_embd.weight").dequantise()
    assert rows.shape == (288, 48)
    np.testing.assert_array_equal(rows[280:], np.broadcast_to(rows[0], (8, 48)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx is 1: 0 is needed"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False: true is needed"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': 'gelu_pytorch_tanh'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: fewer than have a layer of each kind"),
        ({"vocab_size_per_layer_input": 300}, "is 300: at most vocab_size 288"),
        ({"activation_sparsity_pattern": 1.5}, r"is 1\.5: 6 shares from 0 to 1"),
        ({"intermediate_size": [96]}, r"is \[96\]: an integer above 0, or 6 of them"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is missing: a finite number above 0"),
    ],
)
def test_what_gguf_cannot_express(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-gemma3n")
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")
