"""Guesses of a smaller model with the same vocabulary: its likeliest tokens, one after the other."""

import time
from dataclasses import dataclass, field

from hotcold.engine.drafts import Draft, Kind, ModelDrafter
from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.session import Session


@dataclass
class _Text:
    """Tokens of one request that the smaller model has read, and where."""

    row: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)  # whose keys and values it has; guesses among them


class DraftModel(ModelDrafter):
    """A :class:`~hotcold.engine.drafts.ModelDrafter` with a session of the smaller model to itself. It reads
    a prompt before its first guess, and what was guessed wrong again. Where a text has no room, is longer
    than the context, or has tokens that the smaller model lacks, it guesses nothing; and it guesses none that
    the larger one lacks, whose vocabulary has ``vocab`` tokens: both may be padded."""

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
        found = [self._read(text, unread)]
        start = time.perf_counter()
        while len(found) < most:
            found.append(self._read(text, found[-1:]))
        if most > 1:
            self.note((time.perf_counter() - start) / (most - 1))
        return Draft(found, self.kind)

    def seconds_of(self, tokens: int) -> float:
        return tokens * self.seconds

    def clear(self) -> None:
        """Forgets all texts, and takes their rows and pages back."""
        self._texts.clear()
        self._session.state.clear()

    def _forget_finished(self) -> None:
        for other in [other for other in self._texts if other.finished]:
            self._session.cache.release(other)
            del self._texts[other]

    def _begin(self, request: Request) -> _Text | None:
        """Gives a request a row and no pages yet; takes those of requests that ended."""
        self._forget_finished()
        taken = {text.row for text in self._texts.values()}
        free = set(range(self._session.model.limits.sequences)) - taken
        if not free:
            return None
        pages = self._session.cache.allocate(request, 0)
        self._texts[request] = text = _Text(min(free), pages)
        return text

    def _take_back(self, text: _Text, request: Request) -> None:
        """Forgets guesses that were wrong, and the last token, which gives the next one."""
        read = text.tokens
        del read[request.length - 1 :]
        own = request.tokens(0, len(read))
        wrong = next((i for i, (a, b) in enumerate(zip(read, own, strict=True)) if a != b), len(read))
        del read[wrong:]

    def _read(self, text: _Text, tokens: list[int]) -> int:
        """Reads tokens at the end of a text; the likeliest one after them."""
        session = self._session
        batch, limits = session.transformer.batch, session.model.limits
        for at in range(0, len(tokens), limits.tokens):
            some = tokens[at : at + limits.tokens]
            rows = batch.put(0, text.row, len(text.tokens), some, text.pages)
            batch.logits_rows[0] = rows - 1
            batch.counts[:] = (rows, rows if rows <= limits.decode else 0, 1, limits.sequences)
            session.run()
            text.tokens += some
        return int(session.transformer.read_logits(0, 1)[0][: self._vocab].argmax())
