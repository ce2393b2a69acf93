"""Hostile GGUF files, built byte by byte: each gives one line, at once, in little memory."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

from hotcold.formats.gguf import GGUFError, open_gguf

Bounded: TypeAlias = Callable[[], AbstractContextManager[None]]
Refused: TypeAlias = Callable[[Path, str], AbstractContextManager[None]]

UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10
F32, Q8_0, Q2_K, Q4_K, Q8_K = 0, 8, 10, 12, 15
HUGE = (2**64 - 1, 2**63, 500_000_000)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def text(data: bytes) -> bytes:
    return u64(len(data)) + data


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(item: int, length: int, data: bytes = b"") -> bytes:
    return u32(item) + u64(length) + data


def info(name: bytes = b"w", sizes: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0) -> bytes:
    """A tensor entry; ``sizes`` in ggml's order, innermost first."""
    return text(name) + u32(len(sizes)) + u64(*sizes) + u32(kind) + u64(offset)


def header(keys: int, tensors: int, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + u32(version) + u64(tensors, keys)


def model(*keys: bytes, infos: tuple[bytes, ...] = (), data: int = 0, alignment: int = 32) -> bytes:
    """A file of these entries, padded, with ``data`` bytes of tensor data."""
    head = header(len(keys), len(infos)) + b"".join((*keys, *infos))
    return head + bytes(-len(head) % alignment) + bytes(data)


def tensor(*args: object, data: int = 32, **kwargs: object) -> bytes:
    return model(infos=(info(*args, **kwargs),), data=data)  # type: ignore[arg-type]


GOOD = tensor(b"w", (8,), F32, 0)
ALIGNED_64 = entry(b"general.alignment", UINT32, u32(64))

HEADERS = {
    "empty": (b"", "empty.*GGUF file is needed"),
    "magic FUGG": (b"FUGG" + GOOD[4:], "FUGG.*GGUF or PWRI"),
    "magic with control characters": (b"\x1b[2J" + GOOD[4:], r"x1b.*GGUF or PWRI"),
    **{
        f"version {n}": (header(0, 0, version=n), f"version {n} is not supported.*2 and 3")
        for n in (0, 1, 4, 2**31, 2**32 - 1)
    },
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    **{f"{n} tensors": (header(0, n), f"{n} tensors declared.*at most") for n in HUGE},
    **{f"{n} keys": (header(n, 0), f"{n} metadata keys declared.*at most") for n in HUGE},
    "one tensor too many": (header(0, 2) + info() + bytes(40), "the name of tensor 1 is|tensor name ''"),
}

METADATA = {
    "key length 2^64-1": (
        header(1, 0) + u64(2**64 - 1) + bytes(64),
        f"{2**64 - 1} bytes long.*at most 65535",
    ),
    "key of 65536 bytes": (model(entry(b"k" * 65536, BOOL, b"\1")), "65536 bytes long.*at most 65535"),
    "empty key": (model(entry(b"", BOOL, b"\1")), "key ''.*1 to 65535"),
    "key with NUL": (model(entry(b"a\0b", BOOL, b"\1")), r"key 'a\\x00b'"),
    "key with line feed": (model(entry(b"a\nb", BOOL, b"\1")), r"key 'a\\nb'"),
    "key not UTF-8": (model(entry(b"a\xff", BOOL, b"\1")), "key 0 is not UTF-8.*0xff at 1"),
    "duplicate key": (model(entry(b"k", BOOL, b"\1"), entry(b"k", BOOL, b"\1")), "'k' occurs twice"),
    **{
        f"value type {n}": (model(entry(b"k", n, bytes(64))), f"'k' has type {n}: allowed are 0 to 12")
        for n in (13, 255, 2**32 - 1)
    },
    "item type 13": (model(entry(b"k", ARRAY, array(13, 1, bytes(64)))), "has type 13: allowed"),
    "truth value 7": (model(entry(b"k", BOOL, b"\7")), "truth value 7: allowed are 0 and 1"),
    "truth value 7 in array": (model(entry(b"k", ARRAY, array(BOOL, 2, b"\1\7"))), "truth value 7: allowed"),
    **{
        f"string length {n}": (
            model(entry(b"k", STRING, u64(n) + bytes(64))),
            f"{n} bytes long.*at most 16777216",
        )
        for n in (2**64 - 1, 2**63, 2**24 + 1)
    },
    "string beyond the file": (
        model(entry(b"k", STRING, u64(2**20) + bytes(64))),
        "ends inside value of 'k'",
    ),
    "template over 1 MiB": (
        model(entry(b"tokenizer.chat_template", STRING, text(b"x" * (2**20 + 1)))),
        "1048577 bytes long.*at most 1048576",
    ),
    **{
        f"array of {n} of type {kind}": (
            model(entry(b"k", ARRAY, array(kind, n, bytes(64)))),
            f"{n} (strings|numbers) in the value of 'k' declared",
        )
        for n in (2**64 - 1, 2**63, 2**61, 500_000_000)
        for kind in (0, UINT32, BOOL, STRING, 12)
    },
    "array of arrays": (model(entry(b"k", ARRAY, array(ARRAY, 1, array(0, 1, b"\0")))), "only flat arrays"),
    "3000 nested arrays": (model(entry(b"k", ARRAY, array(ARRAY, 1) * 3000)), "only flat arrays"),
    **{
        f"alignment {n}": (
            model(entry(b"general.alignment", UINT32, u32(n)), infos=(info(),), data=64),
            f"alignment is {n}: a power of two from 8",
        )
        for n in (0, 1, 3, 4, 13, 48, 2**21, 2**31)
    },
    "alignment as uint64": (model(entry(b"general.alignment", UINT64, u64(32))), "uint64: uint32 is needed"),
    "alignment as string": (model(entry(b"general.alignment", STRING, text(b"32"))), "string: uint32"),
    "a part that says nothing of itself": (
        model(entry(b"split.count", 2, struct.pack("<H", 3))),
        "split.no is missing.*0 to 2",
    ),
    "parts as array": (model(entry(b"split.count", ARRAY, array(0, 2, b"\2\3"))), "count is an array of 2"),
    "65535 parts": (model(entry(b"split.count", 2, b"\xff\xff")), "count is 65535: .*0 to 512"),
}

TENSORS = {
    "name of 65 bytes": (tensor(b"n" * 65), "65 bytes long: at most 64"),
    "name length 2^64-1": (header(0, 1) + u64(2**64 - 1) + bytes(64), "at most 64"),
    "empty name": (tensor(b""), "name ''.*1 to 64"),
    "name with NUL": (tensor(b"a\0b"), r"name 'a\\x00b'"),
    "name that is a path": (tensor(b"a/../b"), "name 'a/../b'"),
    "name not UTF-8": (tensor(b"\xff"), "tensor 0 is not UTF-8"),
    "duplicate name": (model(infos=(info(), info(offset=32)), data=64), "w occurs twice"),
    **{
        f"{n} dimensions": (
            model(infos=(text(b"w") + u32(n) + u64(*[1] * 8) + u32(F32) + u64(0),), data=64),
            f"{n} dimensions: 1 to 4",
        )
        for n in (0, 5, 2**32 - 1)
    },
    "dimension 0": (tensor(b"w", (0,)), r"shape \(0,\).*from 1"),
    "dimension -1": (tensor(b"w", (8, 2**64 - 1)), r"shape \(18446744073709551615, 8\)"),
    "dimension 2^63": (tensor(b"w", (2**63,)), "from 1 to 2"),
    "dimension 2^63-1": (tensor(b"w", (2**63 - 1,)), "beyond the end of the file"),
    "product wraps to 0": (tensor(b"w", (2**32, 2**32)), "beyond the end of the file"),
    "product 2^66": (tensor(b"w", (2**33, 2**33)), "beyond the end of the file"),
    "bytes wrap to 32": (tensor(b"w", (2**62 + 8,)), "beyond the end of the file"),
    "row not of blocks of 32": (tensor(b"w", (48, 2), Q8_0), "row of 48 weights: Q8_0 needs.*multiple of 32"),
    "row not of blocks of 256": (
        tensor(b"w", (32, 8), Q4_K),
        "row of 32 weights: Q4_K needs.*multiple of 256",
    ),
    **{
        f"block type {n}": (
            tensor(b"w", (256,), n),
            rf"unknown block type number {n}{more}: supported are F32, .*Q4_0",
        )
        for n, more in {
            4: r" \(Q4_2, which ggml dropped\)",
            31: r" \(Q4_0_4_4, which ggml dropped\)",
            36: r" \(bitnet.cpp's I2_S\)",
            255: "",
            2**32 - 1: "",
        }.items()
    },
    "offset not aligned": (tensor(b"w", (8,), F32, 4, data=64), "offset 4: a multiple of the alignment 32"),
    "offset not aligned to 64": (
        model(ALIGNED_64, infos=(info(offset=32),), data=64, alignment=64),
        "offset 32: a multiple of the alignment 64",
    ),
    "offset 2^64-1": (tensor(b"w", (8,), F32, 2**64 - 1), "a multiple of the alignment"),
    "offset 2^64-32": (tensor(b"w", (8,), F32, 2**64 - 32), "beyond the end of the file"),
    "offset at the end": (tensor(b"w", (8,), F32, 32), "beyond the end of the file"),
    "data short by 1": (tensor(data=31), "w .32 bytes at 64. reaches beyond the end of the file .95 bytes"),
    "overlap": (
        model(infos=(info(b"a", (16,)), info(b"b", (8,), F32, 32)), data=64),
        "a and b overlap at byte",
    ),
    "same place": (model(infos=(info(b"a"), info(b"b")), data=32), "overlap"),
}


@pytest.mark.parametrize(
    ("data", "pattern"),
    [pytest.param(*case, id=name) for name, case in (HEADERS | METADATA | TENSORS).items()],
)
def test_a_bad_file_is_refused(data: bytes, pattern: str, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with refused(path, pattern):
        open_gguf(path)


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        b"PWRI" + GOOD[4:],
        header(0, 0),
        model(entry(b"k", ARRAY, array(STRING, 0))),
        model(entry(b"k", 6, struct.pack("<f", float("nan")))),
        tensor(b"n" * 64),
        model(ALIGNED_64, infos=(info(), info(b"v", offset=64)), data=128, alignment=64),
        model(infos=(info(b"b", offset=32), info(b"a")), data=64),
        model(entry(b"split.count", 2, b"\1\0")),
    ],
)
def test_the_nearest_good_file_opens(data: bytes, tmp_path: Path) -> None:
    """The file from which the refusals above are built is right, so each is refused for its own reason."""
    path = tmp_path / "good.gguf"
    path.write_bytes(data)
    with open_gguf(path) as file:
        for name in file.tensors:
            file.load(name)


