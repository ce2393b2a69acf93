"""Child processes of a program that was packed into one folder (by PyInstaller, say).

Hotcold starts its child processes as ``sys.executable -P -m MODULE`` and ``sys.executable -P -c CODE``. In a
packed program that is the program itself and no interpreter, so the program must do what the child is for."""

import re
import runpy
import sys
from importlib import import_module

_MODULE = re.compile(r"hotcold(\.\w+)+")
_CALL = re.compile(r"from (hotcold(?:\.\w+)+) import (\w+); \2\(\)")


def freeze_support() -> None:
    """Does the work of a child process and ends, if a packed program was started to be one; otherwise it
    returns at once. Call it first in the main module of a program that is to be packed, as that function of
    ``multiprocessing``. Only modules of Hotcold are run so."""
    if not getattr(sys, "frozen", False) or len(sys.argv) < 4 or sys.argv[1] != "-P":
        return
    kind, what, *arguments = sys.argv[2:]
    if kind == "-m" and _MODULE.fullmatch(what):
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        sys.exit(0)
    if kind == "-c" and (call := _CALL.fullmatch(what)):
        sys.argv = ["-c", *arguments]
        getattr(import_module(call[1]), call[2])()
        sys.exit(0)
