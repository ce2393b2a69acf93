"""Every architecture of llama.cpp either runs or is refused by a line that says why."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from hotcold.model.config import Config, ModelError
from hotcold.model.families import FAMILIES
from hotcold.model.refused import REFUSED

LISTED = Path(__file__).parents[1] / "data/llama_cpp_architectures.txt"


def known() -> list[str]:
    lines = LISTED.read_text().splitlines()
    listed = [name for line in lines if not line.startswith("#") for name in line.split()]
    return sorted({*listed, *gguf.MODEL_ARCH_NAMES.values()} - {"(unknown)"})


def test_every_architecture_runs_or_has_a_reason() -> None:
    silent = [name for name in known() if name not in FAMILIES and name not in REFUSED]
    assert not silent
    made_up = REFUSED.keys() - {*known()}
    assert not made_up


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - FAMILIES.keys()))
def test_the_line_of_a_refusal(name: str) -> None:
    with pytest.raises(ModelError) as refused:
        Config.from_metadata({"general.architecture": name}, "GGUF", {})
    assert str(refused.value) == f"architecture '{name}' is not supported: {REFUSED[name]}"


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix", "predictor", "profile"])
@pytest.mark.parametrize("architecture", [{"general.architecture": "llama"}, {}], ids=len)
def test_files_that_hold_no_model(kind: str, architecture: dict[str, str]) -> None:
    """Most of them name no architecture."""
    with pytest.raises(ModelError, match=r"^the file (is (an?|the)|holds predictors) "):
        Config.from_metadata({**architecture, "general.type": kind}, "GGUF", {})


def test_the_list_in_the_docs_says_what_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/families.md").read_text()
    rows = text.partition("## The most used architectures")[2].partition("\n## ")[0].splitlines()
    states = {
        name: row.split("|")[3].strip()
        for row in rows
        if row.startswith("| `")
        for name in row.split("|")[1].split("`")[1::2]
    }
    assert len(states) >= 30
    runs = {name for name, state in states.items() if state.startswith("run")}
    assert runs == states.keys() & FAMILIES.keys()
    for name in states.keys() - FAMILIES.keys():
        assert REFUSED[name].startswith(states[name].removeprefix("refused: ")), name
