"""The solver, the costs and the files of placements on two and three GPUs.

The time of a placement is added up here from its definition, part by part, and the best one is found by
trying all there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import bytes_on, groups_of, made_up

from hotcold.placement.baselines import last_layers, layer_split
from hotcold.placement.costs import Costs
from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import MOST_GPUS, Placement, read_placement, write_placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import GROUP, Solver
from hotcold.sparse.sidecar import SidecarError

Model = tuple[Sizes, Profile, list[Hardware]]


def model_and_machines(seed: int, gpus: int, layers: int | None = None, groups: int = 2) -> Model:
    """GPUs that differ in everything; the processor is the first one's."""
    sizes, profile, _ = made_up(seed, layers=layers, groups=groups)
    return sizes, profile, [made_up(seed + 1000 * gpu)[2] for gpu in range(gpus)]


def costs_of(model: Model) -> Costs:
    sizes, profile, machines = model
    return Costs.expected(sizes, profile, *machines)


def seconds(costs: Costs, placement: Placement, dim: int, machines: Sequence[Hardware]) -> float:
    """Bandwidths are in ``costs``, which other tests check; handshakes, visits and steps are added here."""
    round_trips = [each.handshake_s + 8 * dim / (each.link_pinned_gb_s * 1e9) for each in machines]
    total, before = 0.0, None
    for where, hot, i in zip(placement.where, placement.hot, itertools.count(), strict=False):
        if where is None:
            assert not hot.any()
            total += costs.cpu.dense[i] + costs.cpu.neurons[i].sum()
        else:
            gpu = costs.gpus[where]
            total += gpu.dense[i] + max(gpu.neurons[i][hot].sum(), costs.cpu.neurons[i][~hot].sum())
            total += round_trips[where] * (not hot.all()) + round_trips[where] * (where != before)
        before = where
    if placement.head is None:
        total += costs.cpu.head
    else:
        total += costs.gpus[placement.head].head + round_trips[placement.head] * (placement.head != before)
    used = {*placement.where, placement.head} - {None}
    return float(total + sum(machines[gpu].step_s for gpu in used if gpu is not None))


def everything(sizes: Sizes) -> int:
    return last_layers(sizes, len(sizes.neurons)).gpu_bytes(sizes)


def every_placement(sizes: Sizes, profile: Profile, gpus: int) -> Iterator[Placement]:
    """In groups, the most active first; each GPU has one run of layers."""
    options = groups_of(profile)
    places: list[int | None] = [None, *range(gpus)]
    for where in itertools.product(places, repeat=len(options)):
        runs = [gpu for gpu, _ in itertools.groupby(where) if gpu is not None]
        if len(runs) > len(set(runs)):
            continue
        inside = [masks[:1] if gpu is None else masks for gpu, masks in zip(where, options, strict=True)]
        for hot, head in itertools.product(itertools.product(*inside), places):
            yield Placement(hot, where, head)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**20), st.lists(st.floats(0, 1.0), min_size=2, max_size=2))
def test_within_one_group_of_every_placement(seed: int, shares: list[float]) -> None:
    model = sizes, profile, machines = model_and_machines(seed, 2, layers=1 + seed % 3)
    costs, budgets = costs_of(model), [int(share * everything(sizes)) for share in shares]
    best = min(
        seconds(costs, each, sizes.dim, machines)
        for each in every_placement(sizes, profile, 2)
        if all(bytes_on(sizes, each, gpu) <= budget for gpu, budget in enumerate(budgets))
    )
    taken = seconds(costs, Solver(sizes, profile, costs).solve(*budgets), sizes.dim, machines)
    group = max(np.sort(neurons)[-GROUP:].sum() for neurons in costs.cpu.neurons)
    assert best * (1 - 1e-9) <= taken <= best + 2 * group


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**20), st.integers(1, 3), st.lists(st.floats(0, 1.2), min_size=6, max_size=6))
def test_never_over_a_budget_and_never_slower_with_more(seed: int, gpus: int, shares: list[float]) -> None:
    model = sizes, profile, machines = model_and_machines(seed, gpus, groups=4)
    costs, before = costs_of(model), np.inf
    solver, budgets = Solver(sizes, profile, costs), [0] * gpus
    for turn, share in enumerate(shares):
        budgets[turn % gpus] += int(share / 2 * everything(sizes))
        placement = solver.solve(*budgets)
        taken = seconds(costs, placement, sizes.dim, machines)
        assert taken == pytest.approx(costs.token(placement), rel=1e-9)
        assert taken <= before * (1 + 1e-9)
        before = taken
        for gpu, budget in enumerate(budgets):
            assert bytes_on(sizes, placement, gpu) == placement.part_of(gpu).gpu_bytes(sizes) <= budget
        runs = [gpu for gpu, _ in itertools.groupby(placement.where) if gpu is not None]
        assert len(runs) == len(set(runs))
        for where, hot, firing in zip(placement.where, placement.hot, profile.firing, strict=True):
            assert where is not None or not hot.any()
            assert hot.all() or not hot.any() or firing[hot].min() >= firing[~hot].max()


