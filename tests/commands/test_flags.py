"""Options in the library's messages: named as Python does, and turned into flags by the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotcold
from hotcold.commands import cli
from hotcold.commands.command_line import parser_of
from hotcold.commands.flags import FLAGS, in_flags
from hotcold.errors import UserError

SOURCE = Path(hotcold.__file__).parent
#: All but the command line, and the server, whose options only the command line has.
ROOMS = sorted({path.parent.name for path in SOURCE.glob("*/__init__.py")} - {"commands", "server"})

#: Names in texts that a model reads.
OF_PROMPTS = {"tool_call_name", "tool_call_arguments"}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("`placement` and `vram_budget`: give one", "--placement and --vram-budget: give one"),
        ("`gpu=a b` uses it", "--gpu a b uses it"),
        ("`context=9`: this model", "-c 9: this model"),
        ("`hotcold list` says; `nothing`, `tokens", "`hotcold list` says; `nothing`, `tokens"),
    ],
)
def test_names_become_flags(text: str, flags: str) -> None:
    assert in_flags(text) == flags


def test_a_mistake_in_python_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="`n_prompt=4000` and `n_gen=200` need 4200 positions"):
        hotcold.bench(n_prompt=4000, n_gen=200, threads=1)
    assert cli.main(["bench", "-p", "4000", "-n", "200", "-t", "1"]) == 2
    assert "error: -p 4000 and -n 200 need 4200 positions" in capsys.readouterr().err


def test_every_flag_is_an_option_of_a_command() -> None:
    known: set[str] = set()
    for verb, _ in cli.VERBS:
        known |= parser_of(verb).names.keys()
    assert set(FLAGS.values()) <= known


def messages(tree: ast.AST) -> Iterator[str]:
    """All strings but docstrings, with X for what is filled in."""
    nodes = [*ast.walk(tree)]
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


@pytest.mark.parametrize("room", ROOMS)
def test_messages_of_the_library_name_no_flags(room: str) -> None:
    paths = [*(SOURCE / room).rglob("*.py")]
    assert paths
    for path in paths:
        for text in messages(ast.parse(path.read_text(encoding="utf-8"))):
            assert not re.search(r"(?<![\w-])--[a-z]|\(-[a-z]\)", text), f"{path}: {text}"
            for name in re.findall(r"`([a-z_]+)(?:=[^`]+)?`", text):
                assert name in FLAGS or name in OF_PROMPTS, f"{path}: {text}"
