"""Models of experts on the whole stack: modes, batches, two backends, profiles, plans, figures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buffers import allocations, cache_bytes
from support.expert_models import expert_golden
from support.file_sizes import file_sizes
from support.opaque_backend import OpaqueBackend
from support.placed import on_two
from support.vulkan.devices import DRIVERS, device_index
from support.vulkan.model import OrderedReference

import hotcold
from hotcold.commands import cli
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.gpus import slack_bytes
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.model.config import Config
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import find_hardware
from hotcold.placement.placement import Placement, read_placement, write_placement
from hotcold.placement.profiles import Profile, read_profile
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import Solver
from hotcold.placement.step_memory import buffer_bytes, scratch_bytes
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.scoring import Scorer
from hotcold.watch.neuron_map import NeuronMap

TOKENS = [1, *np.random.default_rng(3).integers(3, 288, 40).tolist()]
#: Name, block type and layout of down: neurons that are zero, rows and panels, early and late routers.
SPARSE = [
    ("tiny-turbosparse", "Q4_0", "by_output"),
    ("tiny-turbosparse", "Q8_0", "by_neuron"),
    ("tiny-smallthinker", "F32", "by_output"),
]


def logits(session: Session) -> np.ndarray:
    """By the decode rule."""
    return np.concatenate([rows.copy() for rows in Scorer(session).logits(TOKENS)])


def greedy(session: Session, tokens: int = 20) -> list[list[int]]:
    """Runs three prompts at the same time."""
    random = np.random.default_rng(5)
    prompts = [[1, *random.integers(3, 288, length).tolist()] for length in (4, 30, 9)]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


def halves(config: Config, down: str) -> Placement:
    """Half of the neurons are hot, by output half of the blocks of them; of one layer all."""
    random, block = np.random.default_rng(1), 1 if down == "by_neuron" else 32
    hot = [np.repeat(random.random(n // block) < 0.5, block) for n in config.neurons]
    hot[-1][:] = True
    return Placement.on_one(hot, range(config.layers), True)


def with_predictors(path: Path, bound: float = -0.2) -> None:
    """A sidecar of random predictors, which name some neurons, those of a low bound all."""
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        random, layers = np.random.default_rng(9), []
        for n in config.neurons:
            first, second = (random.standard_normal(shape) for shape in ((32, config.dim), (n, 32)))
            factors = (quantise(each.astype(np.float32) / 6, "F32") for each in (first, second))
            layers.append(PredictorTensors(*factors, np.full(n, bound, np.float32), relu=False))
        facts = {"input": "normed"}
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), layers, facts)


@pytest.mark.parametrize(("name", "type", "down"), SPARSE)
def test_exact_is_off_bit_for_bit_and_reads_less(name: str, type: str, down: str, tmp_path: Path) -> None:
    path = expert_golden(name, tmp_path, type=type, down=down).path
    exact = load(path, LoadOptions(sparsity="exact", threads=2, sequences=3)).session()
    off = load(path, LoadOptions(sparsity="off", threads=1, sequences=3)).session()
    np.testing.assert_array_equal(logits(exact), logits(off))
    assert greedy(exact) == greedy(off)
    read, all_chosen = exact.counters.rows, off.counters.rows
    assert (read[:, 0] == all_chosen[:, 0]).all() and (read[:, 1] < all_chosen[:, 1]).all()
    assert (read[:, 3] < all_chosen[:, 3]).all()
    experts = off.model.config.experts
    assert experts is not None
    assert (all_chosen[:, 3] == off.counters.decode_tokens * experts.chosen * experts.neurons).all()


@pytest.mark.parametrize("name", ["tiny-turbosparse", "tiny-qwen2moe"])
def test_rows_of_a_prompt_and_rows_that_decode_give_the_same_bits(name: str, tmp_path: Path) -> None:
    path = expert_golden(name, tmp_path, type="Q4_0").path
    session = load(path, LoadOptions(sparsity="off", threads=2)).session()
    decoded = logits(session)
    request = Request(Job(TOKENS[:-1], SamplingParams(temperature=0), max_tokens=1))
    Engine(session).run([request])
    np.testing.assert_array_equal(session.transformer.read_logits(0, 1)[0], decoded[-1])


@pytest.mark.parametrize("mode", ["off", "exact", "predicted"])
@pytest.mark.parametrize(("name", "type", "down"), SPARSE[:2])
def test_two_backends_equal_one(name: str, type: str, down: str, mode: str, tmp_path: Path) -> None:
    path = expert_golden(name, tmp_path, type=type, down=down).path
    with_predictors(path)
    one = load(path, LoadOptions(sparsity=mode, threads=1, sequences=3)).session()
    placement = halves(one.model.config, down)
    expected, text = logits(one), greedy(one)
    for hot in (open_backend("cpu", 1), OpaqueBackend(open_backend("reference"))):
        two = on_two(hot, placement, path, sparsity=mode, sequences=3)
        np.testing.assert_allclose(logits(two), expected, atol=1e-3)  # float16 caches
        assert greedy(two) == text
        assert two.footprint.row_bytes == one.footprint.row_bytes
        np.testing.assert_array_equal(two.counters.rows[:, 3] > 0, True)
        # Rounding may make a gate active, or not, now and then.
        np.testing.assert_allclose(two.counters.rows, one.counters.rows, rtol=0.01)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_layers_that_are_all_cold_or_all_hot(share: float, tmp_path: Path) -> None:
    path = expert_golden("tiny-qwen3moe", tmp_path, type="Q4_0").path
    one = load(path, LoadOptions(sparsity="off", threads=1, sequences=3)).session()
    two = on_two(open_backend("cpu", 1), share, path, sparsity="off", sequences=3)
    np.testing.assert_allclose(logits(two), logits(one), atol=2e-4)
    assert greedy(two) == greedy(one)


@pytest.mark.one_driver
@pytest.mark.parametrize(("down", "mode"), [("by_output", "exact"), ("by_neuron", "predicted")])
def test_a_vulkan_device_and_the_cpu(vulkan: Any, down: str, mode: str, tmp_path: Path) -> None:
    """Bit by bit what the model of its numerics gives with the same cold side."""
    path = expert_golden("tiny-turbosparse", tmp_path, type="Q4_0", down=down).path
    with_predictors(path)
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    placement = halves(config, down)
    found = []
    for hot in (vulkan, OrderedReference()):
        session = on_two(hot, placement, path, sparsity=mode, sequences=3, context=64, chunk=32)
        found.append((greedy(session, 4), logits(session)))
        session.close()
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_placement_that_divides_an_expert_is_refused(tmp_path: Path) -> None:
    path = expert_golden("tiny-mixtral", tmp_path, type="Q4_0").path
    with pytest.raises(UserError, match="the placement divides an expert whose down weights are stored"):
        on_two(open_backend("cpu", 1), 0.5, path, sparsity="off")


def sizes_of(path: Path) -> Sizes:
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        return file_sizes(file, config, 128, "f16")


def text_file(folder: Path) -> Path:
    (folder / "text.txt").write_text("the hen and the ant in the tent and the dinner in the train " * 12)
    return folder / "text.txt"


@pytest.mark.parametrize("name", ["tiny-turbosparse", "tiny-qwen3moe"])
def test_a_profile_counts_routing_and_firing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the ids that the reference backend chooses, and its coefficients."""
    path = expert_golden(name, tmp_path).path
    out = tmp_path / f"{path.stem}.profile.gguf"
    found = hotcold.profile(path, text_file(tmp_path), context=64, threads=2, output=out)
    slow = hotcold.profile(path, text_file(tmp_path), context=64, backend="reference")
    config = load(path, LoadOptions(threads=1)).config
    experts = config.experts
    assert experts is not None and found.routing is not None and slow.routing is not None
    tokens = found.tokens
    for layer in range(config.layers):
        routing, firing = found.routing[layer], found.firing[layer].reshape(experts.count, experts.neurons)
        np.testing.assert_allclose(routing, slow.routing[layer], atol=2 / (tokens or 1))
        assert routing.sum() == pytest.approx(experts.chosen)
        assert 0 < routing.min() < routing.max() < 1
        assert (firing <= routing[:, None] + 1e-9).all()
        if name == "tiny-qwen3moe":  # SiLU: all neurons of an expert that was chosen
            np.testing.assert_allclose(firing, np.broadcast_to(routing[:, None], firing.shape), atol=0.01)
        else:
            assert firing.mean() < 0.5 * routing.mean()
    read = read_profile(out, sizes_of(path))
    assert read.routing is not None
    np.testing.assert_allclose(np.stack(read.routing), np.stack(found.routing), atol=1e-3)
    columns = found.columns
    assert read.routes is not None and slow.routes is not None
    for layer, routes in enumerate(read.routes):
        assert routes.shape == (tokens, experts.chosen)
        counted = np.bincount(routes.ravel(), minlength=experts.count) / (tokens or 1)
        np.testing.assert_allclose(counted, found.routing[layer], atol=1e-9)
        kept = sum(len({*a} & {*b}) for a, b in pairwise(routes.tolist())) / max(1, routes[1:].size)
        assert columns["kept_experts"][layer] == pytest.approx(kept, abs=0.05)  # windows begin anew
    assert columns["most_chosen"] == pytest.approx([each.max() for each in found.routing])
    assert "most chosen" in str(found) and "routing" not in found.report()


