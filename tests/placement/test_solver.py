"""The solver against all placements there are, against a mixed-integer program, and what must always hold.

The time of a placement is added up here from its definition, layer by layer, not by the solver's tables.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from support.plans import bytes_on, groups_of, made_up

from hotcold.formats.blocks import block_type
from hotcold.placement.baselines import last_layers, layer_split, paper_placement
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import Hardware, find_hardware
from hotcold.placement.placement import INDEX_BYTES, Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import SHAPES, Sizes, power_law, sizes_of_shape
from hotcold.placement.solver import GROUP, Solver

Model = tuple[Sizes, Profile, Hardware]


def solved(model: Model, budget: int) -> Placement:
    sizes, profile, hardware = model
    return Solver(sizes, profile, Costs.expected(sizes, profile, hardware)).solve(budget)


def everything(sizes: Sizes) -> int:
    """Bytes of the whole model on the GPU."""
    return last_layers(sizes, len(sizes.neurons)).gpu_bytes(sizes)


def neuron_seconds(model: Model, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of each neuron, on the CPU and on the GPU: the rows that are read, each from where
    it is cheaper."""
    sizes, profile, hardware = model
    gather = np.interp(sizes.neuron_bytes[layer] / 2, *np.array(hardware.cpu_gather_gb_s).T)
    pairs = ((hardware.cpu_stream_gb_s, gather), (hardware.gpu_stream_gb_s, hardware.gpu_rows_gb_s))
    whole, p = sizes.neuron_bytes[layer] / 1e9, profile.firing[layer]
    return tuple(
        whole
        * (
            sizes.always_read * sizes.expert_share / stream
            + (1 - sizes.always_read) * np.minimum(p / rows, 1 / stream)
        )
        for stream, rows in pairs
    )  # type: ignore[return-value]


def seconds(model: Model, placement: Placement) -> float:
    sizes, _, hardware = model
    round_trip = hardware.handshake_s + 2 * 4 * sizes.dim / (hardware.link_pinned_gb_s * 1e9)
    cpu, gpu = hardware.cpu_stream_gb_s * 1e9, hardware.gpu_stream_gb_s * 1e9
    total = sizes.head / (cpu if placement.head is None else gpu)
    for i, hot in enumerate(placement.hot):
        dense = sizes.attention[i] + sizes.kv[i] + sizes.predictor[i]
        on_cpu, on_gpu = neuron_seconds(model, i)
        if placement.where[i] is None:
            assert not hot.any()
            total += dense / cpu + on_cpu.sum()
            continue
        total += (
            dense / gpu
            + hardware.layer_s
            + max(on_gpu[hot].sum(), on_cpu[~hot].sum())
            + round_trip * (not hot.all())
        )
    layers, head = placement.layers_of(0), placement.head == 0
    visits = bool(head or layers)
    visits += bool(head and layers and layers[-1] + 1 < len(placement.hot))
    step = hardware.step_s * bool(head or layers)
    return float(total + visits * round_trip + step)


