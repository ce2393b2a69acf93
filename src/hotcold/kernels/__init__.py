"""The narrow waist: the backend interface and its implementations, each imported when it is opened."""

from __future__ import annotations

from hotcold.kernels.backend import Backend

BACKENDS = ("cpu", "reference")


def open_backend(name: str, threads: int | None = None) -> Backend:
    """The backend of this name.

    Args:
        name: one of :data:`BACKENDS`.
        threads: size of the ``cpu`` backend's pool; None takes what affinity and cgroup quota allow.
            ``reference`` has no pool and refuses a number.

    Raises:
        ValueError: unknown name, or a thread count that the backend cannot use.
    """
    if name == "cpu":
        from hotcold.kernels.cpu import CPUBackend

        return CPUBackend(threads=threads, isa=None)
    if name == "reference":
        from hotcold.kernels.reference import ReferenceBackend

        if threads is not None:
            raise ValueError(f"threads {threads}: backend 'reference' has no thread pool; leave threads out")
        return ReferenceBackend()
    raise ValueError(f"backend {name!r} does not exist: choose from {', '.join(BACKENDS)}")
