"""Files of ``convert --dense`` in llama.cpp: transformers' logits, and its greedy tokens far from ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.golden import DATA

from hotcold.convert import ConvertError, ConvertOptions, convert

llama_cpp = pytest.importorskip("llama_cpp")

FOLDERS = sorted(path.parent.name for path in DATA.glob("tiny-*/golden.npz"))
#: Why llama.cpp's logits are others than transformers' for these configurations.
OTHERS = {
    "tiny-falcon40": "it has no place for biases of Falcon",
    "tiny-gpt-oss": "it rounds the ends of YaRN's ramp, which gpt-oss does not",
    "tiny-phi3": "it has no windows of Phi-3, and picks longrope's table by the context's length",
    "tiny-smallthinker": "its windows of SmallThinker have 4096 positions",
    "tiny-deepseek2": "its groups of experts rank by two of each, DeepSeek-V2's by one",
    "tiny-gemma2": "it scales Gemma 2's scores by its number of layers, whatever the file says",
    "tiny-starcoder2": "it has no windows of StarCoder 2",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    try:
        # A name: llama.cpp looks for Phi-3's special tokens in files whose names say so.
        done = convert(DATA / name, path, ConvertOptions("F32", dense=True, name="tiny"))
    except ConvertError as error:
        pytest.skip(str(error))
    if done.notes or name in OTHERS:
        pytest.skip(OTHERS.get(name, "; ".join(done.notes)))
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as arrays:
        golden = {key: arrays[key] for key in arrays.files}
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    try:
        model.eval(golden["prompt"].tolist())
        for id in golden["steps"].tolist():
            model.eval([id])
        seen = np.array(model.scores[: model.n_tokens])
    finally:
        model.close()
    wanted = np.concatenate([golden["prompt_logits"], golden["step_logits"]])
    error = np.sqrt(((seen - wanted) ** 2).mean()) / wanted.std()
    assert error < 0.02  # its cache is F16, and experts near a tie may change places
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > 0.05 * wanted.std()
    assert clear.sum() > 20
    assert np.array_equal(seen.argmax(1)[clear], wanted.argmax(1)[clear])
