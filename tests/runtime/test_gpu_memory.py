"""Models take as much of a device's memory as was planned, within the budget; on software drivers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.golden import golden
from support.sidecars import with_sidecar
from support.vulkan import faults
from support.vulkan.devices import DRIVERS, FULL, device_index

import hotcold
from hotcold import LLM
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import gpus
from hotcold.kernels.gpu import GPU, GPUBackend, GPUMemoryError
from hotcold.kernels.gpus import slack_bytes
from hotcold.runtime import memory, placing
from hotcold.runtime.loading import load, plan_load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.values import exact_size

MIB = 1 << 20


@pytest.fixture
def gpu() -> str:
    """The first driver's device: counts here are the same on all, except for the pieces of memory."""
    return str(device_index(DRIVERS[0]))


def run(path: Path | None, **options: Any) -> Any:
    """A session that has read a prompt and generated."""
    model = load(path, LoadOptions(threads=1, **options))
    session = model.session()
    prompt = [*range(10, 40)]
    Engine(session).run([Request(Job(prompt, SamplingParams(temperature=0), max_tokens=3, ignore_eos=True))])
    return session


def check(session: Any, budget: int) -> None:
    (hot,), (on_gpu,) = session.model.gpus, session.model.on_gpus
    planned, taken = on_gpu.planned_bytes, hot.allocated_bytes
    assert taken <= on_gpu.budget_bytes == budget
    assert abs(taken - planned) <= slack_bytes(planned), f"{taken - planned} more than was planned"


@pytest.mark.parametrize("driver", DRIVERS if FULL else DRIVERS[:1])
def test_the_pieces_of_drivers(driver: str, tmp_path: Path) -> None:
    path = golden("tiny-drelu", tmp_path, type="Q4_0").path
    check(run(path, gpu=str(device_index(driver)), vram_budget=3 * MIB, chunk=1), 3 * MIB)


