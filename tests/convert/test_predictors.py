"""Predictors as PowerInfer publishes them: kept as they are, of every layer; nothing is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, golden_checkpoint
from support.torch_files import write_state

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf

D, N = 64, 160
NAMES = ["fc1.weight", "fc2.weight"]


def arrays(layer: int) -> list[np.ndarray]:
    """Returns the factors of a predictor of rank 32, in the last layer 64."""
    rng, rank = np.random.default_rng(layer), 64 if layer == 2 else 32
    return [rng.standard_normal(shape).astype("<f2") for shape in ((rank, D), (N, rank))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "predictors"
    made.mkdir()
    for layer in range(3):
        write_state(made / f"model_{layer}.pt", NAMES, arrays(layer))
    (made / "config.json").write_text('{"sparse_threshold": -0.25}')
    return made


def with_predictors(folder: Path, type: str = "F16") -> Path:
    output = folder.parent / "out.gguf"
    convert(golden_checkpoint("tiny-drelu"), output, ConvertOptions(type, predictors=folder))
    return output


def test_every_layers_predictor_is_kept(folder: Path) -> None:
    path = with_predictors(folder)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer in range(3):
        for part, expected in zip(("fc1", "fc2"), arrays(layer), strict=True):
            np.testing.assert_array_equal(found[f"blk.{layer}.{part}.weight"].data, expected)
    assert open_gguf(path).metadata["powerinfer.sparse_threshold"] == -0.25


def test_the_engine_predicts_with_them(folder: Path) -> None:
    """A threshold that none reaches leaves no neuron: the logits are those of a model without FFNs."""
    import hotcold

    def logits(threshold: str) -> tuple[int, ...]:
        (folder / "config.json").write_text(f'{{"sparse_threshold": {threshold}}}')
        (folder.parent / "out.gguf").unlink(missing_ok=True)
        with hotcold.LLM(with_predictors(folder), sparsity="predicted") as llm:
            return llm.generate([5, 9, 40, 41], max_tokens=8, temperature=0).ids

    with hotcold.LLM(with_predictors(folder), sparsity="off") as llm:
        dense = llm.generate([5, 9, 40, 41], max_tokens=8, temperature=0).ids
    assert logits("-1e5") == dense != logits("1e5")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def other(name: str, names: list[str], shapes: list[tuple[int, ...]]) -> Callable[[Path], None]:
    return lambda folder: write_state(folder / name, names, [np.ones(shape, "<f2") for shape in shapes])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer is missing": (remove("model_1.pt"), "has no model_1.pt, the predictor of layer 1"),
    "the last one is missing": (remove("model_2.pt"), "has no model_2.pt, the predictor of layer 2"),
    "one too many": (other("model_3.pt", NAMES, [(8, D), (N, 8)]), "has model_3.pt, but the model has 3"),
    "a matrix is missing": (other("model_1.pt", NAMES[:1], [(8, D)]), "has 1 tensors: fc1.weight and"),
    "a bias besides": (
        other("model_1.pt", [*NAMES, "fc1.bias"], [(8, D), (N, 8), (8,)]), "model_1.pt has 3 tensors",
    ),
    "another width": (
        other("model_1.pt", NAMES, [(8, 32), (N, 8)]),
        "'fc1.weight' has shape [8, 32]: config.json implies [8, 64]",
    ),
    "other neurons": (
        other("model_1.pt", NAMES, [(8, D), (N, 9)]), "has shape [160, 9]: config.json implies [160, 8]",
    ),
    "no matrix": (other("model_1.pt", NAMES, [(), (N, 8)]), "fc1.weight has 0 rows"),
    "a pickle": (
        lambda folder: (folder / "model_0.pt").write_bytes(pickle.dumps([1])), "model_0.pt: is not a zip",
    ),
    "a threshold in words": (
        lambda folder: (folder / "config.json").write_text('{"sparse_threshold": "0"}'),
        "sparse_threshold is '0': a finite number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_in_one_line(case: str, folder: Path) -> None:
    change, message = BAD[case]
    change(folder)
    with pytest.raises(ConvertError) as caught:
        with_predictors(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in folder.parent.iterdir()] == ["predictors"]


OWN = "model__layers__{}__mlp__predictor__{}__weight"  #: as the checkpoint of TurboSparse-Mistral has them


def own(**changes: object) -> dict[str, object]:
    """A checkpoint's own predictors, the same as those of ``folder``."""
    named = {
        OWN.format(layer, part): values
        for layer in range(3)
        for part, values in zip(("fc1", "fc2"), arrays(layer), strict=True)
    }
    return named | changes


