"""`hotcold bench`: the figures agree with each other. How large they are is no test's business."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.file_sizes import file_sizes

from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.engine.pace import Pace
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.placement.placement import Placement, write_placement
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.bench import prompt_of


def report(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["bench", *args, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return parsed


def test_figures_agree_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "-p", "40", "-n", "12", "-r", "3")
    assert (result["prompt_tokens"], result["generated_tokens"], result["repetitions"]) == (40, 12, 3)
    for name in ("prompt_tok_s", "tok_s", "bandwidth_share"):
        low, high = result[f"{name}_range"]
        assert 0 < low <= result[name] <= high
    assert 0 < result["python_share"] < 1 and 0.02 < result["active_share"] < 0.3
    assert 3e6 < result["bytes_per_token"] < 8e6
    assert result["read_bandwidth_gb_s"] > 0 and result["sparsity"] == "exact"


def test_a_dense_run_reads_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", "20", "-n", "8", "-r", "1")
    off, exact = report(capsys, *args, "--sparsity", "off"), report(capsys, *args)
    assert off["active_share"] == 1 and off["bytes_per_token"] > 1.3 * exact["bytes_per_token"]


def test_the_reference_has_no_bandwidth_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "-p", "3", "-n", "3", "-r", "1", "--backend", "reference")
    assert result["read_bandwidth_gb_s"] is result["bandwidth_share"] is None and result["tok_s"] > 0


def test_a_prompt_of_any_length() -> None:
    model = load(None, LoadOptions(backend="reference"))
    assert len(prompt_of(model, 1)) == 1
    ids = prompt_of(model, 5000)
    assert len(ids) == 5000 and ids.count(model.tokenizer.bos_id) == 1


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "8", "-n", "4", "-r", "2"]) == 0
    out = capsys.readouterr().out
    assert "prompt of 8: " in out and "generation of 4: " in out and "% of a step in Python" in out


@pytest.mark.parametrize(
    ("parallel", "together"),
    [(1, 1), (3, 3), pytest.param(16, 16, marks=pytest.mark.full), (20, (16 * 6 + 4 * 6) / 12)],
)
def test_sequences_are_decoded_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parallel: int, together: float
) -> None:
    """Prompts longer than a chunk, so that sequences become ready one after the other."""
    monkeypatch.setattr(Pace, "note", lambda *of_step: None)  # a slow step would shorten the next
    result = report(capsys, "-p", "130", "-n", "7", "-r", "1", "-np", str(parallel))
    assert result["rows_per_step"] == together and result["parallel"] == parallel
    assert result["tok_s_per_sequence"] == pytest.approx(result["tok_s"] / together)


def test_lines_for_people_of_several_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "8", "-n", "4", "-r", "2", "--parallel", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\ngeneration of 4 in 2 sequences, 2 at a time: .* in all\neach of them: .* tok/s", out)


def overlap(events: list[dict[str, Any]]) -> float:
    """Share of the cold side's busy time, ``tid`` 1, in which the hot side did anything but wait; by a walk
    over all moments at which something begins or ends."""
    changes = []
    for event in events:
        if event["name"] != "wait":
            changes.append((event["ts"], 1, event["tid"]))
            changes.append((event["ts"] + event["dur"], -1, event["tid"]))
    working, before, both, cold = [0, 0], 0.0, 0.0, 0.0
    for now, change, side in sorted(changes):
        cold += (now - before) * (working[1] > 0)
        both += (now - before) * (min(working) > 0)
        working[side] += change
        before = now
    return both / cold


def test_the_timeline_of_two_backends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half of each layer's neurons on either, so that both wait and both work."""
    half, path = tmp_path / "half.gpuidx", tmp_path / "trace.json"
    with open_gguf(model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = file_sizes(file, config, 256, "f16")
    hot = [np.arange(n) % 2 == 0 for n in sizes.neurons]
    write_placement(half, sizes, Placement.on_one(hot, range(len(hot)), True))
    args = ("-p", "8", "-n", "4", "-r", "1", "-t", "1", "--timeline", str(path))
    result = report(capsys, *args, "--hot-backend", "cpu", "--placement", str(half))
    events = json.loads(path.read_text())
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["hot", "cold"]
    lasting = [event for event in events if event["ph"] == "X"]
    assert {(event["tid"], event["name"]) for event in lasting} >= {
        (0, "attention"),
        (0, "hot ffn"),
        (0, "wait"),
        (1, "cold ffn"),
    }
    assert all(event["dur"] >= 0 for event in lasting)
    assert result["overlap"] == pytest.approx(overlap(lasting), abs=1e-6)
    assert (result["hot_backend"], result["hot_threads"]) == ("cpu", 1)
    path.unlink()
    assert main(["bench", *args]) == 2
    assert (
        "--timeline shows a GPU and the CPU: it needs --gpu, --placement or --vram-budget"
        in capsys.readouterr().err
    )
    assert not path.exists()


def test_no_sequences_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--parallel", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--parallel" in line and "from 1 to 4096" in line
