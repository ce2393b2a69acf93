"""Checkpoints in NVFP4, as llm-compressor and ModelOpt publish them: their blocks are moved, not computed."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.quantised import Array, Parts, Quantise, compressed, in_nvfp4, quantised_pair, rewrite
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend

PUBLISHED = {
    "compressed": compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4, group_size=16),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}
MATRICES = r"_proj|\.w[123]\.|lm_head"
SIZES = {40: 64, 20: 64, 48: 64, 24: 32}  #: multiples of a block for the sizes of tiny-minimax-m2


def nvfp4(published: str) -> Quantise:
    """Each matrix has a factor of its own."""

    def quantise(name: str, values: Array) -> tuple[Parts, Array]:
        factor = float(np.abs(values).max() / 6 / 448)
        codes, scales, dequantised = in_nvfp4(values, factor)
        if published == "modelopt":
            parts = {name: codes, f"{name}_scale_2": np.array(factor, np.float32)}
            parts[name.removesuffix("weight") + "input_scale"] = np.array(3, np.float32)
        else:
            inverse = np.array([1 / factor], np.float32)
            parts = {f"{name}_packed": codes, f"{name}_global_scale": inverse}
            parts[name.removesuffix("weight") + "input_global_scale"] = np.array([3], np.float32)
        return parts | {f"{name}_scale": scales}, dequantised

    return quantise


def pair(folder: Path, name: str, published: str, type: str) -> tuple[Path, Path]:
    """The GGUF files of a quantised checkpoint, and of the same in float32."""
    quantised, plain = quantised_pair(
        copy_checkpoint(folder, name), nvfp4(published), PUBLISHED[published], MATRICES
    )
    convert(plain, folder / "plain.gguf", ConvertOptions("F32"))
    convert(quantised, folder / "out.gguf", ConvertOptions(type))
    return folder / "out.gguf", folder / "plain.gguf"


def kept(made: Path, plain: Path) -> set[str]:
    """The names of blocks of NVFP4, whose values are compared as the gguf package decodes them."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made).tensors}
    names = {name for name in tensors if tensors[name].tensor_type.name == "NVFP4"}
    with open_gguf(plain) as file:
        for name in names:
            values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
            factors = tensors[name.removesuffix("weight") + "scale"].data
            wanted = file.load(name).dequantise()
            shape = [-1] + [1] * (wanted.ndim - 1)
            np.testing.assert_allclose(values * factors.reshape(shape), wanted, rtol=1e-6)
    return {name.split(".")[-2] for name in names}


@pytest.mark.parametrize("published", PUBLISHED)
def test_blocks_stay_blocks(published: str, tmp_path: Path) -> None:
    """Rows of q and k move. Rows of down are no whole blocks, so they are dequantised."""
    found = kept(*pair(tmp_path, "tiny-llama", published, "Q4_0"))
    assert found == {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "output"}


@pytest.mark.parametrize("published", PUBLISHED)
def test_experts_have_a_factor_each(published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy_checkpoint(tmp_path, "tiny-minimax-m2")
    # All experts count, so that rounding changes no choice of experts.
    change_config(source, hidden_size=64, intermediate_size=64, head_dim=16, num_experts_per_tok=6)
    arrays = {
        name: np.resize(each, [SIZES.get(size, size) for size in each.shape])
        for name, each in tensors_of(source).items()
    }
    for i, name in enumerate(arrays):
        arrays[name] = (arrays[name].astype(np.float32) * (1 + i % 3 / 4)).astype(np.float32)
    write_safetensors(source / "model.safetensors", arrays)
    monkeypatch.setattr(f"{__name__}.copy_checkpoint", lambda *given: source)
    made, plain = pair(tmp_path, "tiny-minimax-m2", published, "F32")
    assert {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_q"} <= kept(made, plain)
    prompt = np.arange(3, 19, dtype=np.int32)
    logits, wanted = (
        Runner(path, open_backend("reference"), cache_type="f32").run(prompt) for path in (made, plain)
    )
    # The op rounds what it reads to int8.
    assert np.abs(logits - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("published", PUBLISHED)
def test_transposed_matrices_are_dequantised(published: str, tmp_path: Path) -> None:
    """Rows of down by neuron cut blocks."""
    folder, plain = quantised_pair(
        copy_checkpoint(tmp_path, "tiny-drelu"), nvfp4(published), PUBLISHED[published], r"down_proj"
    )
    files = []
    for each in (folder, plain):
        convert(each, tmp_path / "out.gguf", ConvertOptions("F32", name="x", force=True))
        with open_gguf(tmp_path / "out.gguf") as file:
            files.append({name: file.load(name).dequantise() for name in file.tensors})
    assert files[0].keys() == files[1].keys()
    for name, values in files[1].items():
        np.testing.assert_allclose(files[0][name], values, rtol=1e-6)


NAME = "model.layers.1.self_attn.q_proj.weight"
DAMAGED = {
    "a negative scale": (f"{NAME}_scale", ml_dtypes.float8_e4m3fn(-2), "holds a scale that is negative"),
    "no scale": (f"{NAME}_scale", None, f"{NAME}_packed' is U8 and has no '{NAME}_scale'"),
    "no factor": (f"{NAME}_global_scale", None, "is U8 and has no .*_global_scale' or .*_scale_2'"),
    "no codes": (
        f"{NAME}_packed",
        None,
        "holds scales, but the tensor that they belong to is not stored as U8",
    ),
    "a factor of 0": (f"{NAME}_global_scale", 0, "_global_scale' holds the scale 0: finite numbers above"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    name, value, message = DAMAGED[case]
    folder, _ = quantised_pair(copy_checkpoint(tmp_path), nvfp4("compressed"), PUBLISHED["compressed"])

    def change(arrays: Parts) -> None:
        if value is None:
            del arrays[name]
        else:
            arrays[name][...] = value

    rewrite(folder, change)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")


ADDED = {
    "more than one factor": ("_global_scale", np.ones(2), r"_global_scale' has shape \[2\]: one factor of e"),
    "scales of another type": ("_scale", np.ones((64, 4)), "_scale' is F32: scales of NVFP4 are F8_E4M3"),
    "the weight twice": ("", np.ones((64, 64)), f"'{NAME}' is stored together with '{NAME}_packed'"),
}


@pytest.mark.parametrize("case", ADDED)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    end, values, message = ADDED[case]
    folder, _ = quantised_pair(copy_checkpoint(tmp_path), nvfp4("compressed"), PUBLISHED["compressed"])
    rewrite(folder, lambda arrays: arrays.update({NAME + end: values.astype(np.float32)}))
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")
