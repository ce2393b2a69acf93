"""Options of loading a model."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict, get_type_hints

from hotcold.errors import UserError
from hotcold.model.attention import CACHE_TYPES
from hotcold.runtime.named_templates import template_text
from hotcold.values import integer

SPARSITY_MODES = ("auto", "exact", "predicted", "off")

#: Is called with the phase of the work, what of it is done, and the total: of ``loading`` in bytes.
Progress: TypeAlias = Callable[[str, int, int], None]

_WHOLE_NUMBERS = (
    "threads",
    "context",
    "default_context",
    "sequences",
    "cache_positions",
    "chunk",
    "vram_budget",
    "hot_threads",
)


class LoadError(UserError):
    """A model that cannot run as asked; the message says what would work."""


class ModelOptions(TypedDict, total=False):
    """How a model is loaded and run; all optional."""

    #: ``auto``, ``exact``, ``predicted`` or ``off``; what ``auto`` chose and why is in ``llm.session.notes``.
    sparsity: str
    predictor: (
        str | os.PathLike[str] | None
    )  #: a sidecar; None finds ``MODEL.predictor.gguf`` beside the model
    threads: int | None  #: None takes the cores that affinity and cgroup quota allow
    context: int | None  #: positions of each sequence; None is the model's own, 4096 at most; 0 all of these
    backend: str  #: ``cpu``, or ``reference`` (NumPy; slow, for checks)
    #: a GPU's name or a part of it, its number in ``hotcold doctor``, or ``off``; None takes a discrete card
    gpu: str | int | None
    #: made by ``hotcold plan -o``: what the GPU computes, and ``backend`` the rest
    placement: str | os.PathLike[str] | None
    #: instead: bytes that may be allocated on the GPU, for the placement of ``plan``; None takes what is free
    vram_budget: int | None
    hot_backend: str | None  #: for checks, in the GPU's place: ``cpu`` or ``reference``
    hot_threads: int | None  #: of that; None takes as many as ``threads``
    cache_type: str  #: of that cache: ``f16``, ``q8_0`` (half as large, lossy) or ``f32``
    chat_template: str | None  #: instead of the file's: Jinja, or a name such as ``chatml`` (docs/chat.md)


class LLMOptions(ModelOptions, total=False):
    """The options of :class:`LLM` besides the file."""

    sequences: int  #: how many prompts of one ``generate`` call run at the same time (1)
    cache_positions: int | None  #: of the KV cache, which they share; None is ``context`` for each


@dataclass
class LoadOptions:
    sparsity: str = "auto"  #: one of :data:`SPARSITY_MODES`
    predictor: Path | None = None  #: a sidecar; None: the one beside the model, else what the model has
    threads: int | None = None  #: None takes what affinity and cgroup quota allow
    #: positions of a sequence; None: the model's, ``default_context`` at most; 0: the model's
    context: int | None = None
    default_context: int = 4096
    backend: str = "cpu"  #: or ``reference``
    sequences: int = 1  #: how many run at the same time
    #: of the KV cache, which they share; None: ``context`` for each, less where memory is short
    cache_positions: int | None = None
    chunk: int = 128  #: the most prompt rows of one step
    gpu: str | None = None  #: a part of its name, its number, or ``off``; None: what kernels/gpus.py chooses
    placement: Path | None = None  #: a .gpuidx: what the GPU computes, with ``backend`` for the rest
    vram_budget: int | None = None  #: or bytes that may be allocated there, for the placement of ``plan``
    hot_backend: str | None = None  #: in the GPU's place, as ``backend``
    hot_threads: int | None = None  #: of that; None: as many as ``backend`` has
    cache_type: str = "f16"  #: what keys and values are rounded to, one of :data:`CACHE_TYPES`
    chat_template: str | None = None  #: instead of the file's: Jinja or one of ``named_templates``
    also: str | None = None  #: mode of a second session beside the first, whose GPU memory is planned, too

    @classmethod
    def of(cls, options: Mapping[str, Any], **more: Any) -> Self:
        """Makes options from those of a user, whose paths may be strings; names are those of the fields."""
        given = {**options, **more}
        for name in ("predictor", "placement"):
            if given.get(name) is not None:
                given[name] = Path(given[name])
        if given.get("gpu") is not None:
            given["gpu"] = str(given["gpu"])
        return cls(**given)

    def __post_init__(self) -> None:
        if self.sparsity not in SPARSITY_MODES:
            raise LoadError(f"sparsity {self.sparsity!r}: choose from {', '.join(SPARSITY_MODES)}")
        if self.cache_type not in CACHE_TYPES:
            raise LoadError(f"cache type {self.cache_type!r}: choose from {', '.join(CACHE_TYPES)}")
        if self.chat_template is not None:
            self.chat_template = template_text(self.chat_template)
        for name in _WHOLE_NUMBERS:
            if getattr(self, name) is not None:
                setattr(self, name, integer(name, getattr(self, name)))
        for name in ("sequences", "chunk", "default_context"):
            if getattr(self, name) < 1:
                raise LoadError(f"{name} is {getattr(self, name)}: at least 1 is needed")


def check_names(options: Mapping[str, Any], allowed: type[Any]) -> None:
    """TypeError for an option that is none of a TypedDict's, as of a keyword that a function lacks."""
    names = get_type_hints(allowed)
    if unknown := options.keys() - names.keys():
        raise TypeError(f"unknown option {min(unknown)!r}: allowed are {', '.join(names)}")
