"""GBNF against a plain recogniser of its own rules, llama.cpp's samples, and mistakes with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.vocabulary_of_bytes import matches

from hotcold.grammar import gbnf_lexemes
from hotcold.grammar.error import GrammarError
from hotcold.grammar.gbnf import Chars, Choice, Node, Ref, Repeat, Rules, Sequence, any_of, parse
from hotcold.grammar.gbnf_lexemes import lark_of_gbnf
from hotcold.grammar.lexeme_conflicts import TooManySteps


def ends(rules: Rules, node: Node, text: str, start: int, depth: int = 0) -> Iterator[int]:
    """Where a text from ``start`` on may end to match a node: by trying everything."""
    if depth > 40:
        return
    match node:
        case Chars(ranges):
            if start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges):
                yield start + 1
        case Ref(name):
            yield from ends(rules, rules[name], text, start, depth + 1)
        case Sequence(parts):
            reached = {start}
            for part in parts:
                reached = {end for at in reached for end in ends(rules, part, text, at, depth + 1)}
            yield from reached
        case Choice(options):
            for option in options:
                yield from ends(rules, option, text, start, depth + 1)
        case Repeat(part, least, most):
            reached, before = {start}, set[int]()
            times = 0
            while reached and (most is None or times <= most):
                if times >= least:
                    yield from reached
                    if reached <= before:
                        return
                    before |= reached
                reached = {end for at in reached for end in ends(rules, part, text, at, depth + 1)}
                times += 1


def recognised(source: str, text: str) -> bool:
    rules = parse(source)
    return len(text) in ends(rules, rules["root"], text, 0)


# Grammars in which everything but `item` may be a lexeme, over few letters, so that lexemes get in the
# way of others. `item` calls itself between brackets, which keeps the recogniser above from going round.
leaf = st.sampled_from(['"a"', '"ab"', '"b"', "[ab]", "[^a(]", '"aab"', "word", "item"])
expression = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])).map(
            lambda t: f"({t[0]}){t[1]}"
        ),
    ),
    max_leaves=6,
)
texts = st.text("ab()c", max_size=6)


@given(root=expression, word=st.sampled_from(['"a"+', "[ab]*", '"ab" | "a"', '"b"? "a"']), inner=expression)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_same_texts_match_as_by_the_rules_themselves(root: str, word: str, inner: str) -> None:
    inner = inner.replace("item", '"c"')
    source = f'root ::= {root}\nword ::= {word}\nitem ::= "(" {inner} root? ")" | "c"'
    lark = lark_of_gbnf(source)
    for text in (
        "",
        "a",
        "b",
        "ab",
        "aa",
        "ba",
        "aab",
        "abab",
        "c",
        "(a)",
        "(c)",
        "a(b)",
        "(ab(c))",
        "bbaab",
        "acb",
    ):
        assert matches(lark, text) == recognised(source, text), text


@given(root=expression, sample=texts)
@settings(max_examples=60, deadline=None)
def test_lexemes_of_single_characters_match_the_same(root: str, sample: str) -> None:
    source = f'root ::= {root}\nword ::= "a"+\nitem ::= "(" item ")" | "c"'
    with pytest.MonkeyPatch.context() as patch:

        def too_many(trees: object, most_steps: int) -> None:
            raise TooManySteps

        patch.setattr(gbnf_lexemes, "conflicts", too_many)
        lark = lark_of_gbnf(source)
    assert max(map(len, re.findall(r"/(.*?)/", lark))) < 80
    assert matches(lark, sample) == recognised(source, sample)


CASES = {
    "arithmetic": (["a=1\n", "a = 1\n\n", "a+b*(2) = 3\n\n\nb=1\n"], ["", "a=\n", "a=1", "A=1\n", "(a=1\n"]),
    "c": (
        [
            "",
            "int f(){}",
            "int f(int a){return a+1;}",
            "int f(){if(a==b){}}",
            "int x(){// hi\n}",
            "int y(){/* * */}",
        ],
        ["int f()", "int f(){if(a = b){}}", "int f(){return;}"],
    ),
    "chess": (
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O exd5\n12. e8=Q+ Kf7#\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. a3 a6\n"],
    ),
    "english": (["Hi", "Hello, world! [1]", "a\nb\tc"], ["", " a", "a ", "a  b", "é"]),
    "japanese": (["こんにちは", "日本 カタカナ、", "々"], ["", "abc", "日本 "]),
    "json": (
        ['{"a": [1, -2.5e+1, true, null], "b": {"c": "\\u00e9\\n"}}', "{}", "{\n  }", '{"a":0} '],
        ["[]", "{'a':1}", '{"a":01}', '{"a":1,}', "{  }", '{"a":"\x7f"}'],
    ),
    "json_arr": (['[\n{"a": 1}]', "[\n1,\n2]", '[\n"x",\n 2]'], ["[1]", "[\n1,2]", "[\n1] "]),
    "list": (["- a\n", "- a b\n- é\n"], ["", "- \n", "- a", "- a\u2028b\n", "- a\x85b\n"]),
}


def test_every_sample_has_its_texts(test_data: Path) -> None:
    assert {path.stem for path in (test_data / "golden" / "gbnf").glob("*.gbnf")} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_samples_of_llama_cpp(name: str, test_data: Path) -> None:
    source = (test_data / "golden" / "gbnf" / f"{name}.gbnf").read_text(encoding="utf-8")
    lark = lark_of_gbnf(source)
    right, wrong = CASES[name]
    assert [text for text in right if not matches(lark, text)] == []
    assert [text for text in wrong if matches(lark, text)] == []


def test_strings_and_words_are_one_lexeme() -> None:
    """By the character they would be slow, or too many steps for the compiler."""
    string = r's ::= "\"" ([^"\\] | "\\" ["\\])* "\"" w'
    source = (
        f'root ::= o\no ::= "{{" w (s ":" w v ("," w s ":" w v)*)? "}}" w\nv ::= o | s\n{string}\nw ::= " "?'
    )
    terminals = re.findall(r"^T\d+: (.*)", lark_of_gbnf(source), re.MULTILINE)
    assert any(text.startswith(r"/[\x{22}](?:(?:[\x{0}-\x{21}") for text in terminals), terminals


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no rule 'root'"),
        ('a ::= "b"', "no rule 'root'"),
        ("root ::= x", r"line 1, column 10, at 'x': there is no rule 'x'"),
        ('root ::= "a', r"line 1, column 10, at '\"a': the text that starts here does not end"),
        ("root ::= [a", "line 1, column 10, .*class of characters that starts here does not end"),
        ("root ::= []", "a class of characters is empty"),
        ("root ::= [b-a]", "ends before it starts"),
        ('root ::= "\\q"', r"\\q is not known"),
        ('root ::= "\\x4"', "needs 2 hexadecimal digits"),
        ('root ::= "\\ud800"', r"U\+D800 is not a character"),
        ('root ::= "\\U00110000"', r"U\+110000 is not a character"),
        ('root ::= ("a"', r"line 1, column 14, .*'\)' is needed"),
        ('root ::= "a")', r"line 1, column 13, at '\)': the end of the line is needed"),
        ('root ::= "a"\n\n# x\nb = "c"', "line 4, column 3, at .*: '::=' is needed after 'b'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1, .*the rule 'root' is defined twice"),
        ('root ::= "a"{,3}', "a number of times"),
        ('root ::= "a"{3,2}', r"'\{3,2\}' is not allowed"),
        ('root ::= "a"{1000000}', "not allowed: from 0 to 100000"),
        ("root ::= " + "(" * 30_000, "parentheses are nested too deeply: 100"),
        ("root ::= root", "nothing finite matches the grammar"),
        ('root ::= "a" b\nb ::= "b" root', "nothing finite matches the grammar"),
        ("root ::= <nothing>", "the token '<nothing>', which this model does not have"),
        ("root ::= <", "a token, as"),
        ("::= a", "the name of a rule is needed"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place(source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        lark_of_gbnf(source)
    assert "\n" not in str(caught.value)


def test_a_chain_of_rules_is_no_endless_work() -> None:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)]
    lark = lark_of_gbnf("\n".join(["root ::= r0", *rules, 'r40 ::= "a"?']))
    assert len(lark) < 10**6
    deep = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(3000)), 'r3000 ::= "a"'])
    with pytest.raises(GrammarError, match="too deep"):
        lark_of_gbnf(deep)


def test_tokens() -> None:
    ids = {"<think>": 7, "</think>": 8}
    lark = lark_of_gbnf("root ::= <think> t </think> .*\nt ::= !</think>* !<[9]>", ids.get)
    assert all(part in lark for part in ("<[7]>", "<[^8]>", "<[8]>", "<[^9]>"))


@pytest.mark.parametrize(
    ("ranges", "negated", "expected"),
    [
        ([(97, 99), (98, 120), (121, 122)], False, ((97, 122),)),
        ([(10, 10)], True, ((0, 9), (11, 0xD7FF), (0xE000, 0x10FFFF))),
        ([(0xD000, 0xF000)], False, ((0xD000, 0xD7FF), (0xE000, 0xF000))),
        ([(0, 0x10FFFF)], True, ()),
    ],
)
def test_classes_of_characters(
    ranges: list[tuple[int, int]], negated: bool, expected: tuple[tuple[int, int], ...]
) -> None:
    assert any_of(ranges, negated=negated) == Chars(expected)
