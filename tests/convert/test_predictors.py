"""Predictors as PowerInfer publishes them: kept as they are, of every layer; nothing is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.formats.gguf import open_gguf
from tests.checkpoints import copy_checkpoint
from tests.golden import DATA
from tests.torch_files import write_state

D, N = 64, 160
NAMES = ["fc1.weight", "fc2.weight"]


def arrays(layer: int) -> list[np.ndarray]:
    """Of rank 32, in the last layer 64."""
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
    convert(DATA / "tiny-drelu", output, ConvertOptions(type, predictors=folder))
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
        lambda folder: (folder / "model_0.pt").write_bytes(pickle.dumps([1])), "model_0.pt: is no zip",
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
