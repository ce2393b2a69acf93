"""Folders that sentence-transformers wrote: the key of their pooling, and llama.cpp's vectors of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import DATA
from support.runner import Runner

from hotcold import LLM
from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend

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


TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


def module(path: str, kind: str) -> dict[str, Any]:
    return {"idx": 1, "name": path, "path": path, "type": f"sentence_transformers.models.{kind}"}


@pytest.mark.parametrize(
    ("modules", "noted"),
    [
        ([module("pool", "Pooling"), module("2_Normalize", "Normalize")], ""),
        ([module("pool", "Pooling"), module("1_Dense", "Dense")], "mean, 1_Dense"),
        ([module("pool", "Pooling"), module("1_Pooling", "Pooling")], "mean, 1_Pooling"),
        ([module("1_Splade", "SpladePooling")], "(1_Splade)"),
        ([], ""),
    ],
)
def test_the_list_of_modules_says_where_the_pooling_is(
    tmp_path: Path, modules: list[dict[str, Any]], noted: str
) -> None:
    checkpoint = folder_of(tmp_path, {"pooling_mode": "mean"})
    (checkpoint / "1_Pooling").rename(checkpoint / "pool")
    (checkpoint / "modules.json").write_text(json.dumps([TRANSFORMER, *modules]))
    notes = convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32")).notes
    assert len(notes) == bool(noted) and noted in "".join(notes)
    with open_gguf(tmp_path / "out.gguf") as file:
        named = modules[:1] == [module("pool", "Pooling")]
        assert file.metadata.get("qwen3.pooling_type") == (1 if named and not noted else None)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "is not a list of modules"),
        (["x"], "is not a list of modules"),
        ([module("../other", "Pooling")], "path is '../other': a folder next to it is needed"),
        ([module("/tmp", "Pooling")], "path is '/tmp': a folder next to it is needed"),
        ([module("a\0b", "Dense")], "a folder next to it is needed"),
        ([module("", "Pooling")], "path is '': a folder next to it is needed"),
        ([module("pool", "Pooling") | {"type": 3}], "type is 3: a string is needed"),
    ],
)
def test_a_list_of_modules_that_is_none(tmp_path: Path, modules: Any, message: str) -> None:
    checkpoint = folder_of(tmp_path, {"pooling_mode": "mean"})
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConvertError, match=message):
        convert(checkpoint, tmp_path / "out.gguf")


def test_the_rows_of_a_base_model_are_those_of_transformers(tmp_path: Path) -> None:
    """The golden's head is its embedding, which readers take as the head of a file without one."""
    checkpoint = folder_of(tmp_path, {"pooling_mode": "lasttoken"})
    change_config(checkpoint, architectures=["Qwen3Model"], tie_word_embeddings=False)
    convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32"))
    runner = Runner(tmp_path / "out.gguf", open_backend("reference"), cache_type="f32")
    with np.load(DATA / "tiny-qwen3" / "golden.npz", allow_pickle=False) as arrays:
        logits = runner.run(arrays["prompt"])
        np.testing.assert_allclose(logits, arrays["prompt_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-mistral", "tiny-gemma"])
def test_a_base_model_has_no_head(name: str, prefix: str, tmp_path: Path) -> None:
    """As fine-tunes of embedding models are saved, whose config.json may say that they are not tied."""
    checkpoint = copy_checkpoint(tmp_path, name)
    tensors = {prefix + key.removeprefix("model."): each for key, each in tensors_of(checkpoint).items()}
    kept = {key: each for key, each in tensors.items() if "lm_head" not in key}
    write_safetensors(checkpoint / "model.safetensors", kept)
    (implementation,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    base = implementation.replace("ForCausalLM", "Model")
    for tied, noted in ((True, 0), (False, 1)):
        change_config(checkpoint, architectures=[base], tie_word_embeddings=tied)
        notes = convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32", force=True)).notes
        assert len(notes) == noted and all("the model has no head" in note for note in notes)
        with open_gguf(tmp_path / "out.gguf") as file:
            assert "output.weight" not in file.tensors and "blk.1.attn_q.weight" in file.tensors
    change_config(checkpoint, architectures=[implementation])
    if prefix:  # of the whole model, whose head got lost
        with pytest.raises(ConvertError, match=r"no tensor 'lm_head\.weight'"):
            convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32", force=True))
    else:  # as Qwen3-Embedding-8B is published
        assert convert(checkpoint, tmp_path / "out.gguf", ConvertOptions("F32", force=True)).notes == notes
    change_config(checkpoint, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(ConvertError, match=f"architectures is .*: \\['{implementation}'\\] is needed"):
        convert(checkpoint, tmp_path / "out.gguf")
