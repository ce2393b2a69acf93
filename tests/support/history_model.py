"""A model whose logits depend on every token before them, read back through the page table.

Anything wrong in a batch (a slot, a page, a position, a stale token) gives other tokens than :func:`follow`,
which knows neither batches nor pages. With ``prefill_equals_decode=False`` logits depend, too, on whether
each position was a decode row or a row of a prompt, as under ``predicted``. With ``copies`` it has slots of
states, too, each the history itself: logits come from those, and must agree with the pages."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from hotcold.kernels.backend import DECODE_ROWS, PAGE, Batch, BatchLimits
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.kv_cache import PagePool, SequenceState, SlotPool
from hotcold.runtime.counters import Counters
from hotcold.runtime.session_lock import SessionLock

VOCAB = 50
STOP = 7


def logits_after(history: list[int]) -> np.ndarray:
    """``[VOCAB]`` float32, different for every history."""
    return _logits_after(tuple(history)).copy()


@lru_cache(1 << 13)  # the model and the truth ask for the same ones
def _logits_after(history: tuple[int, ...]) -> np.ndarray:
    seed = np.array([len(history), *history], np.uint32)
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def follow(
    prompt: list[int],
    n: int,
    *,
    ignore_eos: bool = False,
    prefill_equals_decode: bool = True,
    scored: bool = False,
) -> list[int]:
    """The greedy continuation, one token at a time; ``scored``: the prompt's rows are decode rows."""
    decoded = 0 if prefill_equals_decode else VOCAB
    history = [token + (decoded if scored else 0) for token in prompt]
    output: list[int] = []
    for _ in range(n):
        logits = logits_after(history)
        if ignore_eos:
            logits[STOP] = -np.inf
        token = int(logits.argmax())
        if token == STOP:
            break
        output.append(token)
        history.append(token + decoded)
    return output


