"""Files of placements: PowerInfer's own, ours, damaged ones and those of other models; and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.plain_forward import Model
from support.plans import made_up

from hotcold.demo import model_path
from hotcold.formats.blocks import GGML_TYPES, Tensor
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.model.config import Config
from hotcold.placement.placement import INDEX_BYTES, Placement, read_placement, write_placement
from hotcold.placement.profiles import read_profile, write_profile
from hotcold.placement.sizes import SHAPES, power_law
from hotcold.sparse.sidecar import SidecarError

LAYERS = 12  #: enough for names that sort otherwise as text than as numbers

sizes, profile, _ = made_up(3, layers=LAYERS)


def by_layer() -> Placement:
    """Layer i has its i-th neurons from the end; the first has none, the second all."""
    hot = [np.arange(n) % (i + 2) == 1 for i, n in enumerate(sizes.neurons)]
    hot[0][:], hot[1][:] = False, True
    return Placement.on_one(hot, range(LAYERS), True)


def same(one: Placement, other: Placement) -> bool:
    masks = all(np.array_equal(a, b) for a, b in zip(one.hot, other.hot, strict=True))
    return masks and one.where == other.where and one.head == other.head


def test_a_placement_is_read_as_it_was_written(tmp_path: Path) -> None:
    placement = by_layer()
    for i in (1, 11):
        placement.hot[i][:] = False
    for layers in (range(2, 11), range(LAYERS)):
        path = tmp_path / f"{layers.start}.gpuidx"
        write_placement(path, sizes, written := Placement.on_one(placement.hot, layers, layers.start == 0))
        assert same(read_placement(path, sizes), written)


def test_powerinfer_finds_what_it_reads(tmp_path: Path) -> None:
    """It takes tensors by position, two a layer, and the memory of hot neurons from the metadata."""
    placement, path = by_layer(), tmp_path / "x.gpuidx"
    write_placement(path, sizes, placement)
    data = path.read_bytes()
    assert data[:4] == b"PWRI"
    path.write_bytes(b"GGUF" + data[4:])
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "generic.gpu_index"
    assert reader.fields["generic.gpu_index.block_count"].contents() == LAYERS
    needed = sum(
        int(m.sum()) * (int(n) + INDEX_BYTES) for m, n in zip(placement.hot, sizes.neuron_bytes, strict=True)
    )
    assert reader.fields["split.vram_capacity"].contents() == needed
    assert len(reader.tensors) == 2 * LAYERS
    for i, mask in enumerate(placement.hot):
        marks, listed = reader.tensors[2 * i : 2 * i + 2]
        assert (marks.name, listed.name) == (f"blk.{i}.gpu_idx", f"blk.{i}.gpu_bucket")
        assert marks.tensor_type == listed.tensor_type == gguf.GGMLQuantizationType.I32
        assert marks.data.tolist() == mask.astype(int).tolist()
        assert i == 0 or listed.data.tolist() == np.flatnonzero(mask).tolist()


def powerinfer(path: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None) -> Path:
    """Writes a file as PowerInfer's export_split.py does, with the gguf package; ``change`` breaks it."""
    writer = gguf.GGUFWriter(path, "generic.gpu_index")
    tensors: dict[str, Any] = {}
    for i, mask in enumerate(by_layer().hot):
        tensors[f"blk.{i}.gpu_idx"] = mask.astype(np.int32)
        tensors[f"blk.{i}.gpu_bucket"] = np.flatnonzero(mask).astype(np.int32)
    change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.add_block_count(LAYERS)
    writer.add_uint64("split.vram_capacity", 1 << 30)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(b"PWRI" + path.read_bytes()[4:])
    return path


def test_powerinfers_own_file(tmp_path: Path) -> None:
    assert same(read_placement(powerinfer(tmp_path / "x.gpuidx"), sizes), by_layer())


def set_in(name: str, at: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("blk.4.gpu_bucket", 1, -1), r"blk\.4\.gpu_bucket holds -1: numbers from 0 to \d+ are needed"),
        (set_in("blk.4.gpu_bucket", 1, 9999), r"blk\.4\.gpu_bucket holds 9999: numbers from 0"),
        (set_in("blk.4.gpu_bucket", 1, 1), "layer 4 lists neuron 1 twice or out of order"),
        (set_in("blk.4.gpu_bucket", 0, 0), "layer 4 lists other neurons than gpu_idx marks"),
        (set_in("blk.4.gpu_idx", 0, 2), r"blk\.4\.gpu_idx holds 2: numbers from 0 to 1"),
        (set_in("blk.4.gpu_idx", 0, 1), r"blk\.4\.gpu_bucket has shape \(\d+,\): \(\d+,\) is needed"),
        (lambda tensors: tensors.pop("blk.10.gpu_idx"), r"blk\.10\.gpu_idx is missing"),
        (lambda tensors: tensors.pop("blk.10.gpu_bucket"), r"blk\.10\.gpu_bucket is missing"),
        (
            lambda tensors: tensors.update(more=np.ones(1, np.int32)),
            "has 25 tensors: the model has 12 layers",
        ),
        (
            lambda tensors: tensors.update({"blk.2.gpu_idx": np.ones(9999, np.int32)}),
            r"blk\.2\.gpu_idx has shape \(9999,\)",
        ),
    ],
)
def test_a_damaged_index(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    path = powerinfer(tmp_path / "x.gpuidx", change)
    with pytest.raises(SidecarError, match=rf"x\.gpuidx: .*{message}") as caught:
        read_placement(path, sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("general.architecture", "is not a placement"),
        ("hotcold.placement.model_fingerprint", "belongs to the model an array of 2"),
    ],
)
def test_an_array_in_the_place_of_a_text(tmp_path: Path, key: str, message: str) -> None:
    path = tmp_path / "x.gpuidx"
    write_placement(path, sizes, by_layer())
    _rewrite(path, lambda metadata: metadata.update({key: np.array([1, 2], np.int32)}))
    with pytest.raises(SidecarError, match=message):
        read_placement(path, sizes)


