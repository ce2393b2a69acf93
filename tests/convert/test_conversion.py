"""Whole conversions: values against the checkpoint and the gguf package, determinism, memory, failures."""

from __future__ import annotations

import errno
import io
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import (
    change_config,
    change_tensors,
    copy_checkpoint,
    golden_checkpoint,
    shard,
    tensors_of,
)

from hotcold.convert import ConvertError, ConvertOptions, conversion, convert
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import GGUFError, open_gguf

TYPES = tuple(conversion.FILE_TYPES)


def converted(folder: Path, options: ConvertOptions, tmp_path: Path) -> dict[str, gguf.ReaderTensor]:
    """The tensors of the output, as the gguf package reads them."""
    output = tmp_path / "out.gguf"
    convert(folder, output, options)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(output).tensors}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(tensor.shape.tolist()[::-1])


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is its row i in Hugging Face's order, row 2i + 1 its row i + head_dim / 2."""
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + i + part * half for head in range(heads) for i in range(half) for part in (0, 1)
    ]
    return rows[order]


@pytest.mark.parametrize("down", ["by_neuron", "by_output"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama3"])
def test_f32_holds_the_checkpoint_exactly(name: str, down: str, tmp_path: Path) -> None:
    tensors = converted(golden_checkpoint(name), ConvertOptions("F32", down), tmp_path)
    source = {key: array.astype(np.float32) for key, array in tensors_of(golden_checkpoint(name)).items()}
    heads, kv_heads = (4, 2) if name == "tiny-llama" else (8, 1)
    layer, hf = "blk.1.", "model.layers.1."
    expected = {
        "token_embd.weight": source["model.embed_tokens.weight"],
        "output_norm.weight": source["model.norm.weight"],
        layer + "attn_norm.weight": source[hf + "input_layernorm.weight"],
        layer + "ffn_norm.weight": source[hf + "post_attention_layernorm.weight"],
        layer + "attn_q.weight": neighbours(source[hf + "self_attn.q_proj.weight"], heads),
        layer + "attn_k.weight": neighbours(source[hf + "self_attn.k_proj.weight"], kv_heads),
        layer + "attn_v.weight": source[hf + "self_attn.v_proj.weight"],
        layer + "attn_output.weight": source[hf + "self_attn.o_proj.weight"],
        layer + "ffn_gate.weight": source[hf + "mlp.gate_proj.weight"],
        layer + "ffn_up.weight": source[hf + "mlp.up_proj.weight"],
        layer + "ffn_down.weight": source[hf + "mlp.down_proj.weight"],
    }
    if down == "by_neuron":
        expected[layer + "ffn_down.weight"] = expected[layer + "ffn_down.weight"].T
    if name == "tiny-llama":
        expected["output.weight"] = source["lm_head.weight"]
    else:
        assert "output.weight" not in tensors  # tied
        expected[layer + "attn_q.bias"] = neighbours(source[hf + "self_attn.q_proj.bias"], heads)
        expected[layer + "attn_v.bias"] = source[hf + "self_attn.v_proj.bias"]
    for key, array in expected.items():
        np.testing.assert_array_equal(values(tensors[key]), array, err_msg=key)


@pytest.mark.parametrize("type", TYPES)
def test_block_types_are_those_of_the_gguf_package(type: str, tmp_path: Path) -> None:
    tensors = converted(golden_checkpoint("tiny-drelu"), ConvertOptions(type), tmp_path)
    kind = gguf.GGMLQuantizationType[type]
    source = (
        tensors_of(golden_checkpoint("tiny-drelu"))["model.layers.2.mlp.down_proj.weight"]
        .astype(np.float32)
        .T
    )
    assert tensors["blk.2.ffn_down.weight"].tensor_type == kind
    np.testing.assert_array_equal(
        values(tensors["blk.2.ffn_down.weight"]), gguf.dequantize(gguf.quantize(source, kind), kind)
    )
    others = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) == 1}
    assert others == {"F32"}
    assert tensors["output.weight"].tensor_type.name == ("Q8_0" if type not in TYPES[:4] else type)


