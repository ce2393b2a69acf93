"""The probes read the bytes that they report; their speed is not tested here."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.formats.blocks import block_type
from hotcold.kernels.backend import Backend, FFNCall, FFNTensors, FFNWeights
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.kernels.numpy_ffn import unpack_mask
from hotcold.kernels.processor import STREAMS, fetching, set_fetching
from hotcold.placement import measuring
from hotcold.placement.measuring import NeuronProbe, ProbePlan, buffer_bytes

MIB = 1 << 20


@pytest.mark.parametrize("most", [1 << 16, 256])
@pytest.mark.parametrize(("kind", "dim"), measuring.SHAPES)
def test_a_call_reads_a_tenth_of_a_layer(
    kind: str, dim: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten calls a layer read each neuron once. The clock ticks once a call, so GB/s are bytes of calls."""
    monkeypatch.setattr(measuring, "_MOST_NEURONS", most)
    clock = iter(range(1000))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(clock)))
    backend = CPUBackend(2)
    plan = ProbePlan.from_sizes(kind, dim, 3 * MIB)
    probe = NeuronProbe(backend, plan)
    for width, masks in zip(plan.widths, probe._masks, strict=True):
        bits = unpack_mask(masks, width)
        assert bits.shape == (10, width) and (bits.sum(axis=0) == 1).all()
        assert abs(bits.sum(axis=1) - width / 10).max() < 1
    neurons, layers = sum(plan.widths), len(plan.widths)
    neuron = 3 * block_type(kind).row_bytes(dim)
    assert plan.run_bytes == neuron // 2 and plan.nbytes == neurons * neuron
    assert probe.measure(10 * layers - 1, backend, dense=False) == pytest.approx(
        neurons * neuron / (10 * layers) / 1e9
    )
    assert probe.measure(layers - 1, backend, dense=True) == pytest.approx(neurons * neuron / layers / 1e9)


def test_prompts_multiply_each_weight_by_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks once a call, so GFLOPS are multiplications and additions of one call: all weights of a
    made layer, by the 128 rows of a step without decode rows."""
    clock = iter(range(1000))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(measuring, "_MOST_NEURONS", 128)
    backend = CPUBackend(1)
    calls: list[FFNCall] = []
    weights: list[int] = []
    compute, make = backend.ffn, backend.ffn_weights

    def ffn(call: FFNCall) -> None:
        calls.append(call)
        compute(call)

    def ffn_weights(tensors: FFNTensors) -> FFNWeights:
        assert tensors.gate is not None
        weights.extend(int(np.prod(each.shape)) for each in (tensors.gate, tensors.up, tensors.down))
        return make(tensors)

    monkeypatch.setattr(backend, "ffn", ffn)
    monkeypatch.setattr(backend, "ffn_weights", ffn_weights)
    gflops = measuring.prompt_gflops(backend, 64, 3 * 36 * 320, 0.0)
    assert gflops == pytest.approx(2 * 128 * sum(weights) / 1e9) and sum(weights) == 3 * 64 * 320
    assert len(calls) == 3 and all(call.x.shape == call.out.shape == (128, 64) for call in calls)
    assert all((call.batch.n_tokens, call.batch.n_decode) == (128, 0) for call in calls)
    assert all(call.batch.limits.decode == 0 for call in calls)  # a GPU would also run shaders of decode rows
    assert not any(call.skip or call.mask is not None for call in calls)


def test_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No neuron is read again before all others were: a pass over all of them, then the next."""
    monkeypatch.setattr(measuring, "_MOST_NEURONS", 128)
    backend = CPUBackend(1)
    probe = NeuronProbe(backend, ProbePlan.from_sizes("Q4_0", 32, 3 * 18 * 320))
    assert probe.plan.widths == (128, 128, 64)
    calls: list[tuple[int, bytes]] = []
    layers = {id(layer): i for i, layer in enumerate(probe._layers)}

    def see(call: FFNCall) -> None:
        calls.append((layers[id(call.weights)], call.mask.tobytes()))

    monkeypatch.setattr(backend, "ffn", see)
    while len(calls) < 60:
        probe.measure(0, backend, dense=False)
    assert len(set(calls[:30])) == 30 and calls[30:] == calls[:30]


