"""The ops on buffers: an interface, a NumPy specification, and the backends."""

from hotcold.errors import UserError
from hotcold.kernels.backend import Backend

BACKENDS = ("cpu", "reference")


def open_backend(name: str, threads: int | None = None, prompt_math: str = "same") -> Backend:
    """Opens one of :data:`BACKENDS`; ``threads`` None: as many as CPU affinity and cgroup quota allow.

    ``prompt_math``: one of :data:`~hotcold.kernels.numpy_tiles.PROMPT_MATHS`. UserError: an unknown name, a
    thread count that the backend cannot use (``reference``: any), or prompt math that this processor lacks.
    :func:`hotcold.kernels.gpus.open_gpu` opens the backends of GPUs."""
    if name == "cpu":
        from hotcold.kernels.cpu import CPUBackend

        return CPUBackend(threads=threads, isa=None, prompt_math=prompt_math)
    if name == "reference":
        from hotcold.kernels.reference import ReferenceBackend

        if threads is not None:
            raise UserError(f"threads {threads}: backend 'reference' has no thread pool; leave threads out")
        return ReferenceBackend(prompt_math)
    raise UserError(f"backend {name!r} does not exist: choose from {', '.join(BACKENDS)}")
