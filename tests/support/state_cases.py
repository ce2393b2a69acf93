"""Cases of ops that keep a state: inputs of three sequences, the truth of each, and steps that cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.op_truth import Answer, Doubles, Floats
from support.state_truth import Piece, rows_of_step, state_batch

from hotcold.kernels.backend import Backend

LENGTHS = (11, 9, 6)  #: rows of the three sequences
SLOTS = 7


@dataclass(frozen=True)
class Case:
    """An op with its inputs of three sequences, and what it shall give."""

    name: str
    inputs: dict[str, list[Floats]]
    state: tuple[int, ...]
    call: Callable[..., None]  # backend, batch, inputs by name, state, out
    truth: list[tuple[Doubles, Doubles]]

    @property
    def out(self) -> tuple[int, ...]:
        return self.truth[0][0].shape[1:]

    def step(self, backend: Backend, decode: list[Piece], prompt: list[Piece], state: Any) -> list[Floats]:
        """The rows of each piece, after one step."""
        batch, pieces = state_batch(decode, prompt), [*decode, *prompt]
        inputs = {name: rows_of_step(batch, pieces, each) for name, each in self.inputs.items()}
        out = backend.zeros((batch.limits.tokens, *self.out))
        out[:] = 7
        self.call(backend, batch, inputs, state, out)
        assert (out[batch.n_tokens :] == 7).all()
        ends = np.cumsum([piece.rows for piece in pieces])
        return [out[end - piece.rows : end].copy() for piece, end in zip(pieces, ends, strict=True)]

    def new_state(self, backend: Backend) -> Any:
        state = backend.zeros((SLOTS, *self.state))
        state[:] = np.nan  # must not be read before it is written
        return state

    def whole(self, backend: Backend) -> tuple[list[Floats], Any]:
        """Each sequence as one prompt; sequence i's state goes to slot i."""
        state = self.new_state(backend)
        outs = [
            self.step(backend, [], [Piece(i, 0, rows, state_to=i)], state)[0]
            for i, rows in enumerate(LENGTHS)
        ]
        return outs, state

    def check(self, outs: list[Floats], state: Any, what: object) -> None:
        for i, (rows, kept) in enumerate(self.truth):
            Answer(rows, size=np.abs(rows).max()).check(outs[i], (self.name, what, i))
            Answer(kept, size=np.abs(kept).max()).check(state[i], (self.name, what, "state", i))


def random_steps(random: np.random.Generator) -> list[tuple[list[Piece], list[Piece]]]:
    """The three sequences, cut into steps at random: decode rows, prompt rows, or none; states move to
    another slot, or stay."""
    at, slots = [0, 0, 0], [-1, -1, -1]
    steps = []
    while at != list(LENGTHS):
        free = [slot for slot in range(SLOTS) if slot not in slots]
        decode, prompt = [], []
        for i in random.permutation(3).tolist():
            rows = min(int(random.integers(0, 5)), LENGTHS[i] - at[i])
            if not rows:
                continue
            to = slots[i] if slots[i] >= 0 and random.random() < 0.5 else free.pop()
            piece = Piece(i, at[i], rows, slots[i], to)
            (decode if rows < 3 and random.random() < 0.7 else prompt).append(piece)
            at[i], slots[i] = at[i] + rows, to
        if decode or prompt:
            steps.append((decode, prompt))
    return steps