@pytest.mark.parametrize("data", [b"ab\xfe", b"\xed\xa0\x80", b"\xff" * 3000, "é".encode()])
def test_text_need_not_be_utf_8(data: bytes, tmp_path: Path) -> None:
    """Bytes that are no text are replaced where they are shown; the tokens of a vocabulary keep theirs."""
    path = tmp_path / "model.gguf"
    strings = array(STRING, 3, text(b"a") + text(data) + text(b"b"))
    keys = [entry(b"general.name", STRING, text(data)), entry(b"general.tags", ARRAY, strings)]
    path.write_bytes(model(*keys, entry(b"tokenizer.ggml.tokens", ARRAY, strings)))
    with open_gguf(path) as file:
        metadata = file.metadata
    shown = data.decode(errors="replace")
    assert metadata["general.name"] == shown and metadata["general.tags"] == ["a", shown, "b"]
    shown.encode()
    tokens = [token.encode(errors="surrogateescape") for token in metadata["tokenizer.ggml.tokens"]]
    assert tokens == [b"a", data, b"b"]


# --- special files ---


@pytest.mark.skipif(sys.platform == "win32", reason="files are not sparse unasked")
def test_a_sparse_terabyte_is_cheap(tmp_path: Path, refused: Refused, bounded: Bounded) -> None:
    path = tmp_path / "sparse.gguf"
    for data, pattern in (
        (b"", "starts with"),
        (header(0, 2**33), "tensors declared: at most 65536"),
        (header(2**33, 0), "metadata keys declared: at most 65536"),
        (header(65536, 0), "key ''"),
        (header(1, 0) + entry(b"k", ARRAY, array(STRING, 2**36)), "at most 2097152"),
        (header(1, 0) + entry(b"k", ARRAY, array(UINT64, 2**36)), "at most 16777216"),
        (header(1, 0) + entry(b"k", ARRAY, array(UINT64, 2**24)), "beyond 128 MiB"),
    ):
        path.write_bytes(data)
        os.truncate(path, 1 << 40)
        with refused(path, pattern):
            open_gguf(path)
    path.write_bytes(tensor(b"w", (2**30, 200)))
    os.truncate(path, 1 << 40)
    with bounded(), open_gguf(path) as file:
        assert file.tensors["w"].nbytes == 200 * 2**32


