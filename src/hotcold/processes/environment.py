"""Environment variables of child processes. A child gets a secret only if it needs it."""

import os
import sys

#: Variables that an interpreter, its imports and the system's libraries read.
_ALLOWED = frozenset(
    (
        *("PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR"),  # Windows
    )
)
_ALLOWED_PREFIXES = ("LC_", "_PYI_")  # of locales, and of PyInstaller for children of a packed program
#: The server's key. The engine process takes no requests from clients.
_KEY = "HOTCOLD_API_KEY"


def minimal_environment() -> dict[str, str]:
    """The environment of a process that runs code or data from strangers: only variables that an interpreter
    needs."""
    named = {
        name: value
        for name, value in os.environ.items()
        if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }
    return {**named, **_import_path()}


def engine_environment() -> dict[str, str]:
    """The environment of an engine process: this process's own without the server's key. GPU drivers read any
    number of variables, and the engine downloads models, for which it needs ``HF_TOKEN`` and proxies."""
    return {**{name: value for name, value in os.environ.items() if name != _KEY}, **_import_path()}


def _import_path() -> dict[str, str]:
    """The variable that lets another interpreter import the same modules."""
    return {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
