"""Files of ``convert --dense`` in llama.cpp: transformers' logits, and its greedy tokens far from ties.

Where llama.cpp computes something else, its logits are compared with ours on a file without that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.changed_models import changed
from support.checkpoints import golden_checkpoint
from support.golden import DATA
from support.runner import Runner

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.reference import ReferenceBackend

llama_cpp = pytest.importorskip("llama_cpp")

FOLDERS = sorted(path.parent.name for path in DATA.glob("tiny-*/golden.npz"))
_EXAONE4 = "its heads of EXAONE 4 make up D, and windows are those of 64 layers"
_INDEX = "its index has heads of 64 values and more: with fewer it ends the process"
#: Why llama.cpp's logits are others than transformers' for these configurations.
OTHERS = {
    "tiny-command-r": "it reads norms of q and k in models of 64 layers and more alone",
    "tiny-deepseek2": "its groups of experts rank by two of each, DeepSeek-V2's by one",
    "tiny-deepseek2-lite": "it loads queries without a latent in models of 26, 27 and 48 layers alone",
    "tiny-deepseek32": _INDEX,
    "tiny-exaone4": _EXAONE4,
    "tiny-exaone4_5": _EXAONE4,
    "tiny-falcon40": "it has no place for biases of Falcon",
    "tiny-gemma2": "it scales Gemma 2's scores by its number of layers, whatever the file says",
    "tiny-gemma3n": "its Gemma 3n has 256 inputs of a layer, and pages in the first 20 layers",
    "tiny-glm-dsa": _INDEX,
    "tiny-gpt-oss": "it rounds the ends of YaRN's ramp, which gpt-oss does not",
    "tiny-llama4": "its chunks of Llama 4 have 8192 positions, whatever the file says; its temperatures, too",
    "tiny-ministral": "it has no windows in files of llama",
    "tiny-olmo3": "it takes YaRN's own factor of the rotation, whatever the file says",
    "tiny-phi3": "it has no windows of Phi-3, and picks longrope's table by the context's length",
    "tiny-rwkv7": "its heads of RWKV have a multiple of 64 values, or of 32 where vectors are short",
    "tiny-smallthinker": "its windows of SmallThinker have 4096 positions",
    "tiny-starcoder2": "it has no windows of StarCoder 2",
}
_SILU = {"hotcold.ffn.activation": "silu", "hotcold.ffn.threshold": None}
_NO_YARN = {
    f"rope.scaling.{key}": None
    for key in ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
}
_NARROW = {"attention.key_length": 10, "attention.value_length": 10, "rope.dimension_count": 10}
_NO_WINDOW = {"attention.sliding_window": None, "attention.sliding_window_pattern": None}
#: Keys (those of the architecture without its name) with which llama.cpp computes what we do.
ALIKE: dict[str, dict[str, Any]] = {
    "tiny-command-r": {},
    "tiny-deepseek2": {"expert_group_count": None, "expert_group_used_count": None},
    "tiny-deepseek32": {"attention.indexer.key_length": 64},
    "tiny-exaone4": _NARROW | _NO_WINDOW,
    "tiny-falcon40": {"hotcold.ffn.activation": "gelu"},
    "tiny-gemma2": {"attention.scale": None},
    "tiny-glm-dsa": {"attention.indexer.key_length": 64},
    "tiny-gpt-oss": _NO_YARN,
    "tiny-llama4": {
        "attention.sliding_window": 8192, "attention.temperature_scale": None,
        "attention.temperature_length": None,
    },
    "tiny-minicpm": _SILU,
    "tiny-ministral": _NO_WINDOW,
    "tiny-olmo3": {"rope.scaling.yarn_attn_factor": None},
    "tiny-phi3": {"attention.sliding_window": None},
    "tiny-prosparse": _SILU,
    "tiny-rwkv7": {"wkv.head_size": 64},
    # Sigmoids near 1 are alike in float32, and each breaks the tie in its own way: a softmax has none.
    "tiny-smallthinker": {"attention.sliding_window": 4096, "expert_gating_func": 1},
    "tiny-starcoder2": {"attention.sliding_window": 0},
    "tiny-turbosparse": _SILU,
}  # fmt: skip
#: Names of tensors that llama.cpp has no place for.
_TAKEN = {
    "tiny-command-r": r"attn_[qk]_norm",
    "tiny-falcon40": r"(attn_qkv|attn_output|ffn_up|ffn_down)\.bias",
}


def converted(name: str, folder: Path) -> tuple[Path, list[str]]:
    """A file for llama.cpp, and notes of its differences."""
    path = folder / "out.gguf"
    try:
        # A name: llama.cpp looks for Phi-3's special tokens in files whose names say so.
        return path, convert(
            golden_checkpoint(name), path, ConvertOptions("F32", dense=True, name="tiny")
        ).notes
    except ConvertError as error:
        pytest.skip(str(error))


def logits_of(path: Path, prompt: list[int], steps: list[int]) -> npt.NDArray[np.float32]:
    """llama.cpp's of all tokens, with a cache of F32."""
    exact = {"type_k": 0, "type_v": 0}
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False, **exact)
    try:
        model.eval(prompt)
        for id in steps:
            model.eval([id])
        return np.array(model.scores[: model.n_tokens])
    finally:
        model.close()


