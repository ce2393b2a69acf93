"""Defines the ops on buffers: an interface, a NumPy specification, and the backends."""

from hotcold.errors import UserError
from hotcold.kernels.backend import Backend

BACKENDS = ("cpu", "reference")


def open_backend(name: str, threads: int | None = None, prompt_math: str = "same") -> Backend:
    """One of :data:`BACKENDS`; ``threads`` None takes what affinity and cgroup quota allow. ``prompt_math``:
    one of :data:`~hotcold.kernels.numpy_tiles.PROMPT_MATHS`. UserError: it needs another processor, an
    unknown name, or a thread count that the backend cannot use (``reference``: any). Those of GPUs are opened
    by :func:`hotcold.kernels.gpus.open_gpu`."""
    if name == "cpu":
        from hotcold.kernels.cpu import CPUBackend

        return CPUBackend(threads=threads, isa=None, prompt_math=prompt_math)
    if name == "reference":
        from hotcold.kernels.reference import ReferenceBackend

        if threads is not None:
            raise UserError(f"threads {threads}: backend 'reference' has no thread pool; leave threads out")
        return ReferenceBackend(prompt_math)
    raise UserError(f"backend {name!r} does not exist: choose from {', '.join(BACKENDS)}")