@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ({"vram_budget": 64 * MIB}, 256),  # 512, but the model has 256 positions
        ({"vram_budget": 12 * MIB}, 128),  # the larger buffers would take a tenth
        ({"vram_budget": MIB // 2}, 128),  # nothing fits
        ({"vram_budget": 64 * MIB, "chunk": 128}, 128),
        ({"vram_budget": 64 * MIB, "context": 200}, 200),
        ({"gpu": "off"}, 128),
    ],
)
def test_chunks_of_prompts_are_longer_on_a_gpu(gpu: str, options: dict[str, Any], chunk: int) -> None:
    with open_gguf(model_path()) as file:
        plan, *_ = plan_load(file, {"threads": 1, "gpu": gpu, **options})
    assert plan.request.limits.chunk == chunk
    assert (plan.placement is None) == (options in ({"vram_budget": MIB // 2}, {"gpu": "off"}))


def test_main_memory_may_only_hold_the_usual_chunk(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"threads": 1, "gpu": gpu, "vram_budget": 64 * MIB, "context": 256}
    with open_gguf(model_path()) as file:
        longer, *_ = plan_load(file, options)
        monkeypatch.setattr(memory, "available_memory", lambda: sum(longer.cpu_bytes().values()) - 1)
        usual, *_ = plan_load(file, options)
    assert (longer.request.limits.chunk, usual.request.limits.chunk) == (256, 128)
    assert usual.placement is not None and usual.request.context == 256


def test_plan_and_loading_choose_the_same_chunk(gpu: str) -> None:
    """At budgets just above and below loading's limit, which leaves a part of the budget unused."""
    low, high = 12 * MIB, 64 * MIB

    def is_longer(budget: int) -> bool:
        with open_gguf(model_path()) as file:
            plan, *_ = plan_load(file, {"threads": 1, "gpu": gpu, "vram_budget": budget})
        return plan.request.limits.chunk > 128

    def step_bytes(budget: int) -> int:
        planned = hotcold.plan(None, vram_budget=budget, context=256)
        return planned.sizes.gpu_step(int(max(planned.sizes.neurons)))

    usual, longer = step_bytes(low), step_bytes(high)
    assert usual < longer
    while high - low > MIB // 16:
        middle = (low + high) // 2
        low, high = (low, middle) if is_longer(middle) else (middle, high)
    assert (step_bytes(low), step_bytes(high)) == (usual, longer)


def test_longer_chunks_are_planned_for(gpu: str) -> None:
    check(run(None, gpu=gpu, vram_budget=64 * MIB), 64 * MIB)


@pytest.mark.parametrize(
    ("sparsity", "budget"),
    [("exact", 3 * MIB), ("predicted", 5 * MIB), ("exact", 12 * MIB), ("predicted", 12 * MIB)],
)
def test_the_built_in_model(gpu: str, sparsity: str, budget: int, tmp_path: Path) -> None:
    path = with_sidecar(tmp_path, rank=64)
    check(run(path, gpu=gpu, vram_budget=budget, sparsity=sparsity), budget)


@pytest.mark.parametrize(
    ("name", "type", "options"),
    [
        ("tiny-falcon", "F32", {"chunk": 16}),  # a parallel block, GELU, down by output
        ("tiny-drelu", "Q4_0", {"context": 40, "sequences": 20}),
        ("tiny-qwen3", "F16", {"context": 128}),
        ("tiny-mistral", "Q8_0", {"sequences": 3, "cache_type": "f32"}),
        pytest.param("tiny-deepseek3", "F32", {}, marks=pytest.mark.full),  # latent attention, groups
        pytest.param("tiny-bitnet", "F16", {"chunk": 16}, marks=pytest.mark.full),  # norms inside
    ],
)
def test_other_models(gpu: str, name: str, type: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = golden(name, tmp_path, type=type).path
    check(run(path, gpu=gpu, vram_budget=3 * MIB, **options), 3 * MIB)


def test_everything_comes_back(gpu: str) -> None:
    """A model that is closed and forgotten gives back every piece of memory, and the device."""

    def held() -> int:
        gc.collect()
        calls = faults.calls()
        devices = calls["vkCreateDevice"] - calls["vkDestroyDevice"]
        return 1000 * devices + calls["vkAllocateMemory"] - calls["vkFreeMemory"]

    before = held()
    llm = LLM(gpu=gpu, vram_budget=5 * MIB, threads=1)
    llm.generate("Once", max_tokens=2)
    assert held() > before + 1000
    llm.close()
    del llm
    assert held() == before


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_memory_that_runs_out_while_loading(gpu: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has only a share of the planned memory. The placement shrinks, a note says so, and the text
    is the same."""
    opened: list[int] = []

    def open_gpu(gpu: GPU, budget: int, *, spin: bool) -> GPUBackend:
        opened.append(budget)
        return gpus.open_gpu(gpu, budget if len(opened) > 1 else int(share * budget), spin=spin)

    monkeypatch.setattr(placing, "open_gpu", open_gpu)
    options: Any = {"max_tokens": 8, "temperature": 0}
    with LLM(threads=1, gpu="off") as llm:
        expected = llm.generate("Once upon a time", **options).ids
    with LLM(gpu=gpu, vram_budget=8 * MIB, threads=1) as llm:
        first, second, *_ = llm.session.notes
        assert llm.generate("Once upon a time", **options).ids == expected
        check(llm.session, opened[-1])
    assert len(opened) == 2 and 3.5 * MIB < opened[1] < 5 * MIB
    assert "the budget has" in first and f"now `vram_budget={exact_size(opened[1])}`" in first
    assert second.startswith("GPU ")


def test_memory_that_runs_out_in_a_session(gpu: str) -> None:
    """A second session has its own KV cache, which the budget cannot hold: an error, and the first one
    continues."""
    with LLM(gpu=gpu, vram_budget=4 * MIB, threads=1) as llm:
        before = llm.generate("Once", max_tokens=3, temperature=0).ids
        with pytest.raises(GPUMemoryError, match="budget"):
            llm.model.session()
        assert llm.generate("Once", max_tokens=3, temperature=0).ids == before