def test_what_belongs_to_another_model(tmp_path: Path) -> None:
    write_placement(tmp_path / "x.gpuidx", sizes, by_layer())
    write_profile(tmp_path / "x.profile.gguf", profile, {"model_fingerprint": sizes.fingerprint})
    with pytest.raises(SidecarError, match=r"belongs to the model '3'.*'other'"):
        read_placement(tmp_path / "x.gpuidx", replace(sizes, fingerprint="other"))
    with pytest.raises(SidecarError, match="is not a placement"):
        read_placement(tmp_path / "x.profile.gguf", sizes)
    with pytest.raises(SidecarError, match=r"has no hotcold\.profile\.model_fingerprint"):
        read_profile(tmp_path / "x.gpuidx", sizes)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes a placement again, with other metadata."""
    with open_gguf(path) as file:
        metadata, kind = dict(file.metadata), GGML_TYPES[26]
        tensors = {name: file.load_integers(name) for name in file.tensors}
    change(metadata)
    integers = {n: Tensor(kind, v.shape, v.astype("<i4").view(np.uint8)[None]) for n, v in tensors.items()}
    write_gguf(path, metadata, integers, magic="PWRI")


def _of_one_gpu(metadata: dict[str, Any], **more: Any) -> None:
    """As versions wrote it that knew one GPU."""
    del metadata["hotcold.placement.where"]
    keys = {"first_layer": 0, "layers": LAYERS, "head": True} | more
    metadata.update({f"hotcold.placement.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"first_layer": 11}, "first_layer 11, layers 12: the model has 12"),
        ({"layers": 13}, "layers 13"),
        ({"layers": "two"}, "layers 'two'"),
        ({"layers": 5}, "layer 5 has hot neurons, but its attention"),
    ],
)
def test_a_placement_of_one_gpu_that_contradicts_itself(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = tmp_path / "x.gpuidx"
    write_placement(path, sizes, by_layer())
    _rewrite(path, lambda metadata: _of_one_gpu(metadata, **keys))
    with pytest.raises(SidecarError, match=message):
        read_placement(path, sizes)


def test_a_placement_of_a_version_that_knew_one_gpu(tmp_path: Path) -> None:
    placement, path = by_layer(), tmp_path / "x.gpuidx"
    for i in (0, 1, 11):
        placement.hot[i][:] = False
    write_placement(path, sizes, placement)
    _rewrite(path, lambda metadata: _of_one_gpu(metadata, first_layer=2, layers=9, head=False))
    assert same(read_placement(path, sizes), Placement.on_one(placement.hot, range(2, 11), False))


@pytest.mark.parametrize(
    "where",
    [[0] * LAYERS, [-2] + [0] * LAYERS, [4] + [0] * LAYERS, [0.5] * (LAYERS + 1), "0", 0, [True] * 13],
)
def test_places_that_there_are_not(tmp_path: Path, where: Any) -> None:
    path = tmp_path / "x.gpuidx"
    write_placement(path, sizes, by_layer())
    _rewrite(path, lambda metadata: metadata.update({"hotcold.placement.where": where}))
    with pytest.raises(SidecarError, match=r"x\.gpuidx: where is .* a GPU's number below 4 or -1"):
        read_placement(path, sizes)


@pytest.mark.parametrize("tied", [True, False])
def test_every_byte_of_a_file_is_somewhere(tied: bool, tmp_path: Path) -> None:
    """Weights as in the file, keys and values as the cache allocates them."""
    path = model_path()
    if not tied:
        path = Model(tied=False, activation="relu", head_dim=32, rotary=32).write(tmp_path / "untied.gguf")
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        found = file_sizes(file, config, 200, "q8_0")
        weights = sum(info.nbytes for info in file.tensors.values())
    n = len(found.neurons)
    for placement in (
        Placement.on_one([np.zeros(n, np.bool_) for n in found.neurons], range(0), False),
        Placement.on_one([np.ones(n, np.bool_) for n in found.neurons], range(n), True),
    ):
        rows = [row for row in placement.bill(found) if row["kind"] != "buffers"]
        total = sum(row["gpu_bytes"] + row["cpu_bytes"] for row in rows)
        listed = INDEX_BYTES * sum(int(hot.sum()) for hot in placement.hot)
        again = found.embedding * (found.tied and placement.head == 0)  # a tied head is on both sides
        assert total == weights + 7 * config.page_bytes("q8_0") + listed + again


@pytest.mark.parametrize("name", SHAPES)
def test_the_power_law_has_the_published_mean_and_skew(name: str) -> None:
    facts = SHAPES[name]
    firing = power_law(facts.ffn, facts.scale, facts.exponent)
    assert firing.mean() == pytest.approx(facts.active, rel=0.01)
    most = np.searchsorted(firing.cumsum(), 0.8 * firing.sum()) / len(firing)
    assert most == pytest.approx(facts.skew, abs=0.002)
