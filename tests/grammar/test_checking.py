"""Grammars that strangers send: what is refused, what is remembered, and processes that check."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.built_in import tokenizer
from support.threads import Running, wait_until

from hotcold.engine.request import Grammar, RequestError
from hotcold.errors import UserError
from hotcold.grammar import constraint as grammar_module
from hotcold.grammar.checking import GrammarProcess
from hotcold.grammar.compiler import GrammarVocabulary
from hotcold.grammar.constraint import (
    MOST_CHECKS,
    BoundedCache,
    GrammarError,
    Grammars,
    check,
    schema_grammar,
)
from hotcold.processes.guarded import ProcessDied, ProcessTimeout

REFUSED = [
    (Grammar("regex", "(" * 30_000 + "a" + ")" * 30_000), "not valid"),
    (Grammar("regex", "a" * 70_000), "bytes: allowed are 65536"),
    (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", r"(a)\1"), "backreferences are not supported"),
    (Grammar("regex", r"\bx"), "not supported"),
    (Grammar("regex", "["), "unclosed character class"),
    (Grammar("regex", "[a&&b]"), "no token can come next"),
    (Grammar("json_schema", json.dumps({"enum": list(range(100_000))})), "bytes: allowed are 65536"),
    (schema_grammar({"allOf": [{"type": "string"}, {"type": "number"}]}), "Unsatisfiable schema"),
    (schema_grammar({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable schema"),
    (Grammar("json_schema", '{"properties": {"a": {"type": "text"}}}'), "type at properties.a is 'text'"),
    (Grammar("gbnf", "root ::= x"), "line 1, column 10, .*no rule 'x'"),
    (Grammar("gbnf", "root ::= " + "(" * 30_000), "too deep"),
    (Grammar("lark", 'start: "a"\nb: ('), "line 2"),
    (Grammar("lark", "start: a\na: a"), "no token can come next"),
    (Grammar("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "too deeply nested"),
    (Grammar("lark", 'start: %json {"type": "text"}'), "type at the top is 'text'"),
    (Grammar("yaml", ""), "the kind of grammar is 'yaml': allowed are json_schema"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_grammars_that_cannot_be_are_refused_in_one_line(
    grammars: Grammars, grammar: Grammar, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=message) as caught:
            grammars.check(grammar)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
        assert caught.value.code == "invalid_grammar"


def test_a_check_that_takes_too_long_is_stopped_and_the_next_one_runs() -> None:
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer())
    slow = GrammarProcess(vocabulary, seconds=0.05)
    options = " | ".join(f'[a-z]+ "{i}"' for i in range(2500))
    # Which one it is depends on how busy the machine is.
    with pytest.raises(RequestError, match=r"too complex: it took longer than 0\.05 s|machine is too busy"):
        slow.check(Grammar("gbnf", f"root ::= {options}"))
    slow.close()
    process = GrammarProcess(vocabulary)
    assert process.check(Grammar("regex", "a")) == "start: /a/\n"
    assert process._process.pid is not None
    process.close()
    with pytest.raises(RequestError, match="closed") as caught:
        process.check(Grammar("regex", "a"))
    assert caught.value.code == "engine_failed"


def test_a_process_that_was_killed_is_replaced() -> None:
    process = GrammarProcess(GrammarVocabulary.from_tokenizer(tokenizer()))
    process.check(Grammar("regex", "a"))
    child = process._process._child
    assert child is not None
    child.process.kill()
    with pytest.raises(RequestError, match="cannot be checked now") as caught:
        process.check(Grammar("regex", "b"))
    assert (caught.value.code, caught.value.retry_after_s) == ("engine_failed", 5)
    process.check(Grammar("regex", "b"))
    process.close()


class Answers:
    """A fake process: returns or raises the given answers, in order."""

    def __init__(self, answers: list[Exception | dict[str, str]]) -> None:
        self.left = answers

    def ask(self, request: dict[str, str], seconds: float | None = None) -> dict[str, str]:
        if not request:
            return {}
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([ProcessDied("killed"), {"lark": "x"}], ""),
        ([ProcessDied("no memory"), ProcessDied("no memory")], "invalid_grammar"),
        ([ProcessTimeout("too slow")], "invalid_grammar"),
        ([ProcessTimeout("too slow", by_clock=True)], "queue_full"),
        ([UserError("no such rule")], "invalid_grammar"),
    ],
)
def test_who_is_to_blame_for_a_check_that_fails(answers: list[Any], code: str) -> None:
    process = GrammarProcess(GrammarVocabulary.from_tokenizer(tokenizer()))
    process._process = Answers(answers)  # type: ignore[assignment]
    if not code:
        assert process.check(Grammar("regex", "a")) == "x"
    else:
        with pytest.raises(RequestError) as caught:
            process.check(Grammar("regex", "a"))
        assert caught.value.code == code and isinstance(caught.value, GrammarError) == ("grammar" in code)
    assert not answers


class Process:
    """A fake checker of grammars: notes them, and continues on command."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def check(self, grammar: Grammar) -> str:
        self.asked.append(grammar.source)
        self.begun.set()
        assert self.go.wait(60)
        if grammar.source == "bad":
            raise GrammarError("bad")
        if grammar.source == "busy":
            raise RequestError("busy", "queue_full")
        return "start: /a/"

    def prepare(self) -> None:
        self.asked.append("prepared")
        self.begun.set()

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(grammar_module, "GrammarProcess", lambda vocabulary: made)
    return made


