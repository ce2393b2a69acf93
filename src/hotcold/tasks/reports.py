"""Facts that affect the figures of a report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hotcold.runtime.machine import processor

if TYPE_CHECKING:
    from hotcold.runtime.session import Session


@dataclass(frozen=True)
class Setup:
    """Facts that affect figures: the model, how it ran, and the machine."""

    sparsity: str  #: the mode in use
    notes: tuple[str, ...]  #: the choice of ``auto`` with its reason, and slower ways than usual
    details: tuple[str, ...]  #: the last of ``notes``, which commands print only with --verbose
    threads: int | None  #: None if the backend has no pool
    context: int  #: positions per sequence
    cache_type: str
    prompt_math: str
    cold_prompts: str  #: where the cold neurons of prompts are computed
    backend: str
    hot_backend: str | None
    hot_threads: int | None
    gpus: list[dict[str, Any]]  #: each GPU and its part of the model
    isa: str | None
    processor: str
    model: str

    @classmethod
    def from_session(cls, session: "Session") -> Self:
        model = session.model
        return cls(
            sparsity=session.sparsity,
            notes=tuple(session.notes),
            details=session.details,
            threads=model.threads,
            context=model.context,
            cache_type=model.plan.request.cache_type,
            prompt_math=model.backend.prompt_math,
            cold_prompts="gpu" if session.transformer.separates_prompts else "cpu",
            backend=model.backend.name,
            hot_backend=model.gpus[0].name if model.gpus else None,
            hot_threads=model.gpus[0].threads if model.gpus else None,
            gpus=[each.report() for each in model.on_gpus],
            isa=getattr(model.backend, "isa", None),
            processor=processor(),
            model=model.name,
        )
