"""How many states a session keeps, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.buffers import cache_bytes
from support.golden import CPU_HYBRIDS, HYBRIDS, LATENT_HYBRIDS, golden
from support.hybrid_models import write_hybrid

import hotcold
from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import KVCacheFull
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.runtime import memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.runtime.session import LoadedModel
from hotcold.watch.memory_use import memory_use

CONTEXT, SLOT = 64, 3584


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "qwen35.gguf", "qwen35")


def loaded(path: Path | None, **options: Any) -> LoadedModel:
    return load(path, LoadOptions(backend="reference", context=CONTEXT, sparsity="off", **options))


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, 1 + 2),
        ({"sequences": 3}, 3 + 6),
        ({"sequences": 3, "cache_positions": 10 * PAGE}, 3 + 10),
        ({"sequences": 3, "state_copies": 0}, 3),
        ({"state_copies": 9}, 1 + 9),
    ],
)
@pytest.mark.parametrize(("draft_max", "spare"), [(0, 0), (2, 2), (7, 4)])
def test_one_for_each_sequence_copies_and_guesses(
    path: Path, options: dict[str, Any], slots: int, draft_max: int, spare: int
) -> None:
    """By default as many copies as the KV cache has pages, where memory is no limit."""
    model = loaded(path, **options, draft_max=draft_max)
    assert (model.plan.slots, model.plan.spare_slots) == (slots + spare, spare)
    assert model.config.slot_bytes == SLOT
    session = model.session()
    assert session.slots is not None
    assert session.slots.slots == slots and session.slots.spare == spare
    kv = model.plan.pages * model.config.page_bytes("f16")
    assert cache_bytes(session) == kv + (slots + spare) * SLOT
    used = next(each for each in memory_use(session) if each.kind == "states")
    assert used.cpu_bytes == (slots + spare) * SLOT
    assert session.footprint.state_bytes == 2 * SLOT


def test_other_models_have_none() -> None:
    model = loaded(None, state_copies=5)
    session = model.session()
    assert model.plan.slots == session.footprint.state_bytes == 0 and session.slots is None
    assert session.state.take("somebody", 3).slot == -1
    session.state.clear()


@pytest.mark.parametrize(
    ("room", "copies", "spare"),
    [
        (0, 0, 0),
        (10, 0, 0),
        (11, 1, 0),
        (13, 1, 2),
        (15, 1, 4),
        (16, 2, 4),
        (303, 37, 4),
        (400, 40, 4),
        (None, 10, 4),
    ],
)
def test_an_eighth_of_free_memory_has_copies(
    path: Path, room: int | None, copies: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences have theirs in any case, one context's pages come before copies, these before guesses. The
    KV cache has 40 pages."""
    assert SLOT < CONTEXT // PAGE * loaded(path).config.page_bytes("f16") < 2 * SLOT
    free = None if room is None else room * SLOT
    monkeypatch.setattr(MemoryPlan, "_left_of", lambda *_: free)
    model = loaded(path, sequences=8, cache_positions=40 * PAGE)
    assert model.plan.slots == 8 + copies + spare and model.plan.spare_slots == spare
    notes = [note for note in model.notes if "states" in note]
    short = [
        f"{copies} states are kept for prompts with a common prefix (`state_copies`), since more do not "
        "fit in 1/8 of the free memory"
    ]
    fewer = [
        f"a step verifies at most {spare} draft tokens (`draft_max`): memory is too small for the states of 4"
    ]
    assert notes == short * (copies < 10) + fewer * (spare < 4)