@pytest.mark.parametrize("seed", range(4))
def test_a_gpu_without_memory_changes_nothing(seed: int) -> None:
    sizes, profile, machines = model_and_machines(seed, 2, layers=6, groups=6)
    budget = everything(sizes) // 2
    one = Solver(sizes, profile, Costs.expected(sizes, profile, machines[0])).solve(budget)
    two = Solver(sizes, profile, Costs.expected(sizes, profile, *machines)).solve(budget, 0)
    assert two.where == one.where and two.head == one.head
    assert all(np.array_equal(*pair) for pair in zip(one.hot, two.hot, strict=True))


def test_two_small_gpus_hold_what_one_cannot() -> None:
    """Each gets whole layers, as many as fit, where GPUs are much faster than the processor."""
    sizes, profile, machine = made_up(5, layers=8, groups=2, faster=20)
    machines = [replace(machine, handshake_s=1e-9, step_s=0.0, layer_s=0.0)] * 2
    solver = Solver(sizes, profile, Costs.expected(sizes, profile, *machines))
    half = everything(sizes) * 3 // 5
    placement = solver.solve(half, half)
    assert None not in placement.where and set(placement.where) == {0, 1}
    assert all(hot.all() for hot in placement.hot)


def test_whole_layers_are_split_from_the_last_gpu_on() -> None:
    sizes, _, _ = made_up(5, layers=8, groups=2)
    half = everything(sizes) * 3 // 5
    dense, split = layer_split(sizes, half, half)
    last = len(split.layers_of(1))
    assert split.where == (0,) * (8 - last) + (1,) * last and split.head == 1 and 0 < last < 8
    assert bytes_on(dense, split, 1) <= half < bytes_on(dense, last_layers(dense, 0, last + 1), 1)


def some_placement(sizes: Sizes) -> Placement:
    hot = [np.arange(n) % 2 == (i > 1) for i, n in enumerate(sizes.neurons)]
    hot[0][:] = False
    return Placement(hot, (None, 1, 1, 0, None, 2), 1) if len(hot) == 6 else Placement(hot, (), None)


def test_a_placement_is_read_as_it_was_written(tmp_path: Path) -> None:
    sizes, _, _ = made_up(7, layers=6)
    written = some_placement(sizes)
    written.hot[4][:] = False
    write_placement(tmp_path / "x.gpuidx", sizes, written)
    read = read_placement(tmp_path / "x.gpuidx", sizes)
    assert (read.where, read.head) == (written.where, written.head) and read.gpus == [0, 1, 2]
    assert all(np.array_equal(*pair) for pair in zip(read.hot, written.hot, strict=True))


def test_a_layer_of_the_cpu_has_no_hot_neurons(tmp_path: Path) -> None:
    sizes, _, _ = made_up(7, layers=6)
    write_placement(tmp_path / "x.gpuidx", sizes, some_placement(sizes))
    with pytest.raises(SidecarError, match="layer 4 has hot neurons, but its attention is on the CPU"):
        read_placement(tmp_path / "x.gpuidx", sizes)


def test_every_byte_is_on_one_device() -> None:
    sizes, _, _ = made_up(7, layers=6)
    placement = some_placement(sizes)
    placement.hot[4][:] = False
    rows = placement.bill(sizes)
    for gpu in range(3):
        assert sum(row["gpu_bytes"] for row in rows if row["gpu"] == gpu) == bytes_on(sizes, placement, gpu)
    assert all(not row["gpu_bytes"] for row in rows if row["gpu"] is None)
    weights = [row for row in rows if row["kind"] in ("attention", "kv", "predictor")]
    assert all(bool(row["gpu_bytes"]) != bool(row["cpu_bytes"]) for row in weights)
    of_each = [placement.part_of(gpu).gpu_bytes(sizes) for gpu in range(MOST_GPUS)]
    assert placement.gpu_bytes(sizes) == sum(of_each) and of_each[3] == 0
