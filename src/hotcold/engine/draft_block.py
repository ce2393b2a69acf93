"""Drafts from a block in the model's own file (:mod:`hotcold.model.draft_block`), which reads the model's
hidden rows."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotcold.engine.drafts import Draft, Kind, ModelDrafter
from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE, Batch
from hotcold.model.draft_block import DraftBlock


@dataclass
class _Text:
    """A request whose last token the last step chose."""

    length: int  # number of its tokens
    row: int  # row of the block's logits for its next draft token
    drafts: list[int] = field(default_factory=list)  # draft tokens so far


class BlockDrafts(ModelDrafter):
    """A :class:`~hotcold.engine.drafts.ModelDrafter` that reads every step, and drafts for all requests of
    the next step in one pass. ``batch`` is the model's, as the last step left it."""

    kind = Kind.BLOCK

    def __init__(self, block: DraftBlock, batch: Batch) -> None:
        super().__init__()
        self._block = block
        self._batch = batch
        self._texts: dict[Request, _Text] = {}
        self._drafting: list[Request] = []  # requests that get a further draft token

    def read(self, put: Sequence[tuple[Request, int]]) -> None:
        """Reads a step's rows, each with the token that follows it. ``put``: requests, each with the position
        after its rows. Rows of rejected draft tokens are read with a wrong next token; later rows overwrite
        them."""
        model, batch = self._batch, self._block.batch
        rows = model.n_tokens
        batch.tokens[:rows] = 0
        for name in ("positions", "sequence", "slots"):
            getattr(batch, name)[:rows] = getattr(model, name)[:rows]
        for name in ("lengths", "first_rows", "row_counts"):
            getattr(batch, name)[:] = getattr(model, name)
        self._texts = {}
        for request, end in put:
            table_row, pages = request.row, -(-end // PAGE)
            batch.pages[table_row, :pages] = model.pages[table_row, :pages]
            following = request.tokens(request.computed + 1, min(end + 1, request.length))
            first = int(model.first_rows[table_row])
            batch.tokens[first : first + len(following)] = following
            if request.computed + len(following) == request.length - 1 and not request.finished and following:
                batch.logits_rows[len(self._texts)] = first + len(following) - 1
                self._texts[request] = _Text(request.length, len(self._texts))
        batch.counts[:] = (rows, model.n_decode, len(self._texts), model.counts[3])
        self._block.read()

    def begin(self, requests: Iterable[Request]) -> None:
        """Sets the requests of the next step; other requests get no drafts."""
        served = set(requests)
        self._texts = {
            each: text for each, text in self._texts.items() if each in served and each.length == text.length
        }
        self._drafting = [*self._texts]

    def __call__(self, request: Request, most: int) -> Draft | None:
        text = self._texts.get(request)
        if text is None:
            return None
        while len(text.drafts) < most and request in self._drafting:
            start = time.perf_counter()
            self._draft_one_more()
            self.note(time.perf_counter() - start)
        return Draft(text.drafts[:most], self.kind) if text.drafts and most > 0 else None

    def seconds_of(self, tokens: int) -> float:
        return max(tokens - self._drafted, 0) * self.seconds

    def clear(self) -> None:
        self._texts = {}
        self._drafting = []

    @property
    def _drafted(self) -> int:
        """Number of tokens drafted so far for the next step."""
        return max((len(text.drafts) for text in self._texts.values()), default=0)

    def _draft_one_more(self) -> None:
        """Drafts one more token for each request; leaves out requests without a page for it."""
        if self._drafted:
            self._read_drafts()
        if self._drafting:
            logits = self._block.logits()
            for request in self._drafting:
                text = self._texts[request]
                text.drafts.append(int(logits[text.row].argmax()))

    def _read_drafts(self) -> None:
        """Lets the block read the last draft token of each request."""
        batch, rows, row = self._block.batch, [], 0
        drafting = self._drafting
        self._drafting = []
        for request in drafting:
            text = self._texts[request]
            position = text.length - 2 + len(text.drafts)
            if position >= len(request.pages) * PAGE:
                continue
            batch.put(row, request.row, position, text.drafts[-1:], request.pages)
            batch.logits_rows[row] = row
            rows.append(text.row)
            text.row = row
            row += 1
            self._drafting.append(request)
        batch.counts[:3] = row
        if row:
            self._block.read_own(rows)