def least(model: Model, budget: int) -> float:
    """Returns the least cost of all placements in groups, the most active first."""
    sizes, profile, _ = model
    layers, found = len(sizes.neurons), np.inf
    options = groups_of(profile)
    runs = [range(a, b) for a in range(layers) for b in range(a + 1, layers + 1)]
    for run, head in itertools.product([range(0), *runs], (False, True)):
        if any((i in run) != (source in run) for i, source in sizes.shared.items()):
            continue
        inside = [masks if i in run else masks[:1] for i, masks in enumerate(options)]
        for hot in itertools.product(*inside):
            placement = Placement.on_one(hot, run, head)
            if bytes_on(sizes, placement, 0) <= budget:
                found = min(found, seconds(model, placement))
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.floats(0, 1.1))
def test_within_one_group_of_every_placement(seed: int, share: float) -> None:
    model = made_up(seed, groups=2)
    budget = int(share * everything(model[0]))
    placement, best = solved(model, budget), least(model, budget)
    group = max(np.sort(neuron_seconds(model, i)[0])[-GROUP:].sum() for i in range(len(placement.hot)))
    assert best * (1 - 1e-9) <= seconds(model, placement) <= best + group


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.floats(0, 1.1), st.booleans())
def test_a_layer_is_placed_with_the_one_whose_pages_it_reads(
    seed: int, share: float, neighbour: bool
) -> None:
    sizes, *others = made_up(seed, layers=3, groups=2)
    model = (replace(sizes, shared={2: 1 if neighbour else 0}), *others)
    budget = int(share * everything(sizes))
    placement, best = solved(model, budget), least(model, budget)
    assert all(placement.where[i] == placement.where[source] for i, source in model[0].shared.items())
    group = max(np.sort(neuron_seconds(model, i)[0])[-GROUP:].sum() for i in range(len(placement.hot)))
    assert best * (1 - 1e-9) <= seconds(model, placement) <= best + group


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.floats(0, 1.3), min_size=2, max_size=6))
def test_never_over_the_budget_and_never_slower_with_more(seed: int, shares: list[float]) -> None:
    model = made_up(seed, groups=6)
    sizes, profile, hardware = model
    costs = Costs.expected(sizes, profile, hardware)
    solver, before = Solver(sizes, profile, costs), np.inf
    for budget in [0, *sorted(int(share * everything(sizes)) for share in shares)]:
        placement = solver.solve(budget)
        assert bytes_on(sizes, placement, 0) == placement.gpu_bytes(sizes) <= budget
        taken = seconds(model, placement)
        assert taken == pytest.approx(costs.token(placement), rel=1e-9)
        assert taken <= before * (1 + 1e-9)
        before = taken
        for i, (hot, firing) in enumerate(zip(placement.hot, profile.firing, strict=True)):
            assert placement.where[i] == 0 or not hot.any()
            assert hot.all() or not hot.any() or firing[hot].min() >= firing[~hot].max()


@pytest.mark.parametrize("seed", range(12))
def test_a_budget_that_is_just_enough(seed: int) -> None:
    """For the dense parts of all layers alone, for whole layers, for everything: to the byte."""
    model = made_up(seed, groups=3)
    sizes = model[0]
    count = len(sizes.neurons)
    nothing_hot = [np.zeros(n, np.bool_) for n in sizes.neurons]
    placements = [Placement.on_one(nothing_hot, range(count), head) for head in (False, True)]
    placements += [last_layers(sizes, n) for n in range(count + 1)]
    for placement in placements:
        budget = bytes_on(sizes, placement, 0)
        assert seconds(model, solved(model, budget)) <= seconds(model, placement) * (1 + 1e-9)


def test_no_budget_is_the_cpu() -> None:
    placement = solved(made_up(1), 0)
    assert not any(hot.any() for hot in placement.hot) and not placement.gpus


@pytest.mark.parametrize(
    "seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 1, 4, 5))]
)
def test_within_one_percent_of_a_mixed_integer_program(seed: int) -> None:
    """It takes groups in any order. They are small here, memory is short, and the GPU the faster side."""
    model = made_up(seed + 100, layers=4, groups=400, faster=8)
    for share in (0.1, 0.25, 0.4):
        budget = int(share * everything(model[0]))
        bound, best = program(model, budget)
        taken = seconds(model, solved(model, budget))
        assert bound * (1 - 1e-6) <= taken <= best * 1.01, share


