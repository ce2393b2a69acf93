"""The tensors that a model must, may and must not have, and how they are loaded."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.plain_forward import Model, forward, fuse_qkv, transposed
from support.runner import Runner

from hotcold.formats.blocks import GGML_TYPES, Tensor, quantise
from hotcold.formats.gguf import GGUFError, GGUFFile, open_gguf
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import Backend, Floats, Matrix
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config, ModelError
from hotcold.model.weights import Weights, check_tensors, load_weights

Tensors = dict[str, Tensor]


class Untouched(ReferenceBackend):
    """Fails when anything is allocated."""

    def zeros(self, *args: object, **options: object) -> None:
        raise AssertionError("allocated")

    matrix = ffn_weights = zeros


class Collecting(ReferenceBackend):
    """Keeps what matrices were made from."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Tensor, Floats | None]] = []

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        self.taken.append((tensor.load(), bias))
        return super().matrix(tensor, bias)


def zeros(*shape: int) -> Tensor:
    return quantise(np.zeros(shape, np.float32), "F32")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Weights]:
    """Writes a model, after a change of its tensors, and loads it."""

    def write_and_load(
        model: Model,
        change: Callable[[Tensors], None] | None = None,
        backend: Backend | None = None,
        others: frozenset[str] = frozenset(),
        magic: str = "GGUF",
    ) -> Weights:
        tensors = model.tensors()
        if change is not None:
            change(tensors)
        with open_gguf(model.write(tmp_path / "model.gguf", tensors, magic)) as file:
            config = config_of(file)
            total = check_tensors(file, config, others) if others else None
            return load_weights(file, config, backend or ReferenceBackend(), total=total)

    return write_and_load


