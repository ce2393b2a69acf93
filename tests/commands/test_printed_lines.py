"""Printed lines at the edges of their forms, and the time to the first token that they report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hotcold.commands import cli
from hotcold.commands.tokenize import escaped
from hotcold.engine.engine import Engine
from hotcold.engine.request import Request
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.bench import measure


def small_model(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.feed_forward_length": np.array([64], np.int32),
    }
    write_gguf(path, metadata, {"blk.0.ffn_up.weight": quantise(np.ones((64, 32)), "F16")})
    return path


def info(capsys: pytest.CaptureFixture[str], path: object) -> dict[str, str]:
    assert cli.main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    return {line[:16].strip(): line[16:] for line in lines}


def test_a_list_of_one_layer_is_a_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert info(capsys, small_model(tmp_path / "x.gguf"))["neurons"] == "64"


def test_the_first_and_the_last_byte_that_is_no_text() -> None:
    assert escaped(b"\x80\xff") == r'"\x80\xff"'


def test_the_time_to_the_first_token_is_that_of_the_first_prompt() -> None:
    """Prompts are read one after the other, so the last one's is longer."""

    class Watched(Engine):
        def run(self, requests: Sequence[Request]) -> None:
            self.requests = [*requests]
            super().run(requests)

    engine = Watched(load(None, LoadOptions(sequences=2)).session())
    found = measure(engine, [1] * 200, [3, 3], None, seed=4)
    first, last = (request.timings.ttft_s for request in engine.requests)
    assert first is not None and last is not None
    assert found.ttft_s == first < last
    assert [request.seed for request in engine.requests] == [4, 5]
