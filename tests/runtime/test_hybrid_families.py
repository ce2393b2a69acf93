"""Models of layers of several kinds on two backends: with a state, without an FFN, with experts, with others'
pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import config_of
from support.file_sizes import file_sizes
from support.golden import GEMMA4, HYBRIDS, Golden, golden
from support.opaque_backend import OpaqueBackend
from support.placed import on_two

import hotcold
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, read_placement, write_placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session

OPTIONS: dict[str, Any] = {"chunk": 32, "sequences": 40, "cache_type": "f32"}


@pytest.fixture(scope="module", params=(*HYBRIDS, *GEMMA4))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden(str(request.param), tmp_path_factory.mktemp("golden"))


def logits_of(session: Session, tiny: Golden) -> np.ndarray:
    """Logits of the prompt, then of a token a step."""
    batch, reservation = session.transformer.batch, session.state.take("test", 64)
    tokens, parts = [*tiny.prompt, *tiny.steps], []
    for start, stop in [(0, len(tiny.prompt)), *((i, i + 1) for i in range(len(tiny.prompt), len(tokens)))]:
        n = reservation.put(batch, start, tokens[start:stop])
        batch.logits_rows[:n] = np.arange(n)
        batch.counts[:] = (n, 0 if start == 0 else 1, n, 1)
        session.run()
        parts.append(np.array(session.transformer.read_logits(0, n)))
    session.state.release("test")
    return np.concatenate(parts)


def halves(path: Path) -> Placement:
    """Half of the neurons are hot: every second expert, or the first ones of a layer without experts."""
    config = config_of(path)
    hot = []
    for i, n in enumerate(config.neurons):
        experts = config.experts_of(i)
        size = experts.neurons if experts else max(n // 2, 1)
        hot.append(np.arange(n) // size % 2 == 0)
    return Placement.on_one(hot, range(config.layers), True)


def test_on_two_backends(tiny: Golden) -> None:
    session = on_two(OpaqueBackend(open_backend("cpu", 1)), halves(tiny.path), tiny.path, **OPTIONS)
    expected = np.concatenate([tiny.prompt_logits, tiny.step_logits])
    np.testing.assert_allclose(logits_of(session, tiny), expected, atol=1e-4, rtol=0)
    layers = zip(session.model.weights.layers, session.model.config.neurons, strict=True)
    assert all(layer.ffn.neurons == n for layer, n in layers)
    session.close()


def test_counts_are_those_of_the_parts(tiny: Golden) -> None:
    """Each token reads the rows of the neurons that it chose."""
    session = load(tiny.path, LoadOptions(threads=1, gpu="off", sparsity="off", **OPTIONS)).session()
    config = session.model.config
    logits_of(session, tiny)
    tokens, rows = len(tiny.steps), session.counters.rows[:, 1]
    for i, n in enumerate(config.neurons):
        experts = config.experts_of(i)
        ups = experts.chosen * experts.neurons if experts else n
        assert session.counters.rows[i, 1 - (not config.gated)] == tokens * ups, (i, rows)
    session.close()


@pytest.mark.parametrize("budget", [1 << 30, 600 << 10])
def test_a_plan(tiny: Golden, budget: int, tmp_path: Path) -> None:
    plan = hotcold.plan(tiny.path, hardware="rtx4090-i9", vram_budget=budget, output=tmp_path / "out.gpuidx")
    assert plan.predicted_tok_s > 0
    with open_gguf(tiny.path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, config.context, "f16")
    assert [len(mask) for mask in read_placement(tmp_path / "out.gpuidx", sizes).hot] == [*config.neurons]


def test_placements_and_layers_without_neurons(tmp_path: Path) -> None:
    tiny = golden("tiny-nemotron-h", tmp_path)
    with open_gguf(tiny.path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 128, "f16")
    placement = halves(tiny.path)
    write_placement(tmp_path / "half.gpuidx", sizes, placement)
    again = read_placement(tmp_path / "half.gpuidx", sizes)
    assert again.where == placement.where
    for mask, wanted in zip(again.hot, placement.hot, strict=True):
        np.testing.assert_array_equal(mask, wanted)


def test_layers_lie_with_those_whose_pages_they_read(tmp_path: Path) -> None:
    tiny = golden("tiny-gemma4-e", tmp_path)
    with open_gguf(tiny.path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 128, "f16")
    assert sizes.shared == {3: 1, 4: 1, 5: 2}
    for first, fits in ((3, False), (2, False), (0, True)):
        layers = range(first, 6)
        hot = [np.full(n, i in layers) for i, n in enumerate(config.neurons)]
        write_placement(tmp_path / "some.gpuidx", sizes, Placement.on_one(hot, layers, True))
        options = LoadOptions(
            threads=1, hot_backend="cpu", placement=tmp_path / "some.gpuidx", context=128, **OPTIONS
        )
        if fits:
            load(tiny.path, options).session().close()
            continue
        with pytest.raises(UserError, match="layer 3 reads keys and values of layer 1") as caught:
            load(tiny.path, options)
        assert "\n" not in str(caught.value)
