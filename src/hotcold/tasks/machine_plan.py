"""Memory plan of a model on this machine: what loading would allocate now, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotcold.api.llm import Model, source_of
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.runtime import memory
from hotcold.runtime.loading import plan_load
from hotcold.runtime.opening import file_of
from hotcold.values import printable, size


@dataclass(frozen=True)
class MachinePlan:
    """The memory of a model on this machine; ``str()`` gives what ``hotcold plan`` prints."""

    model: str
    context: int  #: tokens
    context_most: int  #: limit of the model, in tokens
    memory: Mapping[str, int]  #: bytes in main memory, by kind
    gpu_memory: Mapping[str, int]  #: bytes on GPUs with their own memory, by kind
    free_bytes: int | None  #: free main memory; None: unknown
    notes: tuple[str, ...]  #: notes of loading about the plan
    shortage: str  #: why the model does not fit, and what helps; empty if it fits

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        return vars(self) | {"fits": not self.shortage, "total_bytes": self.total_bytes}

    @property
    def total_bytes(self) -> int:
        """Bytes in main memory."""
        return sum(self.memory.values())

    def __str__(self) -> str:
        free = "unknown" if self.free_bytes is None else size(self.free_bytes)
        most = f" of {self.context_most}" if self.context_most > self.context else ""
        lines = [
            printable(f"{'model':<12}{self.model}", 80),
            f"{'context':<12}{self.context}{most} tokens",
            "",
            *(f"{kind:<12}{size(nbytes):>12}" for kind, nbytes in self.memory.items() if nbytes),
            f"{'total':<12}{size(self.total_bytes):>12}",
            f"{'free':<12}{free:>12}",
            *(f"{'GPU ' + kind:<12}{size(nbytes):>12}" for kind, nbytes in self.gpu_memory.items() if nbytes),
            "",
            *(f"{'note':<12}{note}" for note in self.notes),
            f"{'fits':<12}{'no: ' + self.shortage if self.shortage else 'yes'}",
        ]
        return "\n".join(lines)


def plan_machine(
    model: Model = None,
    *,
    context: int | None = None,
    cache_type: str | None = None,
    sparsity: str | None = None,
    gpu: str | int | None = None,
) -> MachinePlan:
    """Plans a model's memory on this machine, as :class:`LLM` with these options would use it now. Reads only
    the file's header.

    >>> print(plan_machine("model.gguf"))

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        context, cache_type, sparsity, gpu: as the options of :class:`LLM`.

    UserError: the options do not fit the model, or the file is damaged."""
    with open_gguf(file_of(source_of(model))) as file:
        options = {"context": context, "cache_type": cache_type, "sparsity": sparsity, "gpu": gpu}
        return machine_plan(file, options)


def machine_plan(file: GGUFFile, options: Mapping[str, Any]) -> MachinePlan:
    """Returns the plan of an open file; ``options`` are those of loading. Errors as :func:`plan_machine`."""
    plan, notes, shortage = plan_load(file, options)
    on_gpus: dict[str, int] = {}
    for bytes_by_kind in plan.gpu_bytes:
        for kind, nbytes in bytes_by_kind.items():
            on_gpus[kind] = on_gpus.get(kind, 0) + nbytes
    return MachinePlan(
        model=printable(file.path.stem),
        context=plan.request.context,
        context_most=plan.config.context,
        memory=plan.cpu_bytes(),
        gpu_memory=on_gpus,
        free_bytes=memory.available_memory(),
        notes=notes,
        shortage=shortage,
    )
