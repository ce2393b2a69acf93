"""Lines for people say what the figures of ``--json`` say, in their units, and what is at the edges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import DATA

from hotcold.commands import cli
from hotcold.commands.tokenize import escaped
from hotcold.engine.engine import Engine
from hotcold.engine.request import Request
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.bench import measure


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], str, dict[str, Any]]:
    """The lines for people, stderr and the report."""
    assert cli.main([*map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    return lines, err, json.loads(last)


def test_the_size_of_a_converted_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err, report = run(capsys, "convert", DATA / "tiny-llama", "-o", tmp_path / "x.gguf")
    assert f", {report['bytes'] / 1e6:.1f} MB," in err


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


def test_a_long_path_ends_with_the_files_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for length in (64, 65, 90):  # the room for it is 64
        path = str(small_model(Path("a" * 50) / f"{'b' * (length - 56)}.gguf"))
        assert len(path) == length
        shown = info(capsys, path)["file"]
        assert shown == (path if length == 64 else "..." + path[-61:])


def test_a_list_of_one_layer_is_a_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert info(capsys, small_model(tmp_path / "x.gguf"))["neurons"] == "64"


def test_the_first_and_the_last_byte_that_is_no_text() -> None:
    assert escaped(b"\x80\xff") == r'"\x80\xff"'


@pytest.mark.parametrize("parallel", [1, 2])
def test_lines_of_a_benchmark(capsys: pytest.CaptureFixture[str], parallel: int) -> None:
    arguments = ("-p", 12, "-n", 4, "-r", 3, "--parallel", parallel)
    lines, _, report = run(capsys, "bench", *arguments)
    text = "\n".join(lines)
    names = ["prompt_tok_s", "tok_s"] + ["tok_s_per_sequence"] * (parallel > 1)
    for name in names:
        low, high = report[f"{name}_range"]
        assert f": {report[name]:.1f} tok/s (median; {low:.1f} to {high:.1f})" in text
    read = f"{report['bytes_per_token'] / 1e6:.2f} MB read per token, {report['gb_s']:.2f} GB/s; "
    read += f"{report['active_share']:.1%} of neurons active; {report['python_share']:.1%} of a step"
    assert read in text
    probe = f"{report['read_bandwidth_gb_s']:.1f} GB/s: {report['bandwidth_share']:.0%} of it used"
    assert probe in text


def test_the_time_to_the_first_token_is_that_of_the_first_prompt() -> None:
    """Prompts are read one after the other, so the last one's is longer."""

    class Watched(Engine):
        def run(self, requests: Sequence[Request]) -> None:
            self.seen = [*requests]
            super().run(requests)

    engine = Watched(load(None, LoadOptions(sequences=2)).session())
    found = measure(engine, [1] * 200, [3, 3], None, seed=4)
    first, last = (request.timings.ttft_s for request in engine.seen)
    assert first is not None and last is not None
    assert found.ttft_s == first < last
    assert [request.seed for request in engine.seen] == [4, 5]
