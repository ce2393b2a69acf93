"""Guesses of a block of the model's own file (:mod:`hotcold.model.draft_block`): it reads what the model made
of each token."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotcold.engine.drafts import Draft, Kind, ModelDrafter
from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE, Batch
from hotcold.model.draft_block import DraftBlock


@dataclass
class _Text:
    """A request whose last token was chosen by the last step."""

    length: int  # of its tokens
    row: int  # of the block's logits that guess the next one
    found: list[int] = field(default_factory=list)  # guesses, one after the other


class BlockDrafts(ModelDrafter):
    """A :class:`~hotcold.engine.drafts.ModelDrafter` that is told of each step, and guesses for all requests
    of the next one together. ``batch`` is the model's, as the last step left it."""

    kind = Kind.BLOCK

    def __init__(self, block: DraftBlock, batch: Batch) -> None:
        super().__init__()
        self._block = block
        self._batch = batch
        self._texts: dict[Request, _Text] = {}
        self._going_on: list[Request] = []  # those that get one more guess

    def read(self, put: Sequence[tuple[Request, int]]) -> None:
        """Reads a step's rows, of requests up to a position each, with the tokens that follow them. A row of
        a guess that was wrong is followed by anything: a later one takes its place."""
        model, own = self._batch, self._block.batch
        rows = model.n_tokens
        own.tokens[:rows] = 0
        for name in ("positions", "sequence", "slots"):
            getattr(own, name)[:rows] = getattr(model, name)[:rows]
        for name in ("lengths", "first_rows", "row_counts"):
            getattr(own, name)[:] = getattr(model, name)
        self._texts = {}
        for request, end in put:
            at, pages = request.row, -(-end // PAGE)
            own.pages[at, :pages] = model.pages[at, :pages]
            coming = request.tokens(request.computed + 1, min(end + 1, request.length))
            first = int(model.first_rows[at])
            own.tokens[first : first + len(coming)] = coming
            if request.computed + len(coming) == request.length - 1 and not request.finished and coming:
                own.logits_rows[len(self._texts)] = first + len(coming) - 1
                self._texts[request] = _Text(request.length, len(self._texts))
        own.counts[:] = (rows, model.n_decode, len(self._texts), model.counts[3])
        self._block.read()

    def begin(self, requests: Iterable[Request]) -> None:
        """Says which requests the next step serves: the others are not guessed for."""
        served = set(requests)
        self._texts = {
            each: text for each, text in self._texts.items() if each in served and each.length == text.length
        }
        self._going_on = [*self._texts]

    def __call__(self, request: Request, most: int) -> Draft | None:
        text = self._texts.get(request)
        if text is None:
            return None
        while len(text.found) < most and request in self._going_on:
            start = time.perf_counter()
            self._draft_one_more()
            self.note(time.perf_counter() - start)
        return Draft(text.found[:most], self.kind) if text.found and most > 0 else None

    def seconds_of(self, tokens: int) -> float:
        return max(tokens - self._drafted, 0) * self.seconds

    def clear(self) -> None:
        self._texts = {}
        self._going_on = []

    @property
    def _drafted(self) -> int:
        """How many tokens are guessed already for the next step."""
        return max((len(text.found) for text in self._texts.values()), default=0)

    def _draft_one_more(self) -> None:
        """Guesses the next token of each request, after the last guess for it; those that have no page for
        that are left out from here on."""
        if self._drafted:
            self._read_drafts()
        if self._going_on:
            logits = self._block.logits()
            for request in self._going_on:
                text = self._texts[request]
                text.found.append(int(logits[text.row].argmax()))

    def _read_drafts(self) -> None:
        """Has the block read the last guess for each request."""
        own, rows, row = self._block.batch, [], 0
        going_on = self._going_on
        self._going_on = []
        for request in going_on:
            text = self._texts[request]
            position = text.length - 2 + len(text.found)
            if position >= len(request.pages) * PAGE:
                continue
            own.put(row, request.row, position, text.found[-1:], request.pages)
            own.logits_rows[row] = row
            rows.append(text.row)
            text.row = row
            row += 1
            self._going_on.append(request)
        own.counts[:3] = row
        if row:
            self._block.read_own(rows)
