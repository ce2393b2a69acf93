"""Command lines brought from llama.cpp: each option is understood, or named with what to do instead."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from hotcold.commands import cli, llama_cpp_options
from hotcold.commands.command_line import parser_of
from hotcold.commands.llama_cpp_options import IS, NO, ROWS
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf


def understood(line: str) -> tuple[argparse.Namespace, list[str]]:
    """Returns what a command line gives to its verb, and the notes on it."""
    verb, *words = shlex.split(line)
    parser = parser_of(verb)
    args = parser.parse_strictly(words)
    return args, [*parser.notes]


def refusal(line: str) -> str:
    with pytest.raises(UserError) as caught:
        understood(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "values", "note"),
    [
        ("generate -n 4 -ngl 99", {"n_predict": 4, "gpu": None}, "-ngl 99 has no effect: .*--vram-budget"),
        ("generate --n-gpu-layers=all", {"gpu": None}, "--n-gpu-layers all has no effect"),
        ("serve -ngl 0", {"gpu": "off"}, "-ngl 0 is read as --gpu off"),
        ("chat -dev none", {"gpu": "off"}, "-dev none is read as --gpu off"),
        ("generate -fa -p x", {"prompt": "x"}, "-fa has no effect"),
        ("generate -fa on -p x", {"prompt": "x", "file": None}, "-fa on has no effect"),
        (
            "serve --jinja -fa -hf a/b:Q4_K_M",
            {"model": Path("hf:a/b:Q4_K_M")},
            "-hf a/b:Q4_K_M is read as -m hf:a/b",
        ),
        ("bench -hf a/b", {"model": Path("hf:a/b")}, "-hf a/b is read as -m hf:a/b"),
        ("generate -st -no-cnv -s 3", {"seed": 3}, "-st has no effect"),
        ("generate -mg 0 -sm none", {"gpu": None}, "-mg 0 has no effect: --gpu"),
        ("generate --no-mmap --mlock -b 512 -ub 512 -tb 8", {"threads": None}, "--no-mmap has no effect"),
        (
            "generate --mirostat 0 --typical 1.0 --top-nsigma -1",
            {"top_k": None},
            "--mirostat 0 has no effect",
        ),
        (
            "serve --cors-origins https://a.org",
            {"cors_origin": ["https://a.org"]},
            "is read as --cors-origin https",
        ),
        (
            "chat -cnv --color auto -e",
            {"load": None},
            "-cnv has no effect: hotcold chat is for conversations",
        ),
        ("generate --display-prompt", {"no_display_prompt": False}, "has no effect: it is shown unless"),
        ("chat --simple-io", {"plain": True}, "--simple-io is read as --plain"),
        ("perplexity -f t -ngl 99 -fa 1", {"file": Path("t")}, "-fa 1 has no effect"),
    ],
)
def test_what_is_understood(line: str, values: dict[str, object], note: str) -> None:
    args, notes = understood(line)
    for name, value in values.items():
        assert getattr(args, name) == value, name
    assert re.search(note, "\n".join(notes)), notes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate -mg 1", "-mg of llama.cpp does not exist in `hotcold generate`: --gpu NAME|INDEX"),
        ("serve --api-key secret", "--api-key of llama.cpp .*--api-key-file FILE"),
        ("generate --mirostat 2", "--mirostat .*not supported"),
        ("generate --grammar-file x.gbnf", "--grammar-file .*docs/grammar.md"),
        ("generate -cnv", "-cnv .*hotcold chat is for conversations"),
        ("chat -st", "-st .*echo TEXT | hotcold chat"),
        ("chat -p Hello", "-p of llama.cpp does not exist in `hotcold chat`"),
        ("serve -hff x.gguf", "-hff .*-m hf:OWNER/NAME/FILE.gguf"),
        ("serve --cors-origins https://a,https://b", "once for each origin"),
        ("generate --spec-type ngram", "--spec-type .*--draft-max N"),
        ("generate -ngl", "-ngl needs a value: N"),
        ("generate -ngl -fa", "-ngl needs a value: N"),
        ("generate --jinja=1", "--jinja takes no value"),
        ("info -ngl 99", "unknown option '-ngl'"),
        ("pull -hf a/b", "unknown option '-hf'"),
        # A long name with one dash is never a short option with a value.
        ("generate -no", "unknown option '-no'"),
        ("generate -temp 1", "unknown option '-temp'; did you mean --temp?"),
        ("generate -seed 5", "unknown option '-seed'; did you mean --seed?"),
        ("generate -threads=5", "unknown option '-threads=5'; did you mean --threads?"),
        ("generate -mmodel.gguf", "unknown option '-mmodel.gguf'"),
        ("serve -host x", "unknown option '-host'; did you mean --host?"),
        ("tokenize -parse", "unknown option '-parse'"),
    ],
)
def test_what_is_refused_names_the_option_and_what_to_do(line: str, message: str) -> None:
    assert re.search(message, refusal(line)), refusal(line)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("generate -n4", "n_predict", 4),
        ("generate -n=4", "n_predict", 4),
        ("generate -n -1", "n_predict", 2**31 - 1),
        ("generate -n -2", "n_predict", 2**31 - 1),
        ("chat -n -1", "n_predict", 2**31 - 1),
        ("serve -n 7", "n_predict", 7),
        ("generate -t -1", "threads", None),
        ("generate -t8", "threads", 8),
        ("generate -c 0", "ctx_size", 0),
        ("generate --temperature 0.5", "temp", 0.5),
        ("generate -l 15-inf", "logit_bias", [(15, float("-inf"))]),
        ("generate -p '-ngl 99 is an option'", "prompt", "-ngl 99 is an option"),
        ("generate -p '-h is for help'", "prompt", "-h is for help"),
        ("generate -p -", "prompt", "-"),
        ("generate --temp -1", "temp", -1.0),
    ],
)
def test_what_stays_as_it_was_and_values_of_llama_cpp(line: str, name: str, value: object) -> None:
    args, notes = understood(line)
    assert getattr(args, name) == value and not notes


def test_nothing_of_ours_is_hidden_and_every_row_can_be_reached() -> None:
    """A name that a verb has itself is never looked up here; a row names no option that another one hides."""
    rows_before: set[tuple[str, str]] = set()
    for row in ROWS:
        for name in row.names.split():
            for verb in row.verbs.split() or ["*"]:
                assert (name, verb) not in rows_before and (name, "*") not in rows_before, (name, verb)
                if row.when == ".*":
                    rows_before.add((name, verb))
        assert row.takes or row.when == ".*"
        assert not row.text.endswith(".") and row.outcome in (IS, NO, llama_cpp_options.NOTHING)


def test_the_documentation_has_the_table(repository: Path) -> None:
    text = (repository / "docs" / "llama_cpp.md").read_text(encoding="utf-8")
    assert llama_cpp_options.table() in text, llama_cpp_options.table()


def test_a_whole_line_runs(capsys: pytest.CaptureFixture[str]) -> None:
    line = "generate -p Once -n 4 -s 1 --temp 0 -ngl 99 -fa on -st -c 0 --no-mmap --json"
    assert cli.main(shlex.split(line)) == 0
    found = capsys.readouterr()
    assert "note: -ngl 99 has no effect" in found.err and '"generated_tokens": 4' in found.out
    with open_gguf(Path(importlib.import_module("hotcold.demo").model_path())) as file:
        positions = file.metadata[f"{file.metadata['general.architecture']}.context_length"]
    assert f'"context": {positions}' in found.out


def test_the_end_of_the_context_ends_a_text_without_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split("generate -p Once -n -1 -c 32 --ignore-eos --json")) == 0
    assert '"context_full": true' in capsys.readouterr().out
