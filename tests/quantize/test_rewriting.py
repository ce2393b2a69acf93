"""Rewriting: what is copied is the same bytes, what is changed is what the function gave, and a file appears
whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from support.split_models import split_model

from hotcold.formats.blocks import BLOCK_TYPES, GGML_TYPES, Bytes, Floats, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.formats.written import NewTensor
from hotcold.quantize import rewriting
from hotcold.quantize.rewriting import Plan, QuantizeError, changed, copied, kept_metadata, rewrite

RANDOM = np.random.default_rng(1)
VALUES = {
    "token_embd.weight": RANDOM.normal(size=(300, 64)).astype(np.float32),
    "blk.0.ffn_up_exps.weight": RANDOM.normal(size=(3, 70, 64)).astype(np.float32),
    "output_norm.weight": np.ones(64, np.float32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    tensors = {name: quantise(values, "F32") for name, values in VALUES.items()}
    write_gguf(path, {"general.architecture": "llama", "llama.block_count": 1}, tensors)
    return path


def plan_of(path: Path, type: str, threads: int) -> tuple[Path, Plan]:
    """A copy of ``path`` with the matrices in another type, written with this number of threads."""
    output = path.with_name(f"{type}-{threads}.gguf")
    with open_gguf(path) as source:

        def code(values: Floats, first: int) -> Bytes:
            return quantise(values, type).data

        kind = BLOCK_TYPES[type]
        tensors = {
            name: changed(source, name, kind, code) if len(info.shape) > 1 else copied(source, name)
            for name, info in source.tensors.items()
        }
        plan = Plan(kept_metadata(source), tensors, source.magic)
        rewrite(source, output, plan, threads=threads)
    return output, plan


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_chunks_give_what_the_whole_gives(
    model: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "PIECE_WEIGHTS", 64 * 7)
    output, plan = plan_of(model, "Q8_0", threads)
    with open_gguf(output) as file:
        assert list(file.tensors) == list(VALUES)
        for name, values in VALUES.items():
            kind = "Q8_0" if values.ndim > 1 else "F32"
            assert file.tensors[name].type.name == kind
            assert np.array_equal(file.load(name).data, quantise(values, kind).data)
        assert plan.nbytes == sum(info.nbytes for info in file.tensors.values())


def test_metadata_keeps_its_types_and_bytes(tmp_path: Path) -> None:
    """Types of numbers that Python does not tell apart, text that is no UTF-8, arrays that are empty."""
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 1)
    writer.add_int16("i16", 5)
    writer.add_int32("i32", 7)
    writer.add_uint64("u64", 9)
    writer.add_float64("f64", 0.1)
    writer.add_array("tokenizer.ggml.tokens", [b"\xff", b"a"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2])
    writer.add_uint32("general.alignment", 64)
    writer.data_alignment = 64
    writer.add_tensor("w", np.ones((2, 3), np.float32))
    writer.add_tensor("list", np.arange(5, dtype=np.int32))
    writer.add_tensor(
        "unread", np.arange(2 * 84, dtype=np.uint8).reshape(2, 84), raw_dtype=GGMLQuantizationType.Q2_K
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "a.gguf") as source:
        tensors = {name: copied(source, name) for name in source.tensors}
        rewrite(source, tmp_path / "b.gguf", Plan(kept_metadata(source), tensors))
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_split_model_becomes_one_file(model: Path, tmp_path: Path) -> None:
    parts = split_model(model, tmp_path / "parts.gguf", 2)
    with open_gguf(parts[0]) as source:
        tensors = {name: copied(source, name) for name in source.tensors}
        with pytest.raises(QuantizeError, match="would replace the one that is read"):
            rewrite(source, parts[1], Plan(kept_metadata(source), tensors), force=True)
        rewrite(source, tmp_path / "whole.gguf", Plan(kept_metadata(source), tensors))
    keys = [key for key in GGUFReader(tmp_path / "whole.gguf").fields if not key.startswith("GGUF.")]
    assert keys == ["general.architecture", "llama.block_count"]
    with open_gguf(tmp_path / "whole.gguf") as whole, open_gguf(model) as old:
        assert all(np.array_equal(whole.load(name).data, old.load(name).data) for name in old.tensors)
        assert len(whole.tensors) == len(old.tensors)


def test_powerinfers_magic_and_empty_lists_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.powerinfer.gguf"
    nothing = NewTensor(GGML_TYPES[26], (0,), lambda: ())
    write_gguf(path, {}, {"w": quantise(np.ones((2, 32)), "F16"), "none": nothing}, magic="PWRI")
    with open_gguf(path) as source:
        tensors = {name: copied(source, name) for name in source.tensors}
        plan = Plan(kept_metadata(source), tensors, source.magic)
        rewrite(source, tmp_path / "new.gguf", plan)
    assert (tmp_path / "new.gguf").read_bytes() == path.read_bytes()


# --- what is refused, and leaves nothing ---


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, type: str) -> None:
    values = np.ones((4, 32), np.float32)
    tensor = quantise(values, "F32")
    tensor.data.view(np.float32)[3, 5] = np.nan
    write_gguf(tmp_path / "model.gguf", {}, {"good.weight": quantise(values, "F32"), "bad.weight": tensor})
    with open_gguf(tmp_path / "model.gguf") as source:

        def code(rows: Floats, first: int) -> Bytes:
            return quantise(rows, type).data

        kind = BLOCK_TYPES[type]
        for tensors in (
            {name: copied(source, name) for name in source.tensors},
            {name: changed(source, name, kind, code) for name in source.tensors},
        ):
            with pytest.raises(QuantizeError, match=r"tensor bad\.weight holds NaN or infinity"):
                rewrite(source, tmp_path / "new.gguf", Plan({}, tensors))
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_value_too_large_for_the_type_names_the_tensor(tmp_path: Path) -> None:
    values = np.full((4, 32), 1e6, np.float32)
    write_gguf(tmp_path / "model.gguf", {}, {"w": quantise(values, "F32")})
    with open_gguf(tmp_path / "model.gguf") as source:
        w = changed(source, "w", BLOCK_TYPES["F16"], lambda rows, first: quantise(rows, "F16").data)
        with pytest.raises(QuantizeError, match="tensor w as F16: value 1e\\+06 does not fit in F16"):
            rewrite(source, tmp_path / "new.gguf", Plan({}, {"w": w}))
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_files_that_may_not_be_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = model.with_name("new.gguf")
    os.link(model, model.with_name("link.gguf"))
    output.write_text("precious")
    with open_gguf(model) as source:
        plan = Plan({}, {name: copied(source, name) for name in source.tensors})
        for path in (model, model.with_name("link.gguf")):
            with pytest.raises(QuantizeError, match="would replace the one that is read: give another name"):
                rewrite(source, path, plan, force=True)
        with pytest.raises(QuantizeError, match=r"new\.gguf: the file exists: give another name, or `force`"):
            rewrite(source, output, plan)
        with pytest.raises(QuantizeError, match="none is not a folder: create it first"):
            rewrite(source, model.parent / "none" / "new.gguf", plan)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 8, 2))
        with pytest.raises(QuantizeError, match="needs 130816 bytes, and 2 are free"):
            rewrite(source, output, plan, force=True)
        assert output.read_text() == "precious"


def test_an_interrupt_ends_the_threads_and_keeps_the_old_file(model: Path) -> None:
    output = model.with_name("new.gguf")
    output.write_text("precious")

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with open_gguf(model) as source:
        plan = Plan({}, {name: copied(source, name) for name in source.tensors})
        with pytest.raises(KeyboardInterrupt):
            rewrite(source, output, plan, stop, force=True)
    assert output.read_text() == "precious"
    assert sorted(os.listdir(model.parent)) == ["model.gguf", "new.gguf"]