@pytest.mark.parametrize("cache", [4, 32, 96, 260, 1024])
@pytest.mark.parametrize("shape", measuring.SHAPES)
def test_every_cache_has_a_legal_probe(cache: int, shape: tuple[str, int]) -> None:
    """Layers that a model may have, at least twice the cache in all; nothing is allocated here."""
    nbytes = buffer_bytes(cache * MIB, available=None)
    assert nbytes == min(max(128, 4 * cache), 2048) * MIB >= 2 * cache * MIB
    plan = ProbePlan.from_sizes(*shape, nbytes)
    neuron = 3 * block_type(shape[0]).row_bytes(shape[1])
    assert nbytes - 64 * neuron < plan.nbytes <= nbytes
    assert all(0 < width <= 1 << 16 and width % 64 == 0 for width in plan.widths)
    assert max(plan.widths) - min(plan.widths) <= 64


def test_more_neurons_than_one_layer_may_have() -> None:
    """For real, with the extension's own limit: neurons are short here, so that they take little memory."""
    backend = CPUBackend(1)
    plan = ProbePlan.from_sizes("Q4_0", 32, 15 * MIB)
    assert sum(plan.widths) > 1 << 18
    assert NeuronProbe(backend, plan).measure(0, backend, dense=False) > 0


def test_memory_bounds_the_buffer() -> None:
    assert buffer_bytes(96 * MIB, available=400 * MIB) == 100 * MIB
    assert buffer_bytes(96 * MIB, available=64 * MIB) == 16 * MIB
    assert buffer_bytes(96 * MIB, available=400 * MIB + 4 * MIB - 1) == 100 * MIB  # whole MiB
    message = (
        "63 MiB of memory are available: 64 MiB are needed to measure how fast it is; close other programs"
    )
    with pytest.raises(ValueError, match=message):
        buffer_bytes(0, available=64 * MIB - 1)


@pytest.mark.parametrize("nbytes", [1, MIB, MIB + 256, 3 * MIB - 1])
def test_buffers_of_any_size_are_read_in_streams(nbytes: int) -> None:
    """Rows of a fixed length fill them, so neither the size nor a remainder matters."""
    backend = CPUBackend(2)
    probe = ReadProbe(backend, nbytes)
    assert probe._memory.nbytes == max(1, nbytes // MIB) * MIB
    assert all(probe.rate(streams, 0.0) > 0 for streams in STREAMS) and probe.measure(0.0) > 0
    for streams in (0, 9):
        with pytest.raises(ValueError, match="1 to 8 streams"):
            probe.rate(streams, 0.0)


def test_the_fastest_number_of_streams_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of threads has its own, from made-up rates."""

    def rate(self: ReadProbe, streams: int, seconds: float, backend: CPUBackend) -> float:
        return {(1, 1): 5.0, (1, 4): 9.0, (2, 2): 7.0}.get((backend.threads, streams), 3.0)

    monkeypatch.setattr(ReadProbe, "rate", rate)
    monkeypatch.setattr(measuring, "SHAPES", ())
    failed: list[str] = []
    found = measuring.measure([1, 2], MIB, 0.0, lambda done, total: None, failed.append)
    assert [(each.threads, each.streams, each.gb_s) for each in found] == [(1, 4, 9.0), (2, 2, 7.0)]
    assert not failed


def test_masks_of_one_word() -> None:
    """Fewer neurons than tenths have bits left over still are each read once."""
    bits = unpack_mask(measuring.tenth_masks(64, np.random.default_rng(0)), 64)
    assert (bits.sum(axis=0) == 1).all() and bits.sum(axis=1).tolist() == [7, 7, 7, 7, 6, 6, 6, 6, 6, 6]


@pytest.mark.parametrize(
    ("dense_gain", "rows_gain", "chosen"),
    [(1.02, 1.02, "3K:1"), (1.1, 1.1, "8K:2"), (1.2, 0.8, "3K:1"), (0.8, 1.2, "3K:1"), (1.2, 0.95, "8K:2")],
)
def test_a_clearly_faster_prefetch_setting_is_used(
    dense_gain: float, rows_gain: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_setting(probe: NeuronProbe, seconds: float, backend: Backend, *, dense: bool) -> float:
        gains = {"3K:1": 1.0, "8K:2": dense_gain if dense else rows_gain}
        return gains.get(fetching(), 0.9) * (20 if dense else 10)

    monkeypatch.setattr(NeuronProbe, "measure", measure_setting)
    before = fetching()
    try:
        set_fetching("3K:1")
        assert measuring.measure_fetching(1, MIB, 0.0) == fetching() == chosen
    finally:
        set_fetching(before)


def test_a_failed_measurement_leaves_the_prefetch_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> float:
        raise OSError(fetching())

    monkeypatch.setattr(NeuronProbe, "measure", fail)
    before = fetching()
    with pytest.raises(OSError):
        measuring.measure_fetching(1, MIB, 0.0)
    assert fetching() == before
