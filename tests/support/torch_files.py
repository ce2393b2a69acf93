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


def state(names: list[str], arrays: list[np.ndarray]) -> tuple[bytes, list[bytes]]:
    """The pickle of a state dict as torch.save writes it, and the data of each storage."""
    kinds = {"<f4": "Float", "<f2": "Half", "<u2": "BFloat16"}
    body = b"ccollections\nOrderedDict\n)R("
    for key, (name, array) in enumerate(zip(names, arrays, strict=True)):
        storage = f"torch\n{kinds[array.dtype.str]}Storage".encode()
        body += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"c" + storage
        body += b"\n" + text(str(key)) + text("cpu") + integer(array.size) + b"tQ" + integer(0)
        strides = [int(step // array.itemsize) for step in array.strides]
        for numbers in (array.shape, strides):
            body += b"(" + b"".join(map(integer, numbers)) + b"t"
        body += b"\x89ccollections\nOrderedDict\n)RtR"
    return body + b"u}" + text("_metadata") + b"}sb", [array.tobytes() for array in arrays]


def write_state(path: Path, names: list[str], arrays: list[np.ndarray]) -> Path:
    body, data = state(names, arrays)
    with zipfile.ZipFile(path, "w", STORED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        for key, values in enumerate(data):
            file.writestr(f"archive/data/{key}", values)
    return path


def write(path: Path, body: bytes, data: bytes = NUMBERS.tobytes(), method: int = STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        file.writestr("archive/data/0", data)
        file.writestr("archive/version", "3\n")
    return path
