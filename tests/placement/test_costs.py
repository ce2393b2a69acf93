"""The cost of a token, worked out by hand, and the layers that PowerInfer's objective leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.placement.baselines import paper_placement
from hotcold.placement.costs import Costs, prompt_s, streaming_s
from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes

HARDWARE = Hardware(
    name="round numbers",
    source="a test",
    vram_bytes=1 << 34,
    cpu_stream_gb_s=10.0,
    cpu_gather_gb_s=[[1500.0, 4.0], [3000.0, 8.0]],
    gpu_stream_gb_s=100.0,
    gpu_rows_gb_s=50.0,
    link_pinned_gb_s=8.0,
    link_pageable_gb_s=3.0,
    handshake_s=1e-5,
)
HANDSHAKE = 1e-5 + 1e-6  # two vectors of 1000 float32 at 8 GB/s

SIZES = Sizes(
    name="two layers",
    fingerprint="f",
    always_read=0.25,  # shared experts; of the others a token gets half
    expert_share=0.5,
    dim=1000,
    attention=np.array([900_000, 1_600_000]),
    kv=np.array([60_000, 1_000_000]),
    predictor=np.array([40_000, 400_000]),
    neuron_bytes=np.array([3000, 6000]),
    neurons=np.array([4, 4]),
    head=5_000_000,
    embedding=1000,
    tied=False,
    buffers=0,
    gpu_step=lambda hot: 0,
)
PROFILE = Profile([np.array([1, 0.5, 0.1, 0]), np.array([0.9, 0.2, 0, 0])], "by hand")

#: Nanoseconds per byte of each neuron: 3/4 when it is active, at most a stream's; 1/4 for half of the tokens.
CPU = (
    3000e-9 * np.array([0.0875, 0.0875, 0.03125, 0.0125]),
    6000e-9 * np.array([0.0875, 0.03125, 0.0125, 0.0125]),
)
GPU = (
    3000e-9 * np.array([0.00875, 0.00875, 0.00275, 0.00125]),
    6000e-9 * np.array([0.00875, 0.00425, 0.00125, 0.00125]),
)


def test_neurons_on_both_sides() -> None:
    costs = Costs.expected(SIZES, PROFILE, HARDWARE)
    for expected, found in ((CPU, costs.cpu.neurons), (GPU, costs.gpus[0].neurons)):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12)


def placed(hot: list[list[int]], layers: range, head: bool) -> float:
    masks = [np.isin(np.arange(4), each) for each in hot]
    return Costs.expected(SIZES, PROFILE, HARDWARE).token(Placement.on_one(masks, layers, head))


def test_a_token() -> None:
    on_cpu = [1e6 / 10e9 + CPU[0].sum(), 3e6 / 10e9 + CPU[1].sum()]
    assert placed([[], []], range(0), False) == pytest.approx(sum(on_cpu) + 5e6 / 10e9)
    # The last layer and the head: one visit, and one handshake of the layer.
    split = 3e6 / 100e9 + max(GPU[1][0], CPU[1][1:].sum()) + HANDSHAKE
    assert placed([[], [0]], range(1, 2), True) == pytest.approx(on_cpu[0] + split + HANDSHAKE + 5e6 / 100e9)
    # The first layer, whole, and the head: two visits, since the other layer lies between them.
    whole = 1e6 / 100e9 + GPU[0].sum()
    total = whole + on_cpu[1] + 2 * HANDSHAKE + 5e6 / 100e9
    assert placed([[0, 1, 2, 3], []], range(1), True) == pytest.approx(total)
    assert placed([[], []], range(0), True) == pytest.approx(sum(on_cpu) + HANDSHAKE + 5e6 / 100e9)


def test_too_few_hot_neurons_are_not_worth_a_handshake() -> None:
    """150 save one. The layer with 64 is closed first, which makes room for more of the one with 128."""
    neuron_bytes = 10**6
    saved = neuron_bytes / 1e9 * (1 / 10 - 1 / 20)
    hardware = replace(HARDWARE, gpu_stream_gb_s=20.0, gpu_rows_gb_s=20.0, handshake_s=149.5 * saved - 1e-6)
    thousand = np.full(3, 1000)
    sizes = replace(
        SIZES,
        always_read=0.0,
        attention=thousand,
        kv=thousand,
        predictor=thousand,
        neuron_bytes=np.full(3, neuron_bytes),
        neurons=np.full(3, 256),
        head=1000,
    )
    firing = [
        np.repeat([0.9, 0.1], [192, 64]),
        np.repeat([0.95, 0], [64, 192]),
        np.repeat([0.94, 0.5, 0], [128, 64, 64]),
    ]
    budget = 10_000 + 384 * (neuron_bytes + 8)  # six groups of 64
    for handshake_s, counts in ((hardware.handshake_s, [192, 0, 192]), (50 * saved, [192, 64, 128])):
        machine = replace(hardware, handshake_s=handshake_s)
        placement = paper_placement(sizes, Profile(firing, "by hand"), machine, budget)
        assert [int(mask.sum()) for mask in placement.hot] == counts


def test_kernels_and_layers_that_were_measured() -> None:
    """Each part at the rate of its kernel, and between two types' rates by its share of float types."""
    kernels = {"matrix Q4_0": 100.0, "matrix F16": 50.0, "stream Q4_0": 80.0, "rows Q4_0": 40.0}
    kernels |= {"down Q4_0": 20.0, "attention": 10.0}
    layers = {"exact Q4_0": 3e-6, "exact F16": 5e-6, "head F16": 7e-6}
    hardware = replace(HARDWARE, kernels_gb_s=kernels, layers_s=layers)
    sizes = replace(SIZES, down_share=0.25, floats={"head": 1.0, "attention": 0.5})
    gpu = Costs.expected(sizes, PROFILE, hardware).gpus[0]
    read = SIZES.attention * (0.5 / 100 + 0.5 / 50) + SIZES.predictor / 100 + SIZES.kv / 10
    assert gpu.dense == pytest.approx(read * 1e-9 + 4e-6)
    assert gpu.head == pytest.approx(5e-3 / 50 + 7e-6)
    for neurons, nbytes, firing in zip(gpu.neurons, (3000, 6000), PROFILE.firing, strict=True):
        gates, ups = 0.25 * 0.5 / 80, 0.5 * np.minimum(firing / 40, 1 / 80)
        downs = 0.25 * np.minimum(firing / 20, 2 / 80)
        assert neurons == pytest.approx(nbytes * 1e-9 * (gates + ups + downs))
    missing = replace(hardware, kernels_gb_s={}, layers_s={}, layer_s=2e-6)
    gpu = Costs.expected(sizes, PROFILE, missing).gpus[0]
    assert gpu.dense == pytest.approx((SIZES.attention + SIZES.predictor + SIZES.kv) * 1e-11 + 2e-6)
    assert gpu.head == pytest.approx(5e-3 / 100)


