"""GGUF to GGUF: layouts and formats there and back, bit for bit; predictors in and out; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.expert_models import expert_golden
from support.golden import golden
from support.torch_files import write_state

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.quantize.layouts import LayoutOptions, Rewritten, change_layout
from hotcold.quantize.rewriting import QuantizeError
from hotcold.runtime.loading import load
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.scoring import Scorer


def change(model: Path, output: Path, **options: Any) -> Rewritten:
    return change_layout(model, output, LayoutOptions(**options))


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_gguf(path) as file:
        loaded = ((name, file.load(name)) for name in file.tensors)
        return {name: (each.type.name, each.shape, each.data.tobytes()) for name, each in loaded}


def factors(file: GGUFFile, rank: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    shapes = [info.shape for name, info in file.tensors.items() if name.endswith("ffn_up.weight")]
    return [
        (
            random.standard_normal((rank + i, dim)).astype(np.float16).astype(np.float32),
            random.standard_normal((n, rank + i)).astype(np.float16).astype(np.float32),
        )
        for i, (n, dim) in enumerate(shapes)
    ]


def sidecar(
    model: Path,
    thresholds: tuple[float, float] = (0.25, 0.25),
    *,
    input: str = "residual",
    relu: bool = True,
    type: str = "F16",
) -> Path:
    """Random predictors, whose ranks differ by layer, and thresholds between two values."""
    path = model.with_name(f"{model.stem}-{input}-{relu}-{thresholds}.sidecar.gguf")
    with open_gguf(model) as file:
        layers = [
            PredictorTensors(
                quantise(first, type),
                quantise(second, type),
                np.linspace(*thresholds, len(second), dtype=np.float32),
                relu,
            )
            for first, second in factors(file, 12)
        ]
        facts = {"input": input}
        write_sidecar(path, file.fingerprint(), layers, facts)
    return path


def logits(path: Path, sparsity: str, predictor: Path | None = None) -> np.ndarray:
    model = load(path, {"sparsity": sparsity, "predictor": predictor, "threads": 1, "cache_type": "f32"})
    steps = Scorer(model.session()).logits([*range(1, 21)])
    return np.concatenate([np.array(each) for each in steps])


@pytest.mark.parametrize(
    ("name", "type"),
    [("tiny-drelu", "F32"), ("tiny-drelu", "F16"), ("tiny-drelu", "BF16"), ("tiny-rwkv7", "F32")],
)
def test_down_there_and_back(name: str, type: str, tmp_path: Path) -> None:
    by_output = golden(name, tmp_path, type=type, down="by_output").path
    by_neuron = golden(name, tmp_path, type=type, down="by_neuron").path
    done = change(by_output, tmp_path / "a.gguf", down="by_neuron")
    assert (done.down_layout, done.requantised, done.format) == ("by_neuron", 0, "gguf")
    assert tensors_of(tmp_path / "a.gguf") == tensors_of(by_neuron)
    change(tmp_path / "a.gguf", tmp_path / "b.gguf", down="by_output")
    assert tensors_of(tmp_path / "b.gguf") == tensors_of(by_output)
    with open_gguf(tmp_path / "b.gguf") as file, open_gguf(by_output) as first:
        assert file.metadata.keys() >= first.metadata.keys()
        assert file.fingerprint() == first.fingerprint()
    np.testing.assert_allclose(logits(tmp_path / "a.gguf", "off"), logits(by_output, "off"), atol=1e-3)


def test_down_of_experts(tmp_path: Path) -> None:
    """Down matrices of experts change, those of a shared one too, and under an activation without zeros."""
    for name in ("tiny-turbosparse", "tiny-qwen2moe"):
        by_output = expert_golden(name, tmp_path, type="F16").path
        wanted = expert_golden(name, tmp_path, type="F16", down="by_neuron").path
        change(by_output, tmp_path / "a.gguf", down="by_neuron", force=True)
        assert tensors_of(tmp_path / "a.gguf") == tensors_of(wanted)


def test_blocks_are_made_anew_only_where_they_must(tmp_path: Path) -> None:
    model = golden("tiny-drelu", tmp_path, type="Q8_0", down="by_output").path
    done = change(model, tmp_path / "a.gguf", down="by_neuron", type="q4_0")
    before, after = tensors_of(model), tensors_of(tmp_path / "a.gguf")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "ffn_down" in name} and len(changed) == done.requantised
    assert all(after[name][0] == "Q4_0" for name in changed)
    assert change(model, tmp_path / "b.gguf").requantised == 0
    assert tensors_of(tmp_path / "b.gguf") == before


def test_predictors_in_and_out(tmp_path: Path) -> None:
    """The same bits, and what each file computes is the same."""
    model = golden("tiny-drelu", tmp_path, type="F16").path
    beside = sidecar(model)
    done = change(model, tmp_path / "pwri.gguf", predictors=beside)
    assert (done.format, done.notes) == ("powerinfer", [])
    with open_gguf(tmp_path / "pwri.gguf") as file:
        assert file.magic == "PWRI" and file.metadata["powerinfer.sparse_threshold"] == 0.25
        assert file.metadata["general.architecture"] == "bamboo"
        assert not any(key.startswith("hotcold.ffn") for key in file.metadata)
    change(tmp_path / "pwri.gguf", tmp_path / "b.gguf", take_predictors=tmp_path / "b.predictor.gguf")
    found, wanted = tensors_of(tmp_path / "b.predictor.gguf"), tensors_of(beside)
    assert found == wanted
    change(tmp_path / "b.gguf", tmp_path / "c.gguf", predictors=tmp_path / "b.predictor.gguf")
    assert tensors_of(tmp_path / "c.gguf") == tensors_of(tmp_path / "pwri.gguf")
    other = golden("tiny-drelu", tmp_path, type="F16", down="by_output").path
    change(other, tmp_path / "d.gguf", predictors=sidecar(other))  # by output, as most files have it
    assert tensors_of(tmp_path / "d.gguf") == tensors_of(tmp_path / "pwri.gguf")
    one, two, three = (
        logits(model, "predicted", beside),
        logits(tmp_path / "pwri.gguf", "predicted"),
        logits(tmp_path / "b.gguf", "predicted"),
    )
    assert np.array_equal(one, two) and np.array_equal(two, three)
    assert not np.array_equal(one, logits(model, "exact"))


def test_a_folder_of_predictors(tmp_path: Path) -> None:
    model = golden("tiny-drelu", tmp_path, type="F16").path
    folder = tmp_path / "folder"
    folder.mkdir()
    with open_gguf(model) as file:
        made = factors(file, 9)
    for i, arrays in enumerate(made):
        halves = [each.astype(np.float16) for each in arrays]
        write_state(folder / f"model_{i}.pt", ["fc1.weight", "fc2.weight"], halves)
    (folder / "config.json").write_text(json.dumps({"sparse_threshold": -0.5}))
    change(model, tmp_path / "a.gguf", predictors=folder)
    with open_gguf(tmp_path / "a.gguf") as file:
        assert file.metadata["powerinfer.sparse_threshold"] == -0.5
        for i, arrays in enumerate(made):
            for part, values in zip(("fc1", "fc2"), arrays, strict=True):
                assert np.array_equal(file.load(f"blk.{i}.{part}.weight").dequantise(), values)
    write_state(folder / "model_0.pt", ["fc1.weight", "fc2.weight"], [halves[0], halves[1][:-1]])
    with pytest.raises(UserError, match=r"tensor 'fc2\.weight' has shape"):
        change(model, tmp_path / "b.gguf", predictors=folder)
    (folder / "model_0.pt").unlink()
    with pytest.raises(UserError, match=r"has no model_0\.pt, the predictor of layer 0"):
        change(model, tmp_path / "b.gguf", predictors=folder)
    assert not (tmp_path / "b.gguf").exists()


def scores(path: Path, layer: int, x: np.ndarray) -> np.ndarray:
    """Computes scores from the residual stream as PowerInfer's code does, less the threshold."""
    with open_gguf(path) as file:
        first, second = (file.load(f"blk.{layer}.{part}.weight").dequantise() for part in ("fc1", "fc2"))
        return np.maximum(x @ first.T, 0) @ second.T - file.metadata["powerinfer.sparse_threshold"]


