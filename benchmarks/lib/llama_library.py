"""llama.cpp of the package llama-cpp-python, silent, opened once for the whole process."""

from __future__ import annotations

import ctypes
from typing import Any

#: llama.cpp logs to the function that it was given last, for as long as the process lives: so must these.
_CALLBACKS: list[Any] = []


def open_llama_cpp() -> Any:
    """The package, which prints nothing. ImportError: llama-cpp-python is not installed."""
    import llama_cpp

    silence(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def silence(library: Any) -> None:
    """Gives the library a log that drops what it is told, and keeps it: a function that is collected while
    the library still calls it ends the process."""
    callback = library.llama_log_callback(_drop)
    _CALLBACKS.append(callback)
    library.llama_log_set(callback, ctypes.c_void_p(0))


def _drop(level: int, text: bytes, data: object) -> None:
    pass
