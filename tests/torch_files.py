"""Files as torch.save writes them, made without torch: a zip with a pickle that is written by hand."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

STORED = zipfile.ZIP_STORED
NUMBERS = np.arange(300, dtype="<f4") / 7


def integer(n: int) -> bytes:
    return b"J" + n.to_bytes(4, "little", signed=True)


def text(words: str) -> bytes:
    return b"X" + len(words).to_bytes(4, "little") + words.encode()


def vector(
    storage: str = "torch\nFloatStorage", length: int = 300, offset: int = 0, size: int = 300, stride: int = 1
) -> bytes:
    """The pickle of a tensor, written by hand after the protocol's description in ``pickletools``."""
    key = (
        b"((" + text("storage") + b"c" + storage.encode() + b"\n" + text("0") + text("cpu") + integer(length)
    )
    shape = integer(size) + b"\x85" + integer(stride) + b"\x85"
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + key
        + b"tQ"
        + integer(offset)
        + shape
        + b"\x89"
        + hooks
        + b"tR"
    )


def write(path: Path, body: bytes, data: bytes = NUMBERS.tobytes(), method: int = STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        file.writestr("archive/data/0", data)
        file.writestr("archive/version", "3\n")
    return path
