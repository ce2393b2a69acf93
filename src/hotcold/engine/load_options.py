"""How a model is to be loaded."""

from dataclasses import dataclass
from pathlib import Path

from hotcold.errors import UserError
from hotcold.model.kv_cache import CACHE_TYPES

SPARSITY_MODES = ("auto", "exact", "predicted", "off")


class LoadError(UserError):
    """A model that cannot run as asked; the message says what would work."""


@dataclass
class LoadOptions:
    sparsity: str = "auto"  #: one of :data:`SPARSITY_MODES`
    predictor: Path | None = None  #: a sidecar; None: the one beside the model, else what the model has
    threads: int | None = None  #: None takes what affinity and cgroup quota allow
    context: int | None = None  #: positions of a sequence; None: the model's, ``default_context`` at most
    default_context: int = 4096
    backend: str = "cpu"  #: or ``reference``
    sequences: int = 1  #: how many run at the same time; each has ``context`` positions of KV cache
    chunk: int = 128  #: the most prompt rows of one step
    placement: Path | None = None  #: a .gpuidx: what the hot backend computes, with ``backend`` for the rest
    vram_budget: int | None = None  #: or bytes that the hot backend may take, for the placement of ``plan``
    hot_backend: str | None = None  #: as ``backend``
    hot_threads: int | None = None  #: None: as many as ``backend`` has
    cache_type: str = "f16"  #: what keys and values are rounded to, one of :data:`CACHE_TYPES`

    def __post_init__(self) -> None:
        if self.sparsity not in SPARSITY_MODES:
            raise LoadError(f"sparsity {self.sparsity!r}: choose from {', '.join(SPARSITY_MODES)}")
        if self.cache_type not in CACHE_TYPES:
            raise LoadError(f"cache type {self.cache_type!r}: choose from {', '.join(CACHE_TYPES)}")
        for name in ("sequences", "chunk", "default_context"):
            if getattr(self, name) < 1:
                raise LoadError(f"{name} is {getattr(self, name)}: at least 1 is needed")
