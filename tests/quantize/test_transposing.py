"""Down matrices in the other layout: what transposing and packing in NumPy gives, in pieces of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotcold.formats.blocks import block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.quantize import transposing
from hotcold.quantize.rewriting import Plan, QuantizeError, rewrite
from hotcold.quantize.transposing import transposed

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")


@settings(max_examples=40, deadline=None)
@given(
    old=st.sampled_from(TYPES),
    new=st.sampled_from(TYPES),
    outer=st.sampled_from([(), (3,)]),
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    panel=st.sampled_from([1, 2000, 1 << 22]),
    read=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_rows_become_columns(
    old: str,
    new: str,
    outer: tuple[int, ...],
    rows: int,
    columns: int,
    panel: int,
    read: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("a")
    shape = (*outer, 32 * rows, 32 * columns)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    tensor = quantise(values, old)
    write_gguf(folder / "a.gguf", {}, {"x": tensor})
    with pytest.MonkeyPatch.context() as patch, open_gguf(folder / "a.gguf") as source:
        patch.setattr(transposing, "_PANEL_WEIGHTS", panel)
        patch.setattr(transposing, "_READ_BYTES", read)
        plan = Plan({}, {"x": transposed(source, "x", block_type(new))})
        rewrite(source, folder / "b.gguf", plan, threads=2)
    expected = quantise(np.ascontiguousarray(tensor.dequantise().swapaxes(-1, -2)), new)
    with open_gguf(folder / "b.gguf") as file:
        assert file.tensors["x"].shape == expected.shape
        assert np.array_equal(file.load("x").data, expected.data)


def test_odd_shapes_of_floats_and_what_does_not_fit(tmp_path: Path) -> None:
    values = np.arange(21, dtype=np.float32).reshape(3, 7)
    broken = values.copy()
    broken[2, 5] = np.nan
    tensors = {"x": quantise(values, "F32"), "v": quantise(values[0], "F32"), "n": quantise(broken, "F32")}
    write_gguf(tmp_path / "a.gguf", {}, tensors)
    with open_gguf(tmp_path / "a.gguf") as source:
        rewrite(source, tmp_path / "b.gguf", Plan({}, {"x": transposed(source, "x", block_type("F32"))}))
        with open_gguf(tmp_path / "b.gguf") as file:
            assert np.array_equal(file.load("x").dequantise(), values.T)
        with pytest.raises(QuantizeError, match=r"rows of 3 weights, and Q8_0 needs 32: .*`type`"):
            transposed(source, "x", block_type("Q8_0"))
        with pytest.raises(QuantizeError, match=r"tensor v is F32 \(7,\): it cannot be transposed"):
            transposed(source, "v", block_type("F32"))
        with pytest.raises(QuantizeError, match="tensor n holds NaN or infinity"):
            rewrite(source, tmp_path / "c.gguf", Plan({}, {"n": transposed(source, "n", block_type("F32"))}))
        assert not (tmp_path / "c.gguf").exists()
