"""Gemma 4: layers of two kinds, pages of other layers, inputs of each layer, experts beside an FFN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.file_sizes import file_sizes
from support.golden import GEMMA4, golden
from support.runner import Runner

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PAGE, Backend
from hotcold.model.config import Config, ModelError
from hotcold.model.kv_cache import SequenceState
from hotcold.model.mixers.attention import AttentionShape
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.watch.memory_use import memory_use

Changes = dict[str, Any]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


def shapes_of(config: Config) -> list[AttentionShape]:
    return [mixer for mixer in config.mixers if isinstance(mixer, AttentionShape)]


def test_kinds_of_layers(tmp_path: Path) -> None:
    dense, wide, experts = (config_of(golden(name, tmp_path).path) for name in GEMMA4)
    kinds = [
        (each.kv_heads, each.head_dim, each.window, each.rope and each.rope.dim) for each in shapes_of(dense)
    ]
    assert kinds == [(2, 10, 8, 10), (2, 10, 8, 10), (1, 16, None, 16)] * 2
    assert [each.rope and each.rope.base for each in shapes_of(dense)] == [1e4, 1e4, 1e6] * 2
    assert {each.scale for each in shapes_of(dense)} == {1.0}
    assert [each.pages_of for each in shapes_of(wide)] == [None, None, None, 1, 1, 2]
    assert (wide.neurons, wide.layer_input) == ((28,) * 3 + (56,) * 3, 8)
    assert experts.experts is not None
    assert (experts.experts.shared, experts.experts.beside, experts.softcap) == (28, True, 3.0)


def test_layers_that_read_other_pages_have_none(tmp_path: Path, backend: Backend) -> None:
    config = config_of(golden("tiny-gemma4-e", tmp_path).path)
    state = SequenceState(backend, config, 3, "f32")
    assert state.layers[3] is state.layers[4] is state.layers[1]
    assert state.layers[5] is state.layers[2]
    own = 2 * 2 * 10 * PAGE * 4, 2 * 2 * 10 * PAGE * 4, 2 * 2 * 16 * PAGE * 4
    assert [mixer.page_bytes("f32") for mixer in config.mixers] == [*own, 0, 0, 0]
    assert config.page_bytes("f32") == sum(own)


def test_old_files_have_keys_that_no_layer_computes(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-gemma4-e", tmp_path)
    more: dict[str, Tensor | None] = {
        f"blk.{i}.attn_{part}.weight": quantise(np.ones((rows, 24), np.float32), "F32")
        for i, rows in ((3, 20), (4, 20), (5, 32))
        for part in ("k", "v")
    }
    more["blk.5.attn_k_norm.weight"] = quantise(np.ones(16, np.float32), "F32")
    runner = Runner(changed(tiny.path, tmp_path / "old.gguf", {}, more), backend, cache_type="f32")
    np.testing.assert_allclose(runner.run(tiny.prompt), tiny.prompt_logits, atol=1e-4, rtol=0)


def test_experts_in_two_tensors(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-gemma4-moe", tmp_path)
    other: dict[str, Tensor | None] = {}
    with open_gguf(tiny.path) as file:
        for i in range(6):
            whole = file.load(f"blk.{i}.ffn_gate_up_exps.weight").dequantise()
            other[f"blk.{i}.ffn_gate_up_exps.weight"] = None
            for part, rows in (("gate", whole[:, :20]), ("up", whole[:, 20:])):
                other[f"blk.{i}.ffn_{part}_exps.weight"] = quantise(np.ascontiguousarray(rows), "F32")
    runner = Runner(changed(tiny.path, tmp_path / "two.gguf", {}, other), backend, cache_type="f32")
    np.testing.assert_allclose(runner.run(tiny.prompt), tiny.prompt_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("missing", ["layer_output_scale.weight", "ffn_down_exps.scale"])
def test_factors_that_a_file_may_lack_are_1(missing: str, tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-gemma4-moe", tmp_path)
    ones: dict[str, Tensor | None] = {}
    with open_gguf(tiny.path) as file:
        names = [name for name in file.tensors if name.endswith(missing)]
        ones |= {name: quantise(np.ones(file.tensors[name].shape, np.float32), "F32") for name in names}
    assert len(names) == 6
    given = changed(tiny.path, tmp_path / "ones.gguf", {}, ones)
    lacking = changed(tiny.path, tmp_path / "lacking.gguf", {}, dict.fromkeys(names))
    with_ones, without = (Runner(path, backend).run(tiny.prompt) for path in (given, lacking))
    np.testing.assert_array_equal(with_ones, without)
    assert abs(with_ones - tiny.prompt_logits).max() > 0.01


def test_the_bill_of_a_plan_is_what_a_session_takes(tmp_path: Path) -> None:
    for name in GEMMA4:
        path = golden(name, tmp_path).path
        session = load(path, LoadOptions(threads=1, gpu="off")).session()
        with open_gguf(path) as file:
            sizes = file_sizes(file, session.model.config, 128, "f16", gpu=False)
        use = {each.kind: each.cpu_bytes for each in memory_use(session)}
        assert use["kv"] == sizes.kv.sum()
        assert use["neurons"] >= (sizes.neuron_bytes * sizes.neurons).sum()
        table = 288 * 24 * 4
        inputs = (288 * 48 + 48 * 24 + 8) * 4 if name == "tiny-gemma4-e" else 0
        assert (sizes.embedding, sizes.inputs) == (table, inputs)
        assert sizes.head == table + 24 * 4 + 8 * 4  # the norm, and the factors of the rotation
        assert use["embedding"] >= table + inputs - 8 * 4
        # An FFN beside experts is counted where attention is.
        assert sizes.neuron_bytes[2] == 3 * 24 * 4
        with open_gguf(path) as file:
            whole = sum(info.nbytes for name, info in file.tensors.items() if name.startswith("blk.2."))
        assert sizes.attention[2] == whole - sizes.neurons[2] * sizes.neuron_bytes[2]


HEADS, WIDTH = "gemma4.attention.head_count_kv", "gemma4.embedding_length_per_layer_input"
LENGTH, TURNED = "gemma4.attention.value_length_swa", "gemma4.rope.dimension_count_swa"
SHARED = "gemma4.attention.shared_kv_layers"
WRONG: list[tuple[str, Changes, str]] = [
    ("tiny-gemma4", {HEADS: np.array([2, 2, 3, 2, 2, 1])}, "kv is 3: it must divide 2 heads"),
    ("tiny-gemma4", {LENGTH: 8}, "value_length_swa differs from the keys' length 10"),
    ("tiny-gemma4", {TURNED: 7}, "dimension_count_swa is 7: an even number is needed"),
    ("tiny-gemma4", {TURNED: 12}, "dimension_count_swa is 12: a whole number from 2 to 10"),
    ("tiny-gemma4-e", {SHARED: 6}, "shared_kv_layers is 6: a whole number from 0 to 5"),
    ("tiny-gemma4-e", {SHARED: 4}, "is 4, and layer 2 is without one"),
    ("tiny-gemma4-e", {WIDTH: 4}, r"has shape \(8, 24\): the metadata asks for \(4, 24\)"),
    ("tiny-gemma4-e", {WIDTH: 0}, "is unknown in a gemma4 model"),
    ("tiny-gemma4-moe", {"gemma4.expert_count": 0}, "is unknown in a gemma4 model"),
]


@pytest.mark.parametrize(("name", "keys", "message"), WRONG)
def test_files_that_are_wrong(name: str, keys: Changes, message: str, tmp_path: Path) -> None:
    path = changed(golden(name, tmp_path).path, tmp_path / "wrong.gguf", keys, {})
    with pytest.raises(ModelError, match=message) as caught:
        config_of(path)
    assert "\n" not in str(caught.value)


def test_blocks_of_a_table_must_fit_a_layer(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-gemma4-e", tmp_path)
    config = config_of(tiny.path)
    assert 2 * config.layers * config.layer_input % 32 == 0
    wide = np.zeros((288, 96), np.float32)
    tensors: dict[str, Tensor | None] = {"per_layer_token_embd.weight": quantise(wide, "Q8_0")}
    with open_gguf(tiny.path) as file:
        for name, axis in (("per_layer_model_proj", 0), ("per_layer_proj_norm", 0)):
            values = file.load(f"{name}.weight").dequantise()
            tensors[f"{name}.weight"] = quantise(np.concatenate([values] * 2, axis), "F32")
        for i in range(6):
            for name, axis in (("inp_gate", 0), ("proj", 1)):
                values = file.load(f"blk.{i}.{name}.weight").dequantise()
                tensors[f"blk.{i}.{name}.weight"] = quantise(np.concatenate([values] * 2, axis), "F32")
    keys = {"gemma4.embedding_length_per_layer_input": 16}
    path = changed(tiny.path, tmp_path / "blocks.gguf", keys, tensors)
    with pytest.raises(ModelError, match=r"blocks of 32 weights \(Q8_0\): they do not fit the 16 values"):
        Runner(path, backend)
