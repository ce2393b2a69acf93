"""The state that an engine process reports: its model and its statistics."""

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
    """A loaded model and its settings."""

    name: str  #: name of the file, without its extension
    path: str
    fingerprint: str  #: of the weights, 16 hexadecimal digits
    context: int  #: limit of a request's positions, prompt and answer together
    vocab: int
    family: str  #: ``llama``, ``opt`` ...
    sparsity: str  #: the mode in use: ``exact``, ``predicted`` or ``off``
    notes: tuple[str, ...]  #: lines for users: the choice of ``auto``, and slow alternatives in use
    slots: int  #: limit of requests that run at the same time
    chunk: int  #: limit of prompt tokens in a step
    cache_type: str
    cache_positions: int  #: positions of the KV cache, which the slots share
    threads: int | None
    layers: int
    neurons: tuple[int, ...]  #: of each layer
    gpu: str | None = None  #: name of the GPU in use
    hot_share: float | None = None  #: share of the neurons that are on GPUs
    picture: Picture | None = None  #: facts for a client that shows active neurons
    # The front reads the next fields from the file.
    created: int = 0  #: when the file was changed last, in seconds since 1970
    params: int = 0
    size_bytes: int = 0  #: size of the file
    title: str | None = None  #: the model's name in the file
    template: str | None = None  #: the chat template in the file
    details: tuple[str, ...] = ()  #: the last of ``notes``: how the mode computes a model without predictors


@dataclass(frozen=True)
class ProcessStats(EngineStats):
    """Statistics of the engine and of its process."""

    rss_bytes: int = 0  #: memory of the process, weights included
    #: times from the start of each step to the start of the next, if requests ran in between. Only the newest
    #: some thousand since the last query of step times are stored.
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
        picture=Picture.from_session(session),
    )


def resident_bytes() -> int:
    """Returns this process's memory; 0 if the system does not report it."""
    try:
        if sys.platform == "win32":
            return int(memory_counters(kernel32()).resident)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
