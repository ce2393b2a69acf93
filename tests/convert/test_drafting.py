"""Blocks of checkpoints that guess tokens: kept under llama.cpp's names, or left out with a note.

A block is a copy of one of the model's layers, so its tensors must become what those of that layer become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import copy_checkpoint, tensors_of, write_safetensors
from support.runner import Runner

from hotcold.commands import cli
from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.model.draft_block import with_draft

#: The layer that the block is like, and whether it has names of Qwen.
FAMILIES = {
    "tiny-qwen35": (3, True),
    "tiny-qwen35moe": (3, True),
    "tiny-qwen3next": (3, True),
    "tiny-glm4moe": (2, False),
    "tiny-deepseek3": (2, False),
    "tiny-glm4-flash": (1, False),
    "tiny-glm-dsa": (2, False),
}
NEXTN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm"}  # fmt: skip


def with_block(folder: Path, source: int, qwen: bool, **more: Any) -> dict[str, np.ndarray]:
    """Adds a block to a checkpoint; returns all that it has now, by the name of a layer."""
    random, stored = np.random.default_rng(3), tensors_of(folder)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    at, dim = f"model.layers.{layers}.", stored["model.norm.weight"].size
    block = {
        name.replace(f"model.layers.{source}.", at): values
        for name, values in stored.items()
        if name.startswith(f"model.layers.{source}.")
    }
    shapes = {"eh_proj": (dim, 2 * dim), "enorm": (dim,), "hnorm": (dim,), "shared_head.norm": (dim,)}
    for name, shape in shapes.items():
        block[f"{at}{name}.weight"] = random.standard_normal(shape).astype(np.float32)
    block |= {at + name: values for name, values in more.items()}
    named = block
    if qwen:
        own = {f"{at}{ours}.": f"mtp.{theirs}." for ours, theirs in QWEN.items()}
        named = {}
        for name, values in block.items():
            prefix = next((prefix for prefix in own if name.startswith(prefix)), at)
            named[own.get(prefix, "mtp.layers.0.") + name.removeprefix(prefix)] = values
    write_safetensors(folder / "model.safetensors", stored | named)
    return stored | block


def converted(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    out = folder.parent / "out.gguf"
    notes = convert(folder, out, ConvertOptions(**{"type": "F32", "force": True} | options)).notes
    with open_gguf(out) as file:
        return dict(file.metadata), {name: file.load(name).dequantise() for name in file.tensors}, notes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_is_kept(name: str, tmp_path: Path) -> None:
    folder, (source, qwen) = copy_checkpoint(tmp_path, name), FAMILIES[name]
    before, plain, _ = converted(folder)
    stored = with_block(folder, source, qwen)
    metadata, tensors, notes = converted(folder)
    arch = metadata["general.architecture"]
    layers = before[f"{arch}.block_count"]
    assert metadata[f"{arch}.block_count"] == layers + 1
    assert metadata[f"{arch}.nextn_predict_layers"] == 1
    assert any("draft block" in note and "`no_draft`" in note for note in notes)
    expected = dict(plain)
    for each, values in plain.items():
        if each.startswith(f"blk.{source}."):
            expected[each.replace(f"blk.{source}.", f"blk.{layers}.")] = values
    for origin, target in NEXTN.items():
        values = stored[f"model.layers.{layers}.{origin}.weight"]
        # Norms of Qwen hold the weight less one.
        expected[f"blk.{layers}.nextn.{target}.weight"] = values + (qwen and values.ndim == 1)
    assert tensors.keys() == expected.keys()
    for each, values in expected.items():
        np.testing.assert_array_equal(tensors[each], values)
    known = gguf.MODEL_TENSORS[{text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}[arch]]
    if gguf.MODEL_TENSOR.NEXTN_EH_PROJ in known:
        names = {gguf.TENSOR_NAMES[each].replace("{bid}", str(layers)) for each in known}
        of_block = (each for each in tensors if each.startswith(f"blk.{layers}."))
        assert {each.rpartition(".")[0] for each in of_block} <= names
    # The model computes what it computed, and a reader takes the block.
    config = Runner(tmp_path / "out.gguf", open_backend("reference")).config
    assert config.layers == layers
    with open_gguf(tmp_path / "out.gguf") as file:
        found, why = with_draft(config, file.tensors)
    assert found.draft is not None, why


@pytest.mark.parametrize(("name", "attention", "experts"), [("moe", 3, 4), ("latent", 2, 3)])
def test_a_block_of_two_layers_becomes_one(name: str, attention: int, experts: int, tmp_path: Path) -> None:
    """Nemotron 3's: attention and experts, under the names of its checkpoints."""
    folder = copy_checkpoint(tmp_path, "tiny-nemotron-h-moe" if name == "moe" else "tiny-nemotron-latent")
    before, plain, _ = converted(folder)
    random, stored = np.random.default_rng(4), tensors_of(folder)
    dim, block = stored["backbone.norm_f.weight"].size, {}
    for each, values in stored.items():
        for i, layer in enumerate((attention, experts)):
            if each.startswith(f"backbone.layers.{layer}."):
                block[each.replace(f"backbone.layers.{layer}.", f"mtp.layers.{i}.")] = values
    shapes = {"0.eh_proj": (dim, 2 * dim), "0.enorm": (dim,), "0.hnorm": (dim,), "1.final_layernorm": (dim,)}
    for each, shape in shapes.items():
        block[f"mtp.layers.{each}.weight"] = random.standard_normal(shape).astype(np.float32)
    write_safetensors(folder / "model.safetensors", stored | block)
    metadata, tensors, notes = converted(folder)
    layers, arch = before["nemotron_h_moe.block_count"], "nemotron_h_moe"
    assert metadata[f"{arch}.block_count"] == layers + 1
    assert metadata[f"{arch}.nextn_predict_layers"] == 1
    assert any("draft block" in note for note in notes)
    for key in ("attention.head_count_kv", "feed_forward_length"):
        assert list(metadata[f"{arch}.{key}"]) == [*before[f"{arch}.{key}"], max(before[f"{arch}.{key}"])]
    expected, blk = dict(plain), f"blk.{layers}."
    for each, values in plain.items():
        if each.startswith(f"blk.{attention}."):
            expected[each.replace(f"blk.{attention}.", blk)] = values
        elif each.startswith(f"blk.{experts}."):
            named = each.replace(f"blk.{experts}.attn_norm.", f"{blk}post_attention_norm.")
            expected[named.replace(f"blk.{experts}.", blk)] = values
    for each, target in zip(shapes, ("eh_proj", "enorm", "hnorm", "shared_head_norm"), strict=True):
        expected[f"{blk}nextn.{target}.weight"] = block[f"mtp.layers.{each}.weight"]
    assert tensors.keys() == expected.keys()
    for each, values in expected.items():
        np.testing.assert_array_equal(tensors[each], values)
    config = Runner(tmp_path / "out.gguf", open_backend("reference")).config
    with open_gguf(tmp_path / "out.gguf") as file:
        found, why = with_draft(config, file.tensors)
    assert found.draft is not None, why
    more = {"mtp.layers.2.norm.weight": stored["backbone.norm_f.weight"]}  # a second block, say
    write_safetensors(folder / "model.safetensors", stored | block | more)
    _, left, said = converted(folder)
    assert left.keys() == plain.keys() and any("'mtp.layers.2.norm.weight'" in note for note in said)


