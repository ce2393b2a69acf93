"""Profiles: which one a model gets, and files that are damaged or another model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.plans import made_up

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.placement.profiles import Profile, find_profile, power_law_profile, read_profile, write_profile
from hotcold.placement.sizes import SHAPES, power_law
from hotcold.sparse.sidecar import SidecarError

LAYERS = 12  #: enough for names that sort otherwise as text than as numbers

sizes, profile, _ = made_up(3, layers=LAYERS)


def write(path: Path, source: str = "a text") -> Path:
    facts = {"model_fingerprint": sizes.fingerprint}
    write_profile(path, Profile(profile.firing, source), facts)
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = read_profile(write(tmp_path / "x.profile.gguf"), sizes)
    assert found.source == "x.profile.gguf: a text"
    for one, other in zip(found.firing, profile.firing, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)  # they are stored in F16


def test_which_profile_a_model_gets(tmp_path: Path) -> None:
    """The one that is named, else the one beside it, else a power law; where nothing is zero, all are
    active."""
    sparse = replace(sizes, always_read=0.0)
    model, named = tmp_path / "m.gguf", write(tmp_path / "named.gguf", "named")
    assert "power law" in find_profile(sparse, None, model).source
    assert "power law" in find_profile(sparse, None, None).source
    assert find_profile(sparse, named, model).source == "named.gguf: named"
    write(tmp_path / "m.profile.gguf", "beside")
    assert find_profile(sparse, None, model).source == "m.profile.gguf: beside"
    assert find_profile(sparse, named, model).source == "named.gguf: named"
    dense = replace(sizes, always_read=1.0)
    assert all((each == 1).all() for each in find_profile(dense, None, None).firing)


def test_an_assumed_profile_is_a_power_law_in_every_expert() -> None:
    shape = SHAPES["mixtral-47b"]
    neurons = np.array([shape.experts * 100] * 3)
    own = replace(sizes, neurons=neurons, expert_share=shape.expert_share, experts=shape.experts)
    found = power_law_profile(own, shape)
    expected = 0.25 * power_law(100, shape.scale, shape.exponent)
    assert len(found.firing) == 3 and shape.source in found.source
    for layer in found.firing:
        assert np.array_equal(layer.reshape(shape.experts, 100), [expected] * shape.experts)


@pytest.mark.parametrize(("share", "shown_share"), [(1.5, "1.5"), (-0.25, "-0.25"), (np.nan, "nan")])
def test_shares_that_are_none(tmp_path: Path, share: float, shown_share: str) -> None:
    path = tmp_path / "x.profile.gguf"
    firing = [*profile.firing]
    firing[1] = np.full(sizes.neurons[1], share)
    write_profile(path, Profile(firing, "a text"), {"model_fingerprint": sizes.fingerprint})
    with pytest.raises(SidecarError, match=rf"blk\.1\.profile holds {shown_share}: numbers from 0 to 1"):
        read_profile(path, sizes)


def test_damaged_and_foreign_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "x.profile.gguf")
    with pytest.raises(SidecarError, match=r"belongs to the model '3'.*'other'"):
        read_profile(path, replace(sizes, fingerprint="other"))
    with open_gguf(path) as file:
        metadata = file.metadata
        tensors = {name: file.load(name) for name in file.tensors}
    write_gguf(path, metadata, {name: each for name, each in tensors.items() if "11" not in name})
    with pytest.raises(SidecarError, match=r"x\.profile\.gguf: tensor blk\.11\.profile is missing"):
        read_profile(path, sizes)
    nothing = {f"blk.{i}.profile": quantise(np.zeros(n), "F32") for i, n in enumerate(sizes.neurons)}
    write_gguf(path, metadata, nothing)
    with pytest.raises(SidecarError, match=r"x\.profile\.gguf: no neuron is active in it"):
        read_profile(path, sizes)
