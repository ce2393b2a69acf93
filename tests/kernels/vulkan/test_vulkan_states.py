"""Ops that keep a state on Vulkan: programs of every size, long prompts, and what is refused. Their values,
the same bits in every cut, and wrong batches are for test_states.py; the bits that the numerics prescribe for
test_vulkan_table.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.mirrored_backend import MirroredBackend
from support.op_truth import Floats, plain_batch, random_rows, rng

from hotcold.kernels.backend import Batch, BatchLimits, DeltaCall, Norm, ScanCall
from hotcold.kernels.reference import ReferenceBackend
from hotcold.kernels.vulkan import recurrent
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.memory import DeviceBuffer, Range
from hotcold.kernels.vulkan.recording import Recording

KEYS, HEADS, DK, DV, TAPS, SLOTS = 2, 4, 8, 12, 4, 6
GROUPS, WIDTH, SIZE = 2, 5, 9
DELTA_CHANNELS, SCAN_CHANNELS = 2 * KEYS * DK + HEADS * DV, HEADS * WIDTH + 2 * GROUPS * SIZE


class Layer:
    """A convolution whose result a gated delta net takes, and a scan, of one batch."""

    def __init__(self, backend: Any, limits: BatchLimits) -> None:
        self.backend, self.batch, rows = backend, Batch(limits), limits.tokens
        random = rng("layer")
        self.weight = random_rows(random, DELTA_CHANNELS, TAPS)
        self.vectors = [random_rows(random, HEADS) for _ in range(3)]
        self.vectors[1] = -np.exp(self.vectors[1])
        self.x, self.mixed = (backend.zeros((rows, DELTA_CHANNELS)) for _ in range(2))
        self.scanned, self.numbers = backend.zeros((rows, SCAN_CHANNELS)), backend.zeros((rows, HEADS))
        self.decays, self.outs = backend.zeros((rows, HEADS)), [backend.zeros((rows, HEADS, DV))]
        self.outs.append(backend.zeros((rows, HEADS, WIDTH)))
        shapes = ((TAPS - 1, DELTA_CHANNELS), (HEADS, DK, DV), (HEADS, WIDTH, SIZE))
        self.states = [backend.zeros((SLOTS, *shape)) for shape in shapes]

    def ops(self) -> None:
        b, batch = self.backend, self.batch
        b.short_conv(self.x, self.weight, None, batch, self.states[0], self.mixed, activation="silu")
        b.decay(self.numbers, self.vectors[0], self.vectors[1], batch, self.decays)
        b.gated_delta(DeltaCall(
            self.mixed, self.decays, self.numbers, batch, self.states[1], self.outs[0],
            keys=KEYS, key_dim=DK, tiled=True, eps=1e-6,
        ))  # fmt: skip
        b.ssm_scan(
            ScanCall(
                self.scanned, self.numbers, *self.vectors, batch, self.states[2], self.outs[1], groups=GROUPS
            )
        )

    def step(self, pieces: Sequence[tuple[int, int, int]], decode: int, run: Any) -> list[Floats]:
        """Pieces: a sequence, where it begins, how many rows. Its state stays in the slot of its number."""
        row = 0
        for sequence, start, rows in pieces:
            source = sequence if start else -1
            row = self.batch.put(row, sequence, start, [0] * rows, [0], state_from=source, state_to=sequence)
        self.batch.counts[:] = row, decode, 0, len(pieces)
        at = 0
        for sequence, start, rows in pieces:
            for position in range(start, start + rows):
                random = rng("row", sequence, position)
                for each in (self.x, self.scanned, self.numbers):
                    each[at] = random_rows(random, each.shape[1])
                at += 1
        run()
        return [each[:row].copy() for each in self.outs]


STEPS = (
    ([(4, 0, 1)], 0),
    ([(1, 0, 2)], 0),
    ([(1, 2, 1), (4, 1, 1)], 2),
    ([(0, 0, 1), (4, 2, 1)], 1),
    ([(1, 3, 2)], 2),
)


@pytest.mark.parametrize("sequences", [5, 64])
def test_programs_of_every_size_give_the_same(vulkan: Any, sequences: int) -> None:
    """A program of two rows, whose groups look for sequences by their first rows, and one of 17, whose groups
    do so only among 64 sequences; both run again for steps of other sequences."""
    backend, found = MirroredBackend(vulkan), []
    for rows in (2, None):
        layer = Layer(backend, BatchLimits(17, sequences, 1, 1))
        program = backend.record(layer.ops, rows)
        outs = [each for pieces, decode in STEPS for each in layer.step(pieces, decode, program.run)]
        found.append([*outs, *layer.states])
    model = Layer(ReferenceBackend(), BatchLimits(17, sequences, 1, 1))
    right = [each for pieces, decode in STEPS for each in model.step(pieces, decode, model.ops)]
    for small, whole, true in zip(*found, [*right, *model.states], strict=True):
        np.testing.assert_array_equal(small, whole)
        np.testing.assert_allclose(whole, true, atol=1e-5 * np.abs(true).max())


def test_a_step_without_rows_changes_nothing(vulkan: Any) -> None:
    backend = MirroredBackend(vulkan)
    layer = Layer(backend, BatchLimits(4, 2, 1, 1))
    layer.step([(1, 0, 3)], 0, backend.record(layer.ops).run)
    before = [each.copy() for each in layer.states]
    layer.batch.counts[:] = layer.batch.row_counts[:] = 0
    layer.ops()
    for each, was in zip(layer.states, before, strict=True):
        np.testing.assert_array_equal(each, was)


def test_a_long_prompt(vulkan: Any) -> None:
    """Lavapipe ends the loops of an invocation after 65,535 rounds: those over a state are unrolled."""
    backend, rows, dk, dv = MirroredBackend(vulkan), 1100, 128, 3
    batch, random = Batch(BatchLimits(rows, 1, 1, 1)), rng("long")
    batch.counts[:] = rows, 0, 0, 1
    batch.row_counts[0] = rows
    batch.state_from[0] = batch.state_to[0] = -1
    mixed, given = random_rows(random, rows, 2 * dk + dv), random_rows(random, 2, rows, 1)
    scanned, one = random_rows(random, rows, dv + 2 * dk), np.ones(1, np.float32)
    outs = []
    for each in (backend, ReferenceBackend()):
        delta, scan = (each.zeros((rows, 1, dv)) for _ in range(2))
        state, more = each.zeros((1, 1, dk, dv)), each.zeros((1, 1, dv, dk))
        each.gated_delta(DeltaCall(
            mixed, -np.abs(given[0]) / 8, given[1].copy(), batch, state, delta,
            keys=1, key_dim=dk, tiled=False, eps=1e-6,
        ))  # fmt: skip
        each.ssm_scan(ScanCall(scanned, given[1].copy(), one, -one / 8, one, batch, more, scan, groups=1))
        outs.append((delta, scan))
    for found, right in zip(*outs, strict=True):
        np.testing.assert_allclose(found, right, atol=3e-5 * np.abs(right).max())


def refused(vulkan: VulkanBackend, what: str, **change: Any) -> None:
    batch = plain_batch(vulkan, 1)
    rows, zeros = batch.limits.tokens, vulkan.zeros
    six = zeros((rows, 6))
    given: dict[str, dict[str, Any]] = {
        "short_conv": {
            "x": six, "weight": zeros((6, 3)), "bias": zeros((6,)), "state": zeros((2, 2, 6)),
            "out": zeros((rows, 6)), "activation": "none",
        },
        "gated_delta": {
            "mixed": zeros((rows, 14)), "decay": zeros((rows, 2)), "beta": zeros((rows, 2)),
            "state": zeros((3, 2, 3, 4)), "out": zeros((rows, 2, 4)), "keys": 1, "key_dim": 3,
            "tiled": True, "eps": 1e-6,
        },
        "decay": {"x": six, "bias": zeros((6,)), "factor": zeros((2,)), "out": six},
        "ssm_scan": {
            "mixed": zeros((rows, 14)), "dt": zeros((rows, 2)), "dt_bias": zeros((2,)), "a": zeros((2,)),
            "d": zeros((2,)), "state": zeros((3, 2, 4, 3)), "out": zeros((rows, 2, 4)), "groups": 1,
        },
        "multiply": {"x": six, "gate": six, "out": six, "activation": "none"},
    }  # fmt: skip
    values = given[what] | {"batch": batch} | change
    call = {"gated_delta": DeltaCall, "ssm_scan": ScanCall}.get(what)
    getattr(vulkan, what)(**values) if call is None else getattr(vulkan, what)(call(**values))


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("short_conv", {"weight": (6, 9)}, "short_conv weight of 9 columns: 2 to 8 are allowed"),
    ("short_conv", {"weight": (18,)}, r"weight of shape \(18,\): \[C, k\] is needed"),
    ("short_conv", {"state": (2, 3, 6)}, r"state of shape \(2, 3, 6\): \[slots, 2, 6\] is needed"),
    ("short_conv", {"bias": (5,)}, r"bias of shape \(5,\): \(6,\) is needed"),
    ("short_conv", {"out": (1, 6)}, "out: expected at least 4 rows of 6, got 1 rows of 6"),
    ("gated_delta", {"state": (3, 2, 4)}, r"state of shape \(3, 2, 4\): \[slots, Hv, dk, dv\], with values"),
    ("gated_delta", {"state": (0, 2, 3, 4)}, r"state of shape \(0, 2, 3, 4\): .* with values, is needed"),
    ("gated_delta", {"state": (3, 2, 5, 4)}, r"state of shape \(3, 2, 5, 4\): \[slots, Hv, 3, dv\] is"),
    ("gated_delta", {"mixed": (4, 15)}, "mixed: expected at least 4 rows of 14, got 4 rows of 15"),
    ("gated_delta", {"decay": (4, 2, 4)}, "decay: expected at least 4 rows of 6, got 4 rows of 8"),
    ("gated_delta", {"beta": (4, 3)}, "beta: expected at least 4 rows of 2, got 4 rows of 3"),
    ("decay", {"factor": (4,)}, "decay channels: 6 of them cannot be shared evenly by 4"),
    ("decay", {"bias": (6, 1)}, r"bias of shape \(6, 1\): one axis is needed"),
    ("ssm_scan", {"a": (3,)}, r"a of shape \(3,\): \(2,\) is needed"),
    ("ssm_scan", {"dt": (4, 1)}, "dt: expected at least 4 rows of 2, got 4 rows of 1"),
    ("multiply", {"gate": (4, 5)}, "gate: expected at least 4 rows of 6, got 4 rows of 5"),
)  # fmt: skip


@pytest.mark.parametrize(("what", "shapes", "message"), WRONG)
def test_wrong_shapes_are_refused(
    vulkan: VulkanBackend, what: str, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refused(vulkan, what, **{name: vulkan.zeros(shape) for name, shape in shapes.items()})


def test_wrong_options_are_refused(vulkan: VulkanBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, change, message in (
        ("short_conv", {"activation": "relu"}, "short_conv activation 'relu': choose from none, silu"),
        ("multiply", {"activation": "gelu"}, "multiply activation 'gelu': choose from none, silu, sigmoid"),
        ("gated_delta", {"keys": 3}, "gated_delta v heads: 2 of them cannot be shared evenly by 3"),
        ("ssm_scan", {"groups": 0}, "ssm_scan heads: 2 of them cannot be shared evenly by 0"),
    ):
        with pytest.raises(ValueError, match=message):
            refused(vulkan, what, **change)
    monkeypatch.setattr(recurrent, "MOST_STATE_DIM", 2)
    for what, message in (
        ("gated_delta", "gated_delta with a key_dim of 3: up to 2 are allowed"),
        ("ssm_scan", "ssm_scan with n of 3: up to 2 are allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            refused(vulkan, what)
    with pytest.raises(TypeError, match="state is float16: float32 is needed"):
        refused(vulkan, "short_conv", state=vulkan.zeros((2, 2, 6), np.float16))


def test_states_that_no_shader_can_be_given_are_refused(vulkan: VulkanBackend) -> None:
    most = vulkan.info.max_range
    large = DeviceBuffer(vulkan, Range(None, 0, most + 4), (9, 1, 1), np.dtype(np.float32))
    recording = Recording(vulkan, plain_batch(vulkan, 1), 1)
    message = f"a state of {most + 4} bytes: .* allows {most} for a layer's states; use fewer slots"
    with pytest.raises(ValueError, match=message):
        recurrent._state(recording, large, 3, "")


def test_norms_of_groups_that_do_not_fit_are_refused(vulkan: VulkanBackend) -> None:
    batch, x = plain_batch(vulkan, 1), vulkan.zeros((4, 8))
    for weight, bias, message in (
        ((2, 3), None, r"norm weight of shape \(2, 3\): groups of a row of 8 are needed"),
        ((2, 4), (8,), r"norm bias of shape \(8,\): \(2, 4\) is needed"),
        (None, (4,), r"norm bias of shape \(4,\): \(8,\) is needed"),
    ):
        norm = Norm(*(None if each is None else vulkan.zeros(each) for each in (weight, bias)), 1e-5)
        with pytest.raises(ValueError, match=message):
            vulkan.norm(x, norm, batch, x)