def test_strings_in_arrays_have_a_budget(tmp_path: Path) -> None:
    """Two arrays that are each within the limit."""
    path = tmp_path / "strings.gguf"
    with path.open("wb") as out:
        out.write(header(2, 0) + entry(b"a", ARRAY, array(STRING, 600_000)) + bytes(8 * 600_000))
        out.write(entry(b"b", ARRAY, array(STRING, 1_500_000)))
    os.truncate(path, path.stat().st_size + 8 * 1_500_000)
    with pytest.raises(GGUFError, match=r"'b' brings the strings in arrays to more than 2097152"):
        open_gguf(path)


def special(path: Path, kind: str) -> Path:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        return Path("/dev/zero")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "no permission":
        path.touch(mode=0)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("fifo", "is a FIFO: a regular file is needed"),
        ("directory", "is a directory: a regular file is needed"),
        ("device", "is a device or socket: a regular file is needed"),
        ("link to a device", "is a device or socket"),
        ("broken link", "No such file"),
        ("missing", "No such file"),
        ("loop", "symbolic links"),
        ("no permission", "Permission denied|is empty"),  # root may read it
    ],
)
def test_what_is_no_file_is_refused_at_once(
    kind: str, pattern: str, tmp_path: Path, refused: Refused
) -> None:
    path = special(tmp_path / "model.gguf", kind)
    with refused(path, pattern):
        open_gguf(path)