@pytest.mark.parametrize(
    ("name", "activation", "down"),
    [("tiny-llama", "silu", "by_output"), ("tiny-drelu", "drelu", "by_neuron")],
)
def test_facts_that_gguf_has_no_key_for(name: str, activation: str, down: str, tmp_path: Path) -> None:
    done = convert(
        golden_checkpoint(name), tmp_path / "out.gguf", ConvertOptions("Q8_0", name="A name", license="mit")
    )
    metadata = open_gguf(tmp_path / "out.gguf").metadata
    assert metadata["hotcold.ffn.activation"] == done.activation == activation
    assert metadata["hotcold.ffn.down_layout"] == done.down_layout == down
    assert "hotcold.ffn.threshold" not in metadata
    assert metadata["general.architecture"] == done.architecture
    assert (metadata["general.name"], metadata["general.license"]) == ("A name", "mit")
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert done.nbytes == (tmp_path / "out.gguf").stat().st_size
    assert sum(done.types.values()) == len(open_gguf(tmp_path / "out.gguf").tensors)


def test_file_types_are_llama_cpps() -> None:
    for name, number in conversion.FILE_TYPES.items():
        assert gguf.LlamaFileType(number).name in (f"MOSTLY_{name}", f"ALL_{name}", f"MOSTLY_{name}_MOE")
    assert set(conversion.FILE_TYPES) == {name for name, type in BLOCK_TYPES.items() if type.encode}


