"""PowerInfer's predictors as files hold them: complete ones, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_forward import Model

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config
from hotcold.sparse.predictor import (
    PredictorError,
    check_predictors,
    load_predictors,
    predictor_names,
    read_predictor,
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
        nbytes = check_predictors(file, config)
        assert nbytes == sum(file.tensors[name].nbytes for name in predictor_names(file))
        for i, (n, rank) in enumerate(zip(MODEL.neurons, RANKS, strict=True)):
            tensors = read_predictor(file, config, i)
            assert tensors.relu and tensors.first.shape == (rank, MODEL.dim)
            np.testing.assert_array_equal(tensors.first.data, random(rank, MODEL.dim).data)
            np.testing.assert_array_equal(tensors.second.data, random(n, rank).data)
            np.testing.assert_array_equal(tensors.threshold, np.full(n, -0.25, np.float32))
        seen: list[int] = []
        loaded = load_predictors(file, config, ReferenceBackend(), seen.append)
        assert len(loaded) == 2 and sum(seen) == nbytes
        assert sum(predictor.nbytes for predictor in loaded) == nbytes + 4 * sum(MODEL.neurons)


def test_the_threshold_is_0_unless_the_file_says_it(write: Callable[..., GGUFFile]) -> None:
    with write() as file:
        assert not read_predictor(file, config_of(file), 0).threshold.any()


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "none": (
        lambda t: [t.pop(name(i)) for name in (first, second) for i in range(2)],
        "this file has no predictor .*: use --sparsity exact",
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
