"""The types of tensors are llama.cpp's, tensor for tensor: goldens of its own quantiser
(tests/data/make_quantiser_goldens.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotcold.quantize.mixtures import MIXTURES, Facts, Wishes, choose_types

GOLDENS = json.loads((Path(__file__).parent.parent / "data" / "quantiser_types.json").read_text())
CASES = [(model, type) for model, case in GOLDENS.items() for type in case["types"]]
WISHES = {
    "pure": Wishes(pure=True),
    "output": Wishes(output="Q8_0"),
    "embeddings": Wishes(token_embd="Q5_1"),
    "leave": Wishes(leave_output=True),
    "patterns": Wishes(patterns=[(re.compile("attn_v"), "Q8_0"), (re.compile("blk.[0-3].ffn_down"), "Q5_K")]),
}


def shapes_of(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    def shape(part: str) -> tuple[int, ...]:
        row = case["inner"] if "ffn_down" in part else case["row"]
        return (row,) if "norm" in part else (case["experts"], 2, row) if "exps" in part else (2, row)

    names = [*case["whole"], *(f"blk.{i}.{part}" for i in range(case["layers"]) for part in case["parts"])]
    return {f"{name}.weight": shape(name) for name in names}


def golden(case: dict[str, Any], type: str) -> dict[str, str]:
    found = {}
    for number in case["types"][type]:
        part, _, runs = case["lines"][number].partition(": ")
        types = []
        for run in runs.split():
            name, _, count = run.partition("*")
            types += [name] * int(count or 1)
        names = [part] if part in case["whole"] else [f"blk.{i}.{part}" for i in range(case["layers"])]
        types += types[-1:] * (len(names) - len(types))
        found |= {f"{name}.weight": each for name, each in zip(names, types, strict=True)}
    return found


@pytest.mark.parametrize(("model", "type"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_types_are_llama_cpps(model: str, type: str) -> None:
    case = GOLDENS[model]
    name, _, wish = type.partition(" ")
    facts = Facts.from_metadata(case["keys"], importance=wish == "importance")
    shapes = shapes_of(case)
    choices = choose_types(shapes, MIXTURES[name], facts, WISHES.get(wish))
    assert {key: choices[key].type.name if key in choices else "F32" for key in shapes} == golden(case, type)


def test_every_type_of_the_goldens_is_there() -> None:
    assert {type.split()[0] for _, type in CASES} == set(MIXTURES)
