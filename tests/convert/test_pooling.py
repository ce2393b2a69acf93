"""Folders that sentence-transformers wrote: the key of their pooling, and llama.cpp's vectors of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors

from hotcold import LLM
from hotcold.convert import ConvertOptions, convert
from hotcold.formats.gguf import open_gguf

TEXTS = ["one", "two words of it", "The same is said once more, and then once more.", "ä" * 40]
OLD = {f"pooling_mode_{mode}": False for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}


def folder_of(tmp_path: Path, pooling: dict[str, Any]) -> Path:
    """A checkpoint as Qwen3-Embedding is published: names without a prefix, and no head."""
    checkpoint = copy_checkpoint(tmp_path, "tiny-qwen3")
    change_config(checkpoint, tie_word_embeddings=True)
    tensors = {name.removeprefix("model."): values for name, values in tensors_of(checkpoint).items()}
    tensors.pop("lm_head.weight", None)
    write_safetensors(checkpoint / "model.safetensors", tensors)
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return checkpoint


def converted(tmp_path: Path, pooling: dict[str, Any]) -> tuple[Path, list[str]]:
    path = tmp_path / "out.gguf"
    options = ConvertOptions("F32", dense=True, name="tiny")
    return path, convert(folder_of(tmp_path, pooling), path, options).notes


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (OLD | {"word_embedding_dimension": 40, "pooling_mode_lasttoken": True, "include_prompt": True}, 3),
        (OLD | {"pooling_mode_mean_tokens": True}, 1),
        (OLD | {"pooling_mode_cls_token": True}, 2),
        ({"embedding_dimension": 40, "pooling_mode": "lasttoken"}, 3),
        ({"pooling_mode": "mean"}, 1),
        ({}, None),
        (OLD, None),
    ],
)
def test_the_key_of_a_pooling(tmp_path: Path, pooling: dict[str, Any], kind: int | None) -> None:
    path, notes = converted(tmp_path, pooling)
    with open_gguf(path) as file:
        assert file.metadata.get("qwen3.pooling_type") == kind
        assert "blk.0.attn_q.weight" in file.tensors and "output.weight" not in file.tensors
    assert notes == []


@pytest.mark.parametrize(
    "pooling",
    [
        OLD | {"pooling_mode_max_tokens": True},
        OLD | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},  # both, one after the other
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode": 5},
    ],
)
def test_a_pooling_without_a_key(tmp_path: Path, pooling: dict[str, Any]) -> None:
    path, notes = converted(tmp_path, pooling)
    with open_gguf(path) as file:
        assert "qwen3.pooling_type" not in file.metadata
    assert len(notes) == 1 and "has no key in GGUF" in notes[0]


def test_a_matrix_after_the_pooling(tmp_path: Path) -> None:
    checkpoint = folder_of(tmp_path, {"pooling_mode": "mean"})
    (checkpoint / "2_Dense").mkdir()
    (note,) = convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32")).notes
    assert "mean, 2_Dense" in note


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_vectors_are_those_of_llama_cpp(tmp_path: Path, mode: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path, _ = converted(tmp_path, {"pooling_mode": mode})
    # Its number of sequences stays one: embed() gives each text a context of its own.
    theirs = llama_cpp.Llama(str(path), embedding=True, n_ctx=128, n_threads=1, verbose=False)
    try:
        expected = np.array([theirs.embed(text, normalize=True) for text in TEXTS])
    finally:
        theirs.close()
    with LLM(path) as llm:
        found = llm.embed(TEXTS)
    assert found.shape == expected.shape == (len(TEXTS), 32)
    assert np.abs(found - expected).max() < 2e-3  # both caches are F16
    apart = np.abs(expected[:, None] - expected).max(-1)[~np.eye(len(TEXTS), dtype=bool)]
    assert apart.min() > 0.05
