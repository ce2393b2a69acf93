"""Models with other parts than text: their text models, in the forms in which they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, tensors_of, write_safetensors
from support.golden import WRAPPERS, golden
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.layouts import LAYOUTS
from hotcold.convert.tensors import halve_rotary
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


def file_of(folder: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    """Metadata and tensors of the file that a checkpoint gives, exactly."""
    out = folder.parent / "out.gguf"
    convert(folder, out, ConvertOptions("F32", name="tiny", force=True))
    with open_gguf(out) as file:
        return dict(file.metadata), {name: file.load(name).dequantise() for name in file.tensors}


def assert_same(
    folder: Path, wanted: tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]], *but: str
) -> None:
    """Asserts that a checkpoint gives this file, apart from some keys."""
    metadata, tensors = file_of(folder)
    for key in {**metadata, **wanted[0]}.keys() - {*but}:
        np.testing.assert_array_equal(metadata[key], wanted[0][key], err_msg=key)
    assert tensors.keys() == wanted[1].keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, wanted[1][name], err_msg=name)


def change_text(folder: Path, **changes: Any) -> None:
    """Sets keys of the text model; ``...`` removes one."""
    text = json.loads((folder / "config.json").read_text())["text_config"] | changes
    change_config(folder, text_config={key: value for key, value in text.items() if value is not ...})


@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_of_the_text_model_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = golden(name, tmp_path)
    runner = Runner(tiny.path, open_backend("reference"), cache_type="f32")
    logits = runner.run([*tiny.prompt, *tiny.steps])
    wanted = np.concatenate([tiny.prompt_logits, tiny.step_logits])
    np.testing.assert_allclose(logits, wanted, atol=1e-4, rtol=0)


#: The names of tensors, of the class and of the text model as transformers 5.23 saves them.
SAVED = {
    "tiny-kimi-k25": (".model.layers.", ".model.blocks.", "Kimi_K25ForConditionalGeneration", "deepseek_v3"),
    "tiny-exaone4_5": ("model.language_model.", "language_model.model.", None, "exaone4"),
    "tiny-lfm2vl": ("model.language_model.", "language_model.model.", None, "lfm2"),
    "tiny-glm46v": ("model.language_model.", "language_model.model.", None, "glm4v_text"),
}


@pytest.mark.parametrize("name", SAVED)
def test_other_names_of_the_same_model(name: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    before = file_of(folder)
    old, new, implementation, text = SAVED[name]
    tensors = {each.replace(old, new): values for each, values in tensors_of(folder).items()}
    assert tensors.keys() != tensors_of(folder).keys()
    write_safetensors(folder / "model.safetensors", tensors)
    if implementation:
        change_config(folder, architectures=[implementation])
    change_text(folder, model_type=text)
    assert_same(folder, before)


def test_a_text_model_with_its_keys_outside(tmp_path: Path) -> None:
    """GLM-4.1V was first published so."""
    folder = copy_checkpoint(tmp_path, "tiny-glm4v")
    before = file_of(folder)
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, **config["text_config"] | {"model_type": "glm4v"}, text_config=...)
    assert_same(folder, before)


def test_the_text_model_decides_what_is_computed(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-glm4vmoe")
    before = file_of(folder)
    change_config(folder, model_type="glm46v", architectures=["Glm46VForConditionalGeneration"])
    assert before[0]["general.architecture"] == "glm4moe"
    assert_same(folder, before)
    change_text(folder, model_type="glm4v_text")
    with pytest.raises(ConvertError, match=r"has shape|has no tensor"):
        file_of(folder)


@pytest.mark.parametrize("name", WRAPPERS)
def test_another_text_model_is_refused(name: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_text(folder, model_type="qwen3")
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    known = " or ".join(LAYOUTS[model_type].texts)
    with pytest.raises(ConvertError, match=f"model_type is 'qwen3': {known} is needed"):
        file_of(folder)


def test_what_guesses_tokens_is_left_out(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-exaone4_5")
    before = file_of(folder)
    change_tensors(folder, mtp__fc__weight=np.zeros((40, 80), "<f2"))
    assert_same(folder, before)


def test_sections_of_rotated_pairs(tmp_path: Path) -> None:
    """Rotated rows of GLM-4.1V become halves, as llama.cpp needs them; GLM-4.5V stores them so."""
    folder = copy_checkpoint(tmp_path, "tiny-glm4v")
    metadata, tensors = file_of(folder)
    assert list(metadata["glm4.rope.dimension_sections"]) == [1, 1, 1, 0]
    stored = tensors_of(folder)
    for part, heads in (("q", 4), ("k", 2)):
        order = np.arange(heads * 12).reshape(heads, 12)[:, [0, 2, 4, 1, 3, 5, *range(6, 12)]].ravel()
        for kind in ("weight", "bias"):
            values = stored[f"model.language_model.layers.1.self_attn.{part}_proj.{kind}"]
            np.testing.assert_array_equal(tensors[f"blk.1.attn_{part}.{kind}"], values[order])
    with open_gguf(golden("tiny-glm4vmoe", tmp_path).path) as file:
        assert list(file.metadata["glm4moe.rope.dimension_sections"]) == [1, 1, 1, 0]


def test_halves_of_rotated_rows_by_hand() -> None:
    rows = np.arange(12)[:, None] * np.ones(2)
    assert halve_rotary(rows, 2, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("name", ["tiny-glm4v", "tiny-glm4vmoe"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"mrope_section": [2, 1, 1]}}, r"is \[2, 1, 1\]: a list with the sum 3"),
        ({"rope_scaling": {"mrope_section": [2147483647, 2147483647, 5]}}, "a list with the sum 3"),
        ({"rope_scaling": {"rope_type": "default"}}, "mrope_section is missing: a list with the sum 3"),
        ({"partial_rotary_factor": 1.0}, r"is \[1, 1, 1\]: a list with the sum 6"),
    ],
)
def test_sections_that_do_not_fit(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_text(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        file_of(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-glm4v", {"attention_bias": False}, "attention_bias is False: true is needed"),
        ("tiny-glm4vmoe", {"use_qk_norm": True}, "use_qk_norm is True: false is needed"),
        ("tiny-kimi-k25", {"quantization_config": {"quant_method": "x"}}, "quantised by x"),
    ],
)
def test_what_the_class_would_ignore(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_text(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        file_of(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True: false is needed"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': 'gelu_pytorch_tanh' is needed"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh': one of gelu_new, gelu_pytorch_tanh"),
    ],
)
def test_keys_of_gemma(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-gemma")
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        file_of(folder)


def test_windows_of_ministral(tmp_path: Path) -> None:
    """All layers have the window unless config.json says which; without a length none has."""
    folder = copy_checkpoint(tmp_path, "tiny-ministral")
    key = "llama.attention.sliding_window"
    metadata, _ = file_of(folder)
    assert metadata[key] == 8 and list(metadata[f"{key}_pattern"]) == [False, True, True]
    change_config(folder, layer_types=...)
    metadata, _ = file_of(folder)
    assert metadata[key] == 8 and f"{key}_pattern" not in metadata
    change_config(folder, sliding_window=None)
    assert key not in file_of(folder)[0]
