"""Models are placed on machines with a made-up GPU, whose part a CPU backend plays."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.made_up_gpus import made_up

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels import gpus
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.gpu import GPU, GPUError, GPUMemoryError
from hotcold.placement import memory_plan
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.runtime import loading, machine, memory, placing
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.tasks.planning import plan
from hotcold.tasks.reports import Setup
from hotcold.values import read_size

pytestmark = pytest.mark.long  # no instruction set or backend changes it

CARD = made_up(0, "Made-Up Card")
SECOND = made_up(4, "Other Card")
INTEGRATED = made_up(1, "Made-Up Graphics", kind="integrated", unified=True)
SOFTWARE = made_up(2, "software", kind="software")


def fast() -> Hardware:
    return replace(find_hardware("rtx4090-i9"), source="a test", machine={"gpu": None})


@dataclass
class Machine:
    """A machine with these devices, and what was asked of them."""

    devices: list[GPU] = field(default_factory=lambda: [CARD])
    opened: list[tuple[GPU, int | None, bool]] = field(default_factory=list)
    #: By the device's name: a card that handshakes hardly slow down.
    measured: dict[str, Hardware] = field(default_factory=lambda: {CARD.name: fast()})
    #: Is called with each backend that is opened in a GPU's place.
    change: Callable[[CPUBackend], None] = lambda backend: None

    def open_gpu(self, gpu: GPU, budget: int | None, *, spin: bool) -> CPUBackend:
        self.opened.append((gpu, budget, spin))
        backend = CPUBackend(1)
        backend.check_memory = lambda nbytes: None  # type: ignore[attr-defined]
        backend.check_budget = lambda: None  # type: ignore[attr-defined]
        self.change(backend)
        return backend


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("HOTCOLD_GPU")
    made = Machine()
    monkeypatch.setattr(gpus, "find_gpus", lambda: (made.devices, "" if made.devices else "none found"))
    monkeypatch.setattr(placing, "open_gpu", made.open_gpu)
    monkeypatch.setattr(placing, "measured_hardware", lambda gpu: made.measured.get(gpu.name))
    return made


def load(**options: Any) -> Any:
    return loading.load(None, LoadOptions(threads=1, **options))


def test_a_gpu_is_used_without_a_note(has: Machine) -> None:
    """All of a small model goes there; the notes and the report say so."""
    model = load()
    assert has.opened == [(CARD, 7 << 30, False)] and model.gpus
    where = "GPU Made-Up Card (driver 1.0): 6 of 6 layers and the head; 100.0% of the neurons, 100.0% of the"
    assert model.notes[0].startswith(where) and model.notes[0].endswith("of 7GiB; synchronised by submits")
    assert "is planned for a test (profile: fable-7m" in model.notes[1]
    (report,) = Setup.from_session(model.session()).gpus
    assert (report["name"], report["layers"], report["head"]) == (CARD.name, 6, True)
    assert report["planned_bytes"] == model.on_gpus[0].planned_bytes < report["budget_bytes"] == 7 << 30


def test_the_text_is_the_cpu_s(has: Machine) -> None:
    texts = []
    for options in ({"gpu": "off"}, {"vram_budget": 6 << 20}, {"gpu": 0}):
        with LLM(threads=1, **options) as llm:
            texts.append(llm.generate("Once upon a time", max_tokens=20, temperature=0).ids)
    assert texts[0] == texts[1] == texts[2] and [budget for _, budget, _ in has.opened] == [6 << 20, 7 << 30]


def test_a_gpu_that_was_not_measured(has: Machine) -> None:
    """Its kernels and handshakes are assumed to cost as much as on other devices: too much for a small model,
    unless it is requested."""
    has.measured.clear()
    model = load()
    assert not model.gpus and "it is not expected to be faster than the CPU" in model.notes[0]
    model = load(gpu="card")
    assert model.gpus and model.notes[0].startswith("GPU Made-Up Card")
    assert model.notes[1].startswith("the CPU without a GPU (`gpu=off`) is expected to be faster (")


def test_a_profile_that_does_not_fit_stops_only_who_asks_for_a_gpu(has: Machine, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    path.with_suffix(".profile.gguf").write_bytes(b"GGUF but damaged")
    model = loading.load(path, LoadOptions(threads=1))
    assert model.gpus and any(note.startswith("no profile is used: ") for note in model.notes)
    with pytest.raises(UserError, match=r"model\.profile\.gguf"):
        loading.load(path, LoadOptions(threads=1, vram_budget=6 << 20))


def test_without_a_gpu_nothing_is_said(has: Machine) -> None:
    for has.devices in ([], [SOFTWARE]):
        model = load()
        assert model.gpus == model.on_gpus == () and model.notes == ()
        assert not Setup.from_session(model.session()).gpus


def test_a_model_of_block_types_that_no_shader_reads_stays_on_the_cpu(
    has: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus.unread_types(BLOCK_TYPES) == []
    monkeypatch.setattr(placing, "unread_types", lambda names: ["IQ4_XS", "Q3_K"])
    unused = (
        r"GPU .*Made-Up Card.* is not used: it does not compute with block type IQ4_XS or Q3_K yet, which"
    )
    model = load()
    assert not model.gpus and re.match(unused, model.notes[0])
    with pytest.raises(
        UserError, match=rf"{unused} .* has: leave out the options of GPUs, or give `gpu=off`"
    ):
        load(gpu="card")
    assert not has.opened


def test_a_model_that_gpus_do_not_compute_stays_on_the_cpu(
    has: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "unsupported", lambda ops: "GPUs do not compute it yet")
    model = load()
    assert not model.gpus and model.notes[0].endswith(" is not used: GPUs do not compute it yet")
    with pytest.raises(UserError, match=r"GPUs do not compute it yet: leave out the options of GPUs, or"):
        load(gpu="card")
    assert not has.opened


def test_a_software_driver_has_to_be_named(has: Machine) -> None:
    has.devices = [SOFTWARE]
    with pytest.raises(GPUError, match=r"only software drivers found, 2 \(software\): name one to use it"):
        load(vram_budget=6 << 20)
    has.measured["software"] = slow = replace(find_hardware("rtx4060"), gpu_stream_gb_s=1e-3)
    model = load(gpu="soft", vram_budget=6 << 20)
    assert model.gpus, slow  # it stands for a card
    note = (
        "GPU 2 (software) is a software driver, which computes on the CPU: expect it to be many times slower"
    )
    assert [each for each in model.notes if each.startswith(note)] == [f"{note} than `gpu=off`"]
    has.devices = [CARD]
    assert not any("software driver" in note for note in load(gpu="made-up", vram_budget=6 << 20).notes)


def test_an_integrated_gpu_is_used_where_it_was_measured_to_be_faster(has: Machine) -> None:
    has.devices = [INTEGRATED]
    model = load()
    note = "GPU 1 (Made-Up Graphics) is not used: it shares the processor's memory, and may not be faster"
    assert not model.gpus and model.notes[0].startswith(note) and not has.opened
    discrete = find_hardware("rtx4060")
    has.measured[INTEGRATED.name] = replace(discrete, spins=True, source="a test", machine={})
    assert load().gpus and has.opened[-1] == (INTEGRATED, 7 << 30, True)
    as_fast = replace(
        discrete, gpu_stream_gb_s=discrete.cpu_stream_gb_s, gpu_rows_gb_s=discrete.cpu_stream_gb_s
    )
    has.measured[INTEGRATED.name] = replace(as_fast, source="a test", machine={})
    model = load()
    assert not model.gpus and "is not used: " in model.notes[0] and len(has.opened) == 1
    for options in ({"gpu": "graphics"}, {"vram_budget": 6 << 20}):
        has.measured[INTEGRATED.name] = replace(discrete, source="a test", machine={})
        assert load(**options).gpus


def test_a_budget_above_a_gpu_s_memory_is_refused(has: Machine) -> None:
    needed = r"`vram_budget` is 8193MiB, and GPU 0 \(Made-Up Card\) has 8.00 GiB: at most 8GiB are allowed"
    with pytest.raises(UserError, match=needed):
        load(vram_budget="8193MiB")
    assert load(vram_budget="8GiB").gpus


def test_a_budget_for_which_nothing_fits(has: Machine) -> None:
    model = load(vram_budget=1000)
    assert not model.gpus and not has.opened
    assert "is not used: nothing fits in 1000B" in model.notes[0]


def test_a_gpu_that_fails_to_open(has: Machine) -> None:
    """A note without a request for it, else an error."""

    def fail(backend: CPUBackend) -> None:
        raise GPUError("the driver failed")

    has.change = fail
    model = load()
    assert not model.gpus and model.notes == ("no GPU is used: the driver failed",)
    for options in ({"gpu": "card"}, {"vram_budget": 6 << 20}):
        with pytest.raises(GPUError, match="the driver failed"):
            load(**options)


@pytest.mark.parametrize("allocated", [0, 9_000_000])
def test_memory_that_runs_out_shrinks_the_placement(
    has: Machine, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, while weights are read; a note names the setting, which applies."""

    def fail(backend: CPUBackend) -> None:
        def matrix(*_: Any) -> Any:
            error = GPUMemoryError("12 bytes: the device's memory is full")
            error.allocated = allocated
            raise error

        if len(has.opened) == 1:
            monkeypatch.setattr(backend, "matrix", matrix)

    has.change = fail
    model = load(vram_budget=12 << 20)
    first = read_size(model.notes[0].split("`vram_budget=")[1].split("`")[0])
    assert allocated * 19 // 20 - 1024 < first < 10 << 20
    assert model.notes[0].startswith("12 bytes: the device's memory is full: now `vram_budget=")
    assert model.notes[1].startswith("GPU Made-Up Card")
    assert [budget for _, budget, _ in has.opened] == [12 << 20, first]
    assert (
        model.on_gpus[0].planned_bytes <= first
        and Setup.from_session(model.session()).notes[:2] == model.notes[:2]
    )


