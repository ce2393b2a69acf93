"""Limits of the files and connections that this process may have open at the same time."""

import contextlib
import sys

if sys.platform != "win32":
    import resource

#: Files besides connections of clients: the model, logs, pipes of child processes.
RESERVE = 64
_LEAST_CONNECTIONS = 16
_MAC_OS = 10240  # the largest limit on macOS, which states none


def raise_limit() -> int | None:
    """Raises the limit of open files to the system's maximum. Returns the limit; None if there is none."""
    if sys.platform == "win32":
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (hard, _MAC_OS):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def most_connections(wanted: int, files: int | None, refused: int) -> int:
    """Returns how many connections fit into a limit of ``files`` open files, at most ``wanted``. ``refused``
    additional connections may be open for a moment."""
    if files is None:
        return wanted
    return min(wanted, max(files - RESERVE - refused, _LEAST_CONNECTIONS))