@pytest.mark.parametrize("relu", [True, False])
def test_predictors_of_the_normed_input(relu: bool, tmp_path: Path) -> None:
    """It marks the sidecar's neurons, and few more: the stream's length is known to some percent."""
    model = golden("tiny-drelu", tmp_path, type="F16").path
    beside = sidecar(model, (-2, 4), input="normed", relu=relu)
    done = change(model, tmp_path / "a.gguf", predictors=beside)
    assert "is estimated by rows of their own" in done.notes[0]
    with open_gguf(model) as file:
        norm = file.load("blk.1.ffn_norm.weight").dequantise()
        _, (first, second) = factors(file, 12)[:2]
    lengths = np.repeat([0.01, 1, 30], 40)[:, None]
    x = np.random.default_rng(3).standard_normal((120, len(norm))) * lengths
    x[:, 0] *= 9  # streams have dimensions that stand out
    size = np.sqrt((x**2).mean(1, keepdims=True))
    hidden = (x / size * norm) @ first.T
    wanted = (np.maximum(hidden, 0) if relu else hidden) @ second.T - np.linspace(-2, 4, len(second))
    found = scores(tmp_path / "a.gguf", 1, x) / size
    away = np.abs(wanted) > 0.35 * np.abs(np.linspace(-2, 4, len(second))) + 0.02 * np.abs(wanted).mean()
    assert away.mean() > 0.7
    assert ((found >= 0) == (wanted >= 0))[away].all()
    assert (found > wanted).mean() > 0.7  # rather marked than left out


