"""A budget of memory for the hot side: nothing, a part, all; and the default context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.kernels.backend import BatchLimits
from hotcold.model.config import Config
from hotcold.placement import sizes
from hotcold.placement.sizes import Sizes
from hotcold.runtime import memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import AllOptions, LoadError, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.sparse.timeline import Timeline


@pytest.mark.parametrize("budget", [0, 8 << 20, 1 << 30])
def test_the_hot_side_computes_where_it_has_a_budget(budget: int) -> None:
    session = load(None, AllOptions(vram_budget=budget, hot_backend="cpu", threads=1)).session()
    session.trace(timeline := Timeline(session.model.backend))
    Engine(session).run([Request(Job([1, 400], SamplingParams(temperature=0), max_tokens=3))])
    session.close()
    assert ("hot" in {span.side for span in timeline.spans()}) == (budget > 0)


def with_context(path: Path, context: int, **tensors: Any) -> Path:
    """The built-in model, whose metadata say that it has so long a context."""
    with open_gguf(model_path()) as file:
        key = f"{file.metadata['general.architecture']}.context_length"
        own = {name: file.load(name) for name in file.tensors}
        write_gguf(path, {**file.metadata, key: context}, own | tensors)
    return path


def test_the_default_context_is_what_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_context(tmp_path / "long.gguf", 1 << 17)
    model = load(path, LoadOptions())
    assert (model.context, model.notes) == (1 << 15, ())
    assert load(path, LoadOptions(context=0)).context == 1 << 17
    assert load(path, LoadOptions(context=5000)).context == 5000
    assert load(path, LoadOptions(vram_budget=1 << 30, hot_backend="cpu")).context == 4096
    page = model.config.page_bytes("f16")
    for context in (1 << 14, 1 << 13, 4096):
        needed = sum(load(path, LoadOptions(context=context)).plan.cpu_bytes().values())
        monkeypatch.setattr(memory, "available_memory", lambda free=needed: free)
        small = load(path, LoadOptions())
        assert small.context == context
        (note,) = small.notes
        assert note == f"the context is {context} tokens (`context`): memory is too small for 32768"
    monkeypatch.setattr(memory, "available_memory", lambda: needed - page)
    with pytest.raises(LoadError, match=r"KV cache of 4096 tokens .* smaller context \(`context`\)"):
        load(path, LoadOptions())
    with pytest.raises(LoadError, match=r"KV cache of 8192 tokens"):
        load(path, LoadOptions(context=8192))


def test_a_budget_counts_the_prompt_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def sizes_of_file(file: GGUFFile, config: Config, limits: BatchLimits, *args: Any, **more: Any) -> Sizes:
        counted.append(limits.chunk)
        return sizes.sizes_of_file(file, config, limits, *args, **more)

    monkeypatch.setattr("hotcold.placement.memory_plan.sizes_of_file", sizes_of_file)
    load(None, AllOptions(vram_budget=8 << 20, hot_backend="cpu", threads=1, chunk=48)).close()
    assert counted == [48]
