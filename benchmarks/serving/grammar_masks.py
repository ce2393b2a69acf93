"""Measures the cost of constrained output: compiling, a mask, how much of it the model hides, and tokens per
second.

    python benchmarks/serving/grammar_masks.py [--model FILE] [--vocabulary FILE.gguf ...]

Masks are timed along random answers, for the model's vocabulary and any others; the rest with the model. The
share that is hidden is what a step did not wait for, of the time that making it took; by the medians."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hotcold import LLM
from hotcold.chat.tool_formats import HERMES
from hotcold.chat.tool_grammar import tools_grammar
from hotcold.demo import model_path
from hotcold.engine.request import Grammar
from hotcold.engine.sampler import Allowed
from hotcold.formats.gguf import open_gguf
from hotcold.grammar.compiler import GrammarCompiler, GrammarVocabulary
from hotcold.grammar.constraint import GrammarConstraint, Grammars, schema_grammar
from hotcold.grammar.notations import lark_of
from hotcold.tokenizer.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
GBNF = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
STORIES = {"type": "array", "minItems": 1000, "items": {"type": "string", "minLength": 20, "maxLength": 60}}


def grammars() -> dict[str, Grammar]:
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": PERSON}} for i in range(16)]
    calls = tools_grammar(tools, "auto", True, HERMES)
    assert calls is not None
    return {
        "json_object": Grammar("json_object"),
        "schema": schema_grammar(PERSON),
        "regex": Grammar("regex", r"[A-Z][a-z]+( [a-z]+){3,20}\."),
        "gbnf": Grammar("gbnf", GBNF),
        "tools_auto": calls,
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "p99_ms": round(float(np.percentile(seconds, 99)) * 1e3, 3),
    }


def compiling_and_masks(tokenizer: Tokenizer, repeat: int, tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    vocabulary = GrammarVocabulary.from_tokenizer(tokenizer)
    compiler = GrammarCompiler(vocabulary)
    by_grammar: dict[str, Any] = {
        "vocabulary": tokenizer.vocab_size,
        "prepare_ms": round((time.perf_counter() - start) * 1e3, 1),  # once for a model
    }
    for name, grammar in grammars().items():
        compile_s, mask_s = [], []
        draw = random.Random(0)
        for _ in range(repeat):
            start = time.perf_counter()
            first = compiler.compile(lark_of(grammar, {}))
            compile_s.append(time.perf_counter() - start)
            matcher = first.copy()
            for _ in range(tokens):
                start = time.perf_counter()
                mask = matcher.mask()
                mask_s.append(time.perf_counter() - start)
                bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                id = int(draw.choice(bits))
                if id in compiler.stops or not matcher.consume([id]):
                    matcher = first.copy()
        by_grammar[name] = {
            "compile_ms": round(statistics.median(compile_s) * 1e3, 2),
            "mask": milliseconds(mask_s),
        }
    return by_grammar


class TimedConstraint(GrammarConstraint):
    """Notes how long masks took to make, and how long steps waited for them."""

    made_s: ClassVar[list[float]] = []
    waited_s: ClassVar[list[float]] = []

    def _mask(self, tokens: list[int]) -> Any:
        start = time.perf_counter()
        try:
            return super()._mask(tokens)
        finally:
            TimedConstraint.made_s.append(time.perf_counter() - start)

    def __call__(self, output: Sequence[int]) -> Allowed:
        start = time.perf_counter()
        try:
            return super().__call__(output)
        finally:
            TimedConstraint.waited_s.append(time.perf_counter() - start)


def with_the_model(path: Path, repeat: int, tokens: int) -> dict[str, Any]:
    with LLM(path) as llm:
        compiled = Grammars(llm.tokenizer)
        cases = {
            "free": None,
            "anything": Grammar("regex", r"(?s:.)*"),
            "schema": schema_grammar(STORIES),
        }
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        for round in range(repeat + 1):
            for name, grammar in cases.items():  # one after the other, so that a slow moment meets all
                constraint = None
                if grammar is not None:
                    made = compiled.constraint(grammar)
                    assert isinstance(made, GrammarConstraint)
                    constraint = TimedConstraint(made._start, made._pool)
                generation = llm.generate(
                    "Once upon a time",
                    max_tokens=tokens,
                    seed=1,
                    constraint=constraint,
                    ignore_eos=grammar is None,
                )
                timings = generation.timings
                assert timings.finished is not None and timings.first_token is not None
                if round and len(generation.ids) > 10:
                    speeds[name].append((len(generation.ids) - 1) / (timings.finished - timings.first_token))
        compiled.close()
    medians = {name: round_(statistics.median(each)) for name, each in speeds.items() if each}
    made, waited = map(statistics.median, (TimedConstraint.made_s, TimedConstraint.waited_s))
    return {
        "tok_s": medians,
        "hidden": round_(1 - waited / made, 3),
        "made_us": round_(made * 1e6),
        "waited_us": round_(waited * 1e6),
    }


def round_(value: float, digits: int = 1) -> float:
    return round(value, digits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--vocabulary", type=Path, nargs="*", default=[])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    path = options.model or Path(model_path())
    vocabularies = []
    for file_path in (path, *options.vocabulary):
        with open_gguf(file_path) as file:
            tokenizer = Tokenizer.from_metadata(file.metadata)
        vocabularies.append(compiling_and_masks(tokenizer, options.repeat, options.tokens))
        print(json.dumps(vocabularies[-1]), flush=True)
    model = with_the_model(path, options.repeat, options.tokens)
    print(json.dumps({"model": path.name, **model, "vocabularies": vocabularies}))


if __name__ == "__main__":
    main()