def test_often_chosen_experts_go_to_the_gpu(tmp_path: Path) -> None:
    """By how often they are chosen times how often their neurons are active then; in blocks where down is by
    output."""
    for down in ("by_output", "by_neuron"):
        path = expert_golden("tiny-turbosparse", tmp_path, type="Q4_0", down=down).path
        sizes = sizes_of(path)
        assert (sizes.experts, sizes.expert_share) == (4, 0.5)
        assert sizes.block_neurons == (32 if down == "by_output" else 1)
        random = np.random.default_rng(2)
        routing = [random.permutation([0.9, 0.7, 0.3, 0.1]) for _ in sizes.neurons]
        when_chosen = [np.tile(np.linspace(1, 0.1, 96), 4) for _ in sizes.neurons]
        firing = [np.repeat(r, 96) * f for r, f in zip(routing, when_chosen, strict=True)]
        profile = Profile(firing, "a test", routing=routing)
        costs = Costs.expected(sizes, profile, find_hardware("rtx4090-i9"))
        whole = int(sum(sizes.gpu_dense) + sizes.head + sizes.gpu_step(384))
        budget = whole + int(sizes.neuron_bytes @ sizes.neurons) // 2
        placement = Solver(sizes, profile, replace_handshake(costs)).solve(budget)
        assert placement.gpu_bytes(sizes) <= budget
        write_placement(tmp_path / "x.gpuidx", sizes, placement)
        again = read_placement(tmp_path / "x.gpuidx", sizes)
        for mask, each, other in zip(placement.hot, firing, again.hot, strict=True):
            np.testing.assert_array_equal(mask, other)
            if down == "by_output":
                of_blocks = mask.reshape(-1, 32)
                assert (of_blocks == of_blocks[:, :1]).all()
            if mask.any() and not mask.all():
                blocks = each.reshape(-1, sizes.block_neurons).sum(1)
                hot = mask.reshape(-1, sizes.block_neurons)[:, 0]
                assert blocks[hot].min() >= blocks[~hot].max()


