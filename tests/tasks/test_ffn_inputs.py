"""The inputs of a model's FFNs, on disk."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.ffn_inputs import ffn_inputs


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(None, LoadOptions())


def test_what_the_ffns_are_given(model: LoadedModel) -> None:
    """One input is the norm of the other, by the file's weights; a row depends on those before it alone."""
    window = model.tokenizer.encode(
        "Heidi ran down the path to the hut, and the wind sang in the fir trees. " * 3
    )
    layers = ffn_inputs(model, [window[:9], window], {"normed", "residual"})
    assert len(layers) == 6
    with open_gguf(model_path()) as file:
        for i, layer in enumerate(layers):
            normed, residual = layer["normed"], layer["residual"]
            assert normed.shape == residual.shape == (8 + len(window) - 1, 256)
            size = np.sqrt(
                (residual**2).mean(axis=-1, keepdims=True)
                + float(file.metadata["bamboo.attention.layer_norm_rms_epsilon"])
            )
            weight = file.load(f"blk.{i}.ffn_norm.weight").dequantise()
            np.testing.assert_allclose(normed, residual / size * weight, atol=1e-4)
            np.testing.assert_allclose(normed[:8], normed[8:16], atol=1e-6)
    assert ffn_inputs(model, [window[:9]], {"normed"})[0].keys() == {"normed"}
    assert len(layers[1:3]) == 2 and np.array_equal(layers[1:3][1]["normed"], layers[2]["normed"])
    assert not layers[0]["normed"].flags.writeable


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_files_go_with_the_object(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def opened() -> int:
        targets = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in str(target.readlink()) for target in targets if target.is_symlink())

    inputs = ffn_inputs(model, [[1, 2, 3, 4]], {"normed", "residual"})
    assert opened() == 12 and list(tmp_path.iterdir()) == []  # they have no names
    layer = inputs[0]["normed"].copy()
    kept = inputs[0]["normed"]
    del inputs
    gc.collect()
    assert np.array_equal(kept, layer)  # what is mapped stays
    del kept
    assert opened() == 0

    class Interrupted(Exception): ...

    def fail(self: object) -> None:
        raise Interrupted

    monkeypatch.setattr(Session, "run", fail)
    with pytest.raises(Interrupted):
        ffn_inputs(model, [[1, 2, 3, 4]], {"normed"})
    gc.collect()
    assert opened() == 0


def test_too_little_disk_is_told_before_anything_is_computed(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * 6 * 256 * 3
    monkeypatch.setattr(Session, "run", lambda self: pytest.fail("it ran"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r"inputs of 6 layers for 3 tokens take .* GiB free: .*TMPDIR"):
        ffn_inputs(model, [[1, 2, 3, 4]], {"normed"})
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed))
    assert len(ffn_inputs(model, [[1, 2, 3, 4]], {"normed"})) == 6
