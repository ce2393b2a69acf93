"""The ops of RWKV-7, which GPUs do not compute: against float64, the same bits however rows are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.backends import ISAS, open_one
from support.op_truth import Answer, plain_batch, random_rows, rng
from support.state_cases import LENGTHS, Case, random_steps
from support.state_truth import Piece, Wkv, sigmoid, state_batch, token_shift

from hotcold.kernels.backend import Backend, Batch, Wkv7Call

_EPS = 64e-5


def shift_case(channels: int, count: int) -> Case:
    random = rng("token_shift", channels, count)
    mixes = random.random((count, channels), np.float32)
    x = [random_rows(random, rows, channels) for rows in LENGTHS]

    def call(backend: Backend, batch: Batch, inputs: Any, state: Any, out: Any) -> None:
        outs = [backend.zeros((batch.limits.tokens, channels)) for _ in range(count)]
        backend.token_shift(inputs["x"], mixes, batch, state, outs)
        out[: batch.n_tokens] = np.stack(outs, 1)[: batch.n_tokens]

    truth = [token_shift(each, mixes) for each in x]
    return Case(f"token_shift {channels} to {count}", {"x": x}, (channels,), call, truth)


def wkv_case(heads: int, dim: int, *, blended: bool) -> Case:
    random = rng("wkv7", heads, dim)
    names = ["r", "k", "v", "decay", "rate", *(("first", "share") if blended else ())]
    vectors = random_rows(random, 5, heads * dim)
    vectors[:2] += 1

    def inputs(rows: int) -> Wkv:
        given = {name: random_rows(random, rows, heads, dim) for name in names}
        given["decay"] = given["decay"] * 4
        given["k"][rows // 2] = 0  # without a direction
        return Wkv(given, vectors, _EPS)

    each = [inputs(rows) for rows in LENGTHS]

    def call(backend: Backend, batch: Batch, given: Any, state: Any, out: Any) -> None:
        rows = (given[name] for name in names[:5])
        blend = {name: given[name] for name in names[5:]}
        backend.wkv7(Wkv7Call(*rows, vectors, batch, state, out, **blend, eps=_EPS))

    arrays = {name: [one.given[name] for one in each] for name in names}
    return Case(f"wkv7 {heads} of {dim}", arrays, (heads, dim, dim), call, [one.run() for one in each])


CASES: tuple[Callable[[], Case], ...] = (
    lambda: shift_case(7, 1),
    lambda: shift_case(700, 6),
    lambda: wkv_case(1, 1, blended=False),
    lambda: wkv_case(3, 8, blended=True),
    lambda: wkv_case(2, 21, blended=True),
    lambda: wkv_case(2, 64, blended=False),
)


@pytest.fixture(params=range(len(CASES)))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def test_whole_sequences(cpu_backend: Backend, case: Case) -> None:
    outs, state = case.whole(cpu_backend)
    case.check(outs, state, "whole")
    assert np.isnan(state[len(LENGTHS) :]).all()


def test_steps_of_any_size_give_the_same_bits(cpu_backend: Backend, case: Case) -> None:
    wanted, kept = case.whole(cpu_backend)
    state, outs = case.new_state(cpu_backend), [np.zeros_like(each) for each in wanted]
    last = [-1, -1, -1]
    for decode, prompt in random_steps(rng("steps", 0)):
        rows = case.step(cpu_backend, decode, prompt, state)
        for piece, values in zip([*decode, *prompt], rows, strict=True):
            outs[piece.sequence][piece.start : piece.start + piece.rows] = values
            last[piece.sequence] = piece.state_to
    for i in range(3):
        np.testing.assert_array_equal(outs[i], wanted[i])
        np.testing.assert_array_equal(state[last[i]], kept[i])


def test_the_state_after_each_row_that_decodes(cpu_backend: Backend, case: Case) -> None:
    """Guesses: a sequence continues from the state after any of them, which may be in the slot of the
    first."""
    wanted, kept = case.whole(cpu_backend)
    state = case.new_state(cpu_backend)
    case.step(cpu_backend, [], [Piece(0, 0, 4, state_to=0)], state)
    rows = case.step(cpu_backend, [Piece(0, 4, 4, 0, (3, 0, 5, 6))], [], state)
    np.testing.assert_array_equal(rows[0], wanted[0][4:8])
    rows = case.step(cpu_backend, [], [Piece(0, 6, LENGTHS[0] - 6, 0, 1)], state)
    np.testing.assert_array_equal(rows[0], wanted[0][6:])
    np.testing.assert_array_equal(state[1], kept[0])


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_threads_gives_the_same_bits(isa: str, case: Case) -> None:
    (wanted, kept), (outs, state) = (case.whole(open_one(f"cpu-{isa}", threads)) for threads in (1, 3))
    np.testing.assert_array_equal(state, kept)
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
@pytest.mark.parametrize("width", [1, 7, 2100])
def test_activate(cpu_backend: Backend, activation: str, width: int) -> None:
    x = random_rows(rng("activate", width), 5, width) * 4
    batch = plain_batch(cpu_backend, 2, 3)
    own, out = (cpu_backend.zeros((batch.limits.tokens, width)) for _ in range(2))
    own[:], out[:] = np.nan, 7
    own[:5] = x
    cpu_backend.activate(own, batch, out, activation=activation)
    wanted = {"sigmoid": np.vectorize(sigmoid), "tanh": np.tanh}[activation](x.astype(np.float64))
    Answer(wanted).check(out[:5])
    assert (out[5:] == 7).all()
    cpu_backend.activate(own, batch, own, activation=activation)
    np.testing.assert_array_equal(own[:5], out[:5])


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("activate", {"out": (5, 3)}),
        ("activate", {"activation": "silu"}),
        ("token_shift", {"x": (5, 3)}),
        ("token_shift", {"mixes": (3, 4)}),
        ("token_shift", {"mixes": (2, 5)}),
        ("token_shift", {"outs": []}),
        ("token_shift", {"outs": [(5, 4)] * 9, "mixes": (9, 4)}),
        ("token_shift", {"outs": [(5, 4), (4, 4)]}),
        ("wkv7", {"r": (5, 2, 4)}),
        ("wkv7", {"rate": (5, 5)}),
        ("wkv7", {"vectors": (4, 6)}),
        ("wkv7", {"vectors": (5, 7)}),
        ("wkv7", {"state": (2, 2, 3, 4)}),
        ("wkv7", {"first": None}),
        ("wkv7", {"share": (5, 2, 4)}),
        ("wkv7", {"out": (5, 2, 2)}),
    ],
)
def test_what_does_not_fit_is_refused(cpu_backend: Backend, op: str, change: dict[str, Any]) -> None:
    six = 5, 2, 3
    shapes: dict[str, dict[str, Any]] = {
        "activate": {"x": (5, 4), "out": (5, 4), "activation": "tanh"},
        "token_shift": {"x": (5, 4), "mixes": (2, 4), "state": (2, 4), "outs": [(5, 4), (5, 4)]},
        "wkv7": dict.fromkeys(("r", "k", "v", "decay", "rate", "first", "share", "out"), six)
        | {"vectors": (5, 6), "state": (2, 2, 3, 3), "eps": 1e-5},
    }
    batch = state_batch([], [Piece(0, 0, 2)], spare=3)

    def made(each: Any) -> Any:
        if isinstance(each, list):
            return [made(one) for one in each]
        return cpu_backend.zeros(each) if isinstance(each, tuple) else each

    def run(**other: Any) -> None:
        values = {name: made(each) for name, each in {**shapes[op], **other}.items()}
        if op == "wkv7":
            cpu_backend.wkv7(Wkv7Call(batch=batch, **values))
        else:
            getattr(cpu_backend, op)(batch=batch, **values)

    run()
    with pytest.raises(ValueError):
        run(**change)
