"""The choice of ``cold_prompts=auto``, on machines with a made-up GPU, whose part a CPU backend plays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import golden
from support.made_up_gpus import made_up

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import gpus
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.gpu import GPU, GPUError
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.placement.placement import Placement, write_placement
from hotcold.runtime import loading, memory, placing
from hotcold.runtime.loading import plan_load
from hotcold.runtime.options import LoadOptions

BUDGET = 6 << 20
CARDS = [made_up(i, f"Card {i}", free_bytes=BUDGET + BUDGET // 7) for i in range(2)]
#: The GPU reads little faster than the CPU: tokens lose little if it has fewer neurons. A handshake is free,
#: so layers are divided.
MEASURED = replace(
    find_hardware("rtx4090-i9"),
    machine={"gpu": None},
    cpu_stream_gb_s=60.0,
    cpu_gather_gb_s=[[1000, 60.0]],
    gpu_stream_gb_s=63.0,
    gpu_rows_gb_s=63.0,
    link_pinned_gb_s=20.0,
    handshake_s=1e-9,
    cpu_prompt_gflops=100.0,
    gpu_prompt_gflops=50_000.0,
)


@dataclass
class Machine:
    """A machine with these cards and figures."""

    cards: Sequence[GPU] = tuple(CARDS[:1])
    measured: dict[str, Hardware | None] = field(default_factory=lambda: {CARDS[0].name: MEASURED})
    opened: int = 0
    fails: str = ""  #: "open" or "stream": what the driver cannot do

    def open_gpu(self, gpu: GPU, budget: int | None, *, spin: bool) -> CPUBackend:
        self.opened += 1
        if self.fails == "open":
            raise GPUError("the device was lost")
        backend: Any = CPUBackend(1)
        backend.check_memory = lambda nbytes: None
        backend.check_budget = lambda: None
        if self.fails == "stream":
            backend.streamed_weights = self._refuse
        return backend  # type: ignore[no-any-return]

    def _refuse(self, tensors: object) -> None:
        raise GPUError("`cold_prompts=gpu`: no more memory: use `cold_prompts=cpu`")


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("HOTCOLD_GPU")
    made = Machine()
    monkeypatch.setattr(gpus, "find_gpus", lambda: (made.cards, ""))
    monkeypatch.setattr(placing, "open_gpu", made.open_gpu)
    monkeypatch.setattr(placing, "measured_hardware", lambda gpu: made.measured[gpu.name])
    return made


def planned(path: Path | None = None, **options: Any) -> MemoryPlan:
    """The plan of a load; only a choice of the GPU leaves a note about prompts."""
    with open_gguf(path or model_path()) as file:
        plan, notes, shortage = plan_load(file, {"vram_budget": BUDGET, "context": 256, **options})
    assert not shortage
    about_prompts = [note for note in notes if "prompts" in note]
    assert len(about_prompts) == (plan.streamed_bytes > 0)
    return plan


def seconds(plan: MemoryPlan, hardware: Hardware, rows: int) -> float:
    """The time of the FFNs of a step, from the number of weights in the file."""
    assert plan.placement is not None
    total = plan.streamed_bytes / (hardware.link_pinned_gb_s * 1e9)
    with open_gguf(model_path()) as file:
        for i, hot in enumerate(plan.placement.hot):
            shapes = [file.tensors[f"blk.{i}.ffn_{part}.weight"].shape for part in ("gate", "up", "down")]
            flop = 2 * rows * sum(int(np.prod(shape)) for shape in shapes)
            share = hot.mean()
            if plan.streamed_bytes and plan.placement.where[i] is not None:
                share = 1.0
            cpu_s = (1 - share) * flop / (hardware.cpu_prompt_gflops * 1e9)
            total += max(cpu_s, share * flop / (hardware.gpu_prompt_gflops * 1e9))
    return total


def at_ratio(ratio: float, hardware: Hardware, plans: dict[str, MemoryPlan], rows: int) -> Hardware:
    """A CPU with which streamed prompts are faster by this factor."""
    slow, fast = (replace(hardware, cpu_prompt_gflops=gflops) for gflops in (1.0, 1e15))
    cpu_alone, streamed = (seconds(plans[where], slow, rows) for where in ("cpu", "gpu"))
    on_gpu = seconds(plans["gpu"], fast, rows)
    gflops = (cpu_alone - ratio * (streamed - on_gpu)) / (ratio * on_gpu)
    return replace(hardware, cpu_prompt_gflops=float(gflops))


@pytest.mark.parametrize("ratio", [0.5, 1.05, 1.15, 1.8])
@pytest.mark.parametrize(("link", "rows"), [(5.0, 16), (20.0, 16), (5.0, 128), (20.0, 128)])
def test_the_faster_side_computes_prompts(ratio: float, link: float, rows: int, has: Machine) -> None:
    """The GPU does if its step is more than 10 % faster."""
    has.measured[CARDS[0].name] = hardware = replace(MEASURED, link_pinned_gb_s=link)
    plans = {where: planned(chunk=rows, cold_prompts=where) for where in ("cpu", "gpu")}
    assert plans["cpu"].streamed_bytes == 0 < plans["gpu"].streamed_bytes
    has.measured[CARDS[0].name] = hardware = at_ratio(ratio, hardware, plans, rows)
    on_both, on_gpu = (seconds(plans[where], hardware, rows) for where in ("cpu", "gpu"))
    assert on_both == pytest.approx(ratio * on_gpu)
    chosen, expected = planned(chunk=rows), plans["gpu" if ratio > 1.1 else "cpu"]
    assert chosen.streamed_bytes == expected.streamed_bytes and chosen.gpu_bytes == expected.gpu_bytes


@pytest.mark.parametrize(
    "measured",
    [
        [None],
        [replace(MEASURED, cpu_prompt_gflops=0.0)],
        [replace(MEASURED, gpu_prompt_gflops=0.0)],
        [MEASURED, replace(MEASURED, gpu_prompt_gflops=0.0)],
        [MEASURED, None],
    ],
)
def test_without_figures_the_cpu_computes_its_neurons(measured: list[Hardware | None], has: Machine) -> None:
    has.cards = CARDS[: len(measured)]
    has.measured = {gpu.name: each for gpu, each in zip(has.cards, measured, strict=True)}
    options = {"gpu": ",".join(str(gpu.index) for gpu in has.cards)}
    assert planned(**options).streamed_bytes == 0
    has.measured = dict.fromkeys(has.measured, MEASURED)
    assert planned(**options).streamed_bytes > 0


def test_experts_and_other_loads_without_streaming(has: Machine, tmp_path: Path) -> None:
    """Experts, a placement file, and loads without a GPU: they are as with ``cpu``, without an error."""
    experts = planned(golden("tiny-mixtral", tmp_path).path, vram_budget="1MiB", context=64)
    assert experts.placement is not None and experts.streamed_bytes == 0
    placement = planned().placement
    assert placement is not None
    with open_gguf(model_path()) as file:
        sizes = planned().sizes(file)
    write_placement(tmp_path / "some.gpuidx", sizes, placement)
    from_file = planned(placement=tmp_path / "some.gpuidx", vram_budget=None)
    assert isinstance(from_file.placement, Placement) and from_file.streamed_bytes == 0
    for options in ({"gpu": "off", "vram_budget": None}, {"hot_backend": "cpu"}):
        assert planned(**options).streamed_bytes == 0


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt", "tiny-falcon"])
def test_rows_of_a_neuron(name: str, tmp_path: Path) -> None:
    """All rows of all neurons have as many weights as the file's FFNs, with gates and without."""
    with open_gguf(golden(name, tmp_path).path) as file:
        sizes = plan_load(file, {"gpu": "off"})[0].sizes(file)
        ffns = [info for tensor, info in file.tensors.items() if re.search(r"ffn_\w+\.weight$", tensor)]
        weights = sum(int(np.prod(info.shape)) for info in ffns if len(info.shape) == 2)
    assert sizes.neuron_rows * sizes.dim * int(sizes.neurons.sum()) == weights


