"""Runs large language models on one PC by computing only the neurons that a token needs.

>>> from hotcold import LLM
>>> llm = LLM()  # the built-in model; or LLM("model.gguf")
>>> for piece in llm.stream("Once upon a time"):
...     print(piece, end="")

The functions `bench`, `doctor`, `fit_predictor`, `imatrix`, `perplexity`, `plan` and `profile` work like the
commands of these names; `convert_checkpoint`, `quantize_file` and `sparsify_checkpoint` make model files.
Mistakes of a caller raise a `UserError`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotcold.errors import UserError
from hotcold.version import __version__

if TYPE_CHECKING:
    from hotcold.api.async_llm import AsyncLLM
    from hotcold.api.llm import LLM
    from hotcold.chat.messages import MessageError
    from hotcold.engine.request import Grammar, Job, PromptTooLongError, RequestError
    from hotcold.formats.gguf_values import MissingFileError
    from hotcold.grammar.constraint import Grammars, schema_grammar
    from hotcold.processes.packed import freeze_support
    from hotcold.tasks.bench import bench
    from hotcold.tasks.doctor import doctor
    from hotcold.tasks.fitting import fit_predictor, measure_predictor
    from hotcold.tasks.imatrix import imatrix
    from hotcold.tasks.model_files import convert_checkpoint, quantize_file, sparsify_checkpoint
    from hotcold.tasks.perplexity import perplexity
    from hotcold.tasks.planning import plan
    from hotcold.tasks.profiling import profile

__all__ = [
    "LLM",
    "AsyncLLM",
    "Grammar",
    "Grammars",
    "Job",
    "MessageError",
    "MissingFileError",
    "PromptTooLongError",
    "RequestError",
    "UserError",
    "__version__",
    "bench",
    "convert_checkpoint",
    "doctor",
    "fit_predictor",
    "freeze_support",
    "imatrix",
    "measure_predictor",
    "perplexity",
    "plan",
    "profile",
    "quantize_file",
    "schema_grammar",
    "sparsify_checkpoint",
]

#: Names that are imported at first use: they load NumPy and the kernels, and `hotcold --help` needs neither.
_MODULES = {
    "AsyncLLM": "hotcold.api.async_llm",
    "Grammar": "hotcold.engine.request",
    "Grammars": "hotcold.grammar.constraint",
    "Job": "hotcold.engine.request",
    "LLM": "hotcold.api.llm",
    "MessageError": "hotcold.chat.messages",
    "MissingFileError": "hotcold.formats.gguf_values",
    "PromptTooLongError": "hotcold.engine.request",
    "RequestError": "hotcold.engine.request",
    "bench": "hotcold.tasks.bench",
    "convert_checkpoint": "hotcold.tasks.model_files",
    "doctor": "hotcold.tasks.doctor",
    "fit_predictor": "hotcold.tasks.fitting",
    "freeze_support": "hotcold.processes.packed",
    "measure_predictor": "hotcold.tasks.fitting",
    "imatrix": "hotcold.tasks.imatrix",
    "perplexity": "hotcold.tasks.perplexity",
    "plan": "hotcold.tasks.planning",
    "profile": "hotcold.tasks.profiling",
    "quantize_file": "hotcold.tasks.model_files",
    "schema_grammar": "hotcold.grammar.constraint",
    "sparsify_checkpoint": "hotcold.tasks.model_files",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
