"""State dicts of torch.save, by hand and by torch; whatever else a pickle says is refused, not executed."""

from __future__ import annotations

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

from hotcold.formats import torch_state
from hotcold.formats.torch_entries import TorchFileError
from hotcold.formats.torch_state import TorchState

MATRIX = np.arange(12, dtype="<f4").reshape(3, 4)


def test_values_types_and_strides(tmp_path: Path) -> None:
    arrays = {
        "a.weight": MATRIX,
        "half": MATRIX.astype("<f2"),
        "brain": np.array([[0x3F80, 0xC000]], "<u2"),
        "turned": np.asfortranarray(MATRIX),
    }
    body, data = state(list(arrays), list(arrays.values()))
    data[3] = MATRIX.T.tobytes()  # as it lies in memory
    path = tmp_path / "a.bin"
    with zipfile.ZipFile(path, "w", STORED) as file:
        file.writestr("x/data.pkl", b"\x80\x02" + body + b".")
        for key, values in enumerate(data):
            file.writestr(f"x/data/{key}", values)
    opened = TorchState(path)
    seen = {name: (tensor.dtype, tensor.shape) for name, tensor in opened.tensors.items()}
    assert seen == {
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
    """Tuples of one value twice, so many levels deep: hashing or printing it takes 2^levels steps."""
    return value + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(levels))


FLOATS = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(300) + b"tQ"
REFUSED: dict[str, tuple[bytes, str]] = {
    "a function": (pickle.dumps({"a": Evil()}, 2)[2:-1], "global '__builtin__ print': only a dict"),
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
    "a key that is nested": (b"}" + b"N" + b"\x85" * 400_000 + b"Ns", "a key that is no text"),
    "a key of tuples twice over": (b"}" + pairs_of(b"N", 60) + b"Ns", "a key that is no text"),
    "such a key among several": (b"}(" + text("a") + b"N" + pairs_of(b"N", 60) + b"Nu", "is no text"),
    "a number as key": (b"}" + integer(1) + vector() + b"s", "a key that is no text"),
    "a global of tuples": (pairs_of(b"N", 60) + text("x") + b"\x93", "a global whose name is no text"),
    "a global within tuples": (text("torch") + pairs_of(b"N", 60) + b"\x93", "whose name is no text"),
    "a tuple for a storage": (tensor_of(text("NOPE") + text("0") + b"\x86"), "of what is no storage"),
    "a list for its key": (tensor_of(text("F32") + b"]\x86"), "of what is no storage"),
    "a dict for a shape": (tensor_of(FLOATS, b"}", b"}"), "damaged: \"a tensor's shape\""),
    "a list for a shape": (tensor_of(FLOATS, b"]", b"]"), "damaged: \"a tensor's shape\""),
    "a truth for a size": (tensor_of(FLOATS, b"\x88\x85", b"\x88\x85"), "\"a tensor's shape\""),
    "17 dimensions": (tensor_of(FLOATS, *[b"(" + integer(1) * 17 + b"t"] * 2), "\"a tensor's shape\""),
    "no rows of 2^60 values": (
        tensor_of(FLOATS, b"(" + integer(0) + integer(1 << 30) * 2 + b"t", b"(" + integer(0) * 3 + b"t"),
        "\"a tensor's shape\"",
    ),
    "a call of what is none": (b"ctorch\nFloatStorage\n)R", "it calls what is no function"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_pickles_are_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body, message = REFUSED[case]
    with pytest.raises(TorchFileError) as caught:
        TorchState(write(tmp_path / "a.bin", body))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_strides_that_nobody_follows(tmp_path: Path) -> None:
    """Of sizes of 1 and 0 any stride will do, also one that bytes in 64 bits cannot count."""
    far = b"\x8a\x08" + (1 << 61).to_bytes(8, "little")
    column = tensor_of(FLOATS, integer(4) + integer(1) + b"\x86", integer(1) + far + b"\x86")
    opened = TorchState(write(tmp_path / "a.bin", column))
    np.testing.assert_array_equal(opened.read("a"), NUMBERS[:4].reshape(4, 1))
    none = tensor_of(FLOATS, integer(4) + integer(0) + b"\x86", far + far + b"\x86")
    assert TorchState(write(tmp_path / "b.bin", none)).read("a").shape == (4, 0)
    assert TorchState(write(tmp_path / "c.bin", tensor_of(FLOATS))).read("a").shape == ()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED])
def test_files_that_are_not_torchs(method: int, tmp_path: Path) -> None:
    good = b"}" + text("a") + vector() + b"s"
    with pytest.raises(TorchFileError, match="compressed or encrypted"):
        TorchState(write(tmp_path / "a.bin", good, method=method))
    (tmp_path / "old.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(
        TorchFileError, match=r"old\.bin: is no zip, or cut short: torch\.save of version 1\.6"
    ):
        TorchState(tmp_path / "old.bin")


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = write_state(tmp_path / "a.bin", ["a", "b"], [MATRIX, MATRIX[:1]])
    whole = path.read_bytes()
    assert len(TorchState(path).tensors) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TorchFileError):
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
    """Of files above 4 GiB: the same listing, with sizes and places in fields of their own."""
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
    monkeypatch.setattr(torch_state, "MAX_PICKLE", 16)
    with pytest.raises(TorchFileError, match=r"bytes of data\.pkl: 1 to 16 are allowed"):
        TorchState(path)
