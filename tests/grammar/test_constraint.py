"""Constraints: masks against brute force, what was asked before, limits, whole answers, guesses."""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.built_in import tokenizer
from support.vocabulary_of_bytes import ids_in, tokens_of

from hotcold import LLM
from hotcold.engine.request import Constraint, Grammar
from hotcold.grammar import compiler as grammar_compiler
from hotcold.grammar import constraint as grammar_module
from hotcold.grammar import matching
from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary
from hotcold.grammar.constraint import (
    GrammarConstraint,
    GrammarError,
    Grammars,
    schema_grammar,
)

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer", "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(sequences=4, threads=1) as made:
        yield made


def test_a_complete_form_ends_an_answer_that_ignores_ends(llm: LLM) -> None:
    """Where more may follow, the answer continues to its limit."""
    answers = [
        llm.generate("Once", grammar=Grammar("regex", regex), ignore_eos=True, max_tokens=12, temperature=0)
        for regex in ("(yes|no)", "[a-z ]*")
    ]
    assert answers[0].text in ("yes", "no") and answers[0].finish_reason == "stop"
    assert len(answers[1].ids) == 12 and answers[1].finish_reason == "length"


def allowed(constraint: Constraint, output: list[int]) -> set[int]:
    mask = constraint(output).mask
    assert mask is not None and mask.dtype == np.uint64 and mask.shape == (-(-tokenizer().vocab_size // 64),)
    return ids_in(mask)


# --- masks --------------------------------------------------------------------------------------------

LANGUAGES = [
    (
        Grammar("regex", "(ab|a)c{0,3}|né(e)?"),
        [f"{a}{'c' * n}" for a in ("a", "ab") for n in range(4)] + ["né", "née"],
    ),
    (Grammar("gbnf", 'root ::= "the " ("cat" | "dog")\n'), ["the cat", "the dog"]),
    (
        schema_grammar({"enum": ["Lily", "Lila", "a\nb", 12, None]}),
        ['"Lily"', '"Lila"', '"a\\nb"', "12", "null"],
    ),
    (Grammar("lark", 'start: "one" | "once upon a time" | ""'), ["one", "once upon a time", ""]),
]


@pytest.mark.parametrize(("grammar", "language"), LANGUAGES, ids=lambda value: str(value)[:30])
def test_a_mask_is_what_brute_force_over_the_vocabulary_gives(
    grammars: Grammars, grammar: Grammar, language: list[str]
) -> None:
    texts = [text.encode() for text in language]
    pieces = [tokenizer().piece(id) for id in range(tokenizer().vocab_size)]
    silent = {id for id in range(len(pieces)) if tokenizer().decode([id]) == "" and pieces[id] != b" "}
    constraint = grammars.constraint(grammar)
    draw = random.Random(0)
    for text in texts:
        for length in sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(4))}):
            begun = text[:length]
            expected = set(tokenizer().stop_ids) if begun in texts else set()
            for id, piece in enumerate(pieces):
                if piece and id not in silent and any(each.startswith(begun + piece) for each in texts):
                    expected.add(id)
            assert allowed(constraint, tokens_of(begun)) == expected, begun


def test_masks_depend_on_the_tokens_alone(grammars: Grammars) -> None:
    """Asked in any order, from several threads, prepared or not: as a new constraint that is asked once."""
    grammar = schema_grammar(OBJECT)
    whole = tokens_of('{"name": "Lily", "n": 12}')
    other = tokens_of('{\n  "name":"é\\n"')
    outputs = [whole[:n] for n in range(len(whole) + 1)] + [other[:n] for n in range(len(other) + 1)]
    expected = [allowed(grammars.constraint(grammar), output) for output in outputs]
    asked = grammars.constraint(grammar)
    assert isinstance(asked, GrammarConstraint)
    draw = random.Random(3)
    for _ in range(150):
        index = draw.randrange(len(outputs))
        if draw.random() < 0.5:
            asked.prepare(outputs[draw.choice([index, draw.randrange(len(outputs))])])
        assert allowed(asked, outputs[index]) == expected[index]
    with ThreadPoolExecutor(4) as pool:
        order = [draw.randrange(len(outputs)) for _ in range(100)]
        assert list(pool.map(lambda i: allowed(asked, outputs[i]), order)) == [expected[i] for i in order]