@pytest.mark.parametrize("name", (*HYBRIDS, *LATENT_HYBRIDS, *CPU_HYBRIDS))
def test_copies_stay_within_their_part_of_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes, as allocated, are at most an eighth of the memory that is free, and not much less."""
    path = golden(name, tmp_path).path
    options: dict[str, Any] = {"cache_positions": 64 * PAGE, "chunk": 16, "gpu": "off", "draft_max": 0}
    bare = load(path, LoadOptions(**options, state_copies=0))
    slot = bare.config.slot_bytes
    free = sum(use.cpu_bytes for use in memory_use(bare.session())) + 8 * 20 * slot
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    model = load(path, LoadOptions(**options))
    copies = model.plan.slots - 1
    assert 15 <= copies <= free // 8 // slot
    states = next(use for use in memory_use(model.session()) if use.kind == "states")
    assert states.cpu_bytes == model.plan.slots * slot
    assert cache_bytes(model.session()) - cache_bytes(bare.session()) == copies * slot
    more = load(path, LoadOptions(**options, state_copies=copies + 1))
    assert more.plan.slots == model.plan.slots + 1


def test_copies_stay_within_their_part_of_a_budget_of_ram(tmp_path: Path) -> None:
    path = golden("tiny-qwen35moe", tmp_path).path
    options: dict[str, Any] = {"cache_positions": 64 * PAGE, "chunk": 16, "gpu": "off", "draft_max": 0}
    model = load(path, LoadOptions(**options))
    assert model.plan.slots == 1 + 64
    budget = sum(use.cpu_bytes for use in memory_use(model.session()))
    smaller = load(path, LoadOptions(**options, ram_budget=budget))
    assert 5 <= smaller.plan.slots - 1 <= budget // 8 // model.config.slot_bytes < 64


@pytest.mark.parametrize(("budget", "copies"), [(24 * SLOT, 3), (47 * SLOT, 5), (48 * SLOT, 6), (1 << 30, 6)])
def test_a_placement_keeps_as_many_copies_as_an_eighth_of_its_budget_holds(
    path: Path, budget: int, copies: int
) -> None:
    """And its plan is what is allocated."""
    model = loaded(path, sequences=3, hot_backend="reference", vram_budget=budget, draft_max=2)
    session = model.session()
    assert model.plan.slots == 3 + copies + 2 and session.slots is not None
    assert (session.slots.slots, session.slots.spare) == (3 + copies, 2)
    states = next(use for use in memory_use(session) if use.kind == "states")
    assert states.cpu_bytes + states.gpu_bytes == model.plan.slots * SLOT
    asked = loaded(path, sequences=3, hot_backend="reference", vram_budget=budget, state_copies=7)
    assert asked.plan.slots == 3 + 7 + 4


@pytest.mark.parametrize(("budget", "copies"), [(24 * SLOT, 3), (1 << 30, 8)])
def test_a_plan_has_the_copies_of_its_budget(path: Path, budget: int, copies: int) -> None:
    """For one sequence, whose KV cache has 8 pages, with states after four guesses."""
    plan = hotcold.plan(path, context=8 * PAGE, vram_budget=budget)
    nbytes = sum(part["gpu_bytes"] + part["cpu_bytes"] for part in plan.parts if part["kind"] == "states")
    assert nbytes == (1 + copies + 4) * SLOT


def test_too_many_copies_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 20)
    message = (
        r"1001 states of sequences 0\.00 GiB\), .*: use a smaller number of kept states \(`state_copies`, "
    )
    with pytest.raises(LoadError, match=message):
        loaded(path, state_copies=1000)
    with pytest.raises(LoadError, match="state_copies is -1: at least 0 is needed"):
        loaded(path, state_copies=-1)


def test_a_slot_or_none(path: Path) -> None:
    """Unscheduled sequences take pages and a slot together, and get neither if one is missing."""
    state = loaded(path, state_copies=0).session().state
    room = state.take("one", PAGE + 1)
    assert len(room.pages) == 2 and room.slot == 0
    state.release("one")
    assert state.slots is not None and state.slots.take("two") == 0
    with pytest.raises(KVCacheFull, match="a slot for a state asked for: 0 of 1 are free"):
        state.take("one", 1)
    assert state.pages.free_pages == 2 and not state.pages.owns("one")
