"""Folders that are no checkpoint, or whose names or weights are not plain: one line, or a note, says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    change_config,
    copy_checkpoint,
    safetensors_bytes,
    tensors_of,
    write_safetensors,
)

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.finding import find_layout
from hotcold.convert.settings import Settings

PREFIXES = ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_training_tools_are_left_out(prefix: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    plain = ConvertOptions("F32", name="x", force=True)
    notes = convert(folder, tmp_path / "plain.gguf", plain).notes
    arrays = {f"{prefix}{name}": values for name, values in tensors_of(folder).items()}
    write_safetensors(folder / "model.safetensors", arrays)
    (note,) = set(convert(folder, tmp_path / "out.gguf", plain).notes) - set(notes)
    assert note.startswith(f"names such as {prefix}") and "are left out" in note
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_layers_that_were_compiled_one_by_one(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    before = {*open_checkpoint(folder).files}
    arrays = tensors_of(folder)
    renamed = {name.replace(".mlp.", "._orig_mod.mlp."): values for name, values in arrays.items()}
    write_safetensors(folder / "model.safetensors", renamed)
    assert {*open_checkpoint(folder).files} == before
    write_safetensors(folder / "model.safetensors", arrays | renamed)
    with pytest.raises(ConvertError, match=r"has tensor model\.layers\.0\.mlp\.\w+\.weight twice"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
     "model.layers.0.self_attn.q_proj.base_layer.weight"],
)  # fmt: skip
def test_an_adapter_that_was_not_merged(name: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    write_safetensors(folder / "model.safetensors", tensors_of(folder) | {name: np.ones((2, 2), np.float32)})
    with pytest.raises(ConvertError, match=r"an adapter's matrices \(.*merge_and_unload"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "is an adapter .LoRA.*merge_and_unload"),
        ("params.json", "Mistral's own format .*: download config.json"),
        ("model_index.json", "is a pipeline of diffusers"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_folders_of_something_else(file: str, message: str, config: bool, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / file).write_text("{}")
    open_checkpoint(folder)  # beside a whole checkpoint it does not matter
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    if not config:
        (folder / "config.json").unlink()
    with pytest.raises(ConvertError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("same", [True, False])
def test_a_tensor_that_the_header_names_twice(same: bool, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    entries = [entry % (0, 4), entry % ((0, 4) if same else (4, 8))]
    header = "{" + ", ".join(f'"model.norm.weight": {each}' for each in entries) + "}"
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header.encode(), bytes(4 if same else 8)))
    with pytest.raises(ConvertError, match=r"norm\.weight' twice in its header|not a whole safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq, which is not supported"),
        ({"quant_method": "awq"}, "quantised by awq, which"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes, which"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, r"by modelopt \(W4A16_AWQ\), which"),
        ({"quant_method": "hqq"}, "quantised by hqq, which"),
        ({"quant_method": "quanto", "weights": "int4"}, "quantised by quanto, which"),
        ({"quant_method": "torchao", "quant_type": "int4wo"}, "quantised by torchao, which"),
        ({"quant_method": "exl2", "bits": 4.0}, "quantised by exl2, which"),
        ({"quant_method": "mxfp4"}, "quantised by mxfp4, which"),
        ({"bits": 4}, "quantised by a method without a name, which"),
    ],
)
def test_methods_of_quantisation_are_named(quantised: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, quantization_config=quantised)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_description_of_quantisation_is_none(empty: object, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, quantization_config=empty)
    assert not [note for note in convert(folder, tmp_path / "out.gguf").notes if "quantization" in note]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "it is an encoder"), ("xlm-roberta", "it is an encoder"), ("mpt", "it needs ALiBi"),
        ("gpt_neox", "parallel attention and FFN"), ("phi", "parallel attention and FFN"),
        ("t5", "an encoder with a decoder"), ("whisper", "it is an audio model"),
        ("mamba", "the recurrence of Mamba 1"), ("deepseek_v4", "several residual streams"),
        ("gpt_bigcode", "a learned table of positions"), ("nobodys", "docs/convert.md lists"),
    ],
)  # fmt: skip
def test_unknown_model_types_have_the_reasons_of_their_architectures(model_type: str, reason: str) -> None:
    config = Settings(Path("config.json"), {"model_type": model_type})
    with pytest.raises(ConvertError, match=f"model_type '{model_type}' is not supported: .*{reason}"):
        find_layout(config)