def test_memory_that_is_never_there(has: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: CPUBackend) -> None:
        def matrix(*_: Any) -> Any:
            raise GPUMemoryError("full")

        monkeypatch.setattr(backend, "matrix", matrix)

    has.change = fail
    model = load(vram_budget=12 << 20)  # until nothing is left to place there
    assert not model.gpus and len(has.opened) > 1 and "nothing fits" in model.notes[len(has.opened)]
    budgets = [budget for _, budget, _ in has.opened]
    assert budgets == sorted(budgets, reverse=True) and len(set(budgets)) == len(budgets)
    monkeypatch.setattr(loading, "_TRIES", 1)
    with pytest.raises(GPUMemoryError, match="full"):
        load(vram_budget=12 << 20)


def two_gpus(has: Machine) -> Hardware:
    """Makes GPUs whose handshakes cost next to nothing, so that a small model pays on both."""
    nimble = replace(fast(), handshake_s=1e-9, link_pinned_gb_s=1e6)
    has.devices, has.measured = [CARD, SECOND], {CARD.name: nimble, SECOND.name: nimble}
    return nimble


def test_two_gpus_each_with_a_part(has: Machine) -> None:
    """Together they have more than each could hold; the text is the processor's."""
    two_gpus(has)
    with LLM(threads=1, gpu="off") as llm:
        wanted = llm.generate("Once upon a time", max_tokens=20, temperature=0).ids
    with LLM(threads=1, gpu="other,0", vram_budget=(5 << 20, 4 << 20)) as llm:
        assert llm.generate("Once upon a time", max_tokens=20, temperature=0).ids == wanted
        model, report = llm.session.model, Setup.from_session(llm.session).gpus
    assert has.opened == [(SECOND, 5 << 20, False), (CARD, 4 << 20, False)]
    assert [each["name"] for each in report] == ["Other Card", CARD.name]
    layers = [i for each in model.on_gpus for i in each.layers]
    assert len(layers) == len(set(layers)) and all(each.layers for each in model.on_gpus)
    assert sum(each.head for each in model.on_gpus) == 1
    for each, budget in zip(model.on_gpus, (5 << 20, 4 << 20), strict=True):
        assert 0 < each.planned_bytes <= budget and 0 < each.hot_share < 1
    assert [note.partition(" (")[0] for note in model.notes[:2]] == ["GPU Other Card", f"GPU {CARD.name}"]


