"""Opening a checkpoint folder: single and sharded files, and folders that are not complete."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import copy_checkpoint, shard, tensors_of

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.settings import read_settings

INDEX = "model.safetensors.index.json"


def change_index(folder: Path, name: str, file: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    single = tensors_of(folder)
    shard(folder)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.files) == set(single)
    assert len({id(stored.file) for stored in checkpoint.files.values()}) == 3
    for name, values in single.items():
        np.testing.assert_array_equal(checkpoint.load(name), values)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", "neither model.safetensors nor")],
)
def test_missing_files(missing: str, message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ConvertError, match=message):
        open_checkpoint(folder)


def test_what_torch_did_not_save_is_named(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ConvertError, match=r"pytorch_model\.bin: is not a zip file, or is cut short: torch\.save"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("what", ["none", "config.json"])
def test_what_is_no_folder(what: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    with pytest.raises(ConvertError, match="is not a folder"):
        open_checkpoint(folder / what)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConvertError, match=r"no model-00002-of-00003\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", 7, None, ".."]
)
def test_an_index_cannot_lead_out_of_the_folder(file: object, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    shard(folder)
    change_index(folder, "model.norm.weight", file)
    with pytest.raises(ConvertError, match=r"a \.safetensors file name is needed"):
        open_checkpoint(folder)


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    shard(folder)
    change_index(folder, "model.other.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(ConvertError, match=r"has no tensor 'model\.other\.weight'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", ['{"weight_map": {}}', "{}", '{"weight_map": []}'])
def test_an_index_without_tensors(index: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(index)
    with pytest.raises(ConvertError, match="weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a JSON list: an object is needed"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 0xff at 7"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_json(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConvertError, match=message):
        read_settings(path)


def test_a_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConvertError, match=r"model\.safetensors is not a whole safetensors file"):
        open_checkpoint(folder)
