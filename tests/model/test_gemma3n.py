"""Gemma 3n: streams, gates that are cut, whose neurons are skipped, and pages of other layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.file_sizes import file_sizes
from support.golden import golden
from support.runner import ROWS, Runner

from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend
from hotcold.model.config import Config, ModelError
from hotcold.model.weights import Weights
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.sparse.ffn import make_ffns
from hotcold.tasks.imatrix import imatrix
from hotcold.watch.memory_use import memory_use


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


def skipping(backend: Backend, config: Config, weights: Weights) -> Any:
    return make_ffns(backend, [layer.ffn for layer in weights.layers], ROWS, mode="exact", skips=config.skips)


def test_facts_of_a_file(tmp_path: Path) -> None:
    config = config_of(golden("tiny-gemma3n", tmp_path).path)
    assert (config.streams, config.laurel, config.layer_input, config.softcap) == (4, 6, 8, 3.0)
    assert config.skips == (True, True, False, False, False, False)
    assert [config.activation_of(i) for i in (1, 2)] == ["relu", "gelu"]
    np.testing.assert_allclose([config.cut_of(0), config.cut_of(1)], [1.6448536, 0.8416212], rtol=1e-6)
    assert [mixer.pages_of for mixer in config.mixers] == [None] * 4 + [2, 3]


def test_skipped_neurons_change_no_bit_and_are_not_read(tmp_path: Path) -> None:
    """At least as many gates are 0 as a normal distribution has; up is read of the others alone."""
    tiny = golden("tiny-gemma3n", tmp_path)
    runners = [Runner(tiny.path, open_backend("cpu"), *how) for how in ((), (skipping,))]
    np.testing.assert_array_equal(*(runner.run(tiny.prompt) for runner in runners))
    for token in tiny.steps[:6]:
        np.testing.assert_array_equal(*(runner.run([int(token)], decode=True) for runner in runners))
    counts = np.array([ffn.counts() for ffn in runners[1].ffns])  # type: ignore[attr-defined]
    up, down = counts[:2, 0] / (6 * 96), counts[:2, 2] / (6 * 96)
    np.testing.assert_array_equal(up, down)
    assert (up < (0.15, 0.35)).all()
    assert (counts[2:, 0] == 6 * 96).all()


def test_down_by_neuron_and_quantised(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-gemma3n", tmp_path, down="by_neuron")
    logits = Runner(tiny.path, backend, cache_type="f32").run(tiny.prompt)
    np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)


def test_sessions_skip_by_themselves(tmp_path: Path) -> None:
    path = golden("tiny-gemma3n", tmp_path).path
    model = load(path, LoadOptions(threads=1, gpu="off"))
    session = model.session()
    assert session.sparsity == "exact"
    assert "zeros are skipped in 2 of 6 layers, whose gates are cut" in session.notes
    assert load(path, LoadOptions(threads=1, gpu="off", sparsity="off")).session().sparsity == "off"
    with pytest.raises(LoadError, match="all gates of a token together decide"):
        load(path, LoadOptions(threads=1, gpu="off", sparsity="predicted")).session()
    with open_gguf(path) as file:
        sizes = file_sizes(file, model.config, 128, "f16", gpu=False)
    use = {each.kind: each.cpu_bytes for each in memory_use(session)}
    assert use["kv"] == sizes.kv.sum()
    assert use["attention"] <= sizes.attention.sum() + 2 * 96 * 24 * 4  # with gates that are cut


def test_importance_of_all_matrices(tmp_path: Path) -> None:
    path = golden("tiny-gemma3n", tmp_path).path
    found = imatrix(path, "etaoin shrdlu and the rest", context=16, threads=1)
    with open_gguf(path) as file:
        blocks = {
            name for name, info in file.tensors.items() if name.startswith("blk.") and len(info.shape) == 2
        }
    small = {name for name in blocks if "_coef." in name}
    assert blocks - small == found.keys()
    assert (found["blk.0.ffn_down.weight"].sums > 0).mean() < 0.9


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"altup.active_idx": 1}, "altup.active_idx is not 0: the first stream"),
    ({"altup.num_inputs": 3}, r"has shape \(4, 4\): the metadata asks for \(3, 3\)"),
    ({"attention.shared_kv_layers": None}, "attention.shared_kv_layers is missing"),
    ({"activation_sparsity_scale": np.zeros(5, np.float32)}, "an array of 6 numbers is needed"),
    ({"activation_sparsity_scale": np.full(6, np.nan, np.float32)}, "numbers up to 10, or -inf"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_files_that_are_wrong(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    named = {f"gemma3n.{key}": value for key, value in keys.items()}
    path = changed(golden("tiny-gemma3n", tmp_path).path, tmp_path / "wrong.gguf", named, {})
    with pytest.raises(ModelError, match=message) as caught:
        config_of(path)
    assert "\n" not in str(caught.value)