@pytest.mark.parametrize("thresholds", [(0.5, 3.0), (-3.0, -0.5)])
def test_thresholds_of_one_sign_become_one(thresholds: tuple[float, float], tmp_path: Path) -> None:
    model = golden("tiny-drelu", tmp_path, type="F16").path
    change(model, tmp_path / "a.gguf", predictors=sidecar(model, thresholds))
    with open_gguf(model) as file:
        _, (first, second) = factors(file, 12)[:2]
    x = np.random.default_rng(3).standard_normal((50, first.shape[1]))
    plain = np.maximum(x @ first.T, 0) @ second.T - np.linspace(*thresholds, len(second))
    away = np.abs(plain) > 0.01 * np.abs(plain).mean()
    assert ((scores(tmp_path / "a.gguf", 1, x) >= 0) == (plain >= 0))[away].all()


def test_which_architecture_powerinfer_knows(tmp_path: Path) -> None:
    """By it PowerInfer takes the activation; down's bias goes with it."""
    model = golden("tiny-opt", tmp_path, type="F16", down="by_output").path
    change(model, tmp_path / "opt.gguf", predictors=sidecar(model))
    with open_gguf(tmp_path / "opt.gguf") as file:
        assert {"blk.0.ffn_down_t.weight", "blk.0.ffn_down_t.bias"} <= file.tensors.keys()
    np.testing.assert_allclose(logits(tmp_path / "opt.gguf", "exact"), logits(model, "exact"), atol=2e-3)
    for name, message in (
        ("tiny-llama", "llama with silu: PowerInfer computes llama with relu"),
        ("tiny-prosparse", r"llama with relu, threshold 0\.3: PowerInfer"),
        ("tiny-nemotron", "nemotron with relu2: PowerInfer"),
    ):
        model = golden(name, tmp_path, type="F16").path
        with pytest.raises(QuantizeError, match=message):
            change(model, tmp_path / "x.gguf", predictors=sidecar(model))
    model = expert_golden("tiny-turbosparse", tmp_path, type="F16").path
    with pytest.raises(UserError, match="predictors of experts are not published in this form"):
        change(model, tmp_path / "x.gguf", predictors=tmp_path)


def test_types_that_powerinfer_would_compute_wrongly(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match=r"is Q8_0: PowerInfer computes F16 and Q4_0: .*hotcold quantize"):
        change(model_path(), tmp_path / "a.gguf", predictors=sidecar_of_demo(tmp_path))
    model = golden("tiny-drelu", tmp_path, type="F16").path
    change(model, tmp_path / "b.gguf", predictors=sidecar(model, type="F32"))
    with open_gguf(tmp_path / "b.gguf") as file:
        assert {info.type.name for name, info in file.tensors.items() if ".fc" in name} == {"F16"}


def sidecar_of_demo(folder: Path) -> Path:
    copy = folder / "demo.gguf"
    copy.write_bytes(model_path().read_bytes())
    return sidecar(copy)


def test_mistakes(tmp_path: Path) -> None:
    model = golden("tiny-drelu", tmp_path, type="F16").path
    other = golden("tiny-drelu", tmp_path, type="F16", down="by_output").path
    beside, out = sidecar(model), tmp_path / "out.gguf"
    change(model, tmp_path / "pwri.gguf", predictors=beside)
    inside = tmp_path / "pwri.gguf"
    for path, options, message in (
        (model, {"predictors": beside, "down": "by_output"}, "`down=by_output`: PowerInfer's format"),
        (model, {"predictors": beside, "format": "gguf"}, "a GGUF file has no predictors inside"),
        (model, {"format": "powerinfer"}, "need predictors in the file"),
        (model, {"type": "f32"}, "`type` is for down matrices that change: down is by_neuron already"),
        (model, {"down": "by_output", "type": "q9"}, "`type`: "),
        (other, {"predictors": beside}, "belongs to the model with fingerprint"),
        (model, {"predictors": model}, "is not a predictor file"),
        (model, {"predictors": sidecar(model, (-1, 1))}, "thresholds between -1 and 1"),
        (model, {"predictors": sidecar(model, relu=False)}, "no ReLU between their factors"),
        (model, {"take_predictors": tmp_path / "x.gguf"}, "this file has no predictor"),
        (inside, {"take_predictors": out}, "the predictors need a file of their own"),
        (inside, {"take_predictors": beside}, "exists: give another name"),
        (inside, {"take_predictors": tmp_path / "no" / "x.gguf"}, "is not a folder"),
        (inside, {"take_predictors": tmp_path / "x.gguf", "format": "powerinfer"}, "leave `format`"),
    ):
        with pytest.raises(UserError) as error:
            change(path, out, **options)
        assert message in str(error.value), options
        assert not out.exists() and not (tmp_path / "x.gguf").exists()
    with pytest.raises(QuantizeError, match="would replace the one that is read"):
        change(model, model, force=True)
    note = change(inside, out, format="gguf").notes[0]
    assert "the predictors in the file are left out" in note