class HistoryTransformer:
    """Keeps a token per slot instead of K and V; checks each batch against the rules of the waist."""

    def __init__(
        self,
        limits: BatchLimits,
        pages: int,
        *,
        prefill_equals_decode: bool = True,
        separates_prompts: bool = False,
        slots: SlotPool | None = None,
    ) -> None:
        self.batch = Batch(limits)
        self.slots = slots
        self.states: list[list[int] | None] = [None] * (slots.slots + slots.spare if slots else 0)
        self.decoded = 0 if prefill_equals_decode else VOCAB  # added to the tokens of decode rows
        self.separates_prompts = separates_prompts
        self.head = ReferenceBackend()
        self.logits = np.zeros((limits.logits, VOCAB), np.float32)
        self.logits_after = logits_after
        self.kept = np.full(pages * PAGE, -1)
        self.row_counts: list[tuple[int, int]] = []
        self.interrupt_in: int | None = None
        self.interrupt: type[BaseException] = KeyboardInterrupt

    def read_logits(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.logits[start:stop]

    def run(self) -> None:
        batch = self.batch
        n, n_decode, n_logits, n_sequences = (int(count) for count in batch.counts)
        assert n_decode <= min(n, DECODE_ROWS)
        assert n_decode in (0, n) or not self.separates_prompts
        assert n <= batch.limits.tokens and n_logits <= batch.limits.logits
        assert batch.sequence[:n].min() >= 0 and batch.sequence[:n].max() < n_sequences
        assert len(set(batch.slots[:n].tolist())) == n
        for row in range(n):
            position, pages = int(batch.positions[row]), batch.pages[batch.sequence[row]]
            assert batch.slots[row] == pages[position // PAGE] * PAGE + position % PAGE
            assert position < batch.lengths[batch.sequence[row]]
            self.kept[batch.slots[row]] = batch.tokens[row] + (self.decoded if row < n_decode else 0)
        if self.slots is not None:
            self.write_states()
        if self.interrupt_in is not None:
            self.interrupt_in -= 1
            if self.interrupt_in < 0:
                self.interrupt_in = None
                raise self.interrupt
        for i in range(n_logits):
            self.logits[i] = self.logits_after(self.history(int(batch.logits_rows[i])))
        self.row_counts.append((n_decode, n - n_decode))

    def write_states(self) -> None:
        """Adds each sequence's rows to the state that it reads, where it may write the results."""
        batch, n = self.batch, int(self.batch.counts[0])
        rows_so_far, results, read = 0, {}, {}
        for sequence in range(int(batch.counts[3])):
            first, rows = int(batch.first_rows[sequence]), int(batch.row_counts[sequence])
            if not rows:
                continue
            rows_so_far += rows
            source = int(batch.state_from[sequence])
            assert set(batch.sequence[first : first + rows].tolist()) == {sequence} and first + rows <= n
            start = int(batch.positions[first])
            assert batch.positions[first : first + rows].tolist() == list(range(start, start + rows))
            read.setdefault(source, set()).add(sequence)
            before = [] if source == -1 else self.states[source]
            assert before is not None and len(before) == start, "a state after other tokens was read"
            state = [*before]
            for row in range(first, first + rows):
                state.append(int(self.kept[batch.slots[row]]))
                write = int(batch.state_to[row])
                assert write >= 0 or row + 1 < first + rows
                if write >= 0:
                    assert row < batch.counts[1] or row + 1 == first + rows
                    assert write not in results and self.may_write(write)
                    results[write] = sequence, [*state]
        assert rows_so_far == n
        for write, (sequence, _) in results.items():
            assert read.get(write, set()) <= {sequence}, "a state that another reads was written"
        for write, (_, state) in results.items():
            self.states[write] = state if self.interrupt_in != 0 else None

    def may_write(self, place: int) -> bool:
        """True if one request owns the content exclusively, or no request ever does."""
        slot = [self.slots.at(slot) for slot in range(len(self.states))].index(place)
        return slot >= self.slots.slots or (slot not in self.slots._keys and self.slots.owners(slot) == 1)

    def history(self, row: int) -> list[int]:
        pages, length = self.batch.pages[self.batch.sequence[row]], int(self.batch.positions[row]) + 1
        slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()[:length]
        found: list[int] = self.kept[slots].tolist()
        if self.slots is not None:
            sequence, own = self.batch.sequence[row], int(self.batch.state_to[row])
            last = self.batch.first_rows[sequence] + self.batch.row_counts[sequence] - 1
            state = self.states[self.batch.state_to[last]]
            assert state is not None and state[:length] == found
            assert own < 0 or self.states[own] == found
        return found


def history_model(
    *,
    context: int = 200,
    sequences: int = 1,
    pages: int | None = None,
    chunk: int = 16,
    prefill_equals_decode: bool = True,
    separates_prompts: bool = False,
    copies: int | None = None,
    spare: int = 0,
) -> Any:
    """Makes the part of a session that an :class:`~hotcold.engine.engine.Engine` needs; ``copies``: slots of
    states beside those of the sequences, None where the model has no states; ``spare``: those after guesses.
    """
    per_sequence = -(-context // PAGE)
    pages = sequences * per_sequence if pages is None else pages
    limits = BatchLimits(DECODE_ROWS + chunk, sequences, per_sequence, max(DECODE_ROWS, sequences))
    slots = None if copies is None else SlotPool(sequences + copies, spare)
    same = prefill_equals_decode and not separates_prompts
    transformer = HistoryTransformer(
        limits, pages, prefill_equals_decode=same, separates_prompts=separates_prompts, slots=slots
    )
    model = SimpleNamespace(
        config=SimpleNamespace(vocab=VOCAB),
        context=context,
        limits=SimpleNamespace(chunk=chunk),
        backend=ReferenceBackend(),
        tokenizer=SimpleNamespace(stop_ids=frozenset({STOP})),
        disk_counts=lambda: None,
    )
    state = SequenceState.__new__(SequenceState)  # its places alone, without buffers
    state.pages, state.slots, state.layers = PagePool(pages), slots, []
    return SimpleNamespace(
        sparsity="exact" if prefill_equals_decode else "predicted",
        identity=("history",),
        model=model,
        transformer=transformer,
        state=state,
        cache=state.pages,
        slots=slots,
        lock=SessionLock(),
        closed=False,
        claim=lambda user: None,
        counters=Counters(np.zeros((1, 4), np.int64)),
        run=transformer.run,
        add_seconds=lambda seconds, prompt: None,
        count_drafts=lambda verified, rejected: None,
        count_drafting=lambda seconds: None,
    )
