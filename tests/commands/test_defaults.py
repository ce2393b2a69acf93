"""Defaults of options are as the help says, and the same from Python and the command line."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from hotcold import LLM
from hotcold.commands import cli, options
from hotcold.engine.request import Job, Request
from hotcold.runtime.options import complete
from hotcold.runtime.sampling import SamplingParams
from hotcold.tasks.profiling import LONGEST_WINDOW


def parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    importlib.import_module(f"hotcold.commands.{verb.replace('-', '_')}").add_arguments(made)
    return made


def test_numbers_in_the_help_are_the_defaults() -> None:
    """Numbers that end an option's help, as in ``tokens to generate (default: 64)``, are its default."""
    found = 0
    for verb, _ in cli.VERBS:
        for action in parser(verb)._actions:
            said = re.search(r"\(default: (-?[\d.]+)\)$", action.help or "")
            if said is not None and action.default is not None:  # None: the library's default
                assert action.default == float(said[1]), (verb, action.option_strings)
                found += 1
    assert found > 10


def test_the_help_says_how_long_the_context_is_by_default() -> None:
    for verb, _ in cli.VERBS:
        cuts = verb in ("fit-predictor", "imatrix", "perplexity", "profile")
        most = LONGEST_WINDOW if cuts else complete({})["default_context"]
        for action in parser(verb)._actions:
            if action.dest == "ctx_size":
                assert f"(default: the model's, at most {most}" in (action.help or ""), verb


@pytest.mark.parametrize("verb", [verb for verb, _ in cli.VERBS])
def test_help_fits_a_terminal_of_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = parser(verb).format_help().splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80


#: These report nothing at their end.
INTERACTIVE = ("chat", "serve")


@pytest.mark.parametrize("verb", [verb for verb, _ in cli.VERBS])
def test_flags_are_off(verb: str) -> None:
    flags = [
        each for each in parser(verb)._actions if each.nargs == 0 and each.dest not in ("help", "version")
    ]
    assert not any(each.default for each in flags)
    assert any(each.dest == "json" for each in flags) or verb in INTERACTIVE


def test_python_and_the_command_line_agree() -> None:
    args = parser("generate").parse_args([])
    with LLM() as llm:
        request = llm.request("Once")
    seed = request.params.seed
    assert seed is not None and 0 <= seed < 1 << 63
    expected = SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, seed=seed)
    assert request.params == expected
    args.seed = seed
    assert SamplingParams(**options.sampling_given(args)) == expected
    assert request.job.max_tokens == args.n_predict == Job().max_tokens == 200
    assert request.job.ignore_eos is args.ignore_eos is Job().ignore_eos is False


def test_a_seed_is_drawn_where_none_is_given() -> None:
    args = parser("generate").parse_args([])
    assert "seed" not in options.sampling_given(args)
    assert len({Request(Job([1])).seed for _ in range(8)}) == 8