def test_a_placement_that_only_streaming_makes_impossible(
    has: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error only of ``gpu``."""
    streamed = planned().placement
    assert streamed is not None

    def apart(config: object, placement: Placement) -> str | None:
        return "layer 1 would be apart" if placement.hot_share == streamed.hot_share else None

    monkeypatch.setattr(placing, "_apart", apart)
    assert planned().streamed_bytes == 0
    with pytest.raises(UserError, match="layer 1 would be apart"):
        planned(cold_prompts="gpu")


def test_memory_for_a_second_copy(has: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte too little, the CPU computes its neurons; ``gpu`` is then an error."""
    needed = sum(planned(cold_prompts="gpu").cpu_bytes().values())
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    assert planned().streamed_bytes > 0
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    assert planned().streamed_bytes == 0
    with open_gguf(model_path()) as file:
        options = {"vram_budget": BUDGET, "context": 256, "cold_prompts": "gpu"}
        assert "(`cold_prompts=cpu`)" in plan_load(file, options)[2]


def test_slower_tokens_are_no_price_for_prompts(has: Machine) -> None:
    """A GPU that reads much faster needs its memory for hot neurons."""
    assert planned().streamed_bytes > 0
    has.measured[CARDS[0].name] = replace(MEASURED, gpu_stream_gb_s=600.0, gpu_rows_gb_s=600.0)
    assert planned().streamed_bytes == 0 < planned(cold_prompts="gpu").streamed_bytes


def test_a_model_runs_as_chosen(has: Machine) -> None:
    for hardware in (MEASURED, replace(MEASURED, link_pinned_gb_s=1e-6)):
        has.measured[CARDS[0].name] = hardware
        session = loading.load(None, LoadOptions(threads=1, vram_budget=BUDGET)).session()
        assert session.transformer.separates_prompts == (hardware is MEASURED)
        session.close()


def test_a_driver_without_memory_for_streamed_weights(has: Machine) -> None:
    """The CPU computes its neurons, and a note has the reason; with ``gpu`` this is an error."""
    has.fails = "stream"
    model = loading.load(None, LoadOptions(threads=1, vram_budget=BUDGET))
    assert model.gpus and model.plan.streamed_bytes == 0 and has.opened == 2
    assert any(
        note.startswith("`cold_prompts=cpu` was chosen: `cold_prompts=gpu`: no") for note in model.notes
    )
    with pytest.raises(GPUError, match="no more memory"):
        loading.load(None, LoadOptions(threads=1, vram_budget=BUDGET, cold_prompts="gpu"))


def test_a_gpu_that_fails_is_an_error_only_if_the_user_asked(has: Machine) -> None:
    """The choice of streamed prompts is none of the user's."""
    has.fails = "open"
    model = loading.load(None, LoadOptions(threads=1))
    assert not model.gpus and has.opened == 2
    assert any(note.startswith("no GPU is used: the device was lost") for note in model.notes)
    with pytest.raises(GPUError, match="the device was lost"):
        loading.load(None, LoadOptions(threads=1, vram_budget=BUDGET))
