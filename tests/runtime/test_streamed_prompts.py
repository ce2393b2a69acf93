"""Prompts whose cold neurons the GPU computes from streamed weights: bit for bit the model of its numerics,
whatever runs at the same time; what loading plans, allocates, says and refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.file_sizes import file_sizes
from support.golden import golden
from support.placed import on_two, random_placement
from support.sidecars import with_sidecar
from support.vulkan.devices import DRIVERS, device_index
from support.vulkan.model import OrderedReference

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.gpus import slack_bytes
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config
from hotcold.placement.hardware import DEFAULT, find_hardware
from hotcold.placement.placement import Placement, write_placement
from hotcold.runtime import placing
from hotcold.runtime.loading import load, plan_load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse.ffn import SplitWeights
from hotcold.tasks.reports import Setup
from hotcold.tasks.scoring import Scorer

MIB = 1 << 20
one_driver = pytest.mark.one_driver


def random_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(259, 4096, length).tolist() for length in lengths]


def greedy(session: Session, prompts: list[list[int]], tokens: int = 4) -> list[list[int]]:
    """Texts of all prompts at the same time."""
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


def prompt_logits(session: Session, tokens: list[int]) -> np.ndarray:
    """The logits of all rows, as prompt rows."""
    return np.concatenate([rows.copy() for rows in Scorer(session, prompt=True).logits(tokens)])


@cache
def expected(share: float, sparsity: str) -> tuple[list[list[int]], np.ndarray]:
    session = on_two(OrderedReference(), share, streams=True, sparsity=sparsity, sequences=3)
    return greedy(session, random_prompts(1, 24, 7)), prompt_logits(session, random_prompts(30)[0])


@one_driver
@pytest.mark.parametrize(("share", "sparsity", "chunk"), [(0.5, "exact", 9), (0.0, "off", 128)])
def test_every_bit(vulkan: Any, share: float, sparsity: str, chunk: int) -> None:
    """Prompts together with answers, and a prompt of one row; chunks of another length change nothing."""
    texts, logits = expected(share, sparsity)
    session = on_two(vulkan, share, streams=True, sparsity=sparsity, sequences=3, chunk=chunk)
    assert session.transformer.separates_prompts
    assert greedy(session, random_prompts(1, 24, 7)) == texts
    actual = prompt_logits(session, random_prompts(30)[0])
    np.testing.assert_array_equal(actual.view(np.uint32), logits.view(np.uint32))
    session.close()


@one_driver
def test_prompts_have_the_bits_of_the_gpu_alone(vulkan: Any) -> None:
    """With no hot neurons, all of a layer's are streamed: as where all are hot. The CPU's bits differ."""
    tokens = random_prompts(30)[0]
    whole, streamed, split = (
        prompt_logits(on_two(vulkan, share, streams=streams), tokens)
        for share, streams in ((1.0, False), (0.0, True), (0.0, False))
    )
    np.testing.assert_array_equal(streamed.view(np.uint32), whole.view(np.uint32))
    assert not np.array_equal(split, whole)


@one_driver
def test_logits_of_the_unsplit_model(vulkan: Any, tmp_path: Path) -> None:
    """They equal those of transformers, in float32: a sparse and a smooth activation, and biases. Only one
    part may add the bias of down."""
    for name, share in (("tiny-drelu", 0.5), ("tiny-falcon", 0.5), ("tiny-opt", 0.0)):
        truth = golden(name, tmp_path)
        session = on_two(vulkan, share, truth.path, streams=True, cache_type="f32")
        logits = prompt_logits(session, truth.prompt.tolist())
        np.testing.assert_allclose(logits, truth.prompt_logits[:-1], atol=1e-4, rtol=0)
        session.close()


def test_prompts_add_hot_and_cold_as_two_sides_do() -> None:
    """The bits are those of a cold side with the GPU's order of sums."""
    tokens = random_prompts(20)[0]
    streamed = prompt_logits(on_two(OrderedReference(), 0.5, streams=True), tokens)
    split = prompt_logits(on_two(OrderedReference(), 0.5, cold=OrderedReference()), tokens)
    np.testing.assert_array_equal(streamed.view(np.uint32), split.view(np.uint32))


@pytest.mark.parametrize("hot", [CPUBackend, ReferenceBackend])
def test_answers_do_not_depend_on_neighbours(hot: Any) -> None:
    """Each request alone, and all together while prompts and answers take turns; with reused prompts."""
    prompts = random_prompts(1, 70, 33)
    session = on_two(CPUBackend(1) if hot is CPUBackend else hot(), 0.5, streams=True, sequences=3, chunk=16)
    together = greedy(session, prompts)
    assert [greedy(session, [prompt])[0] for prompt in prompts] == together
    assert "streamed" in session.identity


def test_predictors_and_several_gpus(tmp_path: Path) -> None:
    """One kind of backend has the same bits on all sides, so nothing changes without streamed weights."""
    path, cpu = with_sidecar(tmp_path), CPUBackend(1)
    hot = random_placement(load(path, LoadOptions(threads=1)).config, 0.5).hot
    placement = Placement([mask & (i != 3) for i, mask in enumerate(hot)], (0, 1, 1, None, 1, 0), 1)
    for sparsity in ("predicted", "exact"):
        sessions = [
            on_two({0: cpu, 1: CPUBackend(1)}, placement, path, streams=each, sparsity=sparsity, sequences=2)
            for each in (False, True)
        ]
        assert [each.transformer.separates_prompts for each in sessions] == [False, True]
        plain, streamed = (greedy(each, random_prompts(40, 5), 12) for each in sessions)
        assert plain == streamed


