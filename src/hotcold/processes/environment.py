"""Environment variables of child processes. Only a child that needs a secret gets it."""

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
_ALLOWED_PREFIXES = ("LC_", "_PYI_")  # for locales, and for PyInstaller's child processes
#: The server's key. The engine process takes no requests from clients.
_KEY = "HOTCOLD_API_KEY"


def minimal_environment() -> dict[str, str]:
    """Returns the environment of a process for untrusted code or data: only an interpreter's variables."""
    named = {
        name: value
        for name, value in os.environ.items()
        if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }
    return {**named, **_import_path()}


def engine_environment() -> dict[str, str]:
    """Returns the environment of an engine process: all variables except the server's key. GPU drivers read
    any variables, and the engine downloads models with ``HF_TOKEN`` and proxies."""
    return {**{name: value for name, value in os.environ.items() if name != _KEY}, **_import_path()}


def _import_path() -> dict[str, str]:
    """Returns the variable that lets another interpreter import the same modules."""
    return {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
