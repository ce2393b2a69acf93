"""Fuzz target: the reader of torch.save's files refuses one in one line, or gives a vector of its bytes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hotcold.formats.torch_zip import TorchFileError, read_vector

CORPUS = "torch_zip"  #: folder of the seeds in tests/corpus

_memory = Path("/dev/shm")  # where it exists, files there never reach a disk
_file = tempfile.NamedTemporaryFile(suffix=".pt", dir=_memory if _memory.is_dir() else None)  # noqa: SIM115


def one_input(data: bytes) -> bool:
    """Whether the file is read; what is neither that nor a proper refusal raises."""
    os.ftruncate(_file.fileno(), 0)
    os.pwrite(_file.fileno(), data, 0)
    try:
        vector = read_vector(Path(_file.name))
        assert vector.ndim == 1 and 0 < vector.nbytes < len(data) and vector.tobytes() in data
        return True
    except TorchFileError as error:
        text = str(error)
        assert text.isprintable() and text.startswith(f"{_file.name}: ") and len(text) < 1000, text
        return False
