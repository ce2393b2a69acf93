"""The rows of one step, as all backends read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from hotcold.kernels.arrays import Ints

PAGE = 32  #: positions in one page of the KV cache
SPLIT = 256  #: positions in one partial of attention; fixed, so that results do not depend on threads
DECODE_ROWS = 16  #: decode rows of one step that every backend takes; some take more


@dataclass(frozen=True)
class BatchLimits:
    """Sizes of the largest step."""

    tokens: int  #: rows of one step
    sequences: int
    pages_per_sequence: int
    logits: int  #: rows whose logits are computed
    decode: int = DECODE_ROWS  #: decode rows, if ``tokens`` is at least as large

    @classmethod
    def from_context(cls, context: int, sequences: int, chunk: int) -> Self:
        """Makes the limits for sequences of at most ``context`` positions, ``chunk`` prompt rows a step."""
        return cls(DECODE_ROWS + chunk, sequences, -(-context // PAGE), max(DECODE_ROWS, sequences))

    @property
    def chunk(self) -> int:
        """The most prompt rows of a step."""
        return self.tokens - self.decode


class Batch:
    """Inputs of one step, int32, filled in place. Decode rows come first, then prompt rows.

    All of it is host memory, and one batch serves all backends of a model. A
    :class:`~hotcold.kernels.backend.Program` copies the numbers that it needs to its device."""

    def __init__(self, limits: BatchLimits) -> None:
        def zeros(*shape: int) -> Ints:
            return np.zeros(shape, np.int32)

        self.limits = limits
        self.counts = zeros(4)  #: n_tokens, n_decode, n_logits, n_sequences
        self.tokens = zeros(limits.tokens)
        self.positions = zeros(limits.tokens)  #: of each token within its sequence
        self.sequence = zeros(limits.tokens)  #: row of ``pages``
        self.slots = zeros(limits.tokens)  #: ``page * PAGE + offset``: where K and V are stored
        self.pages = zeros(limits.sequences, limits.pages_per_sequence)  #: of each sequence, in order
        self.lengths = zeros(limits.sequences)  #: positions of each sequence after this step
        self.logits_rows = zeros(limits.logits)  #: rows of the step that need logits
        # Only ops that keep a state (StateOps) read the arrays below: by sequence, the last one by row.
        self.first_rows = zeros(limits.sequences)  #: first row of each sequence
        self.row_counts = zeros(limits.sequences)  #: 0 where a sequence has no row in this step
        self.state_from = zeros(limits.sequences)  #: slot to read its state from; -1: zeros
        #: by row: slot for the state after it; -1: do not store it
        self.state_to = np.full(limits.tokens, -1, np.int32)

    def put(
        self,
        row: int,
        sequence: int,
        start: int,
        tokens: Sequence[int] | Ints,
        pages: Sequence[int],
        *,
        state_from: int = -1,
        state_to: int | Sequence[int] = -1,
    ) -> int:
        """Fills rows from ``row`` on with a sequence's tokens from position ``start`` on; returns the next
        row. All pages of the sequence are in ``pages``.

        ``state_to``: the slot for the state after its last row, or slots for as many of its last rows. The
        caller fills the rest of the batch. Each sequence is put once a step, with all its rows. Row 0 begins
        a new step."""
        if row == 0:
            self.row_counts[:] = 0
        self.first_rows[sequence], self.row_counts[sequence] = row, len(tokens)
        self.state_from[sequence] = state_from
        self.state_to[row : row + len(tokens)] = -1
        for position, token in enumerate(tokens, start):  # faster than arrays for a row or two
            at, offset = divmod(position, PAGE)
            page = self.pages[sequence, at] = pages[at]
            self.tokens[row] = token
            self.positions[row] = position
            self.sequence[row] = sequence
            self.slots[row] = page * PAGE + offset
            row += 1
        self.lengths[sequence] = start + len(tokens)
        if isinstance(state_to, int):
            self.state_to[row - 1] = state_to
        else:
            self.state_to[row - len(state_to) : row] = state_to
        return row

    @property
    def n_tokens(self) -> int:
        return int(self.counts[0])

    @property
    def n_decode(self) -> int:
        return int(self.counts[1])

    @property
    def n_logits(self) -> int:
        return int(self.counts[2])