def config_of(file: GGUFFile) -> Config:
    return Config.from_metadata(file.metadata, file.magic, file.tensors)


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("blk.1.attn_v.weight"), "blk.1.attn_v.weight is missing: llama needs it"),
    "missing norm": (lambda t: t.pop("output_norm.weight"), "tensor output_norm.weight is missing"),
    "missing layer": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("blk.1.")], "tensor blk.1.attn_q.weight"
    ),
    "missing gate": (lambda t: t.pop("blk.1.ffn_gate.weight"), "tensor blk.1.ffn_gate.weight is missing"),
    "gate in one layer": (lambda t: t.pop("blk.0.ffn_gate.weight"), "blk.1.ffn_gate.weight is unknown"),
    "transposed": (
        lambda t: t.update({"blk.0.attn_q.weight": zeros(48, 60)}),
        r"tensor blk.0.attn_q.weight has shape \(48, 60\): the metadata asks for \(60, 48\)",
    ),
    "another model's": (lambda t: t.update({"blk.1.ffn_up.weight": zeros(70, 48)}), r"asks for \(90, 48\)"),
    "bias of wrong size": (lambda t: t.update({"blk.0.attn_q.bias": zeros(48)}), "attn_q.bias has shape"),
    "head of wrong size": (lambda t: t.update({"output.weight": zeros(60, 48)}), "output.weight has shape"),
    "unknown": (
        lambda t: t.update({"blk.0.attn_rel_b.weight": zeros(6)}),
        "tensor blk.0.attn_rel_b.weight is unknown in a llama model",
    ),
    "fused and apart": (
        lambda t: t.update({"blk.0.attn_qkv.weight": zeros(100, 48)}), "blk.0.attn_q.weight is unknown",
    ),
    "two norms": (
        lambda t: t.update({"blk.0.attn_norm_2.weight": zeros(48)}), "attn_norm_2.weight is unknown"
    ),
    "layer too many": (lambda t: t.update({"blk.2.attn_q.weight": zeros(60, 48)}), "blk.2.attn_q.weight is"),
    "predictor": (lambda t: t.update({"blk.0.fc1.weight": zeros(8, 48)}), "blk.0.fc1.weight is unknown"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_allocated(
    load: Callable[..., Weights], change: Callable[[Tensors], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(Model(), change, Untouched())


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    model = Model(dim=256, neurons=(256,))
    path = model.write(tmp_path / "model.gguf")
    with open_gguf(path) as file:
        config = config_of(file)
        info = file.tensors["blk.0.ffn_up.weight"]
        file.tensors[info.name] = replace(info, type=GGML_TYPES[15])
        with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up.weight: .*Q8_K is not supported"):
            check_tensors(file, config)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_norms_and_biases_must_be_finite(load: Callable[..., Weights], value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        values = tensors["blk.1.ffn_norm.weight"].dequantise()
        values[3] = value
        tensors["blk.1.ffn_norm.weight"] = quantise(values, "F32")

    with pytest.raises(ModelError, match=r"blk.1.ffn_norm.weight holds values that are not finite"):
        load(Model(), spoil)


@pytest.mark.parametrize(
    "turn",
    [lambda values: values[:, None], lambda values: values[None], lambda values: values[None, :, None]],
)
def test_vectors_may_have_dimensions_of_one(
    load: Callable[..., Weights], turn: Callable[[Floats], Floats]
) -> None:
    model, names = Model(biases=True), ("output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.bias")

    def change(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = quantise(np.ascontiguousarray(turn(tensors[name].dequantise())), "F32")

    plain, changed = load(model), load(model, change)
    backend = ReferenceBackend()
    for one, other in ((plain, changed), (plain.layers[0].blocks[0], changed.layers[0].blocks[0])):
        norms = [one.norm, other.norm]
        values = [backend.read(norm.weight) for norm in norms if norm is not None]
        np.testing.assert_array_equal(*values)
        assert values[0].shape == (48,)
    np.testing.assert_array_equal(*(each.layers[1].blocks[0].part.q.bias for each in (plain, changed)))


@pytest.mark.parametrize("shape", [(24, 2), (49, 1), (1, 47), (2, 24, 1)])
def test_other_shapes_of_vectors_are_refused(load: Callable[..., Weights], shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"output_norm.weight has shape .*: the metadata asks for \(48,\)"):
        load(Model(), lambda tensors: tensors.update({"output_norm.weight": zeros(*shape)}), Untouched())


def test_others_tensors_are_left_alone(load: Callable[..., Weights]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["blk.0.fc1.weight"] = zeros(8, 48)
        tensors["blk.1.attn_rot_embd"] = zeros(5)  # an old converter's table

    load(Model(), add, others=frozenset({"blk.0.fc1.weight"}))


def test_a_tied_head_is_the_embedding(load: Callable[..., Weights]) -> None:
    tied, own = load(Model(tied=True)), load(Model())
    assert tied.head is tied.embedding and own.head is not own.embedding


@pytest.mark.parametrize("named", ["ffn_down_t", "ffn_down"])
def test_down_stored_by_neuron(load: Callable[..., Weights], named: str) -> None:
    """Under PowerInfer's name, or under the usual one with our key."""

    def change(tensors: Tensors) -> None:
        tensors[f"blk.0.{named}.weight"] = transposed(tensors.pop("blk.0.ffn_down.weight"))

    extra = {} if named == "ffn_down_t" else {"hotcold.ffn.down_layout": "by_neuron"}
    weights = load(Model(neurons=(70,), extra=extra), change)
    assert weights.layers[0].ffn.down_layout == "by_neuron"


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = Model(biases=True).write(tmp_path / "model.gguf")
    reports: list[tuple[int, int]] = []
    with open_gguf(path) as file:
        config = config_of(file)
        total = check_tensors(file, config)
        assert total == sum(info.nbytes for info in file.tensors.values())
        load_weights(file, config, ReferenceBackend(), lambda done, all: reports.append((done, all)))
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert reports[-1] == (total, total) and {all for _, all in reports} == {total}


def test_progress_of_the_cpu_counts_the_same(tmp_path: Path) -> None:
    path = Model(biases=True).write(tmp_path / "model.gguf")
    reports: list[tuple[int, int]] = []
    with open_gguf(path) as file:
        config = config_of(file)
        load_weights(file, config, CPUBackend(2), lambda done, all: reports.append((done, all)))
    assert len(reports) > 20 and reports == sorted(set(reports)) and reports[-1][0] == reports[-1][1]


@pytest.mark.parametrize("backend", [ReferenceBackend, CPUBackend])
def test_a_file_cut_while_it_is_loaded(tmp_path: Path, backend: type[Backend]) -> None:
    path = Model().write(tmp_path / "model.gguf")
    with open_gguf(path) as file:
        size = file.size

        def cut(done: int, total: int) -> None:
            if done > total // 2:
                os.truncate(path, size - 100)

        with pytest.raises(GGUFError, match=f"model.gguf: changed from {size} to {size - 100} bytes"):
            load_weights(file, config_of(file), backend(), cut)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("backend", [ReferenceBackend, CPUBackend])
def test_loading_can_be_interrupted(tmp_path: Path, backend: type[Backend]) -> None:
    path, reports = Model().write(tmp_path / "model.gguf"), []

    def interrupt(done: int, total: int) -> None:
        reports.append(done)
        if len(reports) == 5:
            signal.raise_signal(signal.SIGINT)

    with open_gguf(path) as file, pytest.raises(KeyboardInterrupt):
        load_weights(file, config_of(file), backend(), interrupt)
    assert len(reports) == 5


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_rope_factors_must_be_positive(load: Callable[..., Weights], factor: float) -> None:
    def add(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = quantise(np.array([1, 1, factor, 1, 1], np.float32), "F32")

    with pytest.raises(ModelError, match=r"rope_freqs.weight holds .*: numbers above 0 are needed"):
        load(Model(), add)


FALCON = Model("falcon", activation="relu", layer_norm=True, parallel=True, gated=False, biases=True)


def test_a_fused_matrix_is_split_as_it_is(load: Callable[..., Weights]) -> None:
    """Rows of q, then of k, then of v; any block type, since rows are never cut."""
    model, backend = replace(FALCON, dim=96, head_dim=16, neurons=(64,), type="Q4_0"), Collecting()
    load(model, backend=backend)
    separate, backend.taken = backend.taken, []
    weights = load(model, fuse_qkv, backend=backend)
    assert weights.layers[0].blocks[1].part.q.shape == (96, 96) and len(separate) == len(backend.taken)
    for (tensor, bias), (other, other_bias) in zip(separate, backend.taken, strict=True):
        np.testing.assert_array_equal(tensor.data, other.data)
        np.testing.assert_array_equal(bias, other_bias)


def test_the_bias_of_a_fused_gate_is_split_with_the_rows(tmp_path: Path) -> None:
    """The gate's, then up's."""
    model = Model("phi3", interleaved=False, neurons=(70,), biases=True)
    apart = model.tensors()
    fused = {name: each for name, each in apart.items() if "ffn_gate" not in name}
    for part in ("weight", "bias"):
        rows = [apart[f"blk.0.ffn_{name}.{part}"].dequantise() for name in ("gate", "up")]
        fused[f"blk.0.ffn_up.{part}"] = quantise(np.concatenate(rows), "F32")
    runner = Runner(model.write(tmp_path / "model.gguf", fused), ReferenceBackend(), cache_type="f32")
    np.testing.assert_allclose(runner.run([3, 9, 27]), forward(model, apart, [3, 9, 27]), atol=1e-4, rtol=0)


def test_falcon_40b_names_the_norm_of_attention_second(load: Callable[..., Weights]) -> None:
    def second(tensors: Tensors) -> None:
        for part in ("weight", "bias"):
            tensors[f"blk.0.attn_norm_2.{part}"] = zeros(48)

    first, other = load(FALCON, second).layers
    ffn, attention = first.blocks
    assert not attention.norm.weight.any() and ffn.norm.weight.all()
    ffn, attention = other.blocks
    assert attention.norm.weight.all() and ffn.norm is attention.norm