def replace_handshake(costs: Costs) -> Costs:
    """Without it, since layers are tiny."""
    return Costs(costs.cpu, [replace(gpu, handshake=0.0) for gpu in costs.gpus])


def test_rarely_chosen_experts_cost_little(tmp_path: Path) -> None:
    """Gates of an expert are read when it is chosen, and no more."""
    path = expert_golden("tiny-mixtral", tmp_path, type="Q4_0").path
    sizes = sizes_of(path)
    assert sizes.always_read == 1  # SiLU
    routing = [np.array([1.0, 0.6, 0.4, 0.0])] * 2
    profile = Profile([np.repeat(each, 96) for each in routing], "a test", routing=routing)
    costs = Costs.expected(sizes, profile, find_hardware("rtx4090-i9"))
    by_expert = costs.cpu.neurons[0].reshape(4, 96).sum(1)
    np.testing.assert_allclose(by_expert, by_expert[0] * routing[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["tiny-turbosparse", "tiny-qwen2moe", "tiny-smallthinker"])
def test_memory_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = expert_golden(name, tmp_path, type="Q8_0").path
    model = load(path, LoadOptions(threads=1, sparsity="auto"))
    made = allocations(monkeypatch)
    session = model.session()
    limits = session.transformer.batch.limits
    buffers = sum(made) - cache_bytes(session)
    assert buffers <= buffer_bytes(model.config, limits) + 4096 <= 1.5 * buffers + 4096
    scratch = max(
        getattr(part, "inner", part).native.scratch_bytes
        for parts in session.transformer._programs.values()
        for part in parts
    )
    assert scratch <= scratch_bytes(model.config, limits) <= 1.3 * scratch + 4096


def test_a_budget_on_two_backends(tmp_path: Path) -> None:
    path = expert_golden("tiny-qwen3moe", tmp_path, type="Q4_0").path
    expected = hotcold.LLM(path, threads=1).generate("the hen", max_tokens=12, temperature=0).ids
    sizes = sizes_of(path)
    for budget in (int(sizes.buffers * 2), 1 << 20, 1 << 30):
        with hotcold.LLM(path, vram_budget=budget, hot_backend="cpu", threads=1) as llm:
            assert llm.generate("the hen", max_tokens=12, temperature=0).ids == expected


def test_a_plan_of_a_file(tmp_path: Path) -> None:
    path = expert_golden("tiny-turbosparse", tmp_path, type="Q4_0").path
    plan = hotcold.plan(path, vram_budget=1 << 30)
    assert "a power law in every layer" in plan.profile
    with open_gguf(path) as file:
        parts = [info.nbytes for name, info in file.tensors.items() if "_exps" in name]
    neurons = [part["gpu_bytes"] + part["cpu_bytes"] for part in plan.parts if part["kind"] == "neurons"]
    assert sum(neurons) == pytest.approx(sum(parts), rel=0.05)
    silu = expert_golden("tiny-qwen3moe", tmp_path, type="Q4_0").path
    assert "all neurons of an expert, all experts chosen equally" in hotcold.plan(silu).profile


def test_predictors_are_fitted_to_experts(tmp_path: Path) -> None:
    """With as many dimensions as the input has they find nearly all, and a recall that is asked for holds."""
    path = expert_golden("tiny-turbosparse", tmp_path).path
    out = path.with_suffix(".predictor.gguf")
    options = {"context": 64, "threads": 1, "max_share": 1.0, "type": "F32"}
    found = hotcold.fit_predictor(path, text_file(tmp_path), output=out, **options)
    for fit in found.layers:
        assert fit.rank == 32 and fit.recall > 0.9 and fit.active < fit.candidates < 0.9
    exact, predicted = (
        load(path, LoadOptions(threads=1, sparsity=mode)).session() for mode in ("exact", "predicted")
    )
    logits(exact), logits(predicted)
    read, fewer = exact.counters.rows, predicted.counters.rows
    assert (fewer[:, 0] < 0.9 * read[:, 0]).all() and (fewer[:, 3] > 0.8 * read[:, 3]).all()


def test_trained_predictors_are_not_those_of_experts(tmp_path: Path) -> None:
    path = expert_golden("tiny-turbosparse", tmp_path).path
    with pytest.raises(UserError, match="has 4 experts in a layer: training needs layers"):
        hotcold.fit_predictor(path, text_file(tmp_path), method="trained")


@pytest.mark.parametrize(
    ("name", "down", "placed"),
    [
        ("tiny-turbosparse", "by_neuron", "neurons inside experts"),
        ("tiny-turbosparse", "by_output", "neurons inside experts"),
        ("tiny-gpt-oss", "by_output", "experts: swiglu_oai gives no zeros"),
    ],
)
def test_info_says_what_may_be_divided(
    name: str, down: str, placed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = expert_golden(name, tmp_path, down=down).path
    assert cli.main(["info", str(path)]) == 0
    shown = dict(
        re.split(r" {2,}", line, maxsplit=1)
        for line in capsys.readouterr().out.splitlines()[:20]
        if "  " in line
    )
    assert (shown["experts"], shown["experts used"], shown["GPU takes"]) == ("4", "2", placed)


def test_sparsity_auto_says_what_is_read(tmp_path: Path) -> None:
    path = expert_golden("tiny-gpt-oss", tmp_path).path
    session = load(path, LoadOptions(threads=1)).session()
    assert session.notes[0].endswith("swiglu_oai gives no zeros, so chosen experts are computed whole")
    with pytest.raises(UserError, match="so no neuron can be skipped: use off or auto"):
        load(path, LoadOptions(threads=1, sparsity="exact")).session()


def test_neurons_that_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones are active on two backends, and each is a bit that belongs to a neuron."""
    path = expert_golden("tiny-turbosparse", tmp_path, type="Q8_0", down="by_neuron").path
    one = load(path, LoadOptions(threads=1, sparsity="exact")).session()
    found = []
    for session in (one, on_two(open_backend("cpu", 1), 0.5, path, sparsity="exact")):
        watched, map = session.watched(), NeuronMap(session.model)
        monkeypatch.setattr(session, "run", partial(session.run, watched))
        active = []
        for rows in Scorer(session).logits(TOKENS[:12]):
            masks = np.hstack(watched.active_masks(len(rows)))
            _, both = map.cells(masks)
            ones = np.unpackbits(masks.view(np.uint8), axis=1).sum(1)
            assert [hot + cold for hot, cold in both] == ones.tolist()
            active += ones.tolist()
        found.append(active)
    assert found[0] == found[1] and min(found[0]) > 0


@pytest.mark.parametrize(
    ("name", "down", "mode"),
    [("tiny-turbosparse", "by_neuron", "predicted"), ("tiny-qwen2moe", "by_output", "off")],
)
def test_memory_of_a_gpu_is_what_was_planned(name: str, down: str, mode: str, tmp_path: Path) -> None:
    path = expert_golden(name, tmp_path, type="Q4_0", down=down).path
    if mode == "predicted":
        with_predictors(path)
    gpu, budget = str(device_index(DRIVERS[0])), 3 << 20
    session = load(path, LoadOptions(threads=1, gpu=gpu, vram_budget=budget, sparsity=mode)).session()
    greedy(session, 2)
    (hot,), (on_gpu,) = session.model.gpus, session.model.on_gpus
    assert isinstance(hot, VulkanBackend) and on_gpu.hot_share == 1
    assert hot.allocated_bytes <= on_gpu.budget_bytes == budget
    assert abs(hot.allocated_bytes - on_gpu.planned_bytes) <= slack_bytes(on_gpu.planned_bytes)
