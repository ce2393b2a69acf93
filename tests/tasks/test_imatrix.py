"""The importance matrix: llama.cpp's sums, those of plain NumPy, and what becomes of it on mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.expert_models import expert_golden
from support.golden import golden
from support.imatrix_golden import NAMES, golden_imatrix, model_of

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.kernels.backend import Batch
from hotcold.model.ffn.experts import ffn_names
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.quantize.imatrix import read_imatrix
from hotcold.runtime.loading import load
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.imatrix import imatrix, input_squares
from hotcold.tasks.scoring import Scorer

TEXT = "Heidi ran down the path to the hut, and the wind sang in the fir trees. " * 20


def loaded(path: Path | None, **options: Any) -> LoadedModel:
    return load(path, {"cache_type": "f32", "context": 0, "threads": 2, **options})


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_multiplies_the_same(name: str, tmp_path: Path) -> None:
    path, tokens = model_of(name, tmp_path)
    found, wanted = input_squares(loaded(path), [tokens]), golden_imatrix(name)
    assert found.keys() == wanted.keys()
    rtol = 5e-3 if name in ("tiny-falcon", "tiny-gemma3") else 1e-4  # its GELU is a table of float16
    for matrix, (sums, counts) in wanted.items():
        assert np.array_equal(found[matrix].counts, counts), matrix
        np.testing.assert_allclose(found[matrix].sums, sums, rtol=rtol, atol=1e-5 * sums.mean())


def dequantised(file: GGUFFile, name: str) -> np.ndarray:
    return file.load(name).dequantise().astype(np.float64)


def coefficients(file: GGUFFile, layer: int, x: np.ndarray, activation: str, up_name: str) -> np.ndarray:
    """Computes the sums of an FFN's down rows, from the definition."""
    up = dequantised(file, f"blk.{layer}.{up_name}.weight")
    if f"blk.{layer}.ffn_up.bias" in file.tensors:
        bias = dequantised(file, f"blk.{layer}.ffn_up.bias")
    else:
        bias = np.zeros(len(up))
    if f"blk.{layer}.ffn_gate.weight" in file.tensors:
        gate = dequantised(file, f"blk.{layer}.ffn_gate.weight")
    elif activation == "silu":
        gate, up = np.split(up, 2)
        bias = bias[: len(up)]
    else:
        gate = None
    y = x @ up.T + bias
    if gate is None:
        return {"relu": np.maximum(y, 0), "relu2": np.maximum(y, 0) ** 2}[activation]
    z = x @ gate.T
    return z / (1 + np.exp(-z)) * y if activation == "silu" else np.maximum(z, 0) * np.maximum(y, 0)


def given_to_ffns(path: Path, tokens: list[int]) -> list[np.ndarray]:
    """By layer, ``[tokens - 1, D]``, as the reference computes it token by token."""
    model = loaded(path, backend="reference", threads=None)
    layers: list[list[np.ndarray]] = [[] for _ in range(model.config.layers)]

    def watched(inputs: list[np.ndarray], ffn: AnyFFN) -> AnyFFN:
        def run(normed: Any, residual: Any, batch: Batch, *more: Any) -> None:
            inputs.append(model.backend.read(normed, 0, batch.n_tokens).astype(np.float64))
            ffn(normed, residual, batch, *more)

        return run

    session = model.session("off", wrap=lambda ffns: [*map(watched, layers, ffns)])
    for _ in Scorer(session).logits(tokens):
        pass
    return [np.concatenate(inputs) for inputs in layers]


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("tiny-phi3", "silu"), ("tiny-opt", "relu"), ("tiny-nemotron", "relu2"), ("tiny-drelu", "drelu"),
        ("tiny-rwkv7", "relu2"),
    ],
)  # fmt: skip
def test_inputs_of_ffns_by_plain_numpy(name: str, activation: str, tmp_path: Path) -> None:
    """One matrix for gate and up, biases, FFNs without a gate, zeros, other names."""
    found = golden(name, tmp_path, down="by_output")
    model, tokens = loaded(found.path), found.prompt.tolist()
    sums = input_squares(model, [tokens[:-1]])
    with open_gguf(found.path) as file:
        names = ffn_names("blk.0.", file.tensors)
        for layer, x in enumerate(given_to_ffns(found.path, tokens)):
            hidden = coefficients(file, layer, x, activation, names[0])
            for name, values in zip(names, (x, hidden), strict=True):
                importance = sums[f"blk.{layer}.{name}.weight"]
                assert importance.counts == len(tokens) - 1
                squares = (values**2).sum(0)
                np.testing.assert_allclose(importance.sums[0], squares, rtol=2e-3, atol=1e-4 * squares.mean())