def program(model: Model, budget: int) -> tuple[float, float]:
    """HiGHS's bound of seconds, and the best it finds.

    Columns: head, visits 1 and 2; of each layer on, first, whole, the slower side's seconds, groups.
    """
    sizes, profile, hardware = model
    layers = len(sizes.neurons)
    round_trip = hardware.handshake_s + 8 * sizes.dim / (hardware.link_pinned_gb_s * 1e9)
    cpu, gpu = hardware.cpu_stream_gb_s * 1e9, hardware.gpu_stream_gb_s * 1e9
    dense = sizes.attention + sizes.kv + sizes.predictor
    at, groups = 3, []
    for i, firing in enumerate(profile.firing):
        order = np.argsort(-firing, kind="stable")
        parts = [order[n : n + GROUP] for n in range(0, len(order), GROUP)]
        on_cpu, on_gpu = neuron_seconds(model, i)
        groups.append((at, parts, [on_cpu[p].sum() for p in parts], [on_gpu[p].sum() for p in parts]))
        at += 4 + len(parts)
    cost, rows, low = np.zeros(at), [], []
    integral, constant = np.ones(at), sizes.head / cpu

    def need(least: float, **columns: float) -> None:
        row = np.zeros(at)
        for column, value in columns.items():
            row[int(column[1:])] += value
        rows.append(row)
        low.append(least)

    cost[:3] = sizes.head / gpu - sizes.head / cpu, round_trip + hardware.step_s, round_trip
    memory = np.zeros(at)
    memory[:2] = -sizes.head, -sizes.gpu_step(0)
    need(0, c1=1, c0=-1)
    starts = np.zeros(at)
    for i, (on, parts, on_cpu, on_gpu) in enumerate(groups):
        first, whole, slower = on + 1, on + 2, on + 3
        integral[slower] = 0
        constant += dense[i] / cpu
        cost[on], cost[whole], cost[slower] = dense[i] / gpu - dense[i] / cpu + round_trip, -round_trip, 1
        cost[on] += hardware.layer_s
        memory[on], starts[first] = -dense[i] - sizes.gpu_layer, -1
        before = {f"c{groups[i - 1][0]}": 1.0} if i else {}
        need(0, **{f"c{first}": 1.0, f"c{on}": -1.0}, **before)
        need(0, c1=1, **{f"c{on}": -1.0})
        if i < layers - 1:
            need(-1, c2=1, c0=-1, **{f"c{on}": -1.0, f"c{groups[-1][0]}": 1.0})
        need(sum(on_cpu), **{f"c{slower}": 1.0}, **{f"c{on + 4 + j}": t for j, t in enumerate(on_cpu)})
        need(0, **{f"c{slower}": 1.0}, **{f"c{on + 4 + j}": -t for j, t in enumerate(on_gpu)})
        for j, part in enumerate(parts):
            memory[on + 4 + j] = -len(part) * (sizes.neuron_bytes[i] + INDEX_BYTES)
            need(0, **{f"c{on}": 1.0, f"c{on + 4 + j}": -1.0})
            need(0, **{f"c{on + 4 + j}": 1.0, f"c{whole}": -1.0})
    rows += [memory / budget, starts]
    low += [-1.0, -1.0]
    upper = np.where(integral == 1, 1, np.inf)
    done = optimize.milp(
        cost / constant, integrality=integral, bounds=optimize.Bounds(0, upper),
        constraints=optimize.LinearConstraint(np.array(rows), low, np.inf),
        options={"mip_rel_gap": 1e-3, "time_limit": 5},
    )  # fmt: skip
    assert done.x is not None, done.message
    return float(done.mip_dual_bound + 1) * constant, float(done.fun + 1) * constant


def shape(name: str, kind: str = "Q4_0", context: int = 512) -> tuple[Sizes, Profile]:
    facts = SHAPES[name]
    firing = power_law(facts.ffn, facts.scale, facts.exponent) * facts.routed / facts.experts
    profile = Profile([np.tile(firing, facts.experts)] * facts.layers, "published")
    return sizes_of_shape(name, block_type(kind), context, "f16"), profile


@pytest.mark.parametrize(("name", "ratio"), [("llama2-13b", 2.7), ("llama2-70b", 3.5), ("opt-30b", 4.0)])
def test_the_budget_is_used_whatever_the_width(name: str, ratio: float) -> None:
    """PowerInfer counts a neuron by n_ff in place of n_embd, and leaves a quarter of its budget at 3.5."""
    sizes, profile = shape(name)
    assert SHAPES[name].ffn / SHAPES[name].dim == pytest.approx(ratio, abs=0.01)
    budget = int(0.6 * everything(sizes))
    placement = solved((sizes, profile, find_hardware("rtx4090-i9")), budget)
    assert budget - GROUP * (int(sizes.neuron_bytes[0]) + INDEX_BYTES) < placement.gpu_bytes(sizes) <= budget


