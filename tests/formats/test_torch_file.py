"""Files of torch.save: read as torch and as Python's unpickler read them; what else a pickle says is refused,
and never executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.torch_files import NUMBERS, STORED, integer, state, text, vector, write, write_state

from hotcold.formats import torch_file
from hotcold.formats.torch_file import TorchFileError, TorchState, read_vector

MATRIX = np.arange(12, dtype="<f4").reshape(3, 4)


def test_values_types_and_strides(tmp_path: Path) -> None:
    arrays = {
        "a.weight": MATRIX,
        "half": MATRIX.astype("<f2"),
        "brain": np.array([[0x3F80, 0xC000]], "<u2"),
        "turned": np.asfortranarray(MATRIX),
    }
    body, data = state(list(arrays), list(arrays.values()))
    data[3] = MATRIX.T.tobytes()  # in memory order
    path = tmp_path / "a.bin"
    with zipfile.ZipFile(path, "w", STORED) as file:
        file.writestr("x/data.pkl", b"\x80\x02" + body + b".")
        for key, values in enumerate(data):
            file.writestr(f"x/data/{key}", values)
    opened = TorchState(path)
    types = {name: (tensor.dtype, tensor.shape) for name, tensor in opened.tensors.items()}
    assert types == {
        "a.weight": ("F32", (3, 4)), "half": ("F16", (3, 4)), "brain": ("BF16", (1, 2)),
        "turned": ("F32", (3, 4)),
    }  # fmt: skip
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened.read(name), array)


def test_what_torch_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.arange(24.0).reshape(4, 6)
    made = {
        "whole": shared,
        "rows": shared[1:3],
        "turned": shared.T,
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "bfloat": torch.tensor([1.5, -2.0]).bfloat16(),
        "ids": torch.arange(3),
        "scalar": torch.tensor(7.0),
    }
    torch.save(made, tmp_path / "a.bin")
    torch.save(torch.nn.Linear(3, 5).state_dict(), tmp_path / "b.bin")
    opened = TorchState(tmp_path / "a.bin")
    for name, tensor in made.items():
        if name != "bfloat":
            np.testing.assert_array_equal(opened.read(name), tensor.detach().numpy())
    assert opened.read("bfloat").tolist() == [0x3FC0, 0xC000]
    assert list(TorchState(tmp_path / "b.bin").tensors) == ["weight", "bias"]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def tensor_of(storage: bytes, shape: bytes = b")", strides: bytes = b")") -> bytes:
    """A dict of one tensor, of whatever these make."""
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return b"}" + text("a") + rebuild + storage + integer(0) + shape + strides + b"\x89}tRs"


def pairs_of(value: bytes, levels: int) -> bytes:
    """Nested tuples of one value twice: hashing or printing them takes 2^levels steps."""
    return value + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(levels))


FLOATS = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(300) + b"tQ"
REFUSED: dict[str, tuple[bytes, str]] = {
    "a function": (pickle.dumps({"a": Evil()}, 2)[2:-1], "global '__builtin__ print': only tensors"),
    "a function by name on the stack": (pickle.dumps({"a": Evil()}, 4)[2:-1], "global 'builtins print'"),
    "an object": (b"cos\nsystem\n", "global 'os system'"),
    "a list": (b"]", "not of a dict of tensors"),
    "a dict of numbers": (b"}" + text("a") + integer(1) + b"s", "has 'a': only a dict of tensors is read"),
    "a dict in a dict": (b"}" + text("a") + b"}s", "has 'a': only a dict of tensors is read"),
    "an opcode of another kind": (b"I1\n", "the opcode INT"),
    "an instance": (b"(i__main__\nX\n", "the opcode INST"),
    "two results": (b"}}", "damaged"),
    "nothing": (b"", "damaged"),
    "a tuple without a mark": (b"t", "damaged"),
    "an unknown memo": (b"h\x07", "damaged"),
    "a storage of another kind": (b"(" + text("file") + b"tQ", "a storage is described in another way"),
    "a storage outside of it": (b"}" + text("a") + vector(offset=1) + b"s", "to element 301: its storage"),
    "a negative stride": (b"}" + text("a") + vector(stride=-1) + b"s", "damaged: \"a tensor's shape\""),
    "a stride beyond it": (b"}" + text("a") + vector(stride=9) + b"s", "to element 2692: its storage"),
    "a value many times over": (b"}" + text("a") + vector(size=301, stride=0) + b"s", "'a' has 301 elements"),
    "a key that is nested": (b"}" + b"N" + b"\x85" * 400_000 + b"Ns", "a key that is not a text"),
    "a key of tuples twice over": (b"}" + pairs_of(b"N", 60) + b"Ns", "a key that is not a text"),
    "such a key among several": (b"}(" + text("a") + b"N" + pairs_of(b"N", 60) + b"Nu", "is not a text"),
    "a number as key": (b"}" + integer(1) + vector() + b"s", "a key that is not a text"),
    "a global of tuples": (pairs_of(b"N", 60) + text("x") + b"\x93", "a global whose name is not a text"),
    "a global within tuples": (text("torch") + pairs_of(b"N", 60) + b"\x93", "whose name is not a text"),
    "a tuple for a storage": (tensor_of(text("NOPE") + text("0") + b"\x86"), "of a value that is not a stor"),
    "a list for its key": (tensor_of(text("F32") + b"]\x86"), "of a value that is not a storage"),
    "a dict for a shape": (tensor_of(FLOATS, b"}", b"}"), "damaged: \"a tensor's shape\""),
    "a list for a shape": (tensor_of(FLOATS, b"]", b"]"), "damaged: \"a tensor's shape\""),
    "a truth for a size": (tensor_of(FLOATS, b"\x88\x85", b"\x88\x85"), "\"a tensor's shape\""),
    "17 dimensions": (tensor_of(FLOATS, *[b"(" + integer(1) * 17 + b"t"] * 2), "\"a tensor's shape\""),
    "no rows of 2^60 values": (
        tensor_of(FLOATS, b"(" + integer(0) + integer(1 << 30) * 2 + b"t", b"(" + integer(0) * 3 + b"t"),
        "\"a tensor's shape\"",
    ),
    "a call of what is none": (b"ctorch\nFloatStorage\n)R", "it calls a value that is not a function"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_pickles_are_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body, message = REFUSED[case]
    with pytest.raises(TorchFileError) as caught:
        TorchState(write(tmp_path / "a.bin", body))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_strides_that_nobody_follows(tmp_path: Path) -> None:
    """Any stride will do for sizes of 1 and 0, even one that bytes in 64 bits cannot count."""
    far = b"\x8a\x08" + (1 << 61).to_bytes(8, "little")
    column = tensor_of(FLOATS, integer(4) + integer(1) + b"\x86", integer(1) + far + b"\x86")
    opened = TorchState(write(tmp_path / "a.bin", column))
    np.testing.assert_array_equal(opened.read("a"), NUMBERS[:4].reshape(4, 1))
    none = tensor_of(FLOATS, integer(4) + integer(0) + b"\x86", far + far + b"\x86")
    assert TorchState(write(tmp_path / "b.bin", none)).read("a").shape == (4, 0)
    nowhere = none.replace(text("0"), text("9"))  # a storage without an entry, and without values to read
    assert TorchState(write(tmp_path / "d.bin", nowhere)).read("a").shape == (4, 0)
    assert TorchState(write(tmp_path / "c.bin", tensor_of(FLOATS))).read("a").shape == ()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED])
def test_files_that_are_not_torchs(method: int, tmp_path: Path) -> None:
    good = b"}" + text("a") + vector() + b"s"
    with pytest.raises(TorchFileError, match="compressed or encrypted"):
        TorchState(write(tmp_path / "a.bin", good, method=method))
    (tmp_path / "old.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(
        TorchFileError, match=r"old\.bin: is not a zip file, or is cut short: torch\.save of version 1\.6"
    ):
        TorchState(tmp_path / "old.bin")


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = write_state(tmp_path / "a.bin", ["a", "b"], [MATRIX, MATRIX[:1]])
    whole = path.read_bytes()
    assert len(TorchState(path).tensors) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TorchFileError, match="is not a zip file, or is cut short"):
            TorchState(path)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_files_are_read_or_refused(tmp_path_factory: Any, changes: list[tuple[int, int]]) -> None:
    path = write_state(tmp_path_factory.getbasetemp() / "m.bin", ["a", "b"], [MATRIX, MATRIX[:1]])
    data = bytearray(path.read_bytes())
    for position, value in changes:
        data[position % len(data)] = value
    path.write_bytes(data)
    try:
        opened = TorchState(path)
        for name, tensor in opened.tensors.items():
            assert opened.read(name).shape == tensor.shape
    except TorchFileError as error:
        assert "\n" not in str(error)


def test_sizes_in_64_bits(tmp_path: Path) -> None:
    """Files above 4 GiB have the same listing, with sizes and places in fields of their own."""
    path = write(tmp_path / "a.bin", b"}" + text("a") + vector() + b"s")
    data = bytearray(path.read_bytes())
    end = data.rfind(b"PK\5\6")
    count, _, start = struct.unpack_from("<HII", data, end + 10)
    listing, at = b"", start
    for _ in range(count):
        entry = bytearray(data[at : at + 46])
        name, extra, comment = struct.unpack_from("<3H", entry, 28)
        size, offset = struct.unpack_from("<I", entry, 24)[0], struct.unpack_from("<I", entry, 42)[0]
        wide = struct.pack("<2H2Q", 1, 16, size, offset)
        struct.pack_into("<I", entry, 24, 0xFFFFFFFF)
        struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
        struct.pack_into("<H", entry, 30, len(wide))
        listing += bytes(entry) + bytes(data[at + 46 : at + 46 + name]) + wide
        at += 46 + name + extra + comment
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listing), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(listing), 1)
    narrow = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(bytes(data[:start]) + listing + end64 + locator + narrow)
    with zipfile.ZipFile(path) as theirs:
        assert len(theirs.namelist()) == count
    np.testing.assert_array_equal(TorchState(path).read("a"), NUMBERS)


def test_a_pickle_that_claims_much_allocates_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = b"}" + text("a") + vector(length=1 << 30, size=1 << 30) + b"s"
    path = write(tmp_path / "a.bin", huge)
    tracemalloc.start()
    try:
        with pytest.raises(TorchFileError, match="its storage has 300"):
            TorchState(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for name, most, message in (
        ("MAX_PICKLE", 16, r"bytes of data\.pkl: 1 to 16 are allowed"),
        ("MAX_ENTRIES", 2, r"its zip lists 3 entries: 2 are allowed"),
        ("MAX_LISTING", 64, r"its zip lists entries in \d+ bytes: 64 are allowed"),
    ):
        with monkeypatch.context() as patch, pytest.raises(TorchFileError, match=message):
            patch.setattr(torch_file, name, most)
            TorchState(path)


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
    folder = repository / "tests/corpus/torch_file"
    a = np.arange(12)
    for name, values in (("floats", a / 4), ("list", a), ("dict", a), ("slice", a[3:9])):
        assert read_vector(folder / f"{name}.pt").tolist() == values.tolist()


def test_all_types_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is in the extra test-full")
    values = torch.randint(0, 100, (70000,))
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8"):
        tensor = values.to(getattr(torch, name))
        for saved in (tensor, tensor[100:5000], [tensor], {"count": tensor}, tensor[::2]):
            torch.save(saved, tmp_path / "x.pt")
            kept = (
                saved["count"] if isinstance(saved, dict) else saved[0] if isinstance(saved, list) else saved
            )
            found = read_vector(tmp_path / "x.pt")
            assert found.dtype == np.dtype(name) and np.array_equal(found, kept.numpy())
    for refused in (values.bfloat16(), [values, values], values.reshape(2, -1), {"n": 1}, values > 9):
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
    with pytest.raises(TorchFileError, match=r"has the (global '\w+ mkdir'|opcode \w+): only tensors"):
        read_vector(write(tmp_path / "x.pt", body.removeprefix(b"\x80\x02").removesuffix(b".")))
    assert not harm.exists()
    pickle.loads(body)
    assert harm.exists(), "it would have been"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (vector().replace(b"ctorch._utils\n_rebuild", b"cbuiltins\neval"), "'builtins eval_tensor_v2'"),
        (vector("torch\nBFloat16Storage"), "its tensor is of type BF16"), (b"N", "is not of one vector"),
        (vector("collections\nOrderedDict"), "described in another way"), (b"", "pickle is damaged"),
        (b"]", "is not of one vector"), (b"](" + vector() * 2 + b"e", "is not of one vector"),
        (vector() + vector(), "pickle is damaged"), (vector() + b"0" + vector(), "opcode POP"),
        (vector().replace(b"tQ", b"tP0\n"), "opcode PERSID"), (vector()[:-30], "pickle is damaged"),
        (b"X\xff\xff\xff\x7f", "pickle is damaged"), (b"\xff", "pickle is damaged"),
        (vector(size=301), "to element 301: its storage has 300"), (vector(offset=1), "to element 301: its"),
        (vector(length=2**31 - 1, size=2**26), "to element 67108864: its storage has 300"),
        (vector(length=2**31 - 1, size=2**30), "has 1073741824 elements: 1 to 67108864 are allowed"),
        (vector(length=10), "its storage has 10"), (vector(length=-1), "its storage has -1"),
        (vector(offset=-1, size=5), "pickle is damaged"), (vector(size=-5), "pickle is damaged"),
        (vector(size=0), "has 0 elements"), (vector().replace(text("0"), text("1")), "storage has 0"),
        (vector().replace(text("storage"), text("module")), "described in another way"),
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