def test_tokens_that_do_not_match_are_an_error_and_then_forgotten(grammars: Grammars) -> None:
    constraint = grammars.constraint(Grammar("regex", "abc"))
    before = allowed(constraint, tokens_of("a"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="do not match the grammar"):
            constraint(tokens_of("ax"))
    with pytest.raises(GrammarError, match="do not match the grammar"):
        constraint(tokens_of("abcd"))
    assert allowed(constraint, tokens_of("a")) == before
    assert allowed(constraint, tokens_of("abc")) == tokenizer().stop_ids


def test_what_costs_too_much_is_an_error_and_no_end_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself would allow the token that ends a text."""
    monkeypatch.setitem(grammar_compiler._LIMITS, "step_max_items", 3)
    compiler = GrammarCompiler(GrammarVocabulary.from_tokenizer(tokenizer()))
    matcher = compiler.compile('start: (a | b)+\na: "x" a "y" | "z"\nb: "x" b "w" | "z"').copy()
    with pytest.raises(GrammarError, match="cannot continue: too many items for one token: the limit is 3"):
        matcher.mask()


def test_a_grammar_that_gets_slower_and_slower_ends_its_answer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = grammars.constraint(Grammar("lark", 'start: a\na: a a | a a a | "x" |'))
    assert allowed(constraint, tokens_of("x"))
    monkeypatch.setattr(matching, "MASKS_S", 0)
    monkeypatch.setattr(matching, "MASK_S", 1e-7)
    with pytest.raises(GrammarError, match="too slow: it can match"):
        constraint(tokens_of("xx"))


# --- while the model runs -----------------------------------------------------------------------------


class SlowMatcher:
    """Makes a mask on command, and notes the thread."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.threads: list[int] = []

    def consume(self, tokens: list[int]) -> bool:
        return True

    def rollback(self, n: int) -> bool:
        return True

    def mask(self) -> np.ndarray:
        self.threads.append(threading.get_ident())
        self.begun.set()
        assert self.go.wait(60)
        return np.ones(1, np.uint64)


def test_a_mask_is_made_while_the_model_runs() -> None:
    matcher = SlowMatcher()
    with ThreadPoolExecutor(1) as pool:
        constraint = GrammarConstraint(lambda: matcher, pool)  # type: ignore[arg-type, return-value]
        constraint.prepare([1, 2])
        # Here the model would run: nothing waits for the mask, which is being made elsewhere.
        assert matcher.begun.wait(60)
        matcher.go.set()
        assert constraint([1, 2]).mask is not None
        assert len(matcher.threads) == 1 and matcher.threads[0] != threading.get_ident()
        assert constraint([1, 2]).mask is not None  # a step that is repeated
        assert len(matcher.threads) == 1
        assert constraint([1, 2, 3]).mask is not None  # nothing was prepared: here and now
        assert matcher.threads[1:] == [threading.get_ident()]
        # A thread that is late is not waited for.
        busy = threading.Event()
        pool.submit(busy.wait, 60)
        constraint.prepare([1, 2, 3, 4])
        assert constraint([1, 2, 3, 4]).mask is not None
        assert matcher.threads[2:] == [threading.get_ident()]
        busy.set()


def test_a_constraint_goes_on_when_the_threads_are_gone() -> None:
    made = Grammars(tokenizer())
    constraint = made.constraint(Grammar("regex", "a+"))
    made.close()
    made.close()
    assert isinstance(constraint, GrammarConstraint)
    constraint.prepare(tokens_of("a"))
    assert allowed(constraint, tokens_of("a"))


# --- whole answers ------------------------------------------------------------------------------------

REGEXES = [
    "(yes|no|maybe)( please)?[.!]",
    r"\d{4}-\d{2}",
    "[^a-z\n]{3,9}x?",
    "(ab)*c|d.{2}é",
    'a/b"\\\\',
    "(?i)lily",
    "",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_an_expression_from_beginning_to_end(llm: LLM, grammars: Grammars, regex: str) -> None:
    for seed in range(4):
        constraint = grammars.constraint(Grammar("regex", regex))
        found = llm.generate(
            "Once upon a time",
            max_tokens=60,
            seed=seed,
            temperature=3,
            top_k=0,
            top_p=1,
            min_p=0,
            constraint=constraint,
        )
        if found.finish_reason == "stop":
            assert re.fullmatch(regex, found.text), found.text
        else:
            assert found.finish_reason == "length"


def test_answers_match_a_schema(llm: LLM, grammars: Grammars) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(OBJECT)
    ended = 0
    for seed in range(10):
        found = llm.generate(
            "The answer as JSON: ", max_tokens=120, seed=seed, temperature=2, top_k=0, top_p=1, min_p=0,
            constraint=grammars.constraint(schema_grammar(OBJECT)),
        )  # fmt: skip
        if found.finish_reason == "stop":
            validator.validate(json.loads(found.text))
            ended += 1
    assert ended >= 5


def test_the_example_of_the_documentation_ends() -> None:
    """White space and digits are bounded, so a small model comes to an end."""
    path = os.environ.get("HOTCOLD_SMOLLM2")
    if not path:
        pytest.skip("HOTCOLD_SMOLLM2 names no file")
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    grammar = schema_grammar(schema)
    with LLM(path) as model:
        grammars = Grammars(model.tokenizer)
        assert grammars.check(grammar).notes == ()
        for seed in range(1, 5):
            constraint = grammars.constraint(grammar)
            found = model.generate("She is ", constraint=constraint, max_tokens=30, seed=seed)
            assert found.finish_reason == "stop" and json.loads(found.text).keys() == {"age"}
        grammars.close()


def test_an_object_of_any_kind(llm: LLM, grammars: Grammars) -> None:
    for seed in range(4):
        found = llm.generate(
            "JSON: ", max_tokens=150, seed=seed, constraint=grammars.constraint(Grammar("json_object"))
        )
        assert found.text.startswith("{")
        if found.finish_reason == "stop":
            assert isinstance(json.loads(found.text), dict)


# --- what strangers send ------------------------------------------------------------------------------

RUN = [
    Grammar("regex", "(a+)+b"),
    Grammar("regex", "(((a{1,1000}){1,1000}){1,1000})"),
    Grammar("regex", "a{1000000000}"),
    Grammar("regex", "(a|b)*a(a|b){14}"),
    schema_grammar({"type": "object", "properties": {"a": {"$ref": "#"}}}),
    schema_grammar({"enum": [str(i) for i in range(4096)]}),
    schema_grammar({"type": "array", "minItems": 100_000, "items": {"type": "array", "minItems": 100_000}}),
    schema_grammar({"type": "string", "minLength": 100_000, "pattern": "^(a+)+$"}),
    Grammar("gbnf", 'root ::= ("a" | root "b"){0,100000}'),
]


@pytest.mark.parametrize("grammar", RUN, ids=lambda value: str(value)[:40])
def test_grammars_that_trouble_others_run_within_their_bounds(grammars: Grammars, grammar: Grammar) -> None:
    """Or are refused; but the process lives, and so do steps."""
    try:
        grammars.check(grammar)
    except GrammarError as error:
        assert "too" in str(error)
        return
    constraint = grammars.constraint(grammar)
    output: list[int] = []
    draw = random.Random(0)
    for _ in range(20):
        coming = sorted(allowed(constraint, output) - tokenizer().stop_ids)
        if not coming:
            break
        output.append(draw.choice(coming))


@pytest.mark.parametrize(("grammar", "language"), LANGUAGES, ids=lambda value: str(value)[:30])
def test_what_a_check_gives_needs_no_reading_and_allows_the_same(
    grammars: Grammars, grammar: Grammar, language: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = grammars.checking(grammar).result()
    assert ready.kind == "checked"
    expected = grammars.constraint(grammar)
    monkeypatch.setattr(grammar_module, "lark_of", None)
    found = grammars.constraint(ready)
    for text in language:
        for length in range(len(text.encode()) + 1):
            output = tokens_of(text.encode()[:length])
            assert allowed(found, output) == allowed(expected, output)
    # Only a check makes them.
    with pytest.raises(GrammarError, match="the kind of grammar is 'checked'"):
        grammars.check(ready)


def test_an_answer_cannot_use_up_what_another_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of an expression that one answer has come through count against the bound of that one."""
    monkeypatch.setitem(grammar_compiler._LIMITS, "max_lexer_states", 400)
    made = Grammars(tokenizer())
    grammar = Grammar("regex", "(a|b)*a(a|b){12}e")
    others = made.constraint(grammar)
    before = allowed(others, tokens_of("ab"))
    greedy = made.constraint(grammar)
    draw = random.Random(1)
    text = tokens_of("".join(draw.choice("ab") for _ in range(1000)))
    with pytest.raises(GrammarError, match="too many states"):
        for length in range(len(text)):
            greedy(text[:length])
    assert allowed(others, tokens_of("aba")) == before  # as far from the end as before
    assert allowed(made.constraint(grammar), tokens_of("ab")) == before
    made.close()


# --- guesses ------------------------------------------------------------------------------------------


def test_forced_tokens_spell_what_alone_may_come(grammars: Grammars) -> None:
    constraint = grammars.constraint(grammars.check(Grammar("regex", "(the cat|the dog) sat[0-9]+ away")))
    assert isinstance(constraint, GrammarConstraint)

    def forced(text: str) -> bytes:
        return b"".join(tokenizer().piece(id) for id in constraint.forced(tokens_of(text)))

    assert forced("") == b"the "
    assert forced("the d") == b"og sat"
    assert forced("the dog sat1") == b"" and forced("the dog sat12 a") == b"way"
    assert forced("") == b"the " and forced("no") == b"", "what was asked before changes nothing"
    assert constraint.possible(tokens_of("the "), tokens_of("cot")) < len(tokens_of("cot"))
    assert constraint.possible(tokens_of("the "), tokens_of("cat sat")) == len(tokens_of("cat sat"))
    assert allowed(constraint, tokens_of("the ")) == allowed(
        grammars.constraint(grammars.check(Grammar("regex", "(the cat|the dog) sat[0-9]+ away"))),
        tokens_of("the "),
    )


def test_a_question_about_forced_tokens_changes_nothing_before_a_control_token(grammars: Grammars) -> None:
    id = next(iter(tokenizer().control_names.keys() - tokenizer().stop_ids))
    grammar = Grammar("lark", f'start: <[{id}]> ("the" | "dog") <[{id}]> "sat"\n')
    constraint = grammars.constraint(grammars.check(grammar))
    output: list[int] = []
    for token in [id, *tokens_of("the"), id, *tokens_of("sat")]:
        assert token in ids_in(constraint(output).mask)
        output.append(token)
        constraint.forced(output)
    constraint(output)


def test_questions_do_not_wait_for_a_mask_that_is_being_made(grammars: Grammars) -> None:
    constraint = grammars.constraint(grammars.check(Grammar("regex", "abc[0-9]+")))
    assert isinstance(constraint, GrammarConstraint)
    with constraint._lock:
        assert not constraint.forced([]) and constraint.possible([], [1, 2]) == 2
    assert constraint.forced([])


def test_answers_of_a_grammar_are_the_same_with_guesses() -> None:
    """Guesses are what a grammar forces, and never what it forbids."""
    grammar = Grammar("regex", r"The answer to this question is [a-z]{3,8}, said the old man\. " * 2)
    found = []
    for most in (0, 7):
        with LLM(threads=1, context=160, draft_max=most) as llm:
            speculation = llm.engine.scheduler.speculation
            if speculation is not None:
                speculation.costs.measured = lambda rows: True  # type: ignore[method-assign]
                speculation.costs.of = lambda rows: 1.0  # type: ignore[method-assign]
            found.append([llm.generate("Q:", grammar=grammar, max_tokens=90, seed=s) for s in (1, 2)])
    for own, guessed in zip(*found, strict=True):
        assert own.error is guessed.error is None
        assert guessed.ids == own.ids and guessed.text == own.text
        assert guessed.accepted > 10 and own.guessed == 0
