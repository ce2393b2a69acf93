"""A file runs with all of its layers or is refused, for all counts of blocks that draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed
from support.draft_blocks import with_block
from support.golden import golden
from support.runner import Runner

from hotcold.errors import UserError
from hotcold.formats.gguf import TensorInfo, open_gguf
from hotcold.kernels import open_backend
from hotcold.model.config import Config
from hotcold.model.draft_block import with_draft
from hotcold.model.weights import check_tensors
from hotcold.runtime.loading import load
from tests.model.test_draft_block import FAMILIES

Tensors = dict[str, TensorInfo]


def metadata_with(metadata: dict[str, Any], blocks: int, nextn: int) -> dict[str, Any]:
    """The metadata with other counts; values of each block are as many as blocks."""
    arch = metadata["general.architecture"]
    per_block = {f"{arch}.{key}" for key in ("attention.recurrent_layers", "attention.head_count_kv")}
    found = dict(metadata)
    for key in (*per_block, f"{arch}.feed_forward_length"):
        if hasattr(values := metadata.get(key), "__len__"):
            values = [*values, *[values[-1]] * 4][:blocks]
            found[key] = values if isinstance(values[0], bool | np.bool_) else np.array(values, np.int32)
    return found | {f"{arch}.block_count": blocks, f"{arch}.nextn_predict_layers": nextn}


def selections(tensors: Tensors, layers: int) -> Iterator[tuple[int, Tensors]]:
    """Parts of a file with two blocks that draft tokens, and how many layers they have."""
    first, second = f"blk.{layers}.", f"blk.{layers + 1}."
    own = {name: info for name, info in tensors.items() if name.startswith(first)}
    more = {name.replace(first, second): info for name, info in own.items()}
    nextn = {name: info for name, info in own.items() if ".nextn." in name}
    model = {name: info for name, info in tensors.items() if name not in own}
    for blocks in ({}, own, own | more, more, nextn):
        yield layers, model | blocks
    yield layers + 1, {name: info for name, info in tensors.items() if name not in nextn}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_count_costs_a_layer(name: str, tmp_path: Path) -> None:
    tiny = golden(name, tmp_path)
    source, own = FAMILIES[name]
    with open_gguf(tiny.path) as file:
        plain = Config.from_metadata(file.metadata, file.magic, file.tensors)
        plain_metadata = dict(file.metadata)
    with open_gguf(with_block(tiny.path, tmp_path / "block.gguf", source, own=own)) as file:
        parts = [*selections(dict(file.tensors), plain.layers)]
    ran = set()
    for part, (layers, tensors) in enumerate(parts):
        for blocks, nextn in product(range(1, layers + 4), range(layers + 4)):
            try:
                config = Config.from_metadata(metadata_with(plain_metadata, blocks, nextn), "GGUF", tensors)
                check_tensors(SimpleNamespace(tensors=tensors), config)  # type: ignore[arg-type]
            except UserError:
                continue
            assert (config.layers, blocks) == (layers, layers + nextn)
            assert config.mixers[: plain.layers] == plain.mixers
            assert config.neurons[: plain.layers] == plain.neurons
            with_draft(config, tensors)  # which never refuses
            ran.add((part, nextn))
    # Absent blocks cost nothing although they are counted, and present blocks must be counted.
    assert ran >= {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (3, 2), (4, 1), (4, 2)}
    assert ran.isdisjoint({(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_counted_block_that_is_absent_changes_no_logits(name: str, tmp_path: Path) -> None:
    tiny = golden(name, tmp_path)
    with open_gguf(tiny.path) as file:
        arch = file.metadata["general.architecture"]
        layers = int(file.metadata[f"{arch}.block_count"])
        keys = metadata_with(dict(file.metadata), layers + 1, 1)
    path = changed(tiny.path, tmp_path / "counted.gguf", keys)
    backend = open_backend("cpu", threads=1)
    expected, found = (Runner(each, backend).run(tiny.prompt) for each in (tiny.path, path))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("blocks", "nextn", "present", "message"),
    [
        (4, 1, [], "qwen35.nextn_predict_layers are 4 and 1, but blk.3 has no nextn .*: 4 and 0 are needed"),
        (5, 2, [], "are 5 and 2, but blk.3 has no nextn tensors, so it is a layer .*: 4 and 0 are needed"),
        (4, 1, ["block"], "are 4 and 1, but blk.3 has no nextn tensors, .*: 5 and 1 are needed"),
        (4, 3, [], "are 4 and 3, but blk.3 has no nextn"),
        (4, 4, [], "block_count is 4: a whole number from 5"),
        (5, 1, ["layer"], "are 5 and 1, but blk.4 has no nextn"),
        (4, 0, ["block"], r"tensor blk\.4\..* is unknown"),
        (5, 0, [], r"tensor blk\.4\..* is missing"),
    ],
)  # fmt: skip
def test_wrong_counts_are_refused(
    blocks: int, nextn: int, present: list[str], message: str, tmp_path: Path
) -> None:
    tiny = golden("tiny-qwen35", tmp_path)
    path = with_block(tiny.path, tmp_path / "block.gguf", 3)
    with open_gguf(path) as file:
        absent = {
            name: None
            for name in file.tensors
            if name.startswith("blk.4.") and (not present or (present == ["layer"] and ".nextn." in name))
        }
        keys = metadata_with(dict(file.metadata), blocks, nextn)
    with pytest.raises(UserError, match=message):
        load(changed(path, tmp_path / "other.gguf", keys, absent), {})


def test_a_counted_block_that_is_absent_is_left_out_with_a_note(tmp_path: Path) -> None:
    tiny = golden("tiny-qwen35", tmp_path)
    path = with_block(tiny.path, tmp_path / "block.gguf", 3)
    with open_gguf(path) as file:
        absent = {name: None for name in file.tensors if name.startswith("blk.4.")}
    model = load(changed(path, tmp_path / "other.gguf", {}, absent), {"gpu": "off"})
    assert model.config.layers == 4 and model.config.draft is None
    assert any("draft block" in note for note in model.notes), model.notes
    model.close()
