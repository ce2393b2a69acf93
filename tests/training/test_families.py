"""Sparse models of many families: what is saved and loaded computes the same, or make_sparse refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import golden_checkpoint

from hotcold.errors import UserError

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers", reason="training needs transformers")

from hotcold.training import make_sparse, save_sparse  # noqa: E402
from hotcold.training.sparse_model import activations_of  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
#: Families whose classes compute activations outside FFNs as well, or have further names of weights.
FEW = ("tiny-qwen3next", "tiny-gemma3", "tiny-qwen3moe")
pytestmark = pytest.mark.usefixtures("module_cache")


def check(model: Any, kind: Any, output: Path, **given: Any) -> None:
    make_sparse(model, kind).eval()
    for each in activations_of(model):
        each.threshold = 0.01 * (1 + each.layer)
    save_sparse(model, output, **given)
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        output, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    with torch.no_grad():
        assert torch.allclose(again.eval()(IDS).logits, model(IDS).logits, atol=1e-5)


def loaded(name: str) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(golden_checkpoint(name), dtype=torch.float32)
    except (ValueError, KeyError):
        return None  # transformers has no causal model of this family


@pytest.mark.parametrize("kind", ["relu", "drelu"])
@pytest.mark.parametrize("name", FEW)
def test_a_saved_model_computes_the_same(name: str, kind: Any, tmp_path: Path) -> None:
    if kind == "relu" and name == "tiny-qwen3next":
        with pytest.raises(UserError, match=r"hidden_act is the activation of Qwen3NextGatedDeltaNet, too"):
            make_sparse(loaded(name), kind)
    else:
        check(loaded(name), kind, tmp_path / "sparse", original=golden_checkpoint(name))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # transformers' own, of old keys
@pytest.mark.parametrize("kind", ["relu", "drelu"])
def test_every_family_is_refused_or_the_same(kind: Any, tmp_path: Path) -> None:
    computed = 0
    for folder in sorted(DATA.glob("tiny-*")):
        if (folder / "config.json").exists() and (model := loaded(folder.name)) is not None:
            try:
                check(model, kind, tmp_path / folder.name, original=golden_checkpoint(folder.name))
                computed += 1
            except UserError as error:
                assert "FFN" in str(error) or "activation" in str(error)
    assert computed >= 30


def test_weights_that_transformers_renames(tmp_path: Path) -> None:
    """GPT-NeoX's files name the head `embed_out`, and its class `lm_head`."""
    config = transformers.GPTNeoXConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    check(transformers.AutoModelForCausalLM.from_config(config), "relu", tmp_path / "sparse")


def test_ffns_beside_known_ones_are_not_left_dense() -> None:
    """Experts and shared FFNs of another form, in layers with an FFN of a known form."""
    for name, kind in (
        ("tiny-llama4", "Llama4TextExperts"),
        ("tiny-granitemoeshared", "GraniteMoeSharedMLP"),
    ):
        with pytest.raises(UserError, match=f"the FFN {kind} is of an unknown form"):
            make_sparse(loaded(name), "drelu")
