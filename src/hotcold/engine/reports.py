"""What reports of measurements share: what their figures depend on, and how numbers are written."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hotcold.engine.session import Session


@dataclass(frozen=True)
class Setup:
    """What figures depend on: the model, how it ran, and the machine."""

    sparsity: str  #: the mode in force
    notes: tuple[str, ...]  #: what ``auto`` chose and why, and what ran a slower way
    threads: int | None  #: None where the backend has no pool
    context: int  #: positions of a sequence
    cache_type: str
    backend: str
    hot_backend: str | None
    hot_threads: int | None
    isa: str | None
    processor: str
    model: str

    @classmethod
    def of(cls, session: "Session") -> Self:
        model = session.model
        return cls(
            sparsity=session.sparsity,
            notes=tuple(session.notes),
            threads=model.threads,
            context=model.context,
            cache_type=model.cache_type,
            backend=model.backend.name,
            hot_backend=model.hot.name if model.hot else None,
            hot_threads=model.hot.threads if model.hot else None,
            isa=getattr(model.backend, "isa", None),
            processor=processor(),
            model=model.name,
        )


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def scaled(n: float, step: int = 1000, units: tuple[str, ...] = ("", "K", "M", "B", "T")) -> str:
    """``7.34 M``."""
    power = 0
    while n >= step and power < len(units) - 1:
        n /= step
        power += 1
    return f"{n:.2f} {units[power]}" if power else f"{n:g} {units[0]}".rstrip()


def size(n: int) -> str:
    """``7.34 MiB``."""
    return scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
