"""Runs large language models on one PC by computing only the neurons that a token needs.

>>> from hotcold import LLM
>>> llm = LLM()  # the built-in model; or LLM("model.gguf")
>>> for piece in llm.stream("Once upon a time"):
...     print(piece, end="")"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotcold.engine.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    # LLM brings NumPy and the kernels with it; `hotcold --help` needs neither.
    if name == "LLM":
        from hotcold.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "LLM"])
