"""Checks grammars, and makes the constraints that hold answers to them."""

import contextlib
import json
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hotcold.engine.request import Constraint, Grammar, RequestError
from hotcold.errors import UserError
from hotcold.grammar.checking import RETRY_S, GrammarProcess
from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import read
from hotcold.grammar.matching import GrammarConstraint
from hotcold.grammar.notations import check_size, lark_of
from hotcold.tokenizer.tokenizer import Tokenizer

__all__ = ["GrammarError", "Grammars", "check", "schema_grammar"]

CACHE_BYTES = 64 << 20  #: for the texts of checked grammars
MOST_CHECKS = 16  #: running and waiting
_THREADS = 4
_LINE = re.compile(r"(?<=the grammar is not valid: )line \d+: ")

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def schema_grammar(schema: object, *, strict: bool = False, open: bool = False) -> Grammar:
    """The grammar of a JSON schema. Its ``notes`` name the parts that cannot be enforced; ``strict``: they
    are an error. An object that names its properties, and says nothing about others, has no others; ``open``:
    it may have others, as in the standard. GrammarError: the schema is broken."""
    rewritten = read(schema, strict=strict, open=open)
    return Grammar("json_schema", json.dumps(rewritten.schema), rewritten.notes)


def check(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Checks one grammar, as :meth:`Grammars.check` does."""
    grammars = Grammars(tokenizer)
    try:
        grammars.check(grammar)
    finally:
        grammars.close()


class Grammars:
    """Grammars of one tokenizer, with a cache of checked ones. Safe to use from several threads. Processes
    and threads start when they are needed, or at :meth:`prepare`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # held only briefly, since event loops wait for it
        self._making = threading.Lock()  # held while the vocabulary and the compiler are made
        self._callers = threading.Semaphore(MOST_CHECKS)  # limits callers of `check`, so that none is refused
        self._closed = False
        self._vocabulary: GrammarVocabulary | None = None
        self._process: GrammarProcess | None = None
        self._compiler: GrammarCompiler | None = None
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "grammar")
        self._checker = ThreadPoolExecutor(1, "grammar-check")
        self._under_way: dict[Grammar, Future[Grammar]] = {}
        self._checked: BoundedCache[Grammar, Grammar | GrammarError] = BoundedCache(CACHE_BYTES)

    def check(self, grammar: Grammar) -> Grammar:
        """Returns the checked grammar; GrammarError: it is refused. Waits for :meth:`checking`, up to some
        seconds, so it must not run on an event loop; if too many threads check grammars, also for them."""
        with self._callers:
            return self.checking(grammar).result()

    def checking(self, grammar: Grammar) -> "Future[Grammar]":
        """Checks a grammar in a process with a time limit; returns at once. The result is a GrammarError, or
        the grammar in the form for :meth:`constraint`: of kind ``checked``, with notes on the parts that are
        not enforced. Concurrent callers with the same grammar share the future, which cannot be cancelled.
        RequestError: ``queue_full`` if too many checks wait, ``closed`` after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise _closed()
            future = self._under_way.get(grammar)
            if future is not None:
                return future
            known = self._checked.get(grammar)
            if known is None and len(self._under_way) >= MOST_CHECKS:
                message = f"{MOST_CHECKS} grammars are being checked: try again later"
                raise RequestError(message, "queue_full", RETRY_S)
            future = Future()
            future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
            if known is None:
                self._under_way[grammar] = future
                self._checker.submit(self._check, grammar, future)
                return future
        _settle(future, known)
        return future

    def prepare(self) -> None:
        """Starts the checking process, so that the first grammar need not wait for it; returns at once."""
        with self._lock:
            if not self._closed:
                self._checker.submit(self._prepare)

    def constraint(self, grammar: Grammar) -> Constraint:
        """Makes the constraint of one answer from a checked grammar. The grammar compiles here, within the
        library's own bounds and without Python's lock: some milliseconds, rarely a second. Answers share no
        matcher, since the states that the library stores in one grow with each answer, up to its bounds."""
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._of_tokenizer())
                self._token_ids = self._of_tokenizer().control_ids()
        known = grammar if grammar.kind == "checked" else self._checked.get(grammar)
        lark = known.source if isinstance(known, Grammar) else lark_of(grammar, self._token_ids)
        compiler = self._compiler
        return GrammarConstraint(lambda: compiler.compile(lark), self._pool, compiler.spelled)

    def close(self) -> None:
        """Ends the process and the threads; waiting checks fail. Constraints work on without threads."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.close()
        self._checker.shutdown(wait=False)  # waiting checks fail at once
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, grammar: Grammar, future: "Future[Grammar]") -> None:
        """Checks a grammar, in the checking thread."""
        result: Grammar | Exception
        try:
            notes = [*grammar.notes]
            result = Grammar("checked", self._lark(grammar, notes), tuple(dict.fromkeys(notes)))
        except GrammarError as error:
            # The line number counts lines of the translation, not of the client's text.
            result = error if grammar.kind == "lark" else GrammarError(_LINE.sub("", str(error)))
        except Exception as error:
            result = error
        with self._lock:
            if self._closed:
                result = _closed()
            if isinstance(result, Grammar | GrammarError):
                text = result.source if isinstance(result, Grammar) else str(result)
                self._checked.put(grammar, result, len(grammar.source) + len(text) + 500)
            del self._under_way[grammar]
        _settle(future, result)

    def _lark(self, grammar: Grammar, notes: list[str]) -> str:
        check_size(grammar)
        if grammar.kind in ("json_schema", "lark"):  # faults of schemas are found without the process
            grammar = Grammar("checked", lark_of(grammar, {}, notes))
        return self._started().check(grammar)

    def _started(self) -> GrammarProcess:
        with self._making:
            vocabulary = self._of_tokenizer()
        with self._lock:
            if self._closed:
                raise _closed()
            if self._process is None:
                self._process = GrammarProcess(vocabulary)
            return self._process

    def _prepare(self) -> None:
        """Starts the process, in the checking thread. The first check reports an error."""
        with contextlib.suppress(UserError):
            self._started().prepare()

    def _of_tokenizer(self) -> GrammarVocabulary:
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary.from_tokenizer(self._tokenizer)
        return self._vocabulary


def _closed() -> RequestError:
    return RequestError("the grammars of this model are closed", "closed")


def _settle(future: "Future[Grammar]", result: Grammar | Exception) -> None:
    if isinstance(result, GrammarError):
        future.set_exception(GrammarError(str(result)))  # a new one, since raising one adds a traceback
    elif isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class BoundedCache(Generic[_Key, _Value]):
    """A cache of recently used values, up to a sum of bytes. Safe to use from several threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self.bytes = 0

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: _Key, value: _Value, size: int) -> None:
        """Stores a value of ``size`` bytes and evicts the least recently used ones until all fit. A value
        larger than the whole cache is not stored."""
        with self._lock:
            if size > self._most_bytes:
                return
            if key in self._entries:
                self.bytes -= self._entries.pop(key)[1]
            while self.bytes + size > self._most_bytes:
                self.bytes -= self._entries.popitem(last=False)[1][1]
            self._entries[key] = value, size
            self.bytes += size
