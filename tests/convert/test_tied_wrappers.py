"""Models that have other parts with a text model: their text models are converted, tied as the whole is.

benchmarks/quality/convert_keys.py compares them with transformers, one key at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.golden import DATA
from support.runner import Runner
from support.wrappers import WRAPPERS, make_wrapper

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend


def change_text(folder: Path, **changes: Any) -> None:
    """Sets keys of ``text_config``; ``...`` removes one."""
    text = json.loads((folder / "config.json").read_text())["text_config"] | changes
    change_config(folder, text_config={key: value for key, value in text.items() if value is not ...})


def converted(folder: Path) -> Path:
    out = folder.parent / "out.gguf"
    convert(folder, out, ConvertOptions("F32", force=True))
    return out


@pytest.mark.parametrize("name", WRAPPERS)
def test_logits_are_those_of_the_text_model(name: str, tmp_path: Path) -> None:
    path = converted(make_wrapper(tmp_path, name))
    with np.load(DATA / WRAPPERS[name].golden / "golden.npz", allow_pickle=False) as arrays:
        logits = Runner(path, open_backend("cpu"), cache_type="f32").run(arrays["prompt"])
        np.testing.assert_allclose(logits, arrays["prompt_logits"], atol=1e-4, rtol=0)


#: transformers 5.23 asks the whole model alone; its classes imply the third. An older file may say it in its
#: text_config alone, which is believed, too.
@pytest.mark.parametrize(
    ("name", "implied"),
    [
        ("wrapped-gemma3", True),
        ("wrapped-gemma4-31b", True),
        ("wrapped-mistral-small", True),
        ("wrapped-qwen35", False),
    ],
)
def test_a_model_without_a_head_is_tied_as_its_class_implies(
    name: str, implied: bool, tmp_path: Path
) -> None:
    folder = make_wrapper(tmp_path, name)
    tensors = {key: each for key, each in tensors_of(folder).items() if "lm_head" not in key}
    write_safetensors(folder / "model.safetensors", tensors)
    for outer in (True, False, ...):
        for inner in (True, False, ...):
            change_config(folder, tie_word_embeddings=outer)
            change_text(folder, tie_word_embeddings=inner)
            if inner is True or outer is True or (outer is ... and implied):
                with open_gguf(converted(folder)) as file:
                    assert "output.weight" not in file.tensors
            else:
                with pytest.raises(ConvertError, match=r"no tensor 'lm_head\.weight'"):
                    converted(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wrapped-mistral-small", {"text_config": ...}, "text_config is missing: an object"),
        ("wrapped-mistral-small", {"text_config": {"model_type": "mistral4"}}, "is 'mistral4': mistral or"),
        ("wrapped-mistral-small", {"text_config": {"model_type": [1]}}, "model_type is .1.: a string"),
    ],
)
def test_text_models_that_are_unknown(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_wrapper(tmp_path, name)
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        converted(folder)


def test_scores_grow_in_ministral_alone(tmp_path: Path) -> None:
    """Mistral's class has no such key, and no window that config.json does not state."""
    folder = make_wrapper(tmp_path, "wrapped-mistral-small")
    rope = {"rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1}
    change_text(folder, rope_parameters=rope, sliding_window=None, model_type=...)
    with open_gguf(converted(folder)) as file:
        assert file.metadata["general.architecture"] == "mistral3"
        assert not [key for key in file.metadata if "temperature" in key or "sliding" in key]
    change_text(folder, sliding_window=...)
    with open_gguf(converted(folder)) as file:
        assert file.metadata["mistral3.attention.sliding_window"] == 4096


def test_a_cap_that_the_class_of_images_ignores(tmp_path: Path) -> None:
    folder = make_wrapper(tmp_path, "wrapped-gemma3")
    change_text(folder, final_logit_softcapping=30.0)
    with pytest.raises(ConvertError, match=r"final_logit_softcapping is 30\.0: None is needed"):
        converted(folder)
    change_config(copy_checkpoint(tmp_path, "tiny-gemma3"), final_logit_softcapping=30.0)
    with open_gguf(converted(tmp_path / "tiny-gemma3")) as file:
        assert file.metadata["gemma3.final_logit_softcapping"] == 30
