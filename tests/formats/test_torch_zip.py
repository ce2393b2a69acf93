"""Files of torch.save: read as torch and as Python's unpickler read them, and never executed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.torch_files import NUMBERS, text, vector, write

from hotcold.formats.torch_zip import TorchFileError, read_vector


class Unpickler(pickle.Unpickler):
    """Python's own, with a NumPy array where torch makes a tensor: an independent truth."""

    def persistent_load(self, pid: Any) -> Any:
        assert pid[:2] == ("storage", "FloatStorage")
        return NUMBERS[: pid[4]]

    def find_class(self, module: str, name: str) -> Any:
        def rebuild(storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any) -> Any:
            assert stride == (1,) and grad is False and hooks == {}
            return storage[offset : offset + size[0]]

        return {"_rebuild_tensor_v2": rebuild, "FloatStorage": "FloatStorage", "OrderedDict": dict}[name]


@pytest.mark.parametrize(
    "body", [vector(), vector(offset=7, size=20), b"]" + vector() + b"a", b"}" + text("x") + vector() + b"s"]
)
def test_as_python_reads_it(tmp_path: Path, body: bytes) -> None:
    expected = Unpickler(io.BytesIO(b"\x80\x02" + body + b".")).load()
    while isinstance(expected, list | dict):
        (expected,) = expected.values() if isinstance(expected, dict) else expected
    found = read_vector(write(tmp_path / "x.pt", body))
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_files_that_torch_wrote(repository: Path) -> None:
    folder = repository / "tests/corpus/torch_zip"
    a = np.arange(12)
    for name, values in (("floats", a / 4), ("list", a), ("dict", a), ("slice", a[3:9])):
        assert read_vector(folder / f"{name}.pt").tolist() == values.tolist()


def test_all_types_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is in the extra test-full")
    values = torch.randint(0, 100, (70000,))
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8"):
        tensor = values.to(getattr(torch, name))
        for saved in (tensor, tensor[100:5000], [tensor], {"count": tensor}):
            torch.save(saved, tmp_path / "x.pt")
            kept = tensor[100:5000] if len(saved) == 4900 else tensor
            found = read_vector(tmp_path / "x.pt")
            assert found.dtype == np.dtype(name) and np.array_equal(found, kept.numpy())
    for refused in (values.bfloat16(), [values, values], values.reshape(2, -1), values[::2], {"n": 1}):
        torch.save(refused, tmp_path / "x.pt")
        with pytest.raises(TorchFileError):
            read_vector(tmp_path / "x.pt")


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    harm = tmp_path / "harm"
    body = pickle.dumps([Malicious(harm)], protocol)
    with pytest.raises(TorchFileError, match=r"has the (global '\w+ mkdir'|opcode \w+): only a plain vector"):
        read_vector(write(tmp_path / "x.pt", body.removeprefix(b"\x80\x02").removesuffix(b".")))
    assert not harm.exists()
    pickle.loads(body)
    assert harm.exists(), "it would have been"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (vector().replace(b"ctorch._utils\n_rebuild", b"cbuiltins\neval"), "'builtins eval_tensor_v2'"),
        (vector("torch\nBFloat16Storage"), "global 'torch BFloat16Storage'"),
        (vector("collections\nOrderedDict"), "is not of one vector"), (b"N", "opcode NONE"),
        (b"", "is not of one vector"),
        (b"]" + vector(), "is not of one vector"), (vector() + vector(), "is not of one vector"),
        (vector() + b"0" + vector(), "opcode POP"), (vector().replace(b"tQ", b"tP0\n"), "opcode PERSID"),
        (vector()[:-30], "is not of one vector"), (b"X\xff\xff\xff\x7f", "pickle is damaged"),
        (b"\xff", "pickle is damaged"), (b"N0" * 40000, "bytes of data.pkl: 1 to 65536 are allowed"),
        (vector(size=301), "elements 0 to 301: the storage has 300"), (vector(offset=1), "elements 1 to 301"),
        (vector(length=2**31 - 1, size=2**30), "elements 0 to 1073741824: the storage has 300"),
        (vector(length=10), "the storage has 10"), (vector(offset=-1, size=5), "elements -1 to 4"),
        (vector(size=-5), "elements 0 to -5"), (vector(size=0), "has 0 elements"),
        (vector(size=9, stride=2), "at stride 2"), (vector().replace(text("0"), text("1")), "storage has 0"),
        (vector().replace(text("storage"), text("module")), "is not of one vector"),
    ],
)  # fmt: skip
def test_what_is_no_plain_vector(tmp_path: Path, body: bytes, message: str) -> None:
    with pytest.raises(TorchFileError) as caught:
        read_vector(write(tmp_path / "x.pt", body))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_zip_bomb(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", vector(), bytes(100 << 20), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TorchFileError, match=r"entry 'archive/data\.pkl' is compressed or encrypted"):
        read_vector(path)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", vector())
    for size in range(path.stat().st_size)[::-1]:
        os.truncate(path, size)
        with pytest.raises(TorchFileError, match="is no zip, or cut short"):
            read_vector(path)


def test_an_entry_past_the_end_of_the_file(tmp_path: Path) -> None:
    """The list of entries says more bytes than there are."""
    path = write(tmp_path / "x.pt", vector(length=1 << 20, size=1 << 20))
    data = bytearray(path.read_bytes())
    size = NUMBERS.nbytes.to_bytes(4, "little") * 2
    at = data.index(size, data.index(b"PK\1\2"))
    data[at : at + 8] = (1 << 22).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(TorchFileError, match=r"entry 'archive/data/0' is damaged, or reaches past the end"):
        read_vector(path)
