"""Commands on a published model: SmolLM2."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.served import served

from hotcold.commands import cli

HEIDI = Path(__file__).resolve().parent.parent / "data" / "heidi.txt"


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_generate_answers(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The capital of France is"
    found = report_of(capsys, "generate", "-m", str(smollm2), "-p", prompt, "-n", "4", "--temp", "0")
    assert "Paris" in found["text"] and found["sparsity"] == "off"


def test_perplexity(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-m", str(smollm2), "-c", "128", "--chunks", "1")
    found = report_of(capsys, "perplexity", "-f", str(HEIDI), *options)
    assert found["tokens"] == 127 and 3 < found["ppl"] < 400


def test_bench(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report_of(capsys, "bench", "-m", str(smollm2), "-p", "16", "-n", "4", "-r", "1")
    assert found["model"]


def test_serve(smollm2: Path) -> None:
    def body(question: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}

    with served("-m", str(smollm2), "-c", "512", "--threads", "2") as server, server.client() as client:
        plain = client.post("/v1/chat/completions", json=body("What is a fox?"))
        reply = client.post("/v1/chat/completions", json=body("What is a \x04fox?"))
        (model,) = client.get("/v1/models").json()["data"]
    answers = [each.json()["choices"][0]["message"]["content"] for each in (plain, reply)]
    assert "fox" in answers[0] and answers[0] == answers[1]
    assert reply.headers["x-hotcold-left-out"] == "0x04" and "x-hotcold-left-out" not in plain.headers
    assert model["meta"]["n_vocab"] == 49152


def test_a_conversation_in_a_pipe(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a \x04fox?\n"))
    options = ["-m", str(smollm2), "-c", "512", "-n", "12", "--temp", "0", "--no-figures"]
    assert cli.main(["chat", *options]) == 0
    captured = capsys.readouterr()
    assert "fox" in captured.out
    assert "note: the model's vocabulary cannot spell 0x04 of the text, which are left out" in captured.err
