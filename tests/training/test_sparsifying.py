"""From a checkpoint to a sparse one, to a GGUF file, to text; transformers is the truth of its logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import TINY_TOKENIZER, change_config, copy_checkpoint, golden_checkpoint

from hotcold.convert import ConvertOptions, convert
from hotcold.errors import UserError
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

from hotcold.training.sparse_checkpoint import load_model, open_original  # noqa: E402
from hotcold.training.sparsify_run import rate_share  # noqa: E402
from hotcold.training.sparsifying import SparsifyOptions, sparsify  # noqa: E402
from hotcold.training.token_data import Encoder, Mixture, Source  # noqa: E402

DATA = Path(__file__).parent.parent / "data"
LLAMA = golden_checkpoint("tiny-llama")
HEIDI = (DATA / "heidi.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("texts") / "heidi.txt"
    path.write_text(HEIDI[:12000], encoding="utf-8")
    return Source(path)


def differences(folder: Path, tmp_path: Path) -> tuple[float, float, str]:
    """The largest difference of the converted file's logits from the checkpoint's by transformers with the
    activation of its config.json put in by hand; their deviation; and the file's activation."""
    config = json.loads((folder / "config.json").read_text())
    path = tmp_path / f"{folder.name}.gguf"
    done = convert(folder, path, ConvertOptions("F32"))
    window = [1, *range(40, 56)]
    session = load(path, LoadOptions(sparsity="exact", threads=1, cache_type="f32", context=0)).session()
    ours = np.concatenate([np.array(rows) for rows in Scorer(session).logits(window)])
    session.close()
    model = reference(folder, config)
    with torch.no_grad():
        theirs = model(torch.tensor([window])).logits[0, :-1].numpy()
    return float(abs(ours - theirs).max()), float(theirs.std()), done.activation


