"""How many states a session has room for, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.buffers import cache_bytes
from support.hybrid_models import write_hybrid

from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import KVCacheFull
from hotcold.runtime import loading, memory
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
    [({}, 4), ({"sequences": 3}, 8), ({"sequences": 3, "state_copies": 0}, 3), ({"state_copies": 9}, 10)],
)
@pytest.mark.parametrize(("draft_max", "spare"), [(0, 0), (2, 2), (7, 4)])
def test_one_for_each_sequence_copies_and_guesses(
    path: Path, options: dict[str, Any], slots: int, draft_max: int, spare: int
) -> None:
    model = loaded(path, **options, draft_max=draft_max)
    assert model.slots == slots + spare and model.spare_slots == spare and model.config.slot_bytes == SLOT
    session = model.session()
    assert session.slots is not None
    assert session.slots.slots == slots and session.slots.spare == spare
    kv = model.pages * model.config.page_bytes("f16")
    assert cache_bytes(session) == kv + (slots + spare) * SLOT
    used = next(each for each in memory_use(session) if each.kind == "states")
    assert used.cpu_bytes == (slots + spare) * SLOT
    assert session.footprint.state_bytes == 2 * SLOT


def test_other_models_have_none() -> None:
    model = loaded(None, state_copies=5)
    session = model.session()
    assert model.slots == session.footprint.state_bytes == 0 and session.slots is None
    assert session.state.take("somebody", 3).slot == -1
    session.state.clear()


@pytest.mark.parametrize(
    ("room", "slots", "spare"),
    [(0, 8, 0), (8, 8, 0), (12, 12, 0), (18, 18, 0), (20, 18, 2), (40, 18, 4), (None, 18, 4)],
)
def test_fewer_copies_and_guesses_where_memory_is_short(
    path: Path, room: int | None, slots: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences have theirs in any case, one context's pages come before copies, these before guesses."""
    context = CONTEXT // PAGE * loaded(path).config.page_bytes("f16")
    free = None if room is None else context + room * SLOT + SLOT - 1
    monkeypatch.setattr(loading, "affordable_bytes", lambda *_: free)
    model = loaded(path, sequences=8, cache_positions=CONTEXT)
    assert model.slots == slots + spare and model.spare_slots == spare
    notes = [note for note in model.notes if "states are kept" in note]
    short = [
        f"{slots - 8} states are kept for prompts that begin alike (`state_copies`): memory does not suffice "
        "for 10"
    ]
    fewer = [
        f"{spare} states are kept after guesses, so no step verifies more (`draft_max`): memory does not "
        "suffice for 4"
    ]
    assert notes == short * (slots < 18) + fewer * (spare < 4)


def test_too_many_copies_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 20)
    message = (
        r"1001 states of sequences 0\.00 GiB, .*: use a smaller number of kept states \(`state_copies`, "
    )
    with pytest.raises(LoadError, match=message):
        loaded(path, state_copies=1000)
    with pytest.raises(LoadError, match="state_copies is -1: at least 0 is needed"):
        loaded(path, state_copies=-1)


def test_a_slot_or_none(path: Path) -> None:
    """Who schedules nothing takes pages and a slot together, and gets neither where one lacks."""
    state = loaded(path, state_copies=0).session().state
    room = state.take("one", PAGE + 1)
    assert len(room.pages) == 2 and room.slot == 0
    state.release("one")
    assert state.slots is not None and state.slots.take("two") == 0
    with pytest.raises(KVCacheFull, match="a slot for a state asked for: 0 of 1 are free"):
        state.take("one", 1)
    assert state.pages.free_pages == 2 and not state.pages.owns("one")
