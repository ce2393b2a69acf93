"""The ops that keep a state: on every backend, against loops in float64; and the same bits however rows are
cut into steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.backends import ISAS, VULKAN, open_one
from support.op_truth import Answer, plain_batch, random_rows, rng
from support.state_cases import LENGTHS, SLOTS, Case, random_steps
from support.state_truth import (
    Delta,
    Piece,
    Scan,
    rows_of_step,
    short_conv,
    sigmoid,
    softplus,
    state_batch,
)

from hotcold.kernels.backend import Backend, Batch, BatchLimits, DeltaCall, Norm, ScanCall

BACKENDS = ("reference", "ordered", *(f"cpu-{isa}" for isa in ISAS), *VULKAN)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_one(str(request.param))


def conv_case(channels: int, taps: int, activation: str, *, biased: bool) -> Case:
    random = rng("short_conv", channels, taps)
    weight, bias = random_rows(random, channels, taps), random_rows(random, channels) if biased else None
    x = [random_rows(random, rows, channels) for rows in LENGTHS]

    def call(backend: Backend, batch: Batch, inputs: Any, state: Any, out: Any) -> None:
        backend.short_conv(inputs["x"], weight, bias, batch, state, out, activation=activation)

    truth = [short_conv(each, weight, bias, activation) for each in x]
    return Case(f"short_conv {channels}x{taps}", {"x": x}, (taps - 1, channels), call, truth)


def delta_case(keys: int, heads: int, dk: int, dv: int, *, tiled: bool, per_channel: bool) -> Case:
    random = rng("gated_delta", keys, heads, dk, dv)

    def inputs(rows: int) -> Delta:
        decay = -np.exp(random_rows(random, rows, heads, *([dk] if per_channel else [])) * 2)
        decay[rows // 2] = -316  # as seen in files
        return Delta(
            q=random_rows(random, rows, keys, dk),
            k=random_rows(random, rows, keys, dk),
            v=random_rows(random, rows, heads, dv),
            decay=decay,
            beta=random_rows(random, rows, heads) * 2,
            tiled=tiled,
            eps=1e-6,
        )

    each = [inputs(rows) for rows in LENGTHS]

    def call(backend: Backend, batch: Batch, given: Any, state: Any, out: Any) -> None:
        backend.gated_delta(DeltaCall(
            *(given[name] for name in ("mixed", "decay", "beta")), batch, state, out,
            keys=keys, key_dim=dk, tiled=tiled, eps=1e-6,
        ))  # fmt: skip

    names = ("mixed", "decay", "beta")
    arrays = {name: [getattr(one, name) for one in each] for name in names}
    shape = f"{keys}, {heads} of {dk}x{dv}"
    return Case(f"gated_delta {shape}", arrays, (heads, dk, dv), call, [one.run() for one in each])


def scan_case(heads: int, width: int, size: int, groups: int) -> Case:
    random = rng("ssm_scan", heads, width, size)
    dt_bias, d = random_rows(random, heads), random_rows(random, heads)
    a = -np.exp(random_rows(random, heads))
    each = [
        Scan(
            x=random_rows(random, rows, heads, width),
            b=random_rows(random, rows, groups, size),
            c=random_rows(random, rows, groups, size),
            dt=random_rows(random, rows, heads) * 3,
            dt_bias=dt_bias,
            a=a,
            d=d,
        )
        for rows in LENGTHS
    ]

    def call(backend: Backend, batch: Batch, given: Any, state: Any, out: Any) -> None:
        backend.ssm_scan(
            ScanCall(given["mixed"], given["dt"], dt_bias, a, d, batch, state, out, groups=groups)
        )

    arrays = {name: [getattr(one, name) for one in each] for name in ("mixed", "dt")}
    return Case(
        f"ssm_scan {heads} of {width}x{size}", arrays, (heads, width, size), call, [s.run() for s in each]
    )


CASES: tuple[Callable[[], Case], ...] = (
    lambda: conv_case(1, 2, "none", biased=False),
    lambda: conv_case(7, 3, "none", biased=True),
    lambda: conv_case(300, 4, "silu", biased=True),
    lambda: conv_case(64, 8, "silu", biased=False),
    lambda: conv_case(270, 3, "none", biased=False),
    lambda: delta_case(1, 1, 1, 1, tiled=True, per_channel=False),
    lambda: delta_case(2, 6, 8, 8, tiled=True, per_channel=False),
    lambda: delta_case(2, 6, 8, 12, tiled=False, per_channel=False),
    lambda: delta_case(3, 3, 24, 41, tiled=True, per_channel=True),
    lambda: delta_case(1, 2, 64, 128, tiled=False, per_channel=False),
    lambda: delta_case(1, 2, 128, 9, tiled=False, per_channel=True),
    lambda: scan_case(1, 1, 1, 1),
    lambda: scan_case(6, 8, 16, 2),
    lambda: scan_case(4, 7, 27, 4),
    lambda: scan_case(2, 18, 128, 1),
)


@functools.cache  # the truth of each is the same for every backend
def made(index: int) -> Case:
    return CASES[index]()


@pytest.fixture(params=range(len(CASES)))
def case(request: pytest.FixtureRequest) -> Case:
    return made(request.param)


def test_whole_sequences(backend: Backend, case: Case) -> None:
    outs, state = case.whole(backend)
    case.check(outs, state, "whole")
    assert np.isnan(state[len(LENGTHS) :]).all()


def test_steps_of_any_size_give_the_same_bits(backend: Backend, case: Case) -> None:
    """Decode rows, chunks and batches, with states that move between slots, as one prompt of each."""
    wanted, kept = case.whole(backend)
    for seed in range(2):
        state, outs = case.new_state(backend), [np.zeros_like(each) for each in wanted]
        last = [-1, -1, -1]
        for decode, prompt in random_steps(rng("steps", seed)):
            before = state.copy()
            rows = case.step(backend, decode, prompt, state)
            for piece, values in zip([*decode, *prompt], rows, strict=True):
                outs[piece.sequence][piece.start : piece.start + piece.rows] = values
                last[piece.sequence] = piece.state_to
            others = [slot for slot in range(SLOTS) if slot not in {p.state_to for p in [*decode, *prompt]}]
            np.testing.assert_array_equal(state[others], before[others])
        for i in range(3):
            np.testing.assert_array_equal(outs[i], wanted[i])
            np.testing.assert_array_equal(state[last[i]], kept[i])


def test_a_state_that_is_not_kept_and_one_that_two_sequences_go_on_from(backend: Backend, case: Case) -> None:
    """A fork: two sequences read slot 0; one writes another slot, the other nothing."""
    wanted, kept = case.whole(backend)
    state = case.new_state(backend)
    case.step(backend, [], [Piece(0, 0, 4, state_to=0)], state)
    before, rest = state.copy(), LENGTHS[0] - 4
    twin = replace(case, inputs={name: [each[0], each[0]] for name, each in case.inputs.items()})
    pieces = [Piece(1, 4, rest, 0, -1), Piece(0, 4, rest, 0, 3)]
    for rows in twin.step(backend, [], pieces, state):
        np.testing.assert_array_equal(rows, wanted[0][4:])
    np.testing.assert_array_equal(state[3], kept[0])
    np.testing.assert_array_equal(state[[0, 1, 2, 4, 5, 6]], before[[0, 1, 2, 4, 5, 6]])


def test_the_state_after_each_row_that_decodes(backend: Backend, case: Case) -> None:
    """Guesses: a sequence continues from the state after any of them, which may be in the slot of the
    first."""
    wanted, kept = case.whole(backend)
    state = case.new_state(backend)
    case.step(backend, [], [Piece(0, 0, 4, state_to=0)], state)
    rows = case.step(backend, [Piece(0, 4, 4, 0, (3, 0, 5, 6)), Piece(1, 0, 2, -1, 4)], [], state)
    np.testing.assert_array_equal(rows[0], wanted[0][4:8])
    np.testing.assert_array_equal(rows[1], wanted[1][:2])
    assert np.isnan(state[[1, 2]]).all()
    for length, slot in ((5, 3), (6, 0), (7, 5), (8, 6)):
        alone = case.new_state(backend)
        case.step(backend, [], [Piece(0, 0, length, state_to=1)], alone)
        np.testing.assert_array_equal(state[slot], alone[1])
    rows = case.step(backend, [], [Piece(0, 6, LENGTHS[0] - 6, 0, 1)], state)
    np.testing.assert_array_equal(rows[0], wanted[0][6:])
    np.testing.assert_array_equal(state[1], kept[0])


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_threads_gives_the_same_bits(isa: str, case: Case) -> None:
    (wanted, kept), (outs, state) = (case.whole(open_one(f"cpu-{isa}", threads)) for threads in (1, 3))
    np.testing.assert_array_equal(state, kept)
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out, want)


def test_a_recorded_program_reads_slots_when_it_runs(backend: Backend) -> None:
    """A step that writes another slot than it reads can be repeated, whatever happened to the first try."""
    case = conv_case(7, 3, "none", biased=True)
    pieces = [Piece(0, 0, 4, state_to=1)]
    batch, state = state_batch(pieces, []), case.new_state(backend)
    x, out = rows_of_step(batch, pieces, case.inputs["x"]), backend.zeros((batch.limits.tokens, 7))
    program = backend.record(lambda: case.call(backend, batch, {"x": x}, state, out))
    program.run()
    for slot in (5, 2):
        x[:2] = case.inputs["x"][0][4:6]
        batch.put(0, 0, 4, [0, 0], [0], state_from=1, state_to=slot)
        batch.counts[:2] = 2
        program.run()
    Answer(case.truth[0][0][4:6]).check(out[:2])
    np.testing.assert_array_equal(state[5], state[2])
    np.testing.assert_array_equal(state[2], case.inputs["x"][0][4:6])
    batch.counts[:2] = 0  # no sequence has a row
    program.run()
    np.testing.assert_array_equal(state[2], case.inputs["x"][0][4:6])


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("short_conv", {"x": (5, 3)}),
        ("short_conv", {"weight": (4, 4)}),
        ("short_conv", {"weight": (4, 9), "state": (2, 8, 4)}),
        ("short_conv", {"weight": (4, 1), "state": (2, 0, 4)}),
        ("short_conv", {"bias": (3,)}),
        ("short_conv", {"state": (2, 2, 5)}),
        ("short_conv", {"activation": "gelu"}),
        ("gated_delta", {"mixed": (5, 19)}),
        ("gated_delta", {"decay": (5, 3)}),
        ("gated_delta", {"beta": (5, 1)}),
        ("gated_delta", {"state": (2, 2, 4, 3)}),
        ("gated_delta", {"keys": 3}),
        ("gated_delta", {"keys": 0}),
        ("gated_delta", {"out": (2, 2, 4)}),
        ("decay", {"x": (5, 7)}),
        ("decay", {"factor": (4,)}),
        ("decay", {"out": (2, 6)}),
        ("ssm_scan", {"mixed": (5, 12)}),
        ("ssm_scan", {"dt": (5, 3)}),
        ("ssm_scan", {"a": (1,)}),
        ("ssm_scan", {"state": (2, 2, 3)}),
        ("ssm_scan", {"groups": 3}),
        ("ssm_scan", {"groups": 0}),
        ("multiply", {"gate": (5, 5)}),
        ("multiply", {"activation": "gelu"}),
    ],
)
def test_what_does_not_fit_is_refused(backend: Backend, op: str, change: dict[str, Any]) -> None:
    """``change`` has wrong shapes of arrays, or wrong values."""
    shapes: dict[str, dict[str, Any]] = {
        "short_conv": {
            "x": (5, 4), "weight": (4, 3), "bias": (4,), "state": (2, 2, 4), "out": (5, 4),
            "activation": "silu",
        },
        "gated_delta": {
            "mixed": (5, 20), "decay": (5, 2), "beta": (5, 2), "state": (2, 2, 3, 4), "out": (5, 2, 4),
            "keys": 2, "key_dim": 3, "tiled": True, "eps": 1e-6,
        },
        "decay": {"x": (5, 6), "bias": (6,), "factor": (3,), "out": (5, 6)},
        "ssm_scan": {
            "mixed": (5, 14), "dt": (5, 2), "dt_bias": (2,), "a": (2,), "d": (2,), "state": (2, 2, 3, 4),
            "out": (5, 2, 3), "groups": 1,
        },
        "multiply": {"x": (5, 4), "gate": (5, 4), "out": (5, 4), "activation": "none"},
    }  # fmt: skip
    batch = state_batch([], [Piece(0, 0, 2)], spare=3)

    def run(**other: Any) -> None:
        given = {**shapes[op], **other}
        arrays = {name: backend.zeros(each) for name, each in given.items() if isinstance(each, tuple)}
        values = {"batch": batch, **given, **arrays}
        call = {"gated_delta": DeltaCall, "ssm_scan": ScanCall}.get(op)
        getattr(backend, op)(**values) if call is None else getattr(backend, op)(call(**values))

    run()
    with pytest.raises(ValueError):
        run(**change)
    first, shape = next(iter(shapes[op].items()))
    with pytest.raises(TypeError):
        run(**{first: np.zeros(shape)})


@pytest.mark.parametrize(
    ("decode", "prompt", "change", "message"),
    [
        ([Piece(0, 3, 1, 7, 0)], [], {}, r"state_from 7 is out of range; allowed: -1 to 6"),
        ([Piece(0, 3, 1, 0, -2)], [], {}, r"state_to -2 is out of range; allowed: -1 to 6"),
        ([Piece(0, 3, 1, 0, 2), Piece(1, 3, 1, 1, 2)], [], {}, "two rows write the state in slot 2"),
        ([Piece(0, 3, 2, 0, (2, 2))], [], {}, "two rows write the state in slot 2"),
        ([Piece(0, 3, 1, 0, 1), Piece(1, 3, 1, 1, 2)], [], {}, "slot 1 is read by one sequence and written"),
        ([Piece(0, 3, 2, 0, (1, 0)), Piece(1, 3, 1, 1, 2)], [], {}, "slot 1 is read by one sequence and"),
        ([Piece(0, 3, 2, 0, (7, 0))], [], {}, r"state_to 7 is out of range; allowed: -1 to 6"),
        ([], [Piece(0, 3, 3, 0, (1, 2))], {}, "row 1 of a prompt keeps a state, which only its last one may"),
        ([Piece(0, 3, 1)], [Piece(1, 0, 3)], {"row_counts": (1, 2)}, "1 rows belong to no sequence"),
        ([Piece(0, 3, 1)], [Piece(1, 0, 3)], {"row_counts": (1, 4)}, r"rows 1 to 5 of sequence 1 are out"),
        ([Piece(0, 3, 1)], [Piece(1, 0, 3)], {"row_counts": (0, -1)}, r"rows 0 to -1 of sequence 0 are out"),
        ([Piece(0, 3, 1)], [Piece(1, 0, 3)], {"first_rows": (1, 0)}, "from 0 on are not all of sequence 1"),
        ([Piece(0, 3, 1)], [Piece(1, 0, 3)], {"counts": (1, 3)}, "sequence 1 has decode rows and prompt"),
    ],
)
def test_a_batch_that_breaks_the_rules_is_refused(
    backend: Backend, decode: list[Piece], prompt: list[Piece], change: dict[str, Any], message: str
) -> None:
    """``change`` sets one entry of an array of the batch."""
    batch = state_batch(decode, prompt)
    for name, (at, value) in change.items():
        getattr(batch, name)[at] = value
    rows, state = batch.limits.tokens, backend.zeros((SLOTS, 2, 4))
    x, out = backend.zeros((rows, 4)), backend.zeros((rows, 4))
    with pytest.raises(ValueError, match=message):
        backend.short_conv(x, np.ones((4, 3), np.float32), None, batch, state, out, activation="none")


@pytest.mark.parametrize(("channels", "heads"), [(1, 1), (64, 64), (96, 4), (5, 5)])
def test_decay(backend: Backend, channels: int, heads: int) -> None:
    random = rng("decay", channels)
    x = random_rows(random, 5, channels) * 20
    x[0, 0], x[1, 0], x[2, 0] = -90, 90, 0
    bias, factor = random_rows(random, channels), -np.exp(random_rows(random, heads))
    batch = plain_batch(backend, 2, 3)
    buffer, out = (backend.zeros((batch.limits.tokens, channels)) for _ in range(2))
    buffer[:], buffer[:5], out[:] = np.nan, x, 7
    backend.decay(buffer, bias, factor, batch, out)
    wanted = np.empty((5, channels))
    for (t, i), value in np.ndenumerate(x):
        head = i // (channels // heads)
        wanted[t, i] = float(factor[head]) * softplus(float(value) + float(bias[i]))
    np.testing.assert_allclose(out[:5], wanted, rtol=1e-5, atol=1e-30)
    assert (out[5:] == 7).all()
    backend.decay(buffer, bias, factor, batch, buffer)  # in place
    np.testing.assert_array_equal(buffer[:5], out[:5])


@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid", "relu"])
@pytest.mark.parametrize("width", [1, 7, 64, 2100])
def test_multiply(backend: Backend, activation: str, width: int) -> None:
    random = rng("multiply", width)
    x, gate = random_rows(random, 5, width), random_rows(random, 5, width) * 4
    batch = plain_batch(backend, 2, 3)
    own, gates, out = (backend.zeros((batch.limits.tokens, width)) for _ in range(3))
    own[:], gates[:], out[:] = np.nan, np.nan, 7
    own[:5], gates[:5] = x, gate
    backend.multiply(own, gates, batch, out, activation=activation)
    factors = {
        "none": gate,
        "silu": gate * np.vectorize(sigmoid)(gate.astype(np.float64)),
        "sigmoid": np.vectorize(sigmoid)(gate.astype(np.float64)),
        "relu": np.maximum(gate, 0),
    }
    Answer(x.astype(np.float64) * factors[activation]).check(out[:5])
    assert (out[5:] == 7).all()
    backend.multiply(own, gates, batch, own, activation=activation)
    np.testing.assert_array_equal(own[:5], out[:5])
    own[:5] = x
    backend.multiply(own, gates, batch, gates, activation=activation)
    np.testing.assert_array_equal(gates[:5], out[:5])


@pytest.mark.parametrize(("groups", "size"), [(1, 7), (4, 6), (8, 64)])
@pytest.mark.parametrize("centre", [False, True])
def test_norm_of_groups(backend: Backend, groups: int, size: int, centre: bool) -> None:
    random = rng("groups", groups, size)
    x, weight, bias = (random_rows(random, *shape) for shape in ((5, groups * size), *[(groups, size)] * 2))
    batch = plain_batch(backend, 2, 3)
    buffer = backend.zeros((batch.limits.tokens, groups * size))
    buffer[:5] = x
    backend.norm(buffer, Norm(weight, bias if centre else None, 1e-5, centre), batch, buffer)
    values = x.astype(np.float64).reshape(5, groups, size)
    if centre:
        values = values - values.mean(-1, keepdims=True)
    values = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weight + centre * bias
    Answer(values.reshape(5, -1)).check(buffer[:5])
    with pytest.raises(ValueError, match=r"norm|shape"):
        backend.norm(buffer, Norm(random_rows(random, groups, size + 1), None, 1e-5), batch, buffer)


def test_norm_without_a_weight(backend: Backend) -> None:
    """Over the last axis, of each head."""
    x = random_rows(rng("weightless"), 5, 3, 20)
    batch = plain_batch(backend, 2, 3)
    buffer = backend.zeros((batch.limits.tokens, 3, 20))
    buffer[:5] = x
    backend.norm(buffer, Norm(None, None, 1e-6), batch, buffer)
    values = x.astype(np.float64)
    Answer(values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6)).check(buffer[:5])


def test_put_fills_what_ops_with_a_state_read() -> None:
    """Row 0 begins a step, in which sequences that are not put have no rows."""
    batch = Batch(BatchLimits(8, 4, 1, 1))
    row = batch.put(0, 2, 5, [1, 2, 3], [0], state_from=6, state_to=4)
    assert batch.put(row, 0, 0, [9], [0]) == 4
    assert batch.first_rows[[2, 0]].tolist() == [0, 3] and batch.row_counts.tolist() == [1, 0, 3, 0]
    assert batch.state_from[[2, 0]].tolist() == [6, -1]
    assert batch.state_to.tolist() == [-1, -1, 4, -1, *[-1] * 4]
    batch.put(4, 3, 0, [1, 2, 3], [0], state_to=[5, 0])
    assert batch.state_to.tolist() == [-1, -1, 4, -1, -1, 5, 0, -1]
    batch.put(0, 1, 0, [1, 2], [0])
    assert batch.row_counts.tolist() == [0, 2, 0, 0]
