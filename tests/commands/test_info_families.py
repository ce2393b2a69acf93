"""``hotcold info`` of a made-up file of every supported and every refused family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import golden as goldens
from support.expert_models import NAMES, expert_golden

from hotcold.commands import cli
from hotcold.formats.gguf import write_gguf
from hotcold.model.families import FAMILIES
from hotcold.model.refused import REFUSED

DENSE = (
    *goldens.NAMES, *goldens.FAMILIES, *goldens.LATENT, *goldens.HYBRIDS, *goldens.LATENT_HYBRIDS,
    *goldens.CPU_HYBRIDS,
)  # fmt: skip
#: What may be placed, and where not every neuron for itself, why.
PLACED = (
    "neurons", "neurons inside experts", "layers: ", "experts: ", "nothing: ",
)  # fmt: skip


def report(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[dict[str, Any], str]:
    """Its report as JSON, and its lines for people."""
    for arguments in (["--json"], []):
        assert cli.main(["info", str(path), *arguments]) == 0
    text, err = capsys.readouterr()
    assert not err and "Traceback" not in text
    first, *rest = text.splitlines()
    return json.loads(first), "\n".join(rest)


@pytest.mark.full
def test_every_family_says_what_may_be_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placements = {}
    for name in (*DENSE, *NAMES):
        find = expert_golden if name in NAMES else goldens.golden
        path = find(name, tmp_path).path
        found, text = report(capsys, path)
        assert found["refused"] is None and "cannot run" not in text, name
        assert found["placement"].startswith(PLACED), name
        assert f"GPU takes       {found['placement']}" in text, name
        placements[found["architecture"]] = found["placement"]
    assert placements.keys() == FAMILIES.keys()
    assert placements["bitnet"] == "layers: a norm before down needs all neurons of a token"
    assert placements["rwkv7"].startswith("nothing: GPUs do not compute RWKV")
    assert (placements["opt"], placements["smallthinker"]) == ("neurons", "neurons inside experts")


def test_every_refused_file_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "refused.gguf"
    for name, reason in REFUSED.items():
        write_gguf(path, {"general.architecture": name}, {})
        found, text = report(capsys, path)
        assert found["refused"] == f"architecture '{name}' is not supported: {reason}"
        assert found["placement"] is None
        assert f"This file cannot run here: {found['refused']}." in " ".join(text.split())
    write_gguf(path, {"general.type": "adapter"}, {})
    found, text = report(capsys, path)
    assert found["refused"].startswith("the file is an adapter (LoRA)")
    assert max(map(len, text.splitlines())) <= 80
