"""Counting active neurons, against sets of neurons; PowerInfer's counts, layer by layer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.op_truth import to_words
from support.torch_files import vector, write

from hotcold.kernels.backend import Chosen
from hotcold.sparse.profiler import SPANS, ActivityCounter, import_counts

NEURONS = (70, 64, 3)


@given(seed=st.integers(0, 1000), texts=st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_against_sets(seed: int, texts: list[int]) -> None:
    """This holds whatever the texts' lengths and the steps in which their tokens come."""
    random = np.random.default_rng(seed)
    counter = ActivityCounter(NEURONS)
    by_layer: list[list[list[set[int]]]] = [[] for _ in NEURONS]  # by layer and text, a set per token
    for length in texts:
        shares = [random.random(n) ** 3 for n in NEURONS]
        active = [random.random((length, len(share))) < share for share in shares]
        counter.restart()
        at = 0
        while at < length:
            stop = at + int(random.integers(1, 17))
            counter.add(np.hstack([to_words(layer[at:stop]) for layer in active]))
            at = stop
        for layer, found in zip(active, by_layer, strict=True):
            found.append([set(np.flatnonzero(row)) for row in layer])
    assert counter.tokens == sum(texts)
    spans = [span for span in SPANS if span <= max(texts)]
    figures = counter.figures()
    assert [*figures] == ["overlap", *(f"union_{span}" for span in spans)]
    for i, (n, found) in enumerate(zip(NEURONS, by_layer, strict=True)):
        tokens = [each for text in found for each in text]
        expected = [sum(neuron in each for each in tokens) / len(tokens) for neuron in range(n)]
        assert counter.firing[i].tolist() == pytest.approx(expected)
        pairs = [(a, b) for text in found for a, b in pairwise(text)]
        after = sum(len(b) for _, b in pairs)
        assert figures["overlap"][i] == pytest.approx(sum(len(a & b) for a, b in pairs) / max(1, after))
        for span in spans:
            runs = [text[at : at + span] for text in found for at in range(len(text) - span + 1)]
            assert figures[f"union_{span}"][i] == pytest.approx(
                np.mean([len(set().union(*run)) for run in runs]) / n
            )


def test_experts_begin_at_whole_words() -> None:
    active = np.random.default_rng(2).random((50, 2, 140)) < 0.3
    counter = ActivityCounter((140, 140), experts=2)
    masks = [to_words(active[:, layer, first : first + 70]) for layer in (0, 1) for first in (0, 70)]
    counter.add(np.hstack(masks))
    for layer in (0, 1):
        np.testing.assert_allclose(counter.firing[layer], active[:, layer].mean(0))
    assert counter.routing is None


def counts(folder: Path, layers: int = 12, size: int = 5) -> None:
    for i in range(layers):
        data = (np.arange(size) + 100 * i).astype("<f4").tobytes()
        write(folder / f"activation_{i}.pt", vector(length=size, size=size), data)


@pytest.mark.parametrize(("tokens", "most"), [(None, 1104), (2000, 2000)])
def test_each_layer_gets_its_own_counts(tmp_path: Path, tokens: int | None, most: int) -> None:
    """There are twelve layers, whose names sort 0, 1, 10, 11, 2 as strings."""
    counts(tmp_path)
    (tmp_path / "notes.txt").touch()
    for i, layer in enumerate(import_counts(tmp_path, [5] * 12, tokens)):
        assert (layer * most).tolist() == pytest.approx((np.arange(5) + 100 * i).tolist())


def test_shares_stay_shares(tmp_path: Path) -> None:
    write(tmp_path / "activation_0.pt", vector(length=3, size=3), np.array([0, 0.25, 0.5], "<f4").tobytes())
    assert import_counts(tmp_path, [3])[0].tolist() == [0, 0.25, 0.5]


ONE = vector(length=5, size=5)


@pytest.mark.parametrize(
    ("name", "body", "value", "message"),
    [
        ("activation_12.pt", ONE, 1, "to activation_11.pt: missing none, unknown activation_12.pt"),
        ("activation_03.pt", ONE, 1, "missing none, unknown activation_03.pt"),
        ("activation_3.pt", None, 1, "missing activation_3.pt, unknown none"),
        ("activation_3.pt", vector(length=4, size=4), 1, "3.pt has 4 numbers: the layer has 5 neurons"),
        ("activation_3.pt", ONE, -1, "activation_3.pt holds -1: numbers from 0 to 2000 are needed"),
        ("activation_3.pt", ONE, 2001, "holds 2001: numbers from 0 to 2000"),
        ("activation_3.pt", ONE, np.nan, "holds nan"), ("activation_3.pt", ONE, np.inf, "holds inf"),
        ("activation_3.pt", b"cos\nsystem\n", 1, "activation_3.pt: its pickle has the global 'os system'"),
    ],
)  # fmt: skip
def test_counts_of_another_model(
    tmp_path: Path, name: str, body: bytes | None, value: float, message: str
) -> None:
    counts(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if body is not None:
        write(tmp_path / name, body, np.full(5, value, "<f4").tobytes())
    with pytest.raises(ValueError) as caught:
        import_counts(tmp_path, [5] * 12, 2000)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@given(seed=st.integers(0, 1000), texts=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_experts_that_are_kept(seed: int, texts: list[int]) -> None:
    """The second of two layers has no experts."""
    random, counter = np.random.default_rng(seed), ActivityCounter((12, 3), experts=(6, 1))

    backend: Any = None
    counter.watch_routers([(backend, Chosen("ids", "factors")), None])
    pairs, routes = [], []
    for length in texts:
        chosen = np.array([np.sort(random.permutation(6)[:2]) for _ in range(length)], np.int32)
        pairs += [(set(a), set(b)) for a, b in pairwise(chosen.tolist())]
        routes += chosen.tolist()
        counter.restart()
        at = 0
        while at < length:
            stop = min(length, at + int(random.integers(1, 17)))
            counter._route(0, chosen[at:stop])
            at = stop
    found = counter.figures()["kept_experts"]
    assert found == pytest.approx([sum(len(a & b) for a, b in pairs) / max(1, 2 * len(pairs)), 0])
    assert counter.routes is not None and [each.tolist() for each in counter.routes] == [routes, []]
