"""Writes ``quantising_goldens.json``: the errors that llama.cpp's quantiser leaves of weights of every kind,
weighed by size as quantisers do it.

pip install llama-cpp-python==0.3.36 && HOTCOLD_SMOLLM2=smollm2-135m-instruct-q4_1.gguf \\
    python tests/data/make_quantising_goldens.py
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import llama_cpp
import llama_cpp._ggml
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.weight_kinds import KINDS, Floats, importance, sized_error_left, weights_of, weights_of_smollm2

from hotcold.formats.blocks import BlockType
from hotcold.kernels.quantising import written_types

OUTPUT = Path(__file__).resolve().parent / "quantising_goldens.json"


def quantised(values: Floats, type: BlockType, weights: Floats | None) -> npt.NDArray[np.uint8]:
    """Returns what ``ggml_quantize_chunk`` makes of the rows."""
    packed = np.empty(type.data_shape(values.shape), np.uint8)
    start, rows, columns = (ctypes.c_int64(n) for n in (0, *values.shape))
    at = ctypes.c_void_p(None if weights is None else weights.ctypes.data)
    rows_at, packed_at = ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(packed.ctypes.data)
    llama_cpp._ggml.libggml.ggml_quantize_chunk(type.id, rows_at, packed_at, start, rows, columns, at)
    return packed


def main() -> None:
    weights = {kind: weights_of(kind) for kind in KINDS}
    weights |= weights_of_smollm2(Path(os.environ["HOTCOLD_SMOLLM2"]))
    errors: dict[str, dict[str, list[float]]] = {}
    for type in written_types():
        if type.weights > 1:
            errors[type.name] = {
                kind: [
                    float(f"{sized_error_left(type, quantised(values, type, each), values, each):.6g}")
                    for each in (None, importance())
                ]
                for kind, values in weights.items()
            }
    made = {"llama_cpp_python": llama_cpp.__version__, "errors": errors}
    OUTPUT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
