"""make_sparse, the penalty and the measurements; autograd and transformers' own FFNs are the truth."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotcold.errors import UserError

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

from safetensors.torch import load_file  # noqa: E402
from support import sparse_processes  # noqa: E402
from support.checkpoints import golden_checkpoint  # noqa: E402

from hotcold.training import SparsityPenalty, choose_thresholds, make_sparse, measure_sparsity  # noqa: E402
from hotcold.training.sparse_model import WatchedActivation  # noqa: E402
from hotcold.training.thresholds import _Search  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
IDS = torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(3))


def dense(name: str = "tiny-llama", **more: Any) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(golden_checkpoint(name), **more)
    path = golden_checkpoint(name)
    return transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "key"),
    [("tiny-llama", "hidden_act"), ("tiny-mixtral", "hidden_act"), ("tiny-phi3", "hidden_act"),
     ("tiny-opt", "activation_function"), ("tiny-falcon", "activation"), ("tiny-starcoder2", "hidden_act")],
)  # fmt: skip
def test_relu_is_that_of_transformers(name: str, key: str) -> None:
    """Gates alone and fused, experts, and FFNs without a gate."""
    model = make_sparse(dense(name), "relu").eval()
    model.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, dense(name, **{key: "relu"}).eval()(IDS).logits, atol=1e-5)
    assert getattr(model.config, key) == "relu"


def test_ffns_of_other_forms_are_refused() -> None:
    with pytest.raises(UserError, match=r"no FFN of a known form: gate, up and down"):
        make_sparse(dense("tiny-gpt-oss"))
    with pytest.raises(UserError, match=r"FalconH1MLP of layer 0 is of an unknown form: it computes more"):
        make_sparse(dense("tiny-falcon-h1"))
    with pytest.raises(UserError, match=r"of layer 0 has no gate: use activation='relu'"):
        make_sparse(dense("tiny-opt"), "drelu")
    with pytest.raises(UserError, match=r"activation 'gelu': choose from relu, drelu"):
        make_sparse(dense(), "gelu")  # type: ignore[arg-type]
    for other in (None, "SmolLM2", torch.nn.DataParallel(torch.nn.Linear(3, 3))):
        with pytest.raises(UserError, match=r"is not a model of transformers: pass the model itself, before"):
            make_sparse(other)
    damaged = dense()
    damaged.model.layers[1].mlp.up_proj.weight.data[3, 4] = math.nan
    with pytest.raises(UserError, match=r"an FFN computes values that are not finite"):
        make_sparse(damaged)
    with pytest.raises(UserError, match=r"is not sparse: call make_sparse\(model\) first"):
        SparsityPenalty(dense())


def inputs_of_down(model: Any) -> list[Any]:
    """Inputs of down projections in the forward passes that follow: another way to the activations."""
    kept: list[Any] = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    return kept


def test_the_penalty_is_the_mean_of_layers_in_their_units() -> None:
    model, penalty = make_sparse(dense()).train(), None
    kept = inputs_of_down(model)
    penalty = SparsityPenalty(model, 0.7)
    model(IDS)
    assert penalty().item() == pytest.approx(0.7)  # the first batch is its own unit
    units = torch.stack([values.detach().abs().mean() for values in kept])
    kept.clear()
    model(IDS.flip(0, 1))
    found = penalty()
    wanted = 0.7 * (torch.stack([values.abs().mean() for values in kept]) / units).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert penalty.mean_zeros == pytest.approx(torch.stack([(v == 0).float().mean() for v in kept]).mean())
    weights = [each for each in model.parameters() if each.requires_grad]
    ours = torch.autograd.grad(found, weights, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad(wanted, weights, allow_unused=True)
    for first, second in zip(ours, theirs, strict=True):
        assert (first is None) == (second is None)
        assert first is None or torch.allclose(first, second, atol=1e-7)
    with pytest.raises(UserError, match="call the penalty once after each forward pass"):
        penalty()


def gradients(model: Any) -> list[Any]:
    """Gradients of two steps: figures that one pass leaves behind must not reach the next one."""
    penalty = SparsityPenalty(model, 5.0)
    model.train()
    for ids in (IDS, IDS.flip(0, 1)):
        model.zero_grad()
        (model(ids, labels=ids).loss + penalty()).backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(first: list[Any], second: list[Any]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral"])
def test_activation_checkpointing_and_copies(name: str) -> None:
    plain = gradients(make_sparse(dense(name)))
    model = make_sparse(dense(name))
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert same(plain, gradients(model))
    first = make_sparse(dense(name))
    other = copy.deepcopy(first)
    for weights in first.parameters():
        weights.data.zero_()
    assert same(plain, gradients(other))
    model = make_sparse(dense(name))
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(UserError, match="activation checkpointing needs use_reentrant=False"):
        gradients(model)


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_compiled_model_has_the_same_gradients() -> None:
    plain = gradients(make_sparse(dense()))
    torch._dynamo.reset()
    assert same(plain, gradients(torch.compile(make_sparse(dense()), backend="aot_eager")))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft
@pytest.mark.parametrize("first", [True, False])
def test_adapters_before_and_after(first: bool) -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    settings = peft.LoraConfig(target_modules=["gate_proj", "down_proj", "q_proj"], r=4)
    model = dense()
    if first:
        make_sparse(model)
    model = peft.get_peft_model(model, settings)
    if not first:
        make_sparse(model)
    assert gradients(model)
    frozen = peft.get_peft_model(make_sparse(dense()), peft.LoraConfig(target_modules=["down_proj"], r=4))
    assert gradients(frozen)  # the activations of the first layer depend on no trained weight
    merged = model.merge_and_unload().eval()
    sparse = make_sparse(dense()).eval()
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, sparse(IDS).logits, atol=1e-5)  # B of LoRA is still 0


def test_measurements() -> None:
    model, reference = make_sparse(dense()), dense()
    kept = inputs_of_down(model)
    labels = IDS.clone()
    labels[0, :5] = -100
    found = measure_sparsity(model, [{"input_ids": IDS, "labels": labels}], reference)
    assert found.zeros == pytest.approx([float((each == 0).float().mean()) for each in kept])
    with torch.no_grad():
        logits, other = model(IDS, labels=labels), reference(IDS, labels=labels)
    assert found.perplexity == pytest.approx(math.exp(logits.loss), rel=1e-5)
    used = labels[:, 1:] != -100
    p, q = (torch.softmax(each.logits[:, :-1][used].double(), -1) for each in (other, logits))
    assert found.divergence == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert found.tokens == int(used.sum())
    assert measure_sparsity(reference, [IDS]).zeros == []
    with pytest.raises(UserError, match="no token to measure with"):
        measure_sparsity(model, [])


def test_thresholds_stay_within_the_bound() -> None:
    model, bound = make_sparse(dense()), 2e-3
    model.eval()
    with torch.no_grad():
        before = model(IDS).logits
    zeros = {}
    for mode in ("none", "one", "per-layer"):
        found = choose_thresholds(model, [IDS], mode, bound)  # type: ignore[arg-type]
        assert [each.threshold for each in model.modules() if isinstance(each, WatchedActivation)] == (
            found.thresholds
        )
        with torch.no_grad():
            p, q = (torch.softmax(each[:, :-1].double(), -1) for each in (before, model(IDS).logits))
        divergence = float((p * (p / q).log()).sum(-1).mean())  # over predicted tokens
        assert divergence == pytest.approx(found.divergence, abs=1e-6) and divergence <= bound
        zeros[mode] = measure_sparsity(model, [IDS]).mean_zeros
        assert zeros[mode] == pytest.approx(found.zeros)
        assert len(set(found.thresholds)) == (3 if mode == "per-layer" else 1)
    assert zeros["none"] < zeros["one"] < zeros["per-layer"]


class Coupled(_Search):
    """Two layers whose thresholds together cause more divergence than the sum of both."""

    def __init__(self) -> None:
        pass

    def at(self, candidates: Any) -> list[tuple[float, float]]:
        return [(sum(candidate) ** 2, sum(candidate) / 10) for candidate in candidates]


def test_thresholds_by_layer_shrink_until_all_together_fit() -> None:
    search = Coupled()
    found = search.by_layer([1.0, 1.0], 0.3, [0.1, 0.1])
    assert 0.54 < sum(found) <= 0.3**0.5
    assert search.by_layer([1.0, 1.0], 0.3, [0.3, 0.3]) == [0.3, 0.3]  # with more zeros


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "sparse"
    words = [sys.executable, sparse_processes.__file__, kind, golden_checkpoint("tiny-llama")]
    words += [output, tmp_path / "store"]
    environment = os.environ | {"WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [*map(str, words)], env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    model = sparse_processes.sparse_model(golden_checkpoint("tiny-llama"))
    start = {name: weights.clone() for name, weights in model.state_dict().items()}
    zeros = sparse_processes.train(model, 0, 1)
    saved = load_file(output / "model.safetensors")
    for name, weights in model.state_dict().items():
        if name in saved:
            assert torch.allclose(saved[name], weights, atol=2e-6)
            assert not torch.equal(saved[name], start[name])
    assert json.loads((output / "sparsity.json").read_text())["zeros"] == pytest.approx(zeros, abs=1e-3)
