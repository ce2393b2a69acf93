"""Runs large language models on one PC by computing only the neurons that a token needs.

>>> from hotcold import LLM
>>> llm = LLM()  # the built-in model; or LLM("model.gguf")
>>> for piece in llm.stream("Once upon a time"):
...     print(piece, end="")

The functions `bench`, `doctor`, `fit_predictor`, `plan` and `profile` do what the commands of these names
do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotcold.version import __version__

if TYPE_CHECKING:
    from hotcold.api.async_llm import AsyncLLM
    from hotcold.api.llm import LLM
    from hotcold.engine.request import Grammar, Job, RequestError
    from hotcold.grammar.constraint import Grammars, schema_grammar
    from hotcold.processes.packed import freeze_support
    from hotcold.tasks.bench import bench
    from hotcold.tasks.doctor import doctor
    from hotcold.tasks.fitting import fit_predictor, measure_predictor
    from hotcold.tasks.planning import plan
    from hotcold.tasks.profiling import profile

__all__ = [
    "LLM",
    "AsyncLLM",
    "Grammar",
    "Grammars",
    "Job",
    "RequestError",
    "__version__",
    "bench",
    "doctor",
    "fit_predictor",
    "freeze_support",
    "measure_predictor",
    "plan",
    "profile",
    "schema_grammar",
]

#: Imported when first asked for: they bring NumPy and the kernels, and `hotcold --help` needs neither.
_MODULES = {
    "AsyncLLM": "hotcold.api.async_llm",
    "Grammar": "hotcold.engine.request",
    "Grammars": "hotcold.grammar.constraint",
    "Job": "hotcold.engine.request",
    "LLM": "hotcold.api.llm",
    "RequestError": "hotcold.engine.request",
    "bench": "hotcold.tasks.bench",
    "doctor": "hotcold.tasks.doctor",
    "fit_predictor": "hotcold.tasks.fitting",
    "freeze_support": "hotcold.processes.packed",
    "measure_predictor": "hotcold.tasks.fitting",
    "plan": "hotcold.tasks.planning",
    "profile": "hotcold.tasks.profiling",
    "schema_grammar": "hotcold.grammar.constraint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
