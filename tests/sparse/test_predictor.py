"""Predictors as files hold them, PowerInfer's and sidecars: complete ones, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plain_forward import Model
from support.sidecars import PASSING

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config
from hotcold.sparse.predictor import (
    PredictorError,
    check_predictors,
    find_predictors,
    load_predictors,
    predictor_names,
    read_predictor,
    write_sidecar,
)

RANKS = (32, 64)  # they may differ by layer
MODEL = Model(activation="relu")
Tensors = dict[str, Tensor]


def first(layer: int) -> str:
    return f"blk.{layer}.fc1.weight"


def second(layer: int) -> str:
    return f"blk.{layer}.fc2.weight"


def random(*shape: int) -> Tensor:
    return quantise(np.random.default_rng(shape).standard_normal(shape), "F16")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., GGUFFile]:
    """A file with predictors, after a change of its tensors and with more metadata."""

    def make(change: Callable[[Tensors], object] | None = None, **extra: Any) -> GGUFFile:
        tensors = MODEL.tensors()
        for i, (n, rank) in enumerate(zip(MODEL.neurons, RANKS, strict=True)):
            tensors |= {first(i): random(rank, MODEL.dim), second(i): random(n, rank)}
        if change is not None:
            change(tensors)
        model = Model(activation="relu", extra={f"powerinfer.{key}": value for key, value in extra.items()})
        return open_gguf(model.write(tmp_path / "model.gguf", tensors, "PWRI"))

    return make


def config_of(file: GGUFFile) -> Config:
    return Config.from_metadata(file.metadata, file.magic, file.tensors)


def test_predictors_are_read_as_they_are(write: Callable[..., GGUFFile]) -> None:
    with write(sparse_threshold=np.float32(-0.25)) as file:
        config = config_of(file)
        assert predictor_names(file) == {first(0), second(0), first(1), second(1)}
        facts = check_predictors(file, config)
        assert (facts.input, facts.relu, facts.measured) == ("residual", True, None)
        nbytes = facts.nbytes
        assert nbytes == sum(file.tensors[name].nbytes for name in predictor_names(file))
        for i, (n, rank) in enumerate(zip(MODEL.neurons, RANKS, strict=True)):
            tensors = read_predictor(file, config, i)
            assert tensors.relu and tensors.first.shape == (rank, MODEL.dim)
            np.testing.assert_array_equal(tensors.first.data, random(rank, MODEL.dim).data)
            np.testing.assert_array_equal(tensors.second.data, random(n, rank).data)
            np.testing.assert_array_equal(tensors.threshold, np.full(n, -0.25, np.float32))
        loaded = load_predictors(file, config, ReferenceBackend())
        assert len(loaded) == 2
        assert sum(predictor.nbytes for predictor in loaded) == nbytes + 4 * sum(MODEL.neurons)


def test_the_threshold_is_0_unless_the_file_says_it(write: Callable[..., GGUFFile]) -> None:
    with write() as file:
        assert not read_predictor(file, config_of(file), 0).threshold.any()


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "none": (
        lambda t: [t.pop(name(i)) for name in (first, second) for i in range(2)],
        "this file has no predictor .*: use `sparsity=exact`",
    ),
    "a layer": (lambda t: [t.pop(first(1)), t.pop(second(1))], "predictor of layer 1 is missing"),
    "half a layer": (lambda t: t.pop(second(0)), "predictor of layer 0 is missing"),
    "another model's": (
        lambda t: t.update({first(0): random(32, 64)}),
        r"blk.0.fc1.weight has shape \(32, 64\): \(rank, 48\) is needed",
    ),
    "ranks": (
        lambda t: t.update({second(1): random(90, 32)}),
        r"fc2.weight has shape \(90, 32\): \(90, 64\) is",
    ),
    "neurons": (lambda t: t.update({second(1): random(70, 64)}), r"\(70, 64\): \(90, 64\) is needed"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_predictors_that_do_not_fit_are_refused(
    write: Callable[..., GGUFFile], change: Callable[[Tensors], object], message: str
) -> None:
    with write(change) as file, pytest.raises(PredictorError, match=message):
        check_predictors(file, config_of(file))


@pytest.mark.parametrize("threshold", [np.float32("nan"), np.float32("inf"), "low", True])
def test_the_threshold_must_be_a_number(write: Callable[..., GGUFFile], threshold: Any) -> None:
    with (
        write(sparse_threshold=threshold) as file,
        pytest.raises(PredictorError, match=r"powerinfer.sparse_threshold is .*: a finite number"),
    ):
        check_predictors(file, config_of(file))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", [first(1), second(0)])
def test_weights_that_are_not_finite_are_refused(
    write: Callable[..., GGUFFile], value: float, name: str
) -> None:
    """Their scores would leave neurons out without a word."""

    def spoil(tensors: Tensors) -> None:
        values = tensors[name].dequantise()
        values[-1, -1] = value
        tensors[name] = quantise(values, "F16")

    with (
        write(spoil) as file,
        pytest.raises(PredictorError, match=f"{name} holds values that are not finite"),
    ):
        load_predictors(file, config_of(file), ReferenceBackend())


# --- sidecars ---


def sidecar(tmp_path: Path, change: Callable[[dict[str, Any], Tensors], object] | None = None) -> GGUFFile:
    """The sidecar of a model with the fingerprint ``f``, after a change of its keys and tensors."""
    layers = [
        PredictorTensors(
            random(rank, MODEL.dim), random(n, rank), np.linspace(-1, 1, n, dtype=np.float32), relu=False
        )
        for n, rank in zip(MODEL.neurons, RANKS, strict=True)
    ]
    path = tmp_path / "x.predictor.gguf"
    write_sidecar(path, "f", layers, {"input": "normed"})
    if change is not None:
        with open_gguf(path) as file:
            metadata, tensors = dict(file.metadata), {name: file.load(name) for name in file.tensors}
        change(metadata, tensors)
        write_gguf(path, metadata, tensors)
    return open_gguf(path)


def measured(**changes: Any) -> dict[str, Any]:
    """The keys of a measurement, some of them changed."""
    changed = {f"measured.{name}": value for name, value in changes.items()}
    return {KEY + key: value for key, value in (PASSING.metadata() | changed).items()}


def test_a_measurement_comes_back_as_it_was(tmp_path: Path) -> None:
    """In 64 bits: rounding must not carry the interval over the limit."""
    unbounded = replace(PASSING, ppl_ratio_low=0.0, ppl_ratio_high=math.inf)
    for i, each in enumerate((PASSING, replace(PASSING, ppl_ratio_high=1.001), unbounded)):
        (folder := tmp_path / str(i)).mkdir()
        keys = {KEY + key: value for key, value in each.metadata().items()}
        with sidecar(folder, lambda m, t, keys=keys: m.update(keys)) as file:
            assert check_predictors(file, model_config(), "f").measured == each


def model_config() -> Config:
    return Config.from_metadata(MODEL.metadata(), "GGUF", MODEL.tensors())  # type: ignore[arg-type]


def test_a_sidecar_comes_back_as_it_was(tmp_path: Path) -> None:
    with sidecar(tmp_path) as file:
        facts = check_predictors(file, model_config(), "f")
        assert (facts.input, facts.relu, facts.measured) == ("normed", False, None)
        assert facts.params == tuple(r * (MODEL.dim + n) for r, n in zip(RANKS, MODEL.neurons, strict=True))
        assert facts.nbytes == sum(info.nbytes for info in file.tensors.values())
        for i, (n, rank) in enumerate(zip(MODEL.neurons, RANKS, strict=True)):
            tensors = read_predictor(file, model_config(), i)
            assert not tensors.relu
            np.testing.assert_array_equal(tensors.first.data, random(rank, MODEL.dim).data)
            np.testing.assert_array_equal(tensors.second.data, random(n, rank).data)
            np.testing.assert_array_equal(tensors.threshold, np.linspace(-1, 1, n, dtype=np.float32))


@pytest.mark.parametrize(
    ("stated", "known"),
    [
        (np.float32([0.25, 0.5]), (0.25, 0.5)),
        (np.float32([0.25]), ()),
        (np.float32([0.25, 1.5]), ()),
        (np.float32([0.25, np.nan]), ()),
        (np.int32([0, 1]), ()),
        ("many", ()),
    ],
)
def test_shares_that_are_named_are_read_where_they_are_shares(
    stated: object, known: tuple[float, ...], tmp_path: Path
) -> None:
    with sidecar(tmp_path, lambda keys, _: keys.update({f"{KEY}candidates": stated})) as file:
        assert check_predictors(file, model_config(), "f").candidates == known


KEY = "hotcold.predictor."
DAMAGED: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "another model's": (
        lambda m, t: m.update({KEY + "model_fingerprint": "g"}),
        r"x.predictor.gguf: belongs to the model with fingerprint 'g', not to this one \('f'\): run ",
    ),
    "nobody's": (lambda m, t: m.pop(KEY + "model_fingerprint"), "fingerprint None, not to this one"),
    "of an array": (
        lambda m, t: m.update({KEY + "model_fingerprint": [1, 2]}),
        "fingerprint an array of 2, not to this one",
    ),
    "no sidecar": (lambda m, t: m.pop("general.type"), "not to this one"),
    "a type that is an array": (lambda m, t: m.update({"general.type": [1, 2]}), "not to this one"),
    "input": (
        lambda m, t: m.update({KEY + "input": "logits"}),
        "'logits'.*residual or normed and a truth value",
    ),
    "input of an array": (
        lambda m, t: m.update({KEY + "input": [1, 2]}),
        "residual or normed and a truth value",
    ),
    "relu": (lambda m, t: m.update({KEY + "relu": 1}), "input and relu are 'normed' and 1: "),
    "a part of a measurement": (
        lambda m, t: m.update({KEY + "measured.tokens": 9}),
        "measured.kl_mean is None: a number of at least 0 is needed",
    ),
    "a measurement that is no number": (
        lambda m, t: m.update(measured(ppl_ratio=np.float64("nan"))),
        "hotcold.predictor.measured.ppl_ratio is .*nan.*: a number of at least 0",
    ),
    "a measurement that is a text": (
        lambda m, t: m.update(measured(speed_low="1.2")),
        "speed_low is '1.2': ",
    ),
    "a measurement that is negative": (
        lambda m, t: m.update(measured(speed_low=-1)),
        "speed_low is .*-1.*: ",
    ),
    "no tokens": (lambda m, t: m.update(measured(tokens=np.float64(0))), "tokens is 0: a finite number"),
    "endless tokens": (lambda m, t: m.update(measured(tokens=np.float64("inf"))), "tokens is inf: a finite"),
    "a layer": (lambda m, t: t.pop("blk.1.predictor.first"), "predictor of layer 1 is missing"),
    "thresholds": (lambda m, t: t.pop("blk.0.predictor.threshold"), "predictor of layer 0 is missing"),
    "too few thresholds": (
        lambda m, t: t.update({"blk.0.predictor.threshold": random(60)}),
        r"tensor blk.0.predictor.threshold has shape \(60,\): \(70,\) is needed",
    ),
    "a table of thresholds": (
        lambda m, t: t.update({"blk.0.predictor.threshold": random(70, 1)}),
        r"has shape \(70, 1\): \(70,\) is needed",
    ),
    "a vector": (
        lambda m, t: t.update({"blk.0.predictor.first": random(48)}),
        r"tensor blk.0.predictor.first has shape \(48,\): \(rank, 48\)",
    ),
    "rank": (
        lambda m, t: t.update({"blk.1.predictor.second": random(90, 32)}),
        r"blk.1.predictor.second has shape \(90, 32\): \(90, 64\) is needed",
    ),
    "nan": (
        lambda m, t: t.update({"blk.1.predictor.threshold": quantise(np.full(90, np.nan), "F32")}),
        "tensor blk.1.predictor.threshold holds values that are not finite",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_sidecar_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], Tensors], object], message: str
) -> None:
    with sidecar(tmp_path, change) as file, pytest.raises(PredictorError, match=message):
        load_predictors(file, model_config(), ReferenceBackend(), "f")


def test_where_predictors_are_looked_for(tmp_path: Path, write: Callable[..., GGUFFile]) -> None:
    named = tmp_path / "named.gguf"
    with write() as model:  # it has its own
        assert find_predictors(model) == model.path
        beside = tmp_path / "model.predictor.gguf"
        beside.touch()
        assert find_predictors(model) == beside
        assert find_predictors(model, named) == named
    beside.unlink()
    with open_gguf(MODEL.write(tmp_path / "none.gguf")) as model:
        assert find_predictors(model) is None
