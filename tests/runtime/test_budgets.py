"""A budget of memory for the hot side: nothing, a part, all; and the context that nobody asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.placement import sizes
from hotcold.placement.sizes import Sizes
from hotcold.runtime.loading import load
from hotcold.runtime.options import AllOptions, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.sparse.timeline import Timeline


@pytest.mark.parametrize("budget", [0, 8 << 20, 1 << 30])
def test_the_hot_side_computes_where_it_has_a_budget(budget: int) -> None:
    session = load(None, AllOptions(vram_budget=budget, hot_backend="cpu", threads=1)).session()
    session.trace(timeline := Timeline(session.model.backend))
    Engine(session).run([Request(Job([1, 400], SamplingParams(temperature=0), max_tokens=3))])
    session.close()
    assert ("hot" in {span.side for span in timeline.spans()}) == (budget > 0)


def test_a_long_context_is_4096_positions_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with open_gguf(model_path()) as file:
        key = f"{file.metadata['general.architecture']}.context_length"
        write_gguf(path, {**file.metadata, key: 8192}, {name: file.load(name) for name in file.tensors})
    assert load(path, LoadOptions()).context == 4096
    assert load(path, LoadOptions(context=5000)).context == 5000


def test_a_budget_counts_the_prompt_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def sizes_of_file(*args: Any, chunk: int, **more: Any) -> Sizes:
        counted.append(chunk)
        return sizes.sizes_of_file(*args, chunk=chunk, **more)

    monkeypatch.setattr("hotcold.placement.memory_plan.sizes_of_file", sizes_of_file)
    load(None, AllOptions(vram_budget=8 << 20, hot_backend="cpu", threads=1, chunk=48)).close()
    assert counted == [48]
