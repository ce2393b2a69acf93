"""Saved sparse models: transformers loads them with their own code, and the engine computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import golden_checkpoint

from hotcold.convert import ConvertOptions, convert
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.quantize.layouts import LayoutOptions, change_layout
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers", reason="training needs transformers")

from safetensors.torch import load_file  # noqa: E402

from hotcold.training import make_sparse, save_sparse, train_predictors  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
WINDOW = [1, *range(40, 56)]
pytestmark = pytest.mark.usefixtures("module_cache")


def sparse(name: str, kind: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(golden_checkpoint(name), dtype=torch.float32)
    return make_sparse(model, kind).eval()


def ours(path: Path, sparsity: str) -> Any:
    session = load(path, LoadOptions(sparsity=sparsity, threads=1, cache_type="f32", context=0)).session()
    found = np.concatenate([np.array(rows) for rows in Scorer(session).logits(WINDOW)])
    session.close()
    return found


@pytest.mark.parametrize(
    ("name", "kind", "thresholds"),
    [
        ("tiny-llama", "drelu", [0.05, 0.0, 0.4]),
        ("tiny-llama", "relu", [0.1, 0.1, 0.1]),
        ("tiny-llama", "relu", None),
        ("tiny-qwen2moe", "drelu", [0.3, 0.02]),  # experts, and one that all tokens share
        ("tiny-starcoder2", "relu", [0.05, 0.4]),
    ],
)
def test_saved_models_compute_the_same_everywhere(
    name: str, kind: Any, thresholds: list[float] | None, tmp_path: Path
) -> None:
    model, output = sparse(name, kind), tmp_path / "sparse"
    report = save_sparse(model, output, original=golden_checkpoint(name), threshold=thresholds)
    assert report["thresholds"] == (thresholds or [0.0] * len(report["thresholds"]))
    config = json.loads((output / "config.json").read_text())
    known = kind == "relu" and not thresholds
    assert ("auto_map" in config) == (output / "modeling_hotcold.py").exists() == (not known)
    with torch.no_grad():
        wanted = model(torch.tensor([WINDOW])).logits
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            output, dtype=torch.float32, trust_remote_code=not known
        )
        assert torch.allclose(loaded(torch.tensor([WINDOW])).logits, wanted, atol=1e-6)
    assert loaded.config.to_dict().get("hidden_act") == config.get("hidden_act")
    path = tmp_path / "sparse.gguf"
    assert convert(output, path, ConvertOptions("F32")).activation == kind
    rows, theirs = ours(path, "exact"), wanted[0, :-1].numpy()
    assert abs(rows - theirs).max() < 2e-3 * theirs.std()
    assert np.array_equal(rows, ours(path, "off"))
    if thresholds and len(set(thresholds)) > 1:
        change_layout(path, tmp_path / "again.gguf", LayoutOptions(down="by_neuron"))
        with open_gguf(tmp_path / "again.gguf") as file:
            assert list(file.metadata["hotcold.ffn.threshold"]) == pytest.approx(thresholds)


def test_a_loaded_sparse_model_can_be_trained_on(tmp_path: Path) -> None:
    save_sparse(sparse("tiny-llama", "drelu"), tmp_path / "one", original=golden_checkpoint("tiny-llama"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", trust_remote_code=True)
    save_sparse(make_sparse(loaded, "relu"), tmp_path / "two", original=tmp_path / "one")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["hidden_act"] == "relu" and config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config and not (tmp_path / "two" / "modeling_hotcold.py").exists()


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = sparse("tiny-llama", "drelu")
    (tmp_path / "there").mkdir()
    for output in (tmp_path / "there", tmp_path / "no" / "such"):
        with pytest.raises(UserError, match="a new folder in an existing folder is needed"):
            save_sparse(model, output)
    with pytest.raises(UserError, match=r"threshold .one. needs held-out text: give texts or batches"):
        save_sparse(model, tmp_path / "sparse", threshold="one")
    with pytest.raises(UserError, match=r"3 numbers of at least 0 are needed"):
        save_sparse(model, tmp_path / "sparse", threshold=[0.1])
    with pytest.raises(UserError, match="held-out texts need a tokenizer"):
        save_sparse(model, tmp_path / "sparse", held_out=["Heidi"])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{", encoding="utf-8")
    ids = torch.tensor(WINDOW)
    for message, options in (
        (r"threshold 0\.1: 3 numbers of at least 0 are needed", {"threshold": 0.1}),
        (r"threshold \['a', 'b', 'c'\]: 3 numbers", {"threshold": ["a", "b", "c"]}),
        (r"held_out is one text: give a list", {"held_out": "Heidi", "tokenizer": object()}),
        (r"a batch of shape \(17,\): token ids of shape \[windows, tokens\]", {"held_out": [ids]}),
        (r"dtype torch.int8: a floating type such as torch.bfloat16", {"dtype": torch.int8}),
        (r"dtype 'float61': a floating type", {"dtype": "float61"}),
        (r"nowhere has no config.json", {"original": tmp_path / "nowhere"}),
        (r"there has no config.json", {"original": tmp_path / "there"}),
        (r"damaged", {"original": tmp_path / "damaged"}),
    ):
        with pytest.raises(UserError, match=message) as caught:
            save_sparse(model, tmp_path / "sparse", **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="LlamaModel predicts no tokens: only causal language models"):
        base = transformers.AutoModel.from_pretrained(golden_checkpoint("tiny-llama"))
        save_sparse(make_sparse(base), tmp_path / "sparse")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "there"]


def test_the_type_of_the_weights_can_be_named(tmp_path: Path) -> None:
    save_sparse(sparse("tiny-llama", "drelu"), tmp_path / "sparse", dtype="bfloat16")
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    assert {weights.dtype for weights in tensors.values()} == {torch.bfloat16}


def test_predictors_are_trained_on_the_torch_model(tmp_path: Path) -> None:
    """The engine takes the file, and predicts the neurons that it is meant to find."""
    model = sparse("tiny-llama", "drelu")
    save_sparse(model, tmp_path / "sparse", original=golden_checkpoint("tiny-llama"))
    path, output = tmp_path / "model.gguf", tmp_path / "model.predictor.gguf"
    convert(tmp_path / "sparse", path, ConvertOptions("F32"))
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 280, (2, 48), generator=generator) for _ in range(6)]
    fits = train_predictors(model, path, batches[:5], batches[5:], output, max_share=0.9, type="F32")
    assert len(fits) == 3 and all(fit.weighted_recall > 0.9 and fit.candidates < 0.9 for fit in fits)
    exact, predicted = ours(path, "exact"), ours(path, "predicted")
    assert 0 < abs(exact - predicted).max() < 0.5 * exact.std()
    with pytest.raises(UserError, match=r"1 batches to learn and 1 held-out ones: at least 2 and 1"):
        train_predictors(model, path, batches[:1], batches[5:], output)
