"""Checks untrusted grammars: a child process with limits compiles each one and follows it for some tokens.

Both sides are in this module: :class:`GrammarProcess` asks, and :func:`answer` runs in the child process."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hotcold.engine.request import Grammar, RequestError
from hotcold.errors import UserError
from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import patterns_in_lark
from hotcold.grammar.matching import GrammarConstraint
from hotcold.grammar.notations import lark_of
from hotcold.processes.guarded import GuardedProcess, ProcessDied, ProcessTimeout

SECONDS = 2.0  #: of processor time, for one grammar
VOCABULARY_S = 60.0  #: for the vocabulary, once in a process
MEMORY_BYTES = 1 << 30  #: in addition to the memory after imports; a vocabulary takes some of it
CHECKED_CHARS = 1 << 21  #: of a grammar in Lark
RETRY_S = 5.0  #: time after which to try again
_WALK_S = 0.3  # of processor time, for all walks of a grammar
#: Bytes that lead from one property of a JSON object to the next, and into each, by preference.
_OPENING = b'",{['
#: For each walk: its tokens, in one answer or several; the share of tokens for which _OPENING is preferred;
#: and the number of candidates for other tokens. The candidate that leads deepest into a text is taken.
_WALKS = ((200, 1.0, 1), (100, 0.3, 4), (80, 0.0, 16))


class GrammarProcess:
    """Checks grammars for one vocabulary, from one thread at a time."""

    def __init__(self, vocabulary: GrammarVocabulary, seconds: float = SECONDS) -> None:
        self._vocabulary = vocabulary
        self._process = GuardedProcess(
            __name__, seconds=seconds, memory_bytes=MEMORY_BYTES, output_bytes=8 * CHECKED_CHARS
        )

    def check(self, grammar: Grammar) -> str:
        """Returns the grammar in Lark. GrammarError: it does not compile, has no continuation, or takes too
        much time or memory. RequestError ``queue_full``: the machine is too busy; ``engine_failed``: no
        process could be started."""
        for last in (False, True):  # once more, because the process may have been killed from outside
            self.prepare()
            try:
                lark: str = self._process.ask({"kind": grammar.kind, "source": grammar.source})["lark"]
            except ProcessTimeout as error:
                if error.by_clock:
                    message = "the machine is too busy to check the grammar: try again later"
                    raise RequestError(message, "queue_full", RETRY_S) from None
                raise GrammarError(f"the grammar is too complex: {error}") from None
            except ProcessDied as error:
                if last:
                    raise GrammarError(f"the grammar could not be checked, twice: {error}") from None
            except UserError as error:
                raise GrammarError(str(error)) from None
            else:
                return lark
        raise AssertionError("the last try returns or raises")

    def prepare(self) -> None:
        """Starts the process if needed and sends it the vocabulary; errors as of :meth:`check`."""
        try:
            if self._process.ask({}):
                self._process.ask({"vocabulary": self._vocabulary.to_plain()}, VOCABULARY_S)
        except ProcessDied as error:
            message = f"grammars cannot be checked now: {error}"
            raise RequestError(message, "engine_failed", RETRY_S) from None
        except UserError as error:
            raise RequestError(str(error), "engine_failed") from None

    def close(self) -> None:
        self._process.close()


_vocabulary: tuple[GrammarCompiler, dict[str, int]] | None = None


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answers a request in the child process: reports a missing vocabulary, stores a vocabulary, or compiles
    and follows a grammar."""
    global _vocabulary
    if "vocabulary" in request:
        vocabulary = GrammarVocabulary.from_plain(request["vocabulary"])
        _vocabulary = GrammarCompiler(vocabulary), vocabulary.control_ids()
        return {}
    if not request:
        return {} if _vocabulary else {"need": "vocabulary"}
    assert _vocabulary is not None
    compiler, token_ids = _vocabulary
    lark: str = request["source"]
    if request["kind"] != "checked":  # a checked grammar is in Lark already
        lark = lark_of(Grammar(request["kind"], lark), token_ids)
    if len(lark) > CHECKED_CHARS:
        raise GrammarError(f"the grammar is too large: in Lark it has more than {CHECKED_CHARS} characters")
    walk(compiler, lark)
    return {"lark": lark}


def walk(compiler: GrammarCompiler, lark: str) -> None:
    """Compiles a grammar and follows it on a few fixed paths, as far as the time allows. So a limit that an
    answer would soon reach is found before the answer begins. GrammarError."""
    whole = _constraint(compiler, lark)
    end = time.process_time() + _WALK_S
    _walk(whole, compiler, _WALKS, end)
    for text in dict.fromkeys(patterns_in_lark(lark)):  # a walk of the whole grammar may miss them
        if time.process_time() < end:
            _walk(_constraint(compiler, text), compiler, _WALKS[-1:], end)


def _constraint(compiler: GrammarCompiler, lark: str) -> GrammarConstraint:
    pool = ThreadPoolExecutor(1)  # starts no thread, since no mask is prepared
    return GrammarConstraint(lambda: compiler.compile(lark), pool)


def _walk(
    constraint: GrammarConstraint,
    compiler: GrammarCompiler,
    walks: Sequence[tuple[int, float, int]],
    end: float,
) -> None:
    opening = [id for byte in _OPENING for id in compiler.spelled(bytes([byte]))]
    draw = random.Random(0)
    for steps, share, draws in walks:
        output: list[int] = []
        for _ in range(steps):
            if time.process_time() > end:
                return
            mask = constraint(output).mask
            assert mask is not None
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed[[*compiler.stops]] = 0
            id = next((id for id in opening if allowed[id]), None) if draw.random() < share else None
            if id is None:
                ids = np.flatnonzero(allowed)
                drawn = map(int, draw.choices(ids, k=draws)) if len(ids) else ()
                id = max(drawn, key=lambda id: _depth(compiler.pieces[id]), default=None)
            output = [] if id is None else [*output, id]


def _depth(piece: bytes) -> tuple[bool, int]:
    """A sort key: greater for tokens that lead deeper into a text, plain or in JSON."""
    return b'"' not in piece, len(piece)