class Passed(torch.nn.Module):  # type: ignore[misc,name-defined]
    """ReLU with a threshold, in words of its own."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, gate: Any) -> Any:
        return gate * (gate > self.threshold)


def reference(folder: Path, config: dict[str, Any]) -> Any:
    """The model by transformers' own code for its family, whose activation takes ReLU's place."""
    import transformers

    own = transformers.AutoConfig.from_pretrained(folder)
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    setattr(own, key, "relu")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=own, dtype=torch.float32)
    model.set_experts_implementation("eager")
    threshold = config.get("hidden_act_param", 0.0)
    for module in model.modules():
        for name in ("act_fn", "activation_fn"):
            if hasattr(module, name):
                setattr(module, name, Passed(threshold))
        if config[key] == "drelu":
            put_drelu_into(module)
    return model.eval()


def put_drelu_into(module: Any) -> None:
    """Up is cut where it comes out of its projection; experts ask for it before they multiply."""
    if isinstance(up := getattr(module, "up_proj", None), torch.nn.Linear):
        up.register_forward_hook(lambda module, args, up: up.clamp(min=0))
    if isinstance(both := getattr(module, "gate_up_proj", None), torch.nn.Linear):
        both.register_forward_hook(lambda module, args, both: with_up_cut(both))
    elif isinstance(both, torch.nn.Parameter):
        module._apply_gate = lambda both: (
            module.act_fn(both.chunk(2, -1)[0]) * with_up_cut(both).chunk(2, -1)[1]
        )
        module.config._experts_implementation = "batched_mm"


def with_up_cut(both: Any) -> Any:
    gate, up = both.chunk(2, dim=-1)
    return torch.cat([gate, up.clamp(min=0)], dim=-1)


@pytest.mark.parametrize("kind", ["relu", "drelu"])
def test_from_a_checkpoint_to_logits(kind: Any, text: Source, tmp_path: Path) -> None:
    output = tmp_path / "sparse"
    found = sparsify(LLAMA, [text], output, SparsifyOptions(2048, kind, 3e-3, context=32))
    assert found.measured.perplexity < 200 < found.original.perplexity  # of 288 tokens: it has learnt
    assert [report.tokens for report in found.reports][-1] == 2048
    config = json.loads((output / "config.json").read_text())
    assert found.choice.thresholds == [config.get("hidden_act_param", 0.0)] * 3
    assert json.loads((output / "sparsity.json").read_text())["measured"]["zeros"] == found.measured.zeros
    assert (output / "tokenizer.model").read_bytes() == TINY_TOKENIZER.read_bytes()
    difference, deviation, activation = differences(output, tmp_path)
    assert activation == kind
    assert difference < 2e-3 * deviation
    # The same model of this package's own code: what was trained is what was written.
    assert perplexity(output, text) == pytest.approx(found.measured.perplexity, rel=1e-6)


def test_the_control_and_the_held_out_text(text: Source, tmp_path: Path) -> None:
    """The control is what plain training by transformers and PyTorch makes of the same windows."""
    held_out, output = tmp_path / "held-out.txt", tmp_path / "sparse"
    held_out.write_text(HEIDI[-3000:], encoding="utf-8")
    options = SparsifyOptions(2048, "drelu", 3e-3, context=32, control=True, threshold="none", loss_chunk=9)
    found = sparsify(LLAMA, [text], output, options, held_out=held_out)
    assert found.choice.thresholds == [0.0] * 3
    assert "hidden_act_param" not in json.loads((output / "config.json").read_text())

    original = open_original(LLAMA)
    windows = mixture(original, text, tmp_path, held_out)
    control = load_model(original, torch.device("cpu")).train()
    optimiser = torch.optim.AdamW(control.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(8):
        optimiser.param_groups[0]["lr"] = 3e-3 * rate_share((step + 1) / 8)
        ids = torch.from_numpy(windows.batch(step, 8))
        optimiser.zero_grad()
        control(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(control.parameters(), 1.0)
        optimiser.step()
    judging = torch.from_numpy(windows.judging)
    models = {"original": load_model(original, torch.device("cpu")), "control": control}
    models["measured"] = load_model(open_original(output), torch.device("cpu"))
    logs = {}
    for name, model in models.items():
        with torch.no_grad():
            logs[name] = torch.log_softmax(model.eval()(judging).logits[:, :-1].double(), -1)
        loss = -logs[name].gather(2, judging[:, 1:, None]).mean()
        assert getattr(found, name).perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    for other, value in (
        ("original", found.measured.divergence),
        ("control", found.control_divergence),
    ):
        p, q = logs[other], logs["measured"]
        assert value == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny-mixtral", "relu"),
        ("tiny-qwen3moe", "drelu"),
        ("tiny-qwen2moe", "drelu"),
        ("tiny-phi3", "drelu"),
        ("tiny-gemma3", "drelu"),
        pytest.param("tiny-mistral", "relu", marks=pytest.mark.full),
        ("tiny-qwen2", "drelu"),
        pytest.param("tiny-qwen3", "relu", marks=pytest.mark.full),
        ("tiny-olmo2", "drelu"),
        pytest.param("tiny-olmo3", "relu", marks=pytest.mark.full),
        pytest.param("tiny-granite", "drelu", marks=pytest.mark.full),
        pytest.param("tiny-smollm3", "drelu", marks=pytest.mark.full),
    ],
)
def test_families_experts_and_fused_gates(name: str, kind: Any, text: Source, tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    found = sparsify(
        golden_checkpoint(name), [text], folder, SparsifyOptions(1024, kind, 3e-3, context=32, batch=4)
    )
    assert all(0.3 < share < 1 for share in found.measured.zeros)
    difference, deviation, activation = differences(folder, tmp_path)
    assert activation == kind
    assert difference < 2e-3 * deviation


def test_a_sparse_checkpoint_is_trained_on(text: Source, tmp_path: Path) -> None:
    """It is loaded with its own activation and its thresholds."""
    first, second = tmp_path / "first", tmp_path / "second"
    options = SparsifyOptions(1024, "drelu", 3e-3, context=32, threshold="per-layer")
    found = sparsify(LLAMA, [text], first, options)
    assert len(set(found.choice.thresholds)) == 3
    again = sparsify(first, [text], second, SparsifyOptions(256, "relu", 1e-5, context=32))
    assert again.original.perplexity == pytest.approx(found.measured.perplexity, rel=1e-6)


def test_parts_of_a_step_give_its_gradient(text: Source, tmp_path: Path) -> None:
    """Accumulation, checkpointing and logits in chunks change nothing but rounding."""
    steps = []
    options = SparsifyOptions(512, "drelu", 1e-3, context=32)
    for name, changes in {
        "whole": {},
        "parts": {"batch": 2, "accumulate": 4, "checkpointing": True, "loss_chunk": 20},
    }.items():
        log = tmp_path / f"{name}.jsonl"
        sparsify(LLAMA, [text], tmp_path / name, replace(options, **changes), log=log)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps.append([line for line in lines if "loss" in line])
    for first, second in zip(*steps, strict=True):
        for key in ("step", "tokens", "loss", "gradient_norm", "zeros", "learning_rate"):
            assert first[key] == pytest.approx(second[key], rel=1e-4)


@pytest.mark.full
def test_processes_of_torchrun_train_one_model(text: Source, tmp_path: Path) -> None:
    """Each takes half of the windows of a step; the first writes and prints."""
    one, two = tmp_path / "one", tmp_path / "two"
    sparsify(
        golden_checkpoint("tiny-llama"),
        [text],
        one,
        SparsifyOptions(1024, "drelu", 1e-3, context=32),
        device="cpu",
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hotcold"]
    words += [
        "sparsify",
        golden_checkpoint("tiny-llama"),
        "-f",
        text.path,
        "-o",
        two,
        "--tokens",
        "1024",
        "-c",
        "32",
    ]
    words += ["--batch", "4", "--learning-rate", "1e-3", "--device", "cpu", "-t", "1"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("perplexity of") == 1
    first, second = (json.loads((folder / "sparsity.json").read_text()) for folder in (one, two))
    for key in ("original", "measured"):
        assert first[key]["tokens"] == second[key]["tokens"]
        assert first[key]["perplexity"] == pytest.approx(second[key]["perplexity"], rel=2e-3)


def mixture(original: Any, text: Source, folder: Path, held_out: Path | None = None) -> Mixture:
    encoder = Encoder(original.tokenizer, original.folder, 288)
    return Mixture([text], encoder, 32, 0, folder / "tokens", held_out)


def perplexity(folder: Path, text: Source) -> float:
    original = open_original(folder)
    model = load_model(original, torch.device("cpu")).eval()
    held_out = torch.from_numpy(mixture(original, text, folder.parent).judging)
    with torch.no_grad():
        logits = model(held_out).logits[:, :-1]
    return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()))


def test_quantised_weights_cannot_be_trained(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="quantised by fp8: training needs the original weights"):
        open_original(folder)
