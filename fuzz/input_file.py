"""The file that targets which read files are given, and what every refusal of it must look like."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class InputFile:
    """One file, written anew for each input; in memory where the system has such a place."""

    def __init__(self, suffix: str) -> None:
        memory = Path("/dev/shm")
        folder = memory if memory.is_dir() else None
        self._file = tempfile.NamedTemporaryFile(suffix=suffix, dir=folder)  # noqa: SIM115
        self.path = Path(self._file.name)

    def write(self, data: bytes) -> None:
        os.ftruncate(self._file.fileno(), 0)
        os.pwrite(self._file.fileno(), data, 0)

    def check_refusal(self, error: Exception) -> None:
        text = str(error)
        assert text.isprintable() and text.startswith(f"{self.path}: ") and len(text) < 1000, text
