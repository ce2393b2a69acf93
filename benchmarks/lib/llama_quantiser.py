"""llama.cpp's own quantiser, of the package llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.llama_library import open_llama_cpp


def quantise(source: Path, path: Path, type: str, threads: int) -> None:
    """SystemExit: it cannot."""
    llama_cpp = open_llama_cpp()
    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}", None)
    if ftype is None:
        raise SystemExit(f"type {type} is none of llama.cpp's: Q4_K_M, Q5_K_M, Q6_K and IQ4_NL are")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, threads
    with quiet():
        code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params))
    if code:
        raise SystemExit(f"llama.cpp cannot quantise to {type}: code {code}")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what C++ prints to stderr."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