def test_dense_files_are_plain_and_say_where_llama_cpp_differs(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-falcon")
    change_config(folder, rms_norm_eps=...)  # which the class does not have
    dense = ConvertOptions("F32", dense=True, force=True)
    assert convert(folder, tmp_path / "out.gguf", dense).notes == []  # the tanh form
    change_config(folder, activation="gelu")
    done = convert(folder, tmp_path / "out.gguf", dense)
    assert done.notes == ["llama.cpp computes gelu for falcon; this model needs gelu_erf"]
    change_config(folder, activation="relu")
    assert convert(folder, tmp_path / "sparse.gguf").down_layout == "by_neuron"
    assert convert(folder, tmp_path / "out.gguf", dense).down_layout == "by_output"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tiny-drelu", {}, "`dense`: llama.cpp has no architecture bamboo: leave `dense` out"),
        ("tiny-llama", {"down": "by_neuron"}, "`dense` and `down=by_neuron`: llama.cpp loads no such file"),
        ("tiny-llama", {"predictors": Path("x")}, "`dense` and `predictors`: llama.cpp loads no such file"),
    ],
)
def test_what_llama_cpp_cannot_load_is_not_called_dense(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(golden_checkpoint(name), tmp_path / "out.gguf", ConvertOptions(dense=True, **options))
    assert left_over(tmp_path) == set()


def test_a_relu_llama_with_a_threshold(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, hidden_act="fatrelu", hidden_act_param=0.01)
    convert(folder, tmp_path / "out.gguf", ConvertOptions("F16"))
    metadata = open_gguf(tmp_path / "out.gguf").metadata
    assert metadata["hotcold.ffn.activation"] == "relu"
    assert metadata["hotcold.ffn.threshold"] == np.float32(0.01)
    assert metadata["hotcold.ffn.down_layout"] == "by_neuron"


def test_rows_that_a_type_cannot_hold_stay_f16(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, intermediate_size=150)  # down by output has rows of 150, no multiple of 32
    for layer in range(3):
        for name, shape in (("gate_proj", (150, 64)), ("up_proj", (150, 64)), ("down_proj", (64, 150))):
            change_tensors(folder, **{f"model.layers.{layer}.mlp.{name}.weight": np.ones(shape, "<f2")})
    done = convert(folder, tmp_path / "out.gguf", ConvertOptions("Q8_0"))
    types = {name: info.type.name for name, info in open_gguf(tmp_path / "out.gguf").tensors.items()}
    assert [name for name, type in types.items() if type == "F16"] == [
        f"blk.{layer}.ffn_down.weight" for layer in range(3)
    ]
    assert done.notes == [
        "blk.0.ffn_down.weight and 2 others stay F16: rows of 150 weights, where Q8_0 needs a multiple of 32"
    ]
    assert convert(folder, tmp_path / "n.gguf", ConvertOptions("Q8_0", "by_neuron")).notes == []


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    for name in ("a", "b"):
        convert(folder, tmp_path / name, ConvertOptions("Q4_0"))
    shard(folder)
    convert(folder, tmp_path / "c", ConvertOptions("Q4_0"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_memory_holds_about_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_CHUNK", 1 << 14)
    folder = copy_checkpoint(tmp_path)
    layers, neurons = 12, 4096
    change_config(folder, num_hidden_layers=layers, intermediate_size=neurons, hidden_act="relu")
    arrays = tensors_of(folder)
    layer = {name: array for name, array in arrays.items() if name.startswith("model.layers.0.")}
    layer |= {
        f"model.layers.0.mlp.{name}.weight": np.ones(shape, "<f2")
        for name, shape in (
            ("gate_proj", (neurons, 64)),
            ("up_proj", (neurons, 64)),
            ("down_proj", (64, neurons)),
        )
    }
    change_tensors(
        folder,
        **{name.replace(".0.", f".{i}.", 1): array for i in range(layers) for name, array in layer.items()},
    )
    largest = neurons * 64 * 4
    tracemalloc.start()
    try:
        done = convert(folder, tmp_path / "out.gguf", ConvertOptions("F32"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.nbytes > 36 * largest
    assert peak < 3 * largest


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    convert(
        golden_checkpoint("tiny-llama3"),
        tmp_path / "out.gguf",
        progress=lambda done, total: reports.append((done, total)),
    )
    assert reports[0][0] == 0 and reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    file = open_gguf(tmp_path / "out.gguf")
    assert {total for _, total in reports} == {sum(info.nbytes for info in file.tensors.values())}


# --- failures: an error of one line, and nothing is left --------------------------------------------------


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    output.write_text("precious")
    with pytest.raises(ConvertError, match=r"out\.gguf: the file exists: give another name, or `force`"):
        convert(golden_checkpoint("tiny-llama"), output)
    assert output.read_text() == "precious"
    convert(golden_checkpoint("tiny-llama"), output, ConvertOptions(force=True))
    assert open_gguf(output).tensors
    assert left_over(tmp_path) == {"out.gguf"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ConvertOptions("Q5_K"),
            "'Q5_K' is not one of F32, F16, BF16, .*: hotcold quantize makes others",
        ),
        (ConvertOptions("f16"), "type 'f16' is not one of"),
        (ConvertOptions(down="sideways"), "down layout 'sideways' is not one of by_neuron, by_output"),
    ],
)
def test_bad_options(options: ConvertOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(golden_checkpoint("tiny-llama"), tmp_path / "out.gguf", options)
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_refused(type: str, value: float, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    array = tensors_of(folder)["model.layers.2.mlp.up_proj.weight"]
    array[3, 5] = value
    change_tensors(folder, model__layers__2__mlp__up_proj__weight=array)
    with pytest.raises(ConvertError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' as .* NaN or infinity"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions(type))
    assert left_over(tmp_path) == {"tiny-llama"}


def test_a_weight_that_does_not_fit(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    array = tensors_of(folder)["model.layers.0.mlp.up_proj.weight"].astype("<f4")
    array[0, 0] = 1e6
    change_tensors(folder, model__layers__0__mlp__up_proj__weight=array)
    with pytest.raises(ConvertError, match=r"up_proj\.weight' as F16: value 1e\+06 does not fit"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions("F16"))
    assert left_over(tmp_path) == {"tiny-llama"}
    convert(folder, tmp_path / "out.gguf", ConvertOptions("BF16"))


def test_an_integer_tensor_is_refused(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_tensors(folder, model__norm__weight=np.ones(64, "<i8"))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is I64: only F32, F16, BF16"):
        convert(folder, tmp_path / "out.gguf")
    assert left_over(tmp_path) == {"tiny-llama"}


def test_a_disk_that_is_too_small_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    )
    with pytest.raises(ConvertError, match="bytes, and 1000 are free"):
        convert(golden_checkpoint("tiny-llama"), tmp_path / "out.gguf")
    assert left_over(tmp_path) == set()


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = io.BufferedWriter.write
    written = 0

    class Full(io.BufferedWriter):
        def write(self, data: Any) -> int:
            nonlocal written
            written += memoryview(data).nbytes
            if written > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, data)

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        return Full(io.FileIO(path, "x")) if mode == "xb" else open_path(path, mode, **options)

    open_path = Path.open
    monkeypatch.setattr(Path, "open", opened)
    (tmp_path / "out.gguf").write_text("precious")
    with pytest.raises(GGUFError, match="cannot be written: No space left on device"):
        convert(golden_checkpoint("tiny-llama"), tmp_path / "out.gguf", ConvertOptions(force=True))
    assert written > 100_000
    assert left_over(tmp_path) == {"out.gguf"}
    assert (tmp_path / "out.gguf").read_text() == "precious"


def test_a_missing_output_folder(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="none is not a folder: create it first"):
        convert(golden_checkpoint("tiny-llama"), tmp_path / "none" / "out.gguf")
