"""How tokens are chosen: as a request says, else the server's operator, the model's file, this program."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.served import served

from hotcold import LLM, AsyncLLM
from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.runtime.sampling import SamplingParams, sampling_of_file

pytestmark = pytest.mark.long  # no instruction set or backend changes it

gguf = pytest.importorskip("gguf", reason="names the keys as llama.cpp's own package does")
KEYS = gguf.Keys.General


def recommending(path: Path, **values: Any) -> Path:
    """The built-in model in a file that recommends these."""
    with open_gguf(model_path()) as file:
        metadata = {**file.metadata, **{f"general.sampling.{name}": value for name, value in values.items()}}
        write_gguf(path, metadata, {name: file.load(name) for name in file.tensors})
    return path


def test_what_a_file_recommends() -> None:
    metadata = {
        KEYS.SAMPLING_TEMP: 0.6,
        KEYS.SAMPLING_TOP_K: 20,
        KEYS.SAMPLING_TOP_P: 0.9,
        KEYS.SAMPLING_MIN_P: 0.0,
        KEYS.SAMPLING_PENALTY_REPEAT: 1.1,
        KEYS.SAMPLING_PENALTY_LAST_N: -1,
        "general.name": "x",
    }
    expected = SamplingParams(0.6, top_k=20, top_p=0.9, min_p=0, repeat_penalty=1.1, repeat_last_n=-1)
    assert sampling_of_file(metadata) == (expected, ())
    assert sampling_of_file({}) == (SamplingParams(), ())


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        (KEYS.SAMPLING_TEMP, -1.0, "general.sampling.temp of the file is ignored: temperature is -1.0"),
        (KEYS.SAMPLING_TEMP, float("nan"), "temperature is nan"),
        (KEYS.SAMPLING_TOP_K, "forty", "top_k is 'forty'"),
        (KEYS.SAMPLING_TOP_P, [0.5], "top_p is "),
        (
            KEYS.SAMPLING_MIROSTAT,
            2,
            "the file recommends general.sampling.mirostat 2, which is not supported here",
        ),
        (KEYS.SAMPLING_SEQUENCE, "kpt", "general.sampling.sequence 'kpt'"),
    ],
)
def test_what_is_not_followed_is_said(key: str, value: Any, note: str) -> None:
    found, notes = sampling_of_file({key: value, KEYS.SAMPLING_MIN_P: 0.5})
    assert found == SamplingParams(min_p=0.5) and len(notes) == 1 and note in notes[0]


def test_everything_that_generates_follows_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 all texts are the greedy one, whatever the seed."""
    model = recommending(tmp_path / "model.gguf", temp=0.0)
    with LLM() as plain:
        greedy = plain.generate("Once", max_tokens=8, temperature=0).text
        assert plain.generate("Once", max_tokens=8, seed=3).text != greedy
    with LLM(model) as llm:
        assert llm.generate("Once", max_tokens=8, seed=3).text == greedy
        assert llm.generate("Once", max_tokens=8, seed=3, temperature=1).text != greedy

    async def other() -> str:
        async with AsyncLLM(model) as llm:
            (answer,) = await llm.generate(["Once"], max_tokens=8, seed=3)
            return answer.text

    assert asyncio.run(other()) == greedy
    line = ["generate", "-m", str(model), "-p", "Once", "-n", "8", "-s", "3", "--json"]
    for more, same in (([], True), (["--temp", "1"], False)):
        assert cli.main([*line, *more]) == 0
        assert (json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == greedy) is same
    monkeypatch.setattr(sys, "stdin", io.StringIO("/set\n"))
    assert cli.main(["chat", "-m", str(model), "--top-k", "7"]) == 0
    err = capsys.readouterr().err
    assert "temp              0.0" in err and "top-k             7" in err


def test_a_server_has_its_operators_then_the_files(tmp_path: Path) -> None:
    model = recommending(tmp_path / "model.gguf", temp=0.0, top_k=11)
    options = ("-m", str(model), "--top-k", "9", "--repeat-penalty", "1.5", "-n", "3", "-t", "1", "-c", "64")
    with served(*options) as server, server.client() as client:
        found = client.get("/props").json()["default_generation_settings"]["params"]
        assert (found["temperature"], found["top_k"], found["repeat_penalty"]) == (0.0, 9, 1.5)
        assert (found["top_p"], found["n_predict"]) == (0.95, 3)
        body = {"prompt": "Once", "temperature": "0.5", "top_k": 0}
        settings = client.post("/completion", json=body).json()["generation_settings"]
        assert (settings["temperature"], settings["top_k"], settings["repeat_penalty"]) == (0.5, 0, 1.5)
        reply = client.post("/v1/completions", json={"prompt": "Once"}).json()
        assert reply["usage"]["completion_tokens"] == 3
