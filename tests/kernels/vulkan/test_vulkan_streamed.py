"""FFNs whose weights stay in the processor's memory: the bits of weights on the device, whatever was copied
to the same place before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.op_truth import FFNKind, plain_batch, random_ffn, random_rows, rng

from hotcold.kernels.backend import FFNCall, FFNTensors
from hotcold.kernels.gpu import GPUError, GPUMemoryError
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.buffers import DeviceMemory

pytestmark = pytest.mark.one_driver

Types = tuple[str, str, str]
DIM, PROMPT = 256, 37
#: Each layout of down: rows by neuron, panels, transposed, and a dot of two types.
CASES: list[tuple[FFNKind, Types, str]] = [
    (FFNKind("relu", biases=True), ("Q4_0",) * 3, "by_neuron"),
    (FFNKind("drelu"), ("F16", "Q8_0", "Q5_1"), "by_output"),
    (FFNKind("relu2", gated=False), ("Q8_0", "Q8_0", "F16"), "by_output"),
    (FFNKind("silu"), ("Q4_K", "Q4_K", "Q6_K"), "by_output"),
    (FFNKind("gelu", gated=False, biases=True), ("IQ4_XS", "IQ4_XS", "IQ4_XS"), "by_output"),
]


def layers(kind: FFNKind, types: Types, layout: str) -> list[FFNTensors]:
    """Three layers of other widths, the widest in the middle."""
    return [random_ffn(rng("streamed", n, *kind), (n, DIM), types, kind, layout) for n in (256, 768, 512)]


def outputs(backend: VulkanBackend, weights: list[Any], x: np.ndarray, runs: int = 1) -> np.ndarray:
    """One program of all layers, each adding to a buffer of its own."""
    batch = plain_batch(backend, 0, len(x))
    source = backend.zeros((batch.limits.tokens, DIM))
    backend.write(source, x)
    outs = [backend.zeros((batch.limits.tokens, DIM)) for _ in weights]

    def forward() -> None:
        for each, out in zip(weights, outs, strict=True):
            backend.ffn(FFNCall(source, each, batch, out, skip=False, accumulate=True))

    program = backend.record(forward)
    for _ in range(runs):
        program.run()
    return np.array([backend.read(out, 0, len(x)).copy() for out in outs])


@pytest.mark.parametrize(("kind", "types", "layout"), CASES, ids=str)
def test_every_bit(vulkan: VulkanBackend, kind: FFNKind, types: Types, layout: str) -> None:
    """Layers follow each other directly, and the program runs twice."""
    tensors, x = layers(kind, types, layout), random_rows(rng("x"), PROMPT, DIM)
    expected = outputs(vulkan, [vulkan.ffn_weights(each) for each in tensors], x, runs=2)
    assert np.abs(expected).max() > 0
    streamed = [vulkan.streamed_weights(each) for each in tensors]
    same_bits(outputs(vulkan, streamed, x, runs=2), expected)


def test_a_wider_layer_that_comes_later(vulkan: VulkanBackend) -> None:
    """It gets a larger place."""
    kind, types, layout = CASES[0]
    x = random_rows(rng("x"), PROMPT, DIM)
    for neurons in (1024, 4096):
        tensors = random_ffn(rng("wide", neurons), (neurons, DIM), types, kind, layout)
        expected = outputs(vulkan, [vulkan.ffn_weights(tensors)], x)
        same_bits(outputs(vulkan, [vulkan.streamed_weights(tensors)], x), expected)


def test_where_the_weights_are(vulkan: VulkanBackend) -> None:
    """In the processor's memory, and one place for the largest layer on the device."""
    device = VulkanBackend(vulkan.info.index)
    tensors = random_ffn(rng("where"), (8192, DIM), ("F16",) * 3)
    on_device, on_host = device.allocated_bytes, device.host_bytes
    weights = [device.streamed_weights(tensors) for _ in range(3)]
    assert device.allocated_bytes - on_device < 1 << 20
    assert device.host_bytes - on_host >= 3 * weights[0].nbytes
    before = device.allocated_bytes
    assert weights[0].nbytes <= device.staging.nbytes < 1.01 * weights[0].nbytes
    assert device.allocated_bytes - before == pytest.approx(weights[0].nbytes, rel=0.03)
    assert device.staging is device.staging


def test_too_little_memory_of_the_processor(vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error that a smaller part on the GPU could cure."""

    def refuse(self: DeviceMemory, nbytes: int, where: str = "device") -> Any:
        raise GPUMemoryError("no memory")

    kind, types, layout = CASES[0]
    tensors = random_ffn(rng("none"), (256, DIM), types, kind, layout)
    monkeypatch.setattr(DeviceMemory, "allocate", refuse)
    message = r"more of the processor's memory: use `cold_prompts=cpu`$"
    with pytest.raises(GPUError, match=message) as caught:
        vulkan.streamed_weights(tensors)
    assert not isinstance(caught.value, GPUMemoryError)
