"""The state that an engine process reports: the model that it runs, and how it is."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hotcold.engine.engine import Engine, EngineStats
from hotcold.kernels.backend import PAGE
from hotcold.processes.windows import memory_counters
from hotcold.watch.live import Picture
from hotcold.windows import kernel32


@dataclass(frozen=True)
class ModelInfo:
    """A model that is loaded, and how it runs."""

    name: str  #: of the file, without its ending
    path: str
    fingerprint: str  #: of the weights, 16 hexadecimal digits
    context: int  #: the most positions of one request, prompt and answer together
    vocab: int
    family: str  #: ``llama``, ``opt`` ...
    sparsity: str  #: the mode in force: ``exact``, ``predicted`` or ``off``
    notes: tuple[str, ...]  #: for people, a line each: what ``auto`` chose, and what runs a slower way
    slots: int  #: the most requests that run at the same time
    chunk: int  #: the most prompt tokens of a step
    cache_type: str
    cache_positions: int  #: of the KV cache, which the slots share
    threads: int | None
    layers: int
    neurons: tuple[int, ...]  #: of each layer
    gpu: str | None = None  #: the name of the one in use, if any
    hot_share: float | None = None  #: of the neurons, that GPUs have
    picture: Picture | None = None  #: what somebody who watches neurons has to know
    # These are read from the file by the front.
    created: int = 0  #: when the file was changed last, in seconds since 1970
    params: int = 0
    size_bytes: int = 0  #: of the file
    title: str | None = None  #: the name that the file gives itself
    template: str | None = None  #: the chat template that it has
    details: tuple[str, ...] = ()  #: the last of ``notes``: how a model without predictors is computed


@dataclass(frozen=True)
class ProcessStats(EngineStats):
    """Statistics of the engine, and of the process that it has to itself."""

    rss_bytes: int = 0  #: memory of the process, weights included
    #: seconds from the beginning of each step to the next one's, where requests ran in between; those since
    #: step times were asked for last, the latest some thousand
    step_s: tuple[float, ...] = ()


def model_info(engine: Engine) -> ModelInfo:
    session, model, gpus = engine.session, engine.model, engine.model.on_gpus
    return ModelInfo(
        name=model.name,
        path=str(model.path),
        fingerprint=model.fingerprint,
        context=engine.scheduler.context,
        vocab=model.config.vocab,
        family=model.config.architecture,
        sparsity=session.sparsity,
        notes=tuple(session.notes),
        details=session.details,
        slots=model.limits.sequences,
        chunk=model.limits.chunk,
        cache_type=model.plan.request.cache_type,
        cache_positions=session.cache.pages * PAGE,
        threads=model.threads,
        layers=model.config.layers,
        neurons=model.config.neurons,
        gpu=", ".join(each.gpu.name for each in gpus) or None,
        hot_share=sum(each.hot_share for each in gpus) if gpus else None,
        picture=Picture.of(session),
    )


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        if sys.platform == "win32":
            return int(memory_counters(kernel32()).resident)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