def test_a_gpu_that_would_not_help_has_no_part(has: Machine) -> None:
    two_gpus(has)
    model = load(gpu="0,4")
    assert len(model.gpus) == 1 and model.on_gpus[0].gpu == CARD
    assert model.notes[1] == "GPU 4 (Other Card) is not used: that is expected to be faster"


def test_what_does_not_go_together_for_several(has: Machine, tmp_path: Path) -> None:
    nimble = two_gpus(has)
    with pytest.raises(UserError, match="`vram_budget` has 3 sizes, and 2 GPUs are used: give one"):
        load(gpu="0,4", vram_budget=[1 << 20] * 3)
    with pytest.raises(UserError, match="`vram_budget` has 2 sizes, and 1 GPUs are used"):
        load(hot_backend="cpu", vram_budget=(1 << 20, 2 << 20))
    with pytest.raises(GPUError, match="`gpu=card`: 2 devices match"):
        load(gpu="0,card")
    with pytest.raises(GPUError, match=r"`gpu=0,made`: 0 \(Made-Up Card\) is given twice"):
        load(gpu="0,made")
    both = tmp_path / "both.gpuidx"
    planned = plan(hardware=[nimble] * 2, vram_budget=(5 << 20, 4 << 20), output=both)
    assert planned.placement.gpus == [0, 1]
    with pytest.raises(UserError, match="places layers on GPU 1, counted from 0: give 2 GPUs"):
        load(gpu="0", placement=both)
    model = load(gpu="0,4", placement=both)
    assert [list(each.layers) for each in model.on_gpus] == [each["layers"] for each in planned.gpus]