@given(
    hot=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=2),
    where=st.tuples(*[st.sampled_from([None, 0, 1])] * 2),
    links=st.tuples(*[st.floats(1.0, 64.0)] * 2),
)
def test_cold_neurons_that_are_streamed(
    hot: list[list[bool]], where: tuple[int | None, ...], links: tuple[float, float]
) -> None:
    """Neuron by neuron: those of a layer on a GPU that are not hot, over that GPU's link."""
    sizes = replace(SIZES, streams=True, gpu_layer=100)
    placement = Placement([np.array(each) for each in hot], where, None)
    machines = [replace(HARDWARE, link_pinned_gb_s=link) for link in links]
    nbytes, seconds = [0, 0], 0.0
    for layer, gpu in enumerate(where):
        if gpu is not None and not all(hot[layer]):
            nbytes[layer] = 100 + sum((3000, 6000)[layer] for each in hot[layer] if not each)
            seconds += nbytes[layer] / (links[gpu] * 1e9)
    assert placement.streamed_bytes(sizes) == nbytes
    assert streaming_s(sizes, placement, machines) == pytest.approx(seconds)
    assert max(nbytes) <= sizes.staging_bytes == 100 + 4 * 6000
    assert placement.streamed_bytes(SIZES) == [0, 0] and SIZES.staging_bytes == 0


@given(
    hot=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=2),
    where=st.tuples(*[st.sampled_from([None, 0, 1])] * 2),
    gflops=st.tuples(*[st.floats(1.0, 1e5)] * 3),
    rows=st.integers(1, 512),
    neuron_rows=st.integers(2, 3),
    streams=st.booleans(),
)
def test_a_step_of_a_prompt(
    hot: list[list[bool]],
    where: tuple[int | None, ...],
    gflops: tuple[float, float, float],
    rows: int,
    neuron_rows: int,
    streams: bool,
) -> None:
    """Neuron by neuron: each is computed by one processor, and both sides of a layer at the same time."""
    masks = [np.array(each) & (gpu is not None) for each, gpu in zip(hot, where, strict=True)]
    placement = Placement(masks, where, None)
    sizes = replace(SIZES, streams=streams, neuron_rows=neuron_rows)
    cpu, *of_gpus = gflops
    machines = [replace(HARDWARE, cpu_prompt_gflops=cpu, gpu_prompt_gflops=gpu) for gpu in of_gpus]
    flop = 2 * rows * neuron_rows * 1000
    expected = 0.0
    for layer, gpu in enumerate(where):
        cpu_s = gpu_s = 0.0
        for is_hot in masks[layer]:
            if gpu is not None and (is_hot or streams):
                gpu_s += flop / (of_gpus[gpu] * 1e9)
            else:
                cpu_s += flop / (cpu * 1e9)
            if streams and gpu is not None and not is_hot:
                expected += (3000, 6000)[layer] / 8e9
        expected += max(cpu_s, gpu_s)
    assert prompt_s(sizes, placement, machines, rows) == pytest.approx(expected)
