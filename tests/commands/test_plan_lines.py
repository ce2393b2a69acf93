"""``hotcold plan`` prints what its report says; and the budget of a small card."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from hotcold.commands import cli, options
from hotcold.placement.hardware import find_hardware

GIB = 1 << 30
LINE = "plan --shape mistral-7b --vram-budget 2GiB -c 512 --json"


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(LINE.split()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    said = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines if re.search(r"\S {2,}\S", line))
    for name in ("model", "profile", "hardware", "context"):
        assert report[name] and str(report[name]).startswith(said[name].removesuffix("..."))
    assert said["source"][:40] == report["hardware_source"][:40] != said["hardware"][:40]
    assert said["budget"] == "2GiB"
    for kind in ("attention", "kv", "neurons", "head", "total"):
        parts = [part for part in report["parts"] if kind in (part["kind"], "total")]
        sums = (sum(part[side] for part in parts) for side in ("gpu_bytes", "cpu_bytes"))
        assert said[kind].split("  ")[0] == options.size(next(sums)) and said[kind].endswith(
            options.size(next(sums))
        )
    for name in ("predicted", "cpu", "layer split", "all GPU"):
        speed = report[f"{name.lower().replace(' ', '_')}_tok_s"]
        assert said[name].startswith(f"{speed:.2f} tok/s")
    assert options.size(report["all_gpu_bytes"]) in said["all GPU"]
    assert f"{report['layer_split_layers']} layers" in said["layer split"]
    shares = f"{report['hot_share']:.1%} of neurons, {report['hot_activation_share']:.1%} of firings"
    assert f"hot: {shares}" in lines


def test_a_small_card_keeps_an_eighth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(asdict(find_hardware("rtx3060")) | {"vram_bytes": 4 * GIB}))
    assert cli.main(["plan", "--shape", "mistral-7b", "--hardware", str(machine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["budget_bytes"] == 3.5 * GIB


@pytest.mark.parametrize(("name", "most"), [("rtx4090-i9", 24), ("rtx2080ti-i7", 11)])
def test_a_budget_above_the_card_is_told_what_the_card_has(
    name: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"plan --shape mistral-7b --hardware {name} --vram-budget"
    assert find_hardware(name).vram_bytes == most * GIB
    assert cli.main([*line.split(), f"{most}GiB"]) == 0
    capsys.readouterr()
    assert cli.main([*line.split(), f"{most + 1}GiB"]) == 2
    assert f"--vram-budget is {most + 1}GiB: " in (error := capsys.readouterr().err)
    assert re.search(rf"\b{most}GiB\b", error)