def test_every_matrix_of_the_layers_is_there(tmp_path: Path) -> None:
    """Windows add up, a longer text is cut, and down by neuron is left out."""
    found = imatrix(None, TEXT, context=32, chunks=3, threads=1)
    with open_gguf(model_path()) as file:
        matrices = {name for name, info in file.tensors.items() if "blk." in name and len(info.shape) == 2}
    assert found.keys() == {name for name in matrices if "ffn_down" not in name}
    assert (found.datasets, found.chunks, found.chunk_size) == (("a text",), 3, 32)
    assert all(each.counts == 96 for each in found.values())
    one = imatrix(None, TEXT, context=32, chunks=1, threads=1)
    more = found["blk.5.ffn_up.weight"].sums - one["blk.5.ffn_up.weight"].sums
    assert more.min() >= 0 and more.max() > 0


def test_latent_experts(tmp_path: Path) -> None:
    """They read fewer values than the model has dimensions."""
    found = golden("tiny-nemotron-latent", tmp_path, down="by_output")
    model, tokens = loaded(found.path), found.prompt.tolist()
    sums = input_squares(model, [tokens])
    with open_gguf(found.path) as file:
        for part in ("up", "down"):
            name = f"blk.1.ffn_{part}_exps.weight"
            assert sums[name].sums.shape == (6, file.tensors[name].shape[-1])
            assert sums[name].counts.sum() == 3 * len(tokens)


@pytest.mark.parametrize("name", ["tiny-smallthinker", "tiny-gpt-oss"])
def test_experts_share_their_tokens(name: str, tmp_path: Path) -> None:
    """Each token counts for the experts that it chose, and gate and up of all experts read the same rows."""
    found = expert_golden(name, tmp_path)
    model = loaded(found.path)
    experts, tokens = model.config.experts, found.prompt.tolist()
    assert experts is not None
    sums = input_squares(model, [tokens])
    for layer in range(model.config.layers):
        gate, up, down, router = (
            sums[f"blk.{layer}.ffn_{part}.weight"]
            for part in ("gate_exps", "up_exps", "down_exps", "gate_inp")
        )
        assert np.array_equal(gate.sums, up.sums)
        assert gate.counts.sum() == down.counts.sum() == experts.chosen * len(tokens)
        assert router.counts == len(tokens)
        if name == "tiny-gpt-oss":  # whose router reads what the experts read
            np.testing.assert_allclose(gate.sums.sum(0), experts.chosen * router.sums[0], rtol=1e-5)


def test_the_output_matrix_on_request(tmp_path: Path) -> None:
    """By the norm of the last layer's output: the logits are the matrix times it."""
    found = golden("tiny-qwen2", tmp_path)
    model, tokens = loaded(found.path), found.prompt.tolist()
    sums = input_squares(model, [tokens], output_head=True)
    name = next(name for name in sums if not name.startswith("blk."))
    with open_gguf(found.path) as file:
        head = dequantised(file, name)
    inputs = np.linalg.lstsq(head, found.prompt_logits.T.astype(np.float64))[0].T
    np.testing.assert_allclose(sums[name].sums[0], (inputs**2).sum(0), rtol=1e-3)
    assert sums[name].counts == len(tokens)


def test_the_same_bits_for_any_number_of_threads_and_about_the_same_by_numpy() -> None:
    one, two = (imatrix(None, TEXT, context=32, chunks=1, threads=n) for n in (1, 2))
    slow = imatrix(None, TEXT, context=32, chunks=1, backend="reference")
    for name, each in one.items():
        assert np.array_equal(each.sums, two[name].sums)
        np.testing.assert_allclose(each.sums, slow[name].sums, rtol=0.05, atol=0.01 * each.sums.mean())


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.gguf"
    found = imatrix(None, TEXT, context=32, chunks=1, output=path)
    again = read_imatrix(path)
    assert again.keys() == found.keys()
    assert all(np.array_equal(again[name].sums, found[name].sums) for name in found)
    with pytest.raises(UserError, match="the file exists: give another name, or `force` to replace it"):
        imatrix(None, TEXT, output=path)
    path.unlink()
    run = Session.run

    def interrupted(self: Session, *args: Any) -> None:
        run(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        imatrix(None, TEXT, context=32, output=path)
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_is_not_finite(tmp_path: Path) -> None:
    found = golden("tiny-llama", tmp_path)
    with open_gguf(found.path) as file:
        tensors, metadata = {name: file.load(name) for name in file.tensors}, dict(file.metadata)
    tensors["blk.0.attn_norm.weight"].data.view(np.float32)[:] = 3e38
    path = tmp_path / "large.gguf"
    write_gguf(path, metadata, tensors)
    with pytest.raises(UserError, match=r"inputs of blk\.0\.attn_q\.weight are too large or no numbers"):
        input_squares(loaded(path), [[1, 2, 3]])


def test_mistakes() -> None:
    with pytest.raises(UserError, match="chunks is 0: allowed are"):
        imatrix(None, TEXT, chunks=0)
    with pytest.raises(UserError, match="the text has 0 tokens"):
        imatrix(None, "")
    with pytest.raises(UserError, match="loaded on several backends"):
        imatrix(load(None, {"hot_backend": "cpu", "vram_budget": 3 << 20}), TEXT)