def test_a_step_has_one_kind_of_rows() -> None:
    session = on_two(ReferenceBackend(), 0.5, streams=True)
    session.transformer.batch.counts[:] = 2, 1, 0, 1
    with pytest.raises(ValueError, match="1 decode rows and 1 prompt rows: one kind is allowed"):
        session.run()


def test_weights_without_cold_neurons() -> None:
    """Nothing is streamed, so nothing changes: rows of both kinds share steps."""
    session = on_two(ReferenceBackend(), 1.0, streams=True)
    assert not session.transformer.separates_prompts and "streamed" not in session.identity


# --- loading --------------------------------------------------------------------------------------------


@pytest.fixture
def half(tmp_path: Path) -> dict[str, Any]:
    """Options with which half of the neurons are hot, on a second CPU backend."""
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    write_placement(tmp_path / "half.gpuidx", sizes, random_placement(config, 0.5))
    return {"hot_backend": "cpu", "placement": tmp_path / "half.gpuidx", "threads": 1}


def test_the_same_backend_on_both_sides(half: dict[str, Any]) -> None:
    """It gives the same text as where both sides compute prompts, with draft tokens, too."""
    texts = []
    for where in ("cpu", "gpu"):
        with LLM(**half, cold_prompts=where) as llm:
            assert llm.session.transformer.separates_prompts == (where == "gpu")
            assert Setup.from_session(llm.session).cold_prompts == where
            texts.append(llm.generate("The white ship lost a", max_tokens=40, temperature=0).ids)
    assert texts[0] == texts[1]


def test_main_memory_has_the_cold_neurons_twice(half: dict[str, Any]) -> None:
    models = {where: load(None, LoadOptions(**half, cold_prompts=where)) for where in ("cpu", "gpu")}
    cpu, gpu = (models[where].plan for where in ("cpu", "gpu"))
    streamed = sum(
        layer.ffn.streamed.nbytes
        for layer in models["gpu"].weights.layers
        if isinstance(layer.ffn, SplitWeights) and layer.ffn.streamed is not None
    )
    assert gpu.streamed_bytes == pytest.approx(streamed, rel=0.01)
    assert cpu.streamed_bytes == 0 < gpu.streamed_bytes
    assert gpu.cpu_bytes()["weights"] == cpu.cpu_bytes()["weights"] + gpu.streamed_bytes
    notes = [note for note in models["gpu"].notes if "copies" in note]
    assert len(notes) == 1 and notes[0].startswith("prompts run on the GPU: each of their steps copies ")
    assert "(`cold_prompts=cpu`)" in gpu.shortage(1) and "cold_prompts" not in cpu.shortage(1)


@pytest.mark.parametrize("budget", [4 * MIB, 6 * MIB])
def test_a_gpu_takes_what_is_planned(budget: int) -> None:
    """The place for streamed weights, most of a layer's, is part of the budget."""
    gpu = str(device_index(DRIVERS[0]))
    options: Any = {"gpu": gpu, "vram_budget": budget, "threads": 1, "cold_prompts": "gpu"}
    model = load(None, LoadOptions(**options))
    session = model.session()
    greedy(session, [[*range(10, 40)]], 3)
    (hot,), (on_gpu,) = model.gpus, model.on_gpus
    assert hot.allocated_bytes <= on_gpu.budget_bytes == budget
    assert abs(hot.allocated_bytes - on_gpu.planned_bytes) <= slack_bytes(on_gpu.planned_bytes)
    assert session.transformer.separates_prompts
    session.close()


def test_the_note_has_the_time_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows from the measured speed of the link; without a measurement there is no time."""
    slow = replace(find_hardware(DEFAULT), link_pinned_gb_s=0.001)
    gpu = str(device_index(DRIVERS[0]))
    for measured in (slow, None):
        monkeypatch.setattr(placing, "measured_hardware", lambda gpu, hardware=measured: hardware)
        with open_gguf(model_path()) as file:
            plan, notes, _ = plan_load(file, {"gpu": gpu, "vram_budget": 4 * MIB, "cold_prompts": "gpu"})
        (note,) = (note for note in notes if note.startswith("prompts run on the GPU"))
        time = f", which takes {plan.streamed_bytes / 1e6:.2g} s at the measured speed of the link"
        assert note.endswith(time if measured else "of cold neurons to it")


def test_a_gpu_with_all_neurons() -> None:
    model = load(None, LoadOptions(hot_backend="cpu", vram_budget="1GiB", threads=1, cold_prompts="gpu"))
    assert "`cold_prompts=gpu` has no effect: no layer on the GPU has cold neurons" in model.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cold_prompts": "card"}, "^`cold_prompts=card`: choose from auto, cpu, gpu$"),
        ({}, "`placement`, `vram_budget` and `cold_prompts=gpu` are for a GPU, and HOTCOLD_GPU is off"),
        ({"gpu": "off"}, "`cold_prompts=gpu` are for a GPU: leave them out, or leave out `gpu=off`"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(None, LoadOptions(**{"cold_prompts": "gpu", "threads": 1} | options))


def test_experts_are_not_streamed(tmp_path: Path) -> None:
    path = golden("tiny-glm4moe", tmp_path).path
    message = r"^`cold_prompts=gpu`: \S+\.gguf has experts, whose weights are not streamed: use `cold_prompts"
    with pytest.raises(UserError, match=message):
        load(path, LoadOptions(hot_backend="cpu", vram_budget=MIB, threads=1, cold_prompts="gpu"))
    message = "^`ram_budget` works only without a GPU today: leave out `cold_prompts`$"
    with pytest.raises(UserError, match=message):
        load(path, LoadOptions(ram_budget="1GiB", threads=1, cold_prompts="gpu"))
