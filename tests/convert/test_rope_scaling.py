"""Rotary settings in all the forms that checkpoints have them, against what transformers makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hotcold.convert.finding import find_layout
from hotcold.convert.metadata import model_metadata, rope_notes, rope_tables
from hotcold.convert.settings import ConvertError, Settings
from hotcold.model.families import FAMILIES
from hotcold.model.keys import Keys
from hotcold.model.mixers.positions import LayerPositions, read_positions
from hotcold.model.mixers.rope import chosen_factors, rope_table

CASES = json.loads((Path(__file__).parent.parent / "data" / "rope_goldens.json").read_text())["cases"]
#: Keys of config.json in addition to the keys of the goldens.
BESIDE = {"rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2}
CONTEXT = 256


def settings(kind: str, config: dict[str, Any]) -> Settings:
    return find_settings({"model_type": kind, **BESIDE, **config})[1]


def find_settings(values: dict[str, Any]) -> tuple[Any, Settings]:
    return find_layout(Settings(Path("config.json"), values))


def positions(values: dict[str, Any]) -> tuple[tuple[LayerPositions, ...], Settings]:
    """Returns what a reader makes of the file's keys, by layer."""
    layout, config = find_settings(values)
    metadata = model_metadata(config, layout)
    keys = Keys(metadata, layout.architecture)
    family = FAMILIES[layout.architecture]
    return read_positions(keys, family, values["num_hidden_layers"], values["head_dim"], CONTEXT), config


def same(layer: LayerPositions, config: Settings, golden: dict[str, Any], length: int) -> None:
    assert layer.rope is not None
    factors: dict[str, npt.NDArray[np.float32]] = {
        name.removesuffix(".weight"): values for name, values in rope_tables(config).items()
    }
    # The pairs' order differs between families, their frequencies do not.
    rope = replace(layer.rope, interleaved=False)
    cos, sin = rope_table(rope, 40, chosen_factors(rope, factors, length))
    angles = np.arange(40)[:, None] * np.array(golden["steps"])
    np.testing.assert_allclose(cos, golden["magnitude"] * np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(sin, golden["magnitude"] * np.sin(angles), atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_rotates_as_transformers_does(name: str) -> None:
    case = CASES[name]
    layers, config = positions({"model_type": case["model_type"], **BESIDE, **case["config"]})
    golden = case["layers"]
    windowed = [layer for layer in layers if layer.window is not None]
    full = [layer for layer in layers if layer.window is None and layer.rope is not None]
    assert full and bool(windowed) == ("sliding_window" in case["config"])
    for layer in full:
        same(layer, config, golden["full_attention"], 64)
        if "beyond" in golden:
            same(layer, config, golden["beyond"], 65)
    for layer in windowed:
        same(layer, config, golden.get("sliding_attention", golden["full_attention"]), 64)


def test_the_forms_differ() -> None:
    """So that a reader of one form alone fails above."""
    steps = {name: case["layers"]["full_attention"]["steps"] for name, case in CASES.items()}
    for one, other in (
        ("linear by type", "nothing"), ("old beside new", "old is null"), ("theta twice", "nothing"),
        ("llama3, two contexts", "nothing"), ("gemma3, both", "gemma3, new keys"), ("yarn", "yarn, betas"),
    ):  # fmt: skip
        assert steps[one] != steps[other]


@pytest.mark.parametrize(
    ("scaling", "note"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "a factor of 4.0 and no type: positions are not scaled"),
        ({"rope_parameters": {"factor": 2, "rope_theta": 5.0}}, "a factor of 2 and no type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "changes nothing up to 256 positions"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({}, None),
    ],
)
def test_what_is_left_out_is_said(scaling: dict[str, Any], note: str | None) -> None:
    config = settings("llama", {**CASES["nothing"]["config"], **scaling})
    notes = rope_notes(config)
    assert (note is None and not notes) or (note is not None and len(notes) == 1 and note in notes[0])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type is 'linear': default in layers with a window is needed",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "type is 'ntk': one of",
        ),
        ("llama", {"rope_scaling": {"rope_type": 7}}, "rope_type is 7: a string"),
        ("llama", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3: an object"),
        ("llama", {"rope_names": ["x"]}, "rope_names is ['x']: an object"),
    ],
)
def test_what_cannot_be_expressed_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError) as caught:
        positions({"model_type": kind, **BESIDE, **CASES["gemma3's"]["config"], **changes})
    assert message in str(caught.value)
