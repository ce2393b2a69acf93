"""Drafts from a smaller model with the same vocabulary: its likeliest tokens, one after the other."""

import time
from dataclasses import dataclass, field

from hotcold.engine.drafts import Draft, Kind, ModelDrafter
from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.session import Session


@dataclass
class _Text:
    """The tokens of one request that the smaller model has read, and their row and pages."""

    row: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)  # tokens in its KV cache, draft tokens included


class DraftModel(ModelDrafter):
    """A :class:`~hotcold.engine.drafts.ModelDrafter` with its own session of the smaller model. It reads a
    prompt before its first draft, and tokens that replaced rejected ones.

    It drafts nothing for a request without a free row or page, beyond the smaller model's context, or with
    tokens outside the smaller vocabulary. It drafts no token from ``vocab`` on, the size of the larger
    model's vocabulary: both vocabularies may be padded."""

    kind = Kind.MODEL

    def __init__(self, session: Session, vocab: int) -> None:
        super().__init__()
        self._session = session
        self._texts: dict[Request, _Text] = {}
        self._vocab = min(vocab, session.model.config.vocab)
        session.claim(self)

    @property
    def in_use(self) -> str:
        return "a model that drafts"

    def __call__(self, request: Request, most: int) -> Draft | None:
        most = min(most, self._session.model.context - request.length)
        text = self._texts.get(request) or self._begin(request)
        if most < 1 or text is None:
            return None
        while len(text.pages) * PAGE < request.length + most:
            if not self._session.cache.free_pages:
                self._forget_finished()
            if not self._session.cache.extend(request):
                return None
        self._take_back(text, request)
        unread = [*map(int, request.tokens(len(text.tokens), request.length))]
        if max(unread) >= self._vocab:
            return None
        drafts = [self._read(text, unread)]
        start = time.perf_counter()
        while len(drafts) < most:
            drafts.append(self._read(text, drafts[-1:]))
        if most > 1:
            self.note((time.perf_counter() - start) / (most - 1))
        return Draft(drafts, self.kind)

    def seconds_of(self, tokens: int) -> float:
        return tokens * self.seconds

    def clear(self) -> None:
        """Forgets all texts and frees their rows and pages."""
        self._texts.clear()
        self._session.state.clear()

    def _forget_finished(self) -> None:
        for other in [other for other in self._texts if other.finished]:
            self._session.cache.release(other)
            del self._texts[other]

    def _begin(self, request: Request) -> _Text | None:
        """Gives a request a row, without pages yet; frees the rows and pages of finished requests."""
        self._forget_finished()
        taken = {text.row for text in self._texts.values()}
        free = set(range(self._session.model.limits.sequences)) - taken
        if not free:
            return None
        pages = self._session.cache.allocate(request, 0)
        self._texts[request] = text = _Text(min(free), pages)
        return text

    def _take_back(self, text: _Text, request: Request) -> None:
        """Removes rejected draft tokens, and the last token, whose row gives the next one."""
        read = text.tokens
        del read[request.length - 1 :]
        tokens = request.tokens(0, len(read))
        pairs = enumerate(zip(read, tokens, strict=True))
        first_wrong = next((i for i, (a, b) in pairs if a != b), len(read))
        del read[first_wrong:]

    def _read(self, text: _Text, tokens: list[int]) -> int:
        """Reads tokens at the end of a text; returns the likeliest token after them."""
        session = self._session
        batch, limits = session.transformer.batch, session.model.limits
        for at in range(0, len(tokens), limits.tokens):
            chunk = tokens[at : at + limits.tokens]
            rows = batch.put(0, text.row, len(text.tokens), chunk, text.pages)
            batch.logits_rows[0] = rows - 1
            batch.counts[:] = (rows, rows if rows <= limits.decode else 0, 1, limits.sequences)
            session.run()
            text.tokens += chunk
        return int(session.transformer.read_logits(0, 1)[0][: self._vocab].argmax())
