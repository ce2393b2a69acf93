"""Checkpoints in FP8 and NVFP4: values against ml_dtypes and brute force, and everything that is refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.quantised import FP8, Parts, Quantise, compressed, fp8, in_fp8, quantised_pair, rewrite

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.quantised import E4M3, dequantised, read_method
from hotcold.convert.settings import Settings
from hotcold.convert.tensor_files import Safetensors, stored_in

BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "gate"],
}  # fmt: skip
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def outputs(quantised: Path, plain: Path, type: str = "F32") -> tuple[bytes, bytes, list[str]]:
    """The bytes of both files, and notes that only the quantised one has."""
    options = ConvertOptions(type, name="x", force=True)
    output = plain.with_name("out.gguf")
    notes = convert(plain, output, options).notes
    wanted = output.read_bytes()
    made = convert(quantised, output, options).notes
    return output.read_bytes(), wanted, [note for note in made if note not in notes]


METHODS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "blocks": (fp8((128, 128)), BLOCKS),
    "blocks that are cut": (fp8((16, 24)), BLOCKS | {"weight_block_size": [16, 24]}),
    "bfloat16 scales": (fp8((16, 16), type=ml_dtypes.bfloat16), BLOCKS | {"weight_block_size": [16, 16]}),
    "powers of two": (fp8((16, 16), type=ml_dtypes.float8_e8m0fnu), BLOCKS | {"weight_block_size": [16, 16]}),
    "whole tensors": (fp8((0, 0)), STATIC),
    "blocks without the key": (fp8((128, 128)), {"quant_method": "fp8"}),
    "whole tensors without the key": (fp8((0, 0), "_scale"), {"quant_method": "fp8"}),
    "compressed by tensor": (fp8((0, 0), "_scale"), compressed("tensor")),
    "compressed by channel": (fp8((1, 0), "_scale", ml_dtypes.bfloat16), compressed("channel")),
    "compressed by block": (
        fp8((16, 16), "_scale"), compressed("block", block_structure=[16, 16]),
    ),
    "compressed, an older name": (fp8((1, 0), "_scale"), compressed("channel", "naive-quantized")),
    "modelopt": (fp8((0, 0), "_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_file_is_that_of_the_dequantised_checkpoint(method: str, tmp_path: Path) -> None:
    """Byte for byte: experts, latent attention and rows that move have their own scales."""
    quantise, config = METHODS[method]
    for name in ("tiny-deepseek3", "tiny-llama"):
        pair = quantised_pair(copy_checkpoint(tmp_path / name.strip("-"), name), quantise, config)
        made, wanted, notes = outputs(*pair)
        assert made == wanted
        assert len(notes) == 1 and re.match(r"\d+ matrices that .* quantised are dequantised", notes[0])


@pytest.mark.parametrize("name", ["tiny-minimax-m2", "tiny-qwen3vlmoe", "tiny-mistral3", "tiny-qwen35moe"])
@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_families_and_types(name: str, type: str, tmp_path: Path) -> None:
    """Also stacks of experts that are one tensor, and a model of images."""
    config = BLOCKS | {"weight_block_size": [16, 16]}
    made, wanted, _ = outputs(*quantised_pair(copy_checkpoint(tmp_path, name), fp8((16, 16)), config), type)
    assert made == wanted


def test_scales_of_activations_and_caches_have_no_effect(tmp_path: Path) -> None:
    folder, plain = quantised_pair(copy_checkpoint(tmp_path), fp8((0, 0)), STATIC)
    layer, one = "model.layers.0.self_attn.", np.array(0.5, np.float32)
    names = ("q_proj.input_scale", "q_proj.activation_scale", "k_proj.k_scale", "v_proj.v_scale")
    rewrite(folder, lambda arrays: arrays.update({layer + name: one for name in names}))
    made, wanted, _ = outputs(folder, plain)
    assert made == wanted


def test_shards(tmp_path: Path) -> None:
    """A scale may be in another file than its tensor."""
    folder, plain = quantised_pair(copy_checkpoint(tmp_path), *METHODS["blocks"])
    arrays: Parts = {}
    rewrite(folder, arrays.update)
    files = ["model-1.safetensors", "model-2.safetensors"]
    where = {name: files[name.endswith("_scale_inv")] for name in arrays}
    for file in files:
        write_safetensors(folder / file, {name: arrays[name] for name in arrays if where[name] == file})
    index = {"weight_map": where}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made, wanted, _ = outputs(folder, plain)
    assert made == wanted


def test_all_codes_of_e4m3() -> None:
    np.testing.assert_array_equal(E4M3, np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32))


def test_bytes_of_8_bit_floats(tmp_path: Path) -> None:
    """They are read where the header says, behind other tensors."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    arrays = {"a": np.ones(3, np.float16), "b": codes.view(FP8), "c": codes.view(ml_dtypes.float8_e5m2)}
    write_safetensors(tmp_path / "a.safetensors", arrays)
    file = Safetensors(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(file.read("b"), codes)
    np.testing.assert_array_equal(file.read("c")[3:5], codes[3:5])


@pytest.mark.parametrize("shape", [(64, 32768), (32768, 64), (4, 512, 1024)])
def test_memory_holds_the_values_of_a_tensor_once(shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = np.ones((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), np.float32)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": np.ones(shape, FP8), "x_scale_inv": scales})
    config = Settings(path, {"quantization_config": BLOCKS})
    config = config.having(read_method(config))
    checkpoint = dequantised(Checkpoint(tmp_path, config, stored_in(Safetensors(path))))
    checkpoint.load("x")
    tracemalloc.start()
    values = checkpoint.load("x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes + (4 << 20)


def test_memory_holds_one_matrix(tmp_path: Path) -> None:
    """One expert in float32 and its blocks, however many experts there are."""
    peaks = []
    for experts in (3, 9):
        folder = copy_checkpoint(tmp_path / str(experts), "tiny-minimax-m2")
        wide = 1024
        change_config(folder, num_local_experts=experts, intermediate_size=wide, quantization_config=BLOCKS)
        arrays = {name: each for name, each in tensors_of(folder).items() if ".experts." not in name}
        width = arrays["model.norm.weight"].size
        matrix, _, _ = in_fp8(np.ones((wide, width), np.float32), (128, 128))
        for name, each in [*arrays.items()]:
            if name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias")):
                arrays[name] = np.ones((experts, *each.shape[1:]), np.float32)
                layer = name.partition("block_sparse_moe")[0]
                for expert in range(experts):
                    for part in ("w1", "w2", "w3"):
                        origin = f"{layer}block_sparse_moe.experts.{expert}.{part}.weight"
                        arrays[origin] = matrix.T if part == "w2" else matrix
                        counts = -(-arrays[origin].shape[0] // 128), -(-arrays[origin].shape[1] // 128)
                        arrays[f"{origin}_scale_inv"] = np.ones(counts, np.float32)
        write_safetensors(folder / "model.safetensors", arrays)
        tracemalloc.start()
        convert(folder, tmp_path / "out.gguf", ConvertOptions("F16", force=True))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < matrix.size * 12, peaks


Change = Callable[[Parts], None]
MATRIX = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{MATRIX}_scale_inv"


def put(name: str, values: Any, at: Any = ...) -> Change:
    def change(arrays: Parts) -> None:
        if at is ...:
            arrays[name] = values
        else:
            arrays[name][at] = values

    return change


def drop(*ends: str) -> Change:
    def change(arrays: Parts) -> None:
        for name in [each for each in arrays if each.endswith(ends)]:
            del arrays[name]

    return change


def as_bf16(arrays: Parts) -> None:
    arrays[MATRIX] = arrays[MATRIX].astype(ml_dtypes.bfloat16)


NAN = np.uint8(0x7F).view(FP8)
DAMAGED: dict[str, tuple[Change, dict[str, Any] | None, str]] = {
    "no scale": (drop(SCALE), BLOCKS, f"'{MATRIX}' is F8_E4M3 and has no '{SCALE}' or"),
    "no tensor": (drop(MATRIX), BLOCKS, f"'{SCALE}' holds scales, but the tensor"),
    "a tensor that is not quantised": (as_bf16, BLOCKS, f"'{SCALE}' holds scales, but the tensor"),
    "a code that is not a number": (put(MATRIX, NAN, (3, 5)), BLOCKS, f"'{MATRIX}' holds a code that is not"),
    "zero": (put(SCALE, 0, (0, 0)), BLOCKS, f"'{SCALE}' holds the scale 0: finite numbers above 0"),
    "negative": (put(SCALE, -1, (0, 0)), BLOCKS, f"'{SCALE}' holds the scale -1: finite"),
    "infinite": (put(SCALE, np.inf, (0, 0)), BLOCKS, f"'{SCALE}' holds the scale inf: finite"),
    "no number": (put(SCALE, np.nan, (0, 0)), BLOCKS, f"'{SCALE}' holds the scale nan: finite"),
    "too many scales": (
        put(SCALE, np.ones((3, 1), np.float32)), BLOCKS,
        rf"'{SCALE}' has shape \[3, 1\]: \[160, 64\] of '{MATRIX}' implies \[2, 1\]",
    ),
    "scales of another size": (lambda arrays: None, BLOCKS | {"weight_block_size": [64, 64]}, r"implies \["),
    "a scale for all": (put(SCALE, np.array(1, np.float32)), BLOCKS, rf"'{SCALE}' has shape \[\]"),
    "integers": (put(SCALE, np.ones((2, 1), np.uint8)), BLOCKS, f"'{SCALE}' is U8: scales are F32, F16"),
    "a vector": (
        lambda arrays: arrays.update({"model.norm.weight": np.ones(64, FP8),
                                      "model.norm.weight_scale_inv": np.ones(1, np.float32)}),
        BLOCKS, r"'model\.norm\.weight' has shape \[64\]: a matrix is needed",
    ),
    "no declared method": (lambda arrays: None, {}, "_proj.weight' is F8_E4M3, but config.json has no quant"),
    "another kind of floats": (
        put(MATRIX, np.ones((160, 64), ml_dtypes.float8_e5m2)), BLOCKS, f"'{MATRIX}' is F8_E5M2, which fp8|"
        f"'{SCALE}' holds scales",
    ),
    "nothing is quantised": (
        lambda arrays: arrays.update({name: each.astype("<f4") for name, each in arrays.items()}), BLOCKS,
        "quantised by fp8, but no tensor is F8_E4M3: download all files, or remove",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_in_one_line(case: str, tmp_path: Path) -> None:
    change, config, message = DAMAGED[case]
    folder, _ = quantised_pair(copy_checkpoint(tmp_path), fp8((128, 128)), config or {})
    rewrite(folder, change)
    with pytest.raises(ConvertError, match=message) as caught:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "integers of compressed-tensors": (
        compressed("group", "pack-quantized", num_bits=4, type="int", group_size=128),
        r"compressed-tensors \(pack-quantized: 4 bits of type int, strategy group\), which is not supported",
    ),
    "8-bit integers": (compressed("channel", "int-quantized", type="int"), "8 bits of type int, strategy c"),
    "groups of FP8": (compressed("group", group_size=128), "8 bits of type float, strategy group"),
    "sparse": (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity"),
    "rotated": (compressed("channel") | {"transform_config": {"config_groups": {"u": {}}}}, "with transform"),
    "no groups": (compressed("channel") | {"config_groups": {}}, "config_groups is {}: an object that desc"),
    "a group that is none": (compressed("channel") | {"config_groups": {"a": ["Linear"]}}, "an object of "),
    "blocks of one number": (compressed("block", block_structure=[128]), r"block_structure is \[128\]: a l"),
    "blocks of nothing": (BLOCKS | {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]: a li"),
    "another format": (BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2': e4m3 is needed"),
    "a format of the wrong kind": (compressed("channel") | {"format": 5}, "format is 5: a string is needed"),
    "experts of 4 bits": (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4': fp8 is needed"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"modelopt \(W4A8_AWQ\), which is"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_methods_are_refused(case: str, tmp_path: Path) -> None:
    config, message = OTHERS[case]
    folder, _ = quantised_pair(copy_checkpoint(tmp_path), fp8((128, 128)), config)
    with pytest.raises(ConvertError, match=message) as caught:
        convert(folder, tmp_path / "out.gguf")
    assert f"the weights are quantised by {config['quant_method']}" in str(caught.value)


def test_an_unknown_key_of_the_description_is_noted(tmp_path: Path) -> None:
    folder, plain = quantised_pair(copy_checkpoint(tmp_path), fp8((128, 128)), BLOCKS | {"rotation": 3})
    (note,) = (note for note in outputs(folder, plain)[2] if "not read" in note)
    assert "quantization_config.rotation" in note


@pytest.mark.parametrize(("name", "method"), [("tiny-gpt-oss", "mxfp4"), ("tiny-bitnet", "bitnet")])
def test_methods_of_families_need_their_tensors(name: str, method: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, quantization_config={"quant_method": method})
    rewrite(folder, lambda arrays: arrays.update({n: v.astype(np.float32) for n, v in arrays.items()}))
    with pytest.raises(ConvertError, match=f"quantised by {method}, but no tensor is U8"):
        convert(folder, tmp_path / "out.gguf")
    change_config(folder, quantization_config={})
    convert(folder, tmp_path / "out.gguf")