def test_a_checkpoints_own_predictors_are_kept_as_a_folders_are(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()  # which has the threshold; own predictors have none
    checkpoint = copy_checkpoint(tmp_path, "tiny-drelu")
    change_config(checkpoint, sliding_window=64)
    convert(checkpoint, tmp_path / "given.gguf", ConvertOptions(predictors=folder))
    change_tensors(checkpoint, **own())
    done = convert(checkpoint, tmp_path / "own.gguf")
    assert (tmp_path / "own.gguf").read_bytes() == (tmp_path / "given.gguf").read_bytes()
    assert open_gguf(tmp_path / "own.gguf").metadata["bamboo.attention.sliding_window"] == 64
    assert done.notes == ["the model has predictors: its publishers use them, as `sparsity=predicted` does"]
    # Given ones replace its own.
    change_tensors(checkpoint, **{OWN.format(0, "fc2"): np.zeros((N, 32), "<f2")})
    done = convert(checkpoint, tmp_path / "replaced.gguf", ConvertOptions(predictors=folder))
    assert (tmp_path / "replaced.gguf").read_bytes() == (tmp_path / "given.gguf").read_bytes()
    assert done.notes == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({OWN.format(1, "fc1"): ...}, "has no tensor 'model.layers.1.mlp.predictor.fc1.weight'"),
        ({OWN.format(2, "fc2"): ...}, "has no tensor 'model.layers.2.mlp.predictor.fc2.weight'"),
        (
            {OWN.format(1, "fc2"): np.zeros((N, 31), "<f2")},
            "'model.layers.1.mlp.predictor.fc2.weight' has shape [160, 31]: config.json implies [160, 32]",
        ),
        ({OWN.format(0, "fc1"): np.zeros((), "<f2")}, "predictor.fc1.weight has 0 rows: 1 to 65536"),
        (
            {OWN.format(3, "fc1"): np.zeros((8, D), "<f2")},
            "such as 'model.layers.3.mlp.predictor.fc1.weight'",
        ),
        (
            {"model__layers__0__mlp__predictor__fc1__bias": np.zeros(32, "<f2")},
            "such as 'model.layers.0.mlp.predictor.fc1.bias'",
        ),
    ],
)
def test_own_predictors_that_lack_something(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(tmp_path, "tiny-drelu")
    change_tensors(checkpoint, **own(**changes))
    with pytest.raises(ConvertError) as caught:
        convert(checkpoint, tmp_path / "out.gguf")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


def test_predictors_inside_experts_are_left_out_and_named(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(tmp_path, "tiny-turbosparse")
    convert(checkpoint, tmp_path / "without.gguf")
    name = "model__layers__0__block_sparse_moe__experts__0__predictor__fc1__weight"
    change_tensors(checkpoint, **{name: np.ones((8, 32), "<f2")})
    done = convert(checkpoint, tmp_path / "with.gguf")
    assert (tmp_path / "with.gguf").read_bytes() == (tmp_path / "without.gguf").read_bytes()
    (note,) = done.notes
    assert note.startswith(
        "predictors inside experts (1 tensors, such as 'model.layers.0.block_sparse_moe.exp"
    )


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"none is not a folder: predictors are a folder of model_0\.pt"):
        with_predictors(tmp_path / "none")


def test_weights_of_torch_give_the_same_file(tmp_path: Path) -> None:
    """Whole and in shards, from a checkpoint of safetensors that was saved again."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = copy_checkpoint(tmp_path)
    convert(folder, tmp_path / "a.gguf")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "b.gguf")
    (folder / "pytorch_model.bin").unlink()
    names = list(tensors)
    index = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-{i:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    convert(folder, tmp_path / "c.gguf")
    a, b, c = ((tmp_path / f"{name}.gguf").read_bytes() for name in "abc")
    assert a == b == c
