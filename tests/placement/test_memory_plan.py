"""Plans of memory, compared with what loading allocates and with each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buffers import cache_bytes
from support.draft_blocks import with_block
from support.file_sizes import file_sizes
from support.golden import golden
from support.hybrid_models import write_hybrid
from support.many_experts import budget

from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PAGE, BatchLimits
from hotcold.model.config import Config
from hotcold.placement import expert_cache
from hotcold.placement.memory_plan import MemoryPlan, MemoryRequest, WeightBytes
from hotcold.placement.placement import Placement, write_placement
from hotcold.runtime import loading, memory
from hotcold.runtime.loading import load, plan_memory
from hotcold.runtime.options import AllOptions, LoadError, LoadOptions
from hotcold.watch.memory_use import memory_use

OPTIONS: dict[str, Any] = {"context": 64, "chunk": 16}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "plain.gguf", "qwen35")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of experts with a block that drafts tokens."""
    folder = tmp_path_factory.mktemp("experts")
    return with_block(golden("tiny-glm4moe", folder).path, folder / "block.gguf", 2)


@pytest.fixture(autouse=True)
def no_reading_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read would take more than the tiny models do."""
    monkeypatch.setattr(expert_cache, "reading_bytes", lambda row_bytes: 0)


def test_a_plan_states_what_is_allocated(hybrid: Path) -> None:
    """On one backend, or on two that both have their part in the computer's memory."""
    two: dict[str, Any] = {"hot_backend": "cpu", "vram_budget": 6 << 20}
    for path, options in (
        (model_path(), {"sequences": 3}),
        (model_path(), two),
        (hybrid, {"sequences": 3}),
        (hybrid, {}),
    ):
        model = load(path, LoadOptions(threads=1, **OPTIONS, **options))
        needed, session = model.plan.cpu_bytes(), model.session()
        assert len({*model.devices.parts}) == (2 if options is two else 1)
        uses = {use.kind: use.cpu_bytes + use.gpu_bytes for use in memory_use(session)}
        assert needed["KV cache"] == uses["kv"] > 0 and needed["steps"] == uses["buffers"] > 0
        assert needed["states"] == uses.get("states", 0)
        assert needed["KV cache"] + needed["states"] == cache_bytes(session)
    with open_gguf(model_path()) as file:
        tensors = sum(info.nbytes for info in file.tensors.values())
    assert load(None, LoadOptions(threads=1, **OPTIONS)).plan.cpu_bytes()["weights"] == tensors


def test_loading_follows_the_plan_that_is_shown(drafting: Path) -> None:
    """With all experts, with some, and without the block that drafts tokens."""
    ample = budget(drafting, 1.0, **OPTIONS)
    least = budget(drafting, 0.0, **OPTIONS, draft_max=0)
    plans = []
    for nbytes in (ample, budget(drafting, 0.6, **OPTIONS), least):
        options = LoadOptions(threads=1, **OPTIONS, ram_budget=nbytes)
        with open_gguf(drafting) as file:
            plans.append(plan_memory(file, options))
        assert load(drafting, options).plan == plans[-1]
        experts = plans[-1].experts
        assert experts is not None
        needed = sum(plans[-1].cpu_bytes().values())
        assert needed == sum(experts.bill.values()) + experts.expert_bytes <= nbytes
    assert [plan.config.draft is None for plan in plans] == [False, False, True]
    assert [plan.experts.all_fit for plan in plans if plan.experts] == [True, False, False]


def counted(calls: list[str], name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    return call


def test_a_file_is_parsed_once_whatever_fits(drafting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the block that drafts tokens nor all experts fit, alone or together."""
    least = budget(drafting, 0.0, **OPTIONS, draft_max=0)
    parsed: list[str] = []
    for owner, name in (
        (loading.Config, "from_metadata"),
        (loading.Tokenizer, "from_metadata"),
        (loading.WeightBytes, "from_file"),
    ):
        monkeypatch.setattr(owner, name, counted(parsed, owner.__name__, getattr(owner, name)))
    monkeypatch.setattr(memory, "available_memory", lambda: least * 101 // 100)
    monkeypatch.setattr(memory, "_RESERVE", 10**9)
    model = load(drafting, LoadOptions(threads=1, **OPTIONS))
    assert model.config.draft is None and model.plan.experts is not None and not model.plan.experts.all_fit
    assert sorted(parsed) == ["Config", "Tokenizer", "WeightBytes"]
    assert model.notes[0].startswith("the model does not fit in memory: `ram_budget=")
    assert model.notes[-1].endswith("is not used: it does not fit in `ram_budget`")


def test_the_message_where_no_form_of_a_model_fits(drafting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is about the model without its block and with all experts, as the options ask."""
    with open_gguf(drafting) as file:
        asked = plan_memory(file, OPTIONS | {"draft_max": 0})
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(LoadError) as caught:
        load(drafting, LoadOptions(threads=1, **OPTIONS))
    assert str(caught.value) == asked.shortage(1000)


@pytest.mark.parametrize("head", [True, False])
def test_a_block_that_does_not_run_takes_no_memory(hybrid: Path, tmp_path: Path, head: bool) -> None:
    """Where another backend computes all layers and the head, no block drafts tokens; else it needs weights,
    and keys and values."""
    needed = []
    for path in (hybrid, with_block(hybrid, tmp_path / "block.gguf", 1)):
        with open_gguf(path) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            sizes = file_sizes(file, config, PAGE, "f16")
        hot = [np.ones(n, np.bool_) for n in config.neurons]
        placed = tmp_path / f"{path.stem}.gpuidx"
        write_placement(placed, sizes, Placement.on_one(hot, range(config.layers), head=head))
        model = load(path, AllOptions(threads=1, hot_backend="cpu", placement=placed, **OPTIONS))
        needed.append(model.plan.cpu_bytes())
    without, block = needed
    if head:
        assert block == without
    else:
        assert block["weights"] > without["weights"] and block["KV cache"] > without["KV cache"]


def test_states_have_the_smaller_of_a_budget_and_free_memory(hybrid: Path) -> None:
    with open_gguf(hybrid) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        weights = WeightBytes.from_file(file, config)
    request = MemoryRequest(BatchLimits.from_context(64, 8, 16), 64, "f16", cache_positions=40 * PAGE)
    fixed = sum(replace(MemoryPlan.make(weights, config, request), pages=0, slots=0).cpu_bytes().values())
    small, ample = fixed + 50 * config.slot_bytes, 1 << 40
    plans = [
        MemoryPlan.make(weights, config, replace(request, ram_budget=limit), free=free)
        for limit, free in ((small, ample), (ample, small), (small, None), (None, small), (ample, ample))
    ]
    assert [plan.slots for plan in plans] == [8 + 5] * 4 + [8 + 40]  # an eighth of nine tenths of 50
    assert all(plan.notes for plan in plans[:4]) and not plans[4].notes
