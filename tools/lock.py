"""Writes requirements.lock: the newest versions of all packages that the container is built from, and their
hashes. It needs uv (``pip install uv``)."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements.lock"
#: What scikit-build-core asks for where the system has none.
BUILD_TOOLS = ["cmake", "ninja"]
COMMAND = [
    *("uv", "pip", "compile", "pyproject.toml", "-", "--output-file", LOCK, "--upgrade"),
    *("--generate-hashes", "--no-annotate", "--quiet", "--custom-compile-command", "python tools/lock.py"),
    *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28"),  # of the Dockerfile's image
]


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = "\n".join([*project["build-system"]["requires"], *BUILD_TOOLS])
    return subprocess.run(COMMAND, cwd=ROOT, input=tools, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