def test_what_was_checked_is_remembered(process: Process) -> None:
    made = Grammars(tokenizer())
    for _ in range(3):
        assert made.checking(Grammar("regex", "good")).result() == Grammar("checked", "start: /a/")
        with pytest.raises(GrammarError, match="bad"):
            made.check(Grammar("regex", "bad"))
    assert process.asked == ["good", "bad"]
    for _ in range(2):
        with pytest.raises(RequestError, match="busy"):
            made.check(Grammar("regex", "busy"))
    assert process.asked == ["good", "bad", "busy", "busy"]
    made.close()


def test_the_process_starts_before_the_first_grammar_where_that_is_asked_for(process: Process) -> None:
    made = Grammars(tokenizer())
    made.prepare()
    assert process.begun.wait(60)
    made.check(Grammar("regex", "a"))
    assert process.asked == ["prepared", "a"]
    made.close()
    made.prepare()  # fails silently
    assert process.asked == ["prepared", "a"]


def test_checks_share_one_thread_and_too_many_are_refused_at_once(process: Process) -> None:
    made = Grammars(tokenizer())
    process.go.clear()
    all = [Grammar("regex", str(n)) for n in range(MOST_CHECKS)]
    futures = [made.checking(each) for each in all]
    assert [made.checking(each) for each in all] == futures  # who asks for the same waits for the same
    with pytest.raises(RequestError, match="16 grammars are being checked") as caught:
        made.checking(Grammar("regex", "one more"))
    assert caught.value.code == "queue_full" and caught.value.retry_after_s
    assert not futures[0].cancel()  # others may wait for it
    process.go.set()
    assert {each.result(60).source for each in futures} == {"start: /a/"}
    assert process.asked == [each.source for each in all]
    made.check(Grammar("regex", "one more"))
    made.close()


def test_threads_that_wait_for_a_check_are_never_too_many(process: Process) -> None:
    made = Grammars(tokenizer())
    process.go.clear()
    sources = [str(n) for n in range(MOST_CHECKS + 4)]
    running = [Running(lambda source=source: made.check(Grammar("regex", source))) for source in sources]
    wait_until(lambda: len(made._under_way) == MOST_CHECKS)
    process.go.set()
    assert {each.result().source for each in running} == {"start: /a/"}
    assert sorted(process.asked) == sorted(sources)
    made.close()


def test_after_closing_nothing_starts_and_who_waits_is_told(process: Process) -> None:
    made = Grammars(tokenizer())
    process.go.clear()
    futures = [made.checking(Grammar("regex", source)) for source in "ab"]
    assert process.begun.wait(60)
    made.close()
    for future in futures:
        with pytest.raises(RequestError) as caught:
            future.result(60)
        assert caught.value.code == "closed"
    with pytest.raises(RequestError) as caught:
        made.check(Grammar("regex", "a"))
    assert caught.value.code == "closed" and process.asked == ["a"]


def test_a_single_check() -> None:
    check(Grammar("regex", "a"), tokenizer())
    with pytest.raises(GrammarError):
        check(Grammar("regex", "("), tokenizer())


def test_a_cache_holds_what_was_used_last_up_to_its_bytes() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100)
    for key, size in (("a", 40), ("b", 40)):
        cache.put(key, size, size)
    assert cache.get("a") == 40
    cache.put("c", 1, 50)  # b goes, which was used longest ago
    assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.bytes) == (40, None, 1, 90)
    cache.put("c", 2, 10)
    assert (cache.get("c"), cache.bytes) == (2, 50)
    cache.put("d", 3, 101)
    assert (cache.get("d"), cache.get("a"), cache.bytes) == (None, 40, 50)
    cache.put("e", 4, 100)
    assert (cache.get("e"), cache.get("a"), cache.bytes) == (4, None, 100)


def test_a_vocabulary_without_an_end_is_refused() -> None:
    class Endless:
        stop_ids = frozenset[int]()

    with pytest.raises(GrammarError, match="no token that ends a text"):
        GrammarVocabulary.from_tokenizer(Endless())  # type: ignore[arg-type]


def test_a_vocabulary_crosses_to_another_process_unchanged() -> None:
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer())
    plain = json.loads(json.dumps(vocabulary.to_plain()))
    assert GrammarVocabulary.from_plain(plain) == vocabulary
