"""Child processes of a packed program (made by PyInstaller, for example).

Hotcold starts its child processes as ``sys.executable -P -m MODULE`` and ``sys.executable -P -c CODE``. In a
packed program ``sys.executable`` is the program itself, not an interpreter, so the program must do the
child's work."""

import re
import runpy
import sys
from importlib import import_module

_MODULE = re.compile(r"hotcold(\.\w+)+")
_CALL = re.compile(r"from (hotcold(?:\.\w+)+) import (\w+); \2\(\)")


def freeze_support() -> None:
    """Runs a child process and ends, if this process was started as one. Call it first in the main module of
    a packed program, like the function of ``multiprocessing``. It runs only modules of Hotcold."""
    if not getattr(sys, "frozen", False) or len(sys.argv) < 4 or sys.argv[1] != "-P":
        return
    kind, work, *arguments = sys.argv[2:]
    if kind == "-m" and _MODULE.fullmatch(work):
        sys.argv = [work, *arguments]
        runpy.run_module(work, run_name="__main__", alter_sys=True)
        sys.exit(0)
    if kind == "-c" and (call := _CALL.fullmatch(work)):
        sys.argv = ["-c", *arguments]
        getattr(import_module(call[1]), call[2])()
        sys.exit(0)
