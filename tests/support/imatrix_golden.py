"""Reads the inputs that llama.cpp multiplies with matrices (tests/data/make_imatrix_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.checkpoints import golden_checkpoint
from support.golden import DATA

from hotcold.convert import ConvertOptions, convert

FILE = "golden_imatrix.npz"

#: One matrix for q, k and v; norms after blocks; experts; a shared expert.
NAMES = ("tiny-llama", "tiny-falcon", "tiny-gemma3", "tiny-mixtral", "tiny-qwen2moe")


def model_of(name: str, folder: Path) -> tuple[Path, list[int]]:
    """The model, in a file that llama.cpp loads, and the tokens."""
    path = folder / f"{name}.gguf"
    convert(golden_checkpoint(name), path, ConvertOptions("F32", dense=True, name="tiny"))
    with np.load(DATA / name / "golden.npz", allow_pickle=False) as arrays:
        return path, [*arrays["prompt"].tolist(), *arrays["steps"].tolist()]


def golden_imatrix(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns for each matrix of the layers: sums ``[E, I]`` and counts ``[E]``."""
    with np.load(DATA / name / FILE, allow_pickle=False) as arrays:
        names = [key.removesuffix(".counts") for key in arrays.files if key.endswith(".counts")]
        return {each: (arrays[f"{each}.in_sum2"], arrays[f"{each}.counts"]) for each in names}