def test_memory_that_runs_out_on_one_of_two_shrinks_both(
    has: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(has)

    def fail(backend: CPUBackend) -> None:
        def matrix(*_: Any) -> Any:
            raise GPUMemoryError("full")

        if len(has.opened) == 2:
            monkeypatch.setattr(backend, "matrix", matrix)

    has.change = fail
    model = load(gpu="0,4", vram_budget=(5 << 20, 4 << 20))
    assert model.notes[0].startswith("full: now `vram_budget=") and " and `vram_budget=" in model.notes[0]
    first, second = ([budget for gpu, budget, _ in has.opened if gpu == each] for each in (CARD, SECOND))
    assert first[0] > first[1] and (len(second) == 1 or second[0] > second[1])


class Free(int):
    """A number of free bytes that notes with how many it is compared."""

    needed = 0

    def __lt__(self, other: int) -> bool:
        self.needed = max(self.needed, other)
        return int(self) < other


def needed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Bytes of the processor's memory that have to be free for weights to be read."""

    class Enough(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Enough

    free = Free(64 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_weights", stop)
        patch.setattr(memory, "available_memory", lambda: free)
        with pytest.raises(Enough):
            load(**options)
        patch.setattr(memory, "available_memory", lambda: free.needed - 1)
        with pytest.raises(LoadError, match="not enough memory"):
            load(**options)
    return free.needed


def test_memory_of_the_host_has_only_the_host_s_tensors(
    has: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a card that has memory of its own, the host holds neither its weights nor its keys, values and
    buffers, but what goes there at a time: for a small model, as much as its weights."""
    has.devices = [CARD, INTEGRATED, SOFTWARE]
    alone = needed(monkeypatch, gpu="off")
    on_gpu = needed(monkeypatch, gpu="0", vram_budget=16 << 20)
    shared = [needed(monkeypatch, gpu=gpu, vram_budget=16 << 20) for gpu in ("1", "2")]
    assert shared[0] == shared[1] > max(alone, on_gpu)
    monkeypatch.setattr(memory_plan, "STAGING_BYTES", 0)
    held = load(gpu="0", vram_budget=16 << 20).on_gpus[0]
    without = needed(monkeypatch, gpu="0", vram_budget=16 << 20)
    assert on_gpu - without == held.weight_bytes > 7 << 20 and without < alone - (5 << 20)


def test_what_doctor_measured_is_found(has: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.measured_hardware(CARD) is None
    path = machine.cache_path(CARD)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert machine.measured_hardware(CARD) is None
    assert len({path, machine.cache_path(INTEGRATED), machine.cache_path(None)}) == 3
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        monkeypatch.setenv("XDG_CACHE_HOME", "here")
        machine.cache_path(CARD)
