"""Figures that doctor measures of a GPU, and times that ``plan`` predicts from them: on a device whose
dispatches have known times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.made_up_gpus import made_up
from support.placed import on_two
from support.plain_forward import Model
from support.random_blocks import random_blocks
from support.vulkan.priced import PricedDevice, Prices, priced_backend

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.placement import gpu_measuring, measuring
from hotcold.placement.gpu_measuring import GPUSpeed
from hotcold.placement.hardware import Hardware
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes
from hotcold.runtime.sampling import SamplingParams
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.planning import plan

CONTEXT, ACTIVE = 512, 0.1
LLAMA = Model(
    dim=512, heads=4, kv_heads=2, head_dim=128, rotary=128, neurons=(1408,) * 3, vocab=4096,
    extra={"llama.context_length": CONTEXT},
)  # fmt: skip
#: Six models: the FFN of each kind, and both kinds of types.
MODELS = {
    "dense Q4_0": replace(LLAMA, type="Q4_0"),
    "dense F16": replace(LLAMA, type="F16"),
    "exact Q4_0": replace(LLAMA, type="Q4_0", activation="relu"),
    "predicted Q8_0": replace(LLAMA, type="Q8_0", activation="relu"),
    "predicted F16": replace(LLAMA, type="F16", activation="relu"),
    "experts Q4_0": replace(LLAMA, type="Q4_0"),
}
EXPERTS, CHOSEN, WIDTH = 8, 2, 352


@pytest.fixture(scope="module")
def monkeypatch_of_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def device(monkeypatch_of_module: pytest.MonkeyPatch) -> tuple[VulkanBackend, PricedDevice]:
    return priced_backend(monkeypatch_of_module, Prices())


@pytest.fixture(scope="module")
def speed(device: tuple[VulkanBackend, PricedDevice], monkeypatch_of_module: pytest.MonkeyPatch) -> GPUSpeed:
    backend, priced = device
    monkeypatch_of_module.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: priced.now))
    monkeypatch_of_module.setattr(gpu_measuring, "open_gpu", lambda gpu, budget: backend)
    return gpu_measuring.measure_gpu(made_up(0, "priced"), 64 << 20, 0.0, lambda done, total: None)


@pytest.mark.parametrize("type", ["Q4_0", "F16"])
def test_bandwidths_are_those_of_the_device(type: str, speed: GPUSpeed) -> None:
    prices, column = Prices(), int(type == "F16")
    rates = {
        "matrix": prices.gemv,
        "stream": prices.ffn_rows,
        "rows": prices.ffn_rows,
        "down": prices.ffn_down,
    }
    for kernel, expected in rates.items():
        assert speed.kernels_gb_s[f"{kernel} {type}"] == pytest.approx(expected[column] / 1e9, rel=0.01), (
            kernel
        )
    assert speed.kernels_gb_s["attention"] == pytest.approx(prices.attention / 1e9, rel=0.01)


def write(name: str, folder: Path) -> Path:
    model = MODELS[name]
    path = folder / f"{name.replace(' ', '-')}.gguf"
    with open_gguf(model_path()) as file:
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tensors, metadata = model.tensors(), tokenizer | model.metadata()
    if name.startswith("experts"):
        random = np.random.default_rng(1)
        metadata |= {"llama.expert_count": EXPERTS, "llama.expert_used_count": CHOSEN}
        metadata |= {"llama.feed_forward_length": WIDTH}
        for layer in range(len(model.neurons)):
            blk = f"blk.{layer}.ffn_"
            for part in ("gate", "up", "down"):
                del tensors[f"{blk}{part}.weight"]
                shape = (WIDTH, model.dim) if part != "down" else (model.dim, WIDTH)
                tensors[f"{blk}{part}_exps.weight"] = random_blocks(random, model.type, EXPERTS, *shape)
            router = random.standard_normal((EXPERTS, model.dim)).astype(np.float32)
            tensors[f"{blk}gate_inp.weight"] = quantise(router, "F32")
    write_gguf(path, metadata, tensors)
    if name.startswith("predicted"):
        write_predictors(path, model)
    return path


def write_predictors(path: Path, model: Model) -> None:
    random, rank = np.random.default_rng(2), 128
    layers = [
        PredictorTensors(
            random_blocks(random, "Q8_0", rank, model.dim), random_blocks(random, "Q8_0", n, rank),
            np.zeros(n, np.float32), relu=True,
        )
        for n in model.neurons
    ]  # fmt: skip
    with open_gguf(path) as file:
        fingerprint = file.fingerprint()
    write_sidecar(path.with_suffix(".predictor.gguf"), fingerprint, layers, {"input": "normed"})


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_the_predicted_time(
    name: str, device: tuple[VulkanBackend, PricedDevice], speed: GPUSpeed, tmp_path: Path
) -> None:
    backend, priced = device
    path, mode = write(name, tmp_path), name.split()[0]
    priced.active = ACTIVE
    session = on_two(
        backend, 1.0, path, context=CONTEXT, sparsity={"experts": "off", "dense": "off"}.get(mode, mode)
    )
    engine = Engine(session)
    request = Request(Job([1, 2, 3], SamplingParams(temperature=0.0), max_tokens=8, ignore_eos=True))
    engine.add(request)
    while len(request.output) < 2:
        engine.step()
    start = priced.now
    engine.step()
    measured = priced.now - start
    session.close()
    priced.active = 1.0

    planned = plan(path, context=CONTEXT, hardware=hardware(speed), profile=None)
    sizes = planned.sizes
    firing = [np.full(n, firing_share(sizes, i)) for i, n in enumerate(sizes.neurons)]
    planned = plan(path, context=CONTEXT, hardware=hardware(speed), profile=Profile(firing, "a test"))
    assert 1 / planned.all_gpu_tok_s == pytest.approx(measured, rel=0.05)


def firing_share(sizes: Sizes, layer: int) -> float:
    return sizes.share_of(layer) if sizes.always_read == 1 else ACTIVE


def hardware(speed: GPUSpeed) -> Hardware:
    return Hardware(
        name="priced",
        source="a test",
        vram_bytes=1 << 34,
        cpu_stream_gb_s=20.0,
        cpu_gather_gb_s=[[1, 10.0]],
        gpu_stream_gb_s=speed.stream_gb_s,
        gpu_rows_gb_s=speed.rows_gb_s,
        link_pinned_gb_s=1e6,
        link_pageable_gb_s=10.0,
        handshake_s=1e-9,
        step_s=speed.link.step_s,
        layer_s=speed.layer_s,
        kernels_gb_s=speed.kernels_gb_s,
        layers_s=speed.layers_s,
    )