def test_embedding_and_head_of_its_own_are_kept_where_they_differ(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-glm4moe")
    stored = tensors_of(folder)
    head, table = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    more = {"shared_head.head.weight": head + head, "embed_tokens.weight": table}
    with_block(folder, 2, False, **more)
    tensors = converted(folder)[1]
    np.testing.assert_array_equal(
        tensors["blk.3.nextn.shared_head_head.weight"], (head + head).astype(np.float32)
    )
    assert "blk.3.nextn.embed_tokens.weight" not in tensors


def test_blocks_that_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On request; with a note where something is missing, or unknown, in the block."""
    folder = copy_checkpoint(tmp_path, "tiny-deepseek3")
    before = converted(folder)
    stored = with_block(folder, 2, False)
    at = f"model.layers.{before[0]['deepseek2.block_count']}."
    notes = {"no_draft": ""}
    for case in ("no_draft", "missing", "unknown"):
        arrays = dict(stored)
        if case == "missing":
            del arrays[f"{at}hnorm.weight"]
            notes[case] = f"left out: {folder} has no tensor '{at}hnorm.weight'"
        elif case == "unknown":
            arrays[f"{at}more.weight"] = arrays[f"{at}hnorm.weight"]
            notes[case] = f"it has unknown tensors (1, such as '{at}more.weight')"
        write_safetensors(folder / "model.safetensors", arrays)
        metadata, tensors, said = converted(folder, no_draft=case == "no_draft")
        assert metadata.keys() == before[0].keys() and tensors.keys() == before[1].keys()
        assert metadata["deepseek2.block_count"] == before[0]["deepseek2.block_count"]
        assert any(notes[case] in note for note in said) if notes[case] else said == before[2]
    write_safetensors(folder / "model.safetensors", stored)
    out = str(tmp_path / "command.gguf")
    assert cli.main(["convert", str(folder), "-o", out, "--no-draft"]) == 0
    assert cli.main(["convert", str(folder), "-o", out, "--force"]) == 0
    assert capsys.readouterr().err.count("--no-draft leaves it out") == 1
    with open_gguf(Path(out)) as file:
        assert file.metadata["deepseek2.nextn_predict_layers"] == 1


def test_layers_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-deepseek3")
    more = {"model.layers.9.enorm.weight": tensors_of(folder)["model.norm.weight"]}
    write_safetensors(folder / "model.safetensors", tensors_of(folder) | more)
    with pytest.raises(ConvertError, match=r"such as 'model\.layers\.9\.enorm\.weight'"):
        converted(folder)