def test_a_path_with_control_characters_stays_one_line(tmp_path: Path) -> None:
    for name in ("a\nb", "a\0b"):
        with pytest.raises(GGUFError) as caught:
            open_gguf(tmp_path / name)
        assert str(caught.value).isprintable()


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights")
def test_a_link_to_a_file_opens(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GOOD)
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    with open_gguf(tmp_path / "link.gguf") as file:
        assert list(file.tensors) == ["w"]


def test_an_unsupported_type_is_listed_but_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tensor(b"blk.0.ffn_up.weight", (256, 2), Q8_K, data=584))
    with open_gguf(path) as file:
        listed = file.tensors["blk.0.ffn_up.weight"]
        assert (listed.type.name, listed.shape, listed.nbytes) == ("Q8_K", (2, 256), 584)
        assert file.fingerprint()
        with pytest.raises(
            GGUFError, match=r"blk\.0\.ffn_up\.weight: .*Q8_K is not supported.*F32, .*Q4_0, "
        ):
            file.load("blk.0.ffn_up.weight")
        with pytest.raises(GGUFError, match=r"blk\.0\.ffn_up\.weight is Q8_K: I8, I16, I32 or I64 is needed"):
            file.load_integers("blk.0.ffn_up.weight")
        with pytest.raises(GGUFError, match=r"no tensor 'blk\.0\.ffn_down\.weight' among its 1"):
            file.load("blk.0.ffn_down.weight")
