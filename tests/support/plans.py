"""Models of a few groups of neurons and machines, made up, for tests of placement."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import INDEX_BYTES, Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import GROUP


def made_up(
    seed: int, layers: int | None = None, groups: int = 3, faster: float = 0.5
) -> tuple[Sizes, Profile, Hardware]:
    """Everything differs: layers, widths, skew, handshake; the GPU is at least ``faster`` times as fast."""
    rng, more = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    step_bytes = int(more.integers(0, 3000))
    count = layers or int(rng.integers(1, 5))
    neurons = rng.integers(1, 64 * groups + 1, count)
    sizes = Sizes(
        name="made up",
        fingerprint=f"{seed}",
        always_read=float(rng.choice([0, 0, 1 / 3, 1])),
        expert_share=float(rng.choice([1, 0.25])),
        dim=int(rng.integers(64, 4096)),
        attention=rng.integers(100, 200000, count),
        kv=rng.integers(0, 50000, count),
        predictor=rng.integers(0, 50000, count),
        neuron_bytes=rng.integers(500, 5000, count) if rng.random() < 0.5 else np.full(count, 2000),
        neurons=neurons,
        head=int(rng.integers(1000, 200000)),
        embedding=1000,
        tied=bool(rng.random() < 0.5),
        buffers=int(rng.integers(0, 3000)),
        gpu_step=lambda hot: step_bytes,
        gpu_layer=int(more.integers(0, 300)),
    )
    profile = Profile([rng.random(n) ** rng.uniform(0.5, 6) for n in neurons], "made up")
    cpu = rng.uniform(0.5, 2)
    gpu = cpu * rng.uniform(faster, 30)
    hardware = Hardware(
        name="made up",
        source="a test",
        vram_bytes=1 << 30,
        cpu_stream_gb_s=cpu,
        cpu_gather_gb_s=[[1, cpu * rng.uniform(0.2, 1)]],
        gpu_stream_gb_s=gpu,
        gpu_rows_gb_s=gpu * rng.uniform(0.3, 1),
        link_pinned_gb_s=5.0,
        link_pageable_gb_s=3.0,
        handshake_s=float(10 ** rng.uniform(-7, -4)),
        step_s=float(10 ** more.uniform(-7, -4)),
        layer_s=float(10 ** more.uniform(-8, -5)),
    )
    return sizes, profile, hardware


def bytes_on(sizes: Sizes, placement: Placement, gpu: int) -> int:
    """Counts the bytes that a placement needs on a GPU, by the definition."""
    layers = [i for i, where in enumerate(placement.where) if where == gpu]
    total = sizes.head * (placement.head == gpu)
    for i in layers:
        total += int(sizes.attention[i] + sizes.kv[i] + sizes.predictor[i]) + sizes.gpu_layer
        total += int(placement.hot[i].sum()) * (int(sizes.neuron_bytes[i]) + INDEX_BYTES)
    return total + sizes.gpu_step(0) * bool(layers or placement.head == gpu)


def groups_of(profile: Profile) -> list[list[npt.NDArray[np.bool_]]]:
    """Returns for each layer the masks of its most active neurons, in steps of the solver's groups."""
    options = []
    for firing in profile.firing:
        masks = []
        for n in [*range(0, len(firing), GROUP), len(firing)]:
            masks.append(np.zeros(len(firing), np.bool_))
            masks[-1][np.argsort(-firing, kind="stable")[:n]] = True
        options.append(masks)
    return options
