"""The budgets of ``hotcold plan`` that small GPUs and too large values give."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from hotcold.commands import cli
from hotcold.placement.hardware import find_hardware

GIB = 1 << 30


def test_a_small_gpu_keeps_an_eighth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(asdict(find_hardware("rtx3060")) | {"vram_bytes": 4 * GIB}))
    assert cli.main(["plan", "--shape", "mistral-7b", "--hardware", str(machine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["budget_bytes"] == 3.5 * GIB


@pytest.mark.parametrize(("name", "most"), [("rtx4090-i9", 24), ("rtx2080ti-i7", 11)])
def test_a_budget_above_the_gpu_is_refused_with_what_it_has(
    name: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"plan --shape mistral-7b --hardware {name} --vram-budget"
    assert find_hardware(name).vram_bytes == most * GIB
    assert cli.main([*line.split(), f"{most}GiB"]) == 0
    capsys.readouterr()
    assert cli.main([*line.split(), f"{most + 1}GiB"]) == 2
    assert f"--vram-budget is {most + 1}GiB: " in (error := capsys.readouterr().err)
    assert re.search(rf"\b{most}GiB\b", error)
