"""Writes src/hotcold/kernels/_native.pyi, the extension's types for type checkers.

Run ``python csrc/bind/bind_stub.py`` after signatures have changed and the package is installed again.
``--check`` compares with the existing file instead. Needs nanobind and ruff."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

from hotcold.kernels import _native

STUB = Path(__file__).resolve().parents[2] / "src/hotcold/kernels/_native.pyi"
#: Order, device and read-only flags of arrays, which type checkers ignore.
ANNOTATED = re.compile(r"Annotated\[(NDArray(?:\[[\w.]+\])?), dict\((?:[^()]|\([^()]*\))*\)\]")
TITLE = '"""The C++ extension: csrc/bind/bind_stub.py wrote this. Arrays must be C-contiguous."""\n\n'


def stub() -> str:
    made = StubGen(_native, quiet=True)
    made.put(_native)
    text = TITLE + re.sub(r"NDArray(?![\[\n])", "NDArray[numpy.generic]", ANNOTATED.sub(r"\1", made.get()))
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            ["ruff", *command, "--stdin-filename", str(STUB), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    check = parser.parse_args().check
    if hasattr(_native, "vulkan_faults"):
        sys.exit("bind_stub.py: this build injects faults: install the package without HOTCOLD_FAULTS")
    if not check:
        STUB.write_text(stub(), encoding="utf-8")
    elif STUB.read_text(encoding="utf-8") != stub():
        sys.exit(f"{STUB.name} is not what the extension has: run csrc/bind/bind_stub.py")


if __name__ == "__main__":
    main()