def test_layers_get_their_own_neurons() -> None:
    """PowerInfer sorts its layers' files as text, so that layer 2 gets the neurons of layer 10."""
    sizes, _ = shape("mistral-7b")
    firing = []
    for i in range(len(sizes.neurons)):
        rng = np.random.default_rng(i)
        firing.append(rng.permutation(power_law(int(sizes.neurons[i]), 0.01, 1.2 + i / 100)))
    profile = Profile(firing, "by layer")
    placement = solved((sizes, profile, find_hardware("rtx3060")), 2 << 30)
    assert len(placement.layers_of(0)) >= 12
    for own, hot in zip(firing, placement.hot, strict=True):
        assert 0 < hot.sum() < len(hot)
        assert set(np.argsort(-own)[: hot.sum()]) == set(np.flatnonzero(hot))


def test_the_objective_of_the_paper() -> None:
    """Most activations within the memory, each layer none or enough of them; HiGHS knows the most."""
    for seed in range(8):
        sizes, profile, hardware = made_up(seed, layers=5, groups=8)
        costs = Costs.expected(sizes, profile, hardware)
        dense = int((sizes.attention + sizes.kv + sizes.predictor + sizes.gpu_layer).sum())
        dense += sizes.head + sizes.gpu_step(0)
        room = (everything(sizes) - dense) // 2
        placement = paper_placement(sizes, profile, hardware, dense + room)
        assert placement.gpu_bytes(sizes) <= dense + room
        saved = sizes.neuron_bytes / 1e9 * (1 / hardware.cpu_stream_gb_s - 1 / hardware.gpu_stream_gb_s)
        enough = np.minimum(sizes.neurons, costs.gpus[0].handshake / np.maximum(saved, 1e-300))
        counts = np.array([hot.sum() for hot in placement.hot])
        assert ((counts == 0) | (counts >= enough)).all()
        layer = np.concatenate([np.full(-(-n // GROUP), i) for i, n in enumerate(sizes.neurons)])
        parts = [np.sort(f)[::-1][n : n + GROUP] for f in profile.firing for n in range(0, len(f), GROUP)]
        widths = np.array([len(part) for part in parts])
        rows, high = (
            [np.append(widths * (sizes.neuron_bytes[layer] + INDEX_BYTES) / room, np.zeros(5))],
            [1.0],
        )
        for i in range(5):
            opened = np.eye(5)[i]
            rows.append(np.append(-widths * (layer == i), opened * enough[i]))
            rows.append(np.append(1.0 * (layer == i), -opened * 99))
            high += [0, 0]
        gains = np.append([part.sum() for part in parts], np.zeros(5))
        done = optimize.milp(
            -gains, integrality=np.ones(len(gains)), bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(np.array(rows), -np.inf, high),
        )  # fmt: skip
        activations = sum(f[hot].sum() for f, hot in zip(profile.firing, placement.hot, strict=True))
        assert activations >= -done.fun - 2 * gains.max(), seed


def test_the_layer_split_is_the_largest_that_fits() -> None:
    sizes, _ = shape("llama2-13b")
    dense, split = layer_split(sizes, 5 << 30)
    more = last_layers(dense, len(split.layers_of(0)) + 1)
    assert split.gpu_bytes(dense) <= 5 << 30 < more.gpu_bytes(dense)
    layers = split.layers_of(0)
    assert layers[-1] == 39 and all(hot.all() for hot in split.hot[layers[0] :])


@pytest.mark.parametrize("shared", [32, 256])
def test_neurons_of_one_block_stay_together(shared: int) -> None:
    """Within the budget, and better than without any hot neuron."""
    rng = np.random.default_rng(shared)
    sizes, _, hardware = made_up(7, layers=3)
    neurons = shared * np.array([7, 9, 12])
    sizes = replace(sizes, neurons=neurons, block_neurons=shared)
    profile = Profile([rng.random(n) ** 4 for n in neurons], "made up")
    partly = 0
    for budget in np.linspace(0, everything(sizes), 25).astype(int):
        placement = solved((sizes, profile, hardware), int(budget))
        assert placement.gpu_bytes(sizes) <= budget
        for hot in placement.hot:
            blocks = hot.reshape(-1, shared)
            assert (blocks == blocks[:, :1]).all()
            partly += 0 < hot.sum() < len(hot)
    assert partly > 5
