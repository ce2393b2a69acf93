"""A good GGUF file that was cut, mutated or changed while it was open."""

from __future__ import annotations

import gc
import os
import re
import struct
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import GGUFError, GGUFFile, open_gguf, write_gguf

Bounded: TypeAlias = Callable[[], AbstractContextManager[None]]
Refused: TypeAlias = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file of every kind of content, that ends with the last byte of a tensor."""
    path = tmp_path_factory.mktemp("sample") / "sample.gguf"
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(60)],
        "tokenizer.ggml.scores": np.linspace(-1, 0, 60, dtype=np.float32),
        "flags": [True, False],
        "wide": np.uint64(2**40),
    }
    values = np.sin(np.arange(16 * 64, dtype=np.float32)).reshape(16, 64)
    write_gguf(path, metadata, {f"blk.0.{type}": quantise(values, type) for type in ("Q8_0", "F16", "F32")})
    return path.read_bytes()


def everything(file: GGUFFile) -> None:
    """Uses all that a file offers, and checks what the reader promises of it."""
    end = 0
    for info in sorted(file.tensors.values(), key=lambda info: info.offset):
        assert end <= info.offset <= info.offset + info.nbytes <= file.size
        end = info.offset + info.nbytes
        if info.type.supported:
            loaded = file.load(info.name)
            assert loaded.nbytes == info.nbytes and loaded.dequantise().shape == info.shape
    assert re.fullmatch("[0-9a-f]{16}", file.fingerprint())


def test_every_truncation_is_refused(sample: bytes, tmp_path: Path, refused: Refused, full: bool) -> None:
    """At each of the first bytes, and further on at every few: how many of them divides no number's size."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(sample)
    assert len(sample) > 4096
    with open_gguf(path) as file:
        everything(file)
    for size in (len(sample) - 1, *range(4096, 64, -3 if full else -11), *range(64, -1, -1)):
        os.truncate(path, size)
        with refused(path):
            open_gguf(path)


def outcome(path: Path, data: bytes) -> bool:
    """True if the file opens; then all of it works, else it is refused in one line."""
    path.write_bytes(data)
    try:
        with open_gguf(path) as file:
            everything(file)
        return True
    except GGUFError as error:
        assert str(error).isprintable() and str(error).startswith(f"{path}: ")
        return False


def put(data: bytes, at: int, new: bytes) -> bytes:
    at %= len(data)
    return data[:at] + new + data[at + len(new) :]


EXTREMES = [0, 1, 2**7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
EDITS: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.builds(
        lambda at, b: lambda data: put(data, at, bytes([b])), st.integers(0, 2200), st.integers(0, 255)
    ),
    st.builds(
        lambda at, n: lambda data: put(data, at, struct.pack("<Q", n)),
        st.integers(0, 2200),
        st.sampled_from(EXTREMES),
    ),
    st.builds(
        lambda at, n: lambda data: data[:at] + data[at + n :], st.integers(0, 5000), st.integers(1, 64)
    ),
    st.builds(
        lambda at, new: lambda data: data[:at] + new + data[at:], st.integers(0, 2200), st.binary(max_size=40)
    ),
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, min_size=1, max_size=4))
def test_mutations_work_or_are_refused(
    edits: list[Callable[[bytes], bytes]], sample: bytes, tmp_path: Path, bounded: Bounded
) -> None:
    data = sample
    for edit in edits:
        data = edit(data) or b"\0"
    with bounded():
        outcome(tmp_path / "mutated.gguf", data)


@pytest.mark.full
def test_extreme_numbers_everywhere(sample: bytes, tmp_path: Path) -> None:
    """Every offset of the header, not only random ones; most must be refused."""
    path = tmp_path / "mutated.gguf"
    assert outcome(path, sample)
    opened = [outcome(path, put(sample, at, struct.pack("<Q", 2**63))) for at in range(24)]
    opened += [outcome(path, put(sample, at, b"\xff" * 4)) for at in range(24, 2200)]
    assert opened[:24] == [False] * 24
    assert 0 < sum(opened) < len(opened)


def test_a_file_cut_or_grown_while_open_is_refused(sample: bytes, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "model.gguf"
    for size in (len(sample) - 1, 100, 0, len(sample) + 1):
        path.write_bytes(sample)
        with open_gguf(path) as file:
            os.truncate(path, size)
            for use in (lambda file=file: file.load("blk.0.F32"), lambda file=file: file.load("blk.0.Q8_0")):
                with refused(path, f"changed from {len(sample)} to {size} bytes"):
                    use()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not replace open files")
def test_a_file_replaced_while_open_keeps_its_tensors(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sample)
    with open_gguf(path) as file:
        before = file.load("blk.0.F32").data
        write_gguf(path, {}, {"blk.0.F32": quantise(np.zeros((16, 64)), "F32")})
        assert np.array_equal(file.load("blk.0.F32").data, before)


def test_a_closed_file_says_so(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sample)
    with open_gguf(path) as file:
        pass
    with pytest.raises(GGUFError, match="is closed"):
        file.load("blk.0.F32")


def test_no_descriptor_is_left_open(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if not Path("/dev/fd").is_dir():
        pytest.skip("no list of descriptors")
    gc.collect()  # closes what earlier tests left
    before = len(os.listdir("/dev/fd"))
    for data in (sample, sample[:-1], b"GGUF", b""):
        path.write_bytes(data)
        for _ in range(5):
            with suppress(GGUFError):
                open_gguf(path)
    assert len(os.listdir("/dev/fd")) == before
