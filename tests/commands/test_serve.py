"""`hotcold serve`: what it refuses before it loads anything. What it serves is in tests/server."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from hotcold.commands import cli, serve
from hotcold.commands.command_line import parser_of


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("the model would be loaded")

    monkeypatch.setattr("hotcold.api.async_llm.AsyncLLM.start", start)
    monkeypatch.delenv("HOTCOLD_API_KEY", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["serve", "--port", "0", *arguments]) == cli.EXIT_ERROR
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and found.err.startswith("hotcold: error: ")
    return found.err


MISTAKES = [
    (["-m", "none.gguf"], "none.gguf: cannot be opened: No such file"),
    (["-m", "."], r"\."),
    (["-m", "bad.gguf"], "bad.gguf"),
    (["--port", "65536"], "'65536' is not a whole number from 0 to 65535"),
    (["--port", "-1"], "'-1'"),
    (["--port", "http"], "'http'"),
    (["--host", "0.0.0.0"], "without a key; give --api-key-file"),
    (["--host", "::"], "without a key"),
    (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    (["--host", "192.0.2.1", "--public-without-key"], "no such address"),
    (["--api-key-file", "none"], "none: cannot be opened: No such file"),
    (["--api-key-file", "empty"], "empty has no key"),
    (["--api-key-file", "."], r"\."),
    (
        ["--api-key", "secret"],
        "--api-key of llama.cpp does not exist in `hotcold serve`: give keys in",
    ),
    (["--cors-origin", "https://*"], "means too many pages"),
    (["--cors-origin", "http://localhost:3000/"], "leave out paths"),
    (["--chat-template", "made-up"], "chat template 'made-up' is not a template: .*chatml"),
    (["--temp", "-1"], "temperature is -1.0: allowed are 0 to 100"),
    (["--allow-host", "a b"], "host 'a b'"),
    (["--cors-origin", "localhost"], "origin 'localhost'"),
    (["-np", "0"], "'0' is not a whole number from 1"),
    (["-np", "many"], "'many'"),
    (["-c", "1"], "'1' is not a whole number from 2"),
    (["-t", "0"], "'0'"),
    (["--cache-positions", "0"], "'0'"),
    (["--state-copies", "-1"], "'-1'"),
    (["--timeout", "0"], "'0'"),
    (["--max-body", "8"], "'8' is not a size from 1KiB to 1GiB"),
    (["--max-body", "4194304"], "'4194304' is not a size from 1KiB to 1GiB"),
    (["--max-body", "2GiB"], "'2GiB' is not a size from 1KiB to 1GiB"),
    (["--max-body", "0.5KiB"], "'0.5KiB' is not a size from 1KiB to 1GiB"),
    (["--max-body", "much"], "'much' is not a size"),
    (["--vram-budget", "much"], "'much' is not a size"),
    (["-ctk", "q8_0", "-ctv", "f16"], "the same type"),
    (["--no-such-option"], "unknown option"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "bad.gguf").write_bytes(b"FUGG" * 100)
    assert re.search(message, refused(capsys, *arguments))


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, "--port", port)


def test_a_key_in_the_environment_that_no_client_can_send(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTCOLD_API_KEY", "two words")
    text = refused(capsys)
    assert "$HOTCOLD_API_KEY" in text and "two words" not in text


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for option in ("--host", "--port", "--api-key-file", "-np", "-c", "--vram-budget", "--alias", "--drain"):
        assert option in text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf:own/name:Q4_K_M", "hf:own/name:Q4_K_M"),
        ("hf.co/own/name:Q4_K_M", "hf:own/name:Q4_K_M"),
        ("https://huggingface.co/own/name/resolve/main/a.gguf", "hf:own/name/a.gguf"),
        ("model.gguf", ""),
    ],
)
def test_the_name_on_the_hub_by_which_clients_may_pull(model: str, name: str) -> None:
    args = parser_of("serve").parse_args(["-m", model])
    assert serve._settings(args).hub_name == name