def check(logits: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> None:
    error = np.sqrt(((logits - wanted) ** 2).mean()) / wanted.std()
    assert error < 0.003  # its GELU is a table of halves; without that 0.0001
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > 0.05 * wanted.std()
    assert clear.sum() > len(wanted) // 2
    assert np.array_equal(logits.argmax(1)[clear], wanted.argmax(1)[clear])


@pytest.mark.parametrize("name", FOLDERS)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    if name in OTHERS:
        pytest.skip(OTHERS[name])
    path, notes = converted(name, tmp_path)
    if notes:
        pytest.skip("; ".join(notes))
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as arrays:
        golden = {key: arrays[key] for key in arrays.files}
    logits = logits_of(path, golden["prompt"].tolist(), golden["steps"].tolist())
    check(logits, np.concatenate([golden["prompt_logits"], golden["step_logits"]]))


@pytest.mark.parametrize("name", ALIKE)
def test_the_rest_of_a_family_that_differs(name: str, tmp_path: Path) -> None:
    path, _ = converted(name, tmp_path)
    with open_gguf(path) as file:
        own = f"{file.metadata['general.architecture']}."
        tensors = {each: file.load(each).dequantise() for each in file.tensors}
    keys = {key if "hotcold" in key else own + key: value for key, value in ALIKE[name].items()}
    alike = changed(path, tmp_path / "alike.gguf", keys, _changed_tensors(name, tensors))
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as arrays:
        prompt, steps = arrays["prompt"].tolist(), arrays["steps"].tolist()
    wanted = Runner(alike, ReferenceBackend(), cache_type="f32").run(prompt + steps)
    check(logits_of(alike, prompt, steps), wanted)


def _changed_tensors(name: str, tensors: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Tensor | None]:
    if name == "tiny-exaone4":  # 10 of each head's 12 values, whatever they mean
        cut = {"attn_q.weight": 40, "attn_k.weight": 20, "attn_v.weight": 20, "attn_q_norm.weight": 10,
               "attn_k_norm.weight": 10, "rope_freqs.weight": 5}  # fmt: skip
        found: dict[str, Tensor | None] = {}
        for each, values in tensors.items():
            part = re.sub(r"blk\.\d+\.", "", each)
            if part == "attn_output.weight":
                found[each] = _f32(values[:, :40])
            elif part in cut:
                found[each] = _f32(values[: cut[part]])
        return found
    if OTHERS.get(name) == _INDEX:  # without effect, while a text is shorter than what it chooses
        return {
            each: _f32(np.resize(values, _index_shape(each, values.shape)))
            for each, values in tensors.items()
            if "indexer.attn" in each or "indexer.k" in each
        }
    return {each: None for each in tensors if re.search(_TAKEN.get(name, "$^"), each)}


def _index_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tensor of the index, whose heads of 16 values get 64."""
    return (shape[0] * 4, *shape[1:])


def _f32(values: npt.NDArray[np.float32]) -> Tensor:
    return quantise(np.ascontiguousarray(values), "F32")
