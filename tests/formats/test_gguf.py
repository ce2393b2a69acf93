"""The GGUF reader and writer against the ``gguf`` package and against each other."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.llama_cpp_vectors import write_vocabulary

from hotcold.formats.blocks import BLOCK_TYPES, Tensor, quantise
from hotcold.formats.gguf import GGUFError, open_gguf, write_gguf
from hotcold.formats.gguf_values import Cursor, MissingFileError

SCALARS = [
    (np.uint8(255), "UINT8"),
    (np.int8(-128), "INT8"),
    (np.uint16(65535), "UINT16"),
    (np.int16(-32768), "INT16"),
    (np.uint32(2**32 - 1), "UINT32"),
    (np.int32(-(2**31)), "INT32"),
    (np.uint64(2**64 - 1), "UINT64"),
    (np.int64(-(2**63)), "INT64"),
    (np.float32(0.1), "FLOAT32"),
    (np.float64(0.1), "FLOAT64"),
    (np.bool_(True), "BOOL"),
    (0, "UINT32"),
    (2**32 - 1, "UINT32"),
    (-1, "INT32"),
    (2**32, "UINT64"),
    (-(2**31) - 1, "INT64"),
    (1e-5, "FLOAT32"),
    (False, "BOOL"),
    ("grüße\n", "STRING"),
    ("", "STRING"),
]

ARRAYS = [
    ([1, 2, 3], "INT32"),
    ([2**31], "INT64"),
    ([2**63], "UINT64"),
    ([0.5, 2], "FLOAT32"),
    ([True, False], "BOOL"),
    (["a", "", "ß"], "STRING"),
    ([], "STRING"),
    (("a", "b"), "STRING"),
    *(
        (np.arange(5).astype(dtype), dtype.__name__.upper())
        for dtype in (np.uint8, np.int8, np.uint16, np.int16)
    ),
    *((np.arange(5).astype(dtype), dtype.__name__.upper()) for dtype in (np.uint32, np.uint64, np.int64)),
    *((np.arange(5).astype(dtype), dtype.__name__.upper()) for dtype in (np.float32, np.float64)),
    (np.array([], np.float32), "FLOAT32"),
    (np.array([1, 2], ">u4"), "UINT32"),
]

#: Types that the package writes as well.
WRITTEN = [name for name, type in BLOCK_TYPES.items() if type.encode]


def weights(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def same(ours: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return isinstance(ours, float) and ours == pytest.approx(expected, rel=1e-7)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, np.asarray(expected))
    return bool(ours == expected) and type(ours) is type(expected)


# --- against the package ---


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("value", "kind"), SCALARS + ARRAYS, ids=lambda value: repr(value)[:40])
def test_the_package_reads_our_metadata(value: Any, kind: str, version: int, tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    write_gguf(path, {"first.key": value, "last": 7}, {}, version=version)
    fields = gguf.GGUFReader(path).fields
    field = fields["first.key"]
    assert field.types[-1].name == kind or len(value) == 0  # the package records no item type of empty arrays
    if isinstance(value, list | tuple | np.ndarray):
        assert field.types[0].name == "ARRAY"
        assert field.contents() == (list(value) if len(value) else [])
    else:
        assert field.contents() == pytest.approx(value) if kind == "FLOAT32" else field.contents() == value
    assert fields["last"].contents() == 7
    assert fields["GGUF.version"].contents() == version

    read = open_gguf(path).metadata
    assert list(read) == ["first.key", "last"]
    expected = (
        value.item() if isinstance(value, np.generic) else list(value) if isinstance(value, tuple) else value
    )
    assert same(read["first.key"], expected)


def test_the_package_reads_our_tensors(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    shapes = {"one": (96,), "two": (3, 64), "three": (2, 3, 32), "four": (2, 1, 3, 32)}
    tensors = {
        f"{name}.{type}": quantise(weights(*shape), type)
        for name, shape in shapes.items()
        for type in WRITTEN
    }
    for alignment in (None, 8, 256):
        metadata = {} if alignment is None else {"general.alignment": alignment}
        write_gguf(path, metadata, tensors)
        reader = gguf.GGUFReader(path)
        assert [tensor.name for tensor in reader.tensors] == list(tensors)
        for read_tensor in reader.tensors:
            tensor = tensors[read_tensor.name]
            assert read_tensor.tensor_type.name == tensor.type.name
            assert tuple(int(n) for n in read_tensor.shape) == tensor.shape[::-1]
            assert np.array_equal(read_tensor.data.view(np.uint8).ravel(), tensor.data.ravel())
            assert read_tensor.data_offset % (alignment or 32) == 0
        with open_gguf(path) as file:
            for name, tensor in tensors.items():
                loaded = file.load(name)
                assert (loaded.type, loaded.shape) == (tensor.type, tensor.shape)
                assert np.array_equal(loaded.data, tensor.data)


def package_file(path: Path, endianness: Any = gguf.GGUFEndian.LITTLE) -> dict[str, npt.NDArray[np.float32]]:
    """A file that the package writes, with a key of every type; its tensors' values."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianness)
    writer.add_uint8("k.uint8", 1)
    writer.add_int8("k.int8", -1)
    writer.add_uint16("k.uint16", 2)
    writer.add_int16("k.int16", -2)
    writer.add_uint32("k.uint32", 3)
    writer.add_int32("k.int32", -3)
    writer.add_uint64("k.uint64", 2**40)
    writer.add_int64("k.int64", -(2**40))
    writer.add_float32("k.float32", 0.25)
    writer.add_float64("k.float64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "ünï\0code")
    writer.add_array("k.strings", ["<s>", "▁the", ""])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, -1.0])
    writer.add_array("k.bools", [True, False])
    values = {f"blk.{i}.ffn_up.weight": weights(3, 64) for i in range(len(WRITTEN))}
    for name, type in zip(values, WRITTEN, strict=True):
        kind = gguf.GGMLQuantizationType[type]
        writer.add_tensor(name, gguf.quants.quantize(values[name], kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_we_read_the_packages_files(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    values = package_file(path)
    with open_gguf(path) as file:
        assert (file.magic, file.version, file.size, file.path) == ("GGUF", 3, path.stat().st_size, path)
        ours = {key: list(v) if isinstance(v, np.ndarray) else v for key, v in file.metadata.items()}
        assert ours == {
            "general.architecture": "llama", "k.uint8": 1, "k.int8": -1, "k.uint16": 2, "k.int16": -2,
            "k.uint32": 3, "k.int32": -3, "k.uint64": 2**40, "k.int64": -(2**40), "k.float32": 0.25,
            "k.float64": 0.1, "k.bool": True, "k.string": "ünï\0code", "k.strings": ["<s>", "▁the", ""],
            "k.ints": [1, -2, 3], "k.floats": [0.5, -1.0], "k.bools": [True, False],
        }  # fmt: skip
        for (name, expected), type in zip(values.items(), WRITTEN, strict=True):
            tensor = file.load(name)
            assert (tensor.type.name, tensor.shape) == (type, (3, 64))
            assert np.array_equal(tensor.data, quantise(expected, type).data)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_integers_of_the_package(dtype: type[np.signedinteger[Any]], tmp_path: Path) -> None:
    """They are no weights: loaded as an array, refused as a tensor to compute with."""
    limits = np.iinfo(dtype)
    values = np.array([[limits.min, -1, 0], [1, 2, limits.max]], dtype)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("index", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "model.gguf") as file:
        loaded = file.load_integers("index")
        assert loaded.dtype == dtype and np.array_equal(loaded, values)
        with pytest.raises(GGUFError, match=rf"index: block type I{limits.bits} is not supported"):
            file.load("index")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    package_file(tmp_path / "big.gguf", gguf.GGUFEndian.BIG)
    with pytest.raises(GGUFError, match="big-endian file; convert it to little-endian"):
        open_gguf(tmp_path / "big.gguf")


@pytest.mark.parametrize(
    "kind",  # which take the package seconds; Falcon's, the largest, has the keys of GPT-2's
    ["llama-spm", pytest.param("gpt-2", marks=pytest.mark.full)],
)
def test_vocabulary_only_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(kind, path)
    fields = gguf.GGUFReader(path).fields
    with open_gguf(path) as file:
        assert file.tensors == {}
        assert set(file.metadata) == {key for key in fields if not key.startswith("GGUF.")}
        for key, value in file.metadata.items():
            expected = fields[key].contents()
            assert list(value) == expected if isinstance(value, list | np.ndarray) else value == expected, key


# --- against each other ---


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("magic", ["GGUF", "PWRI"])
def test_magic_and_version(magic: str, version: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensor = quantise(weights(4, 32), "F16")
    write_gguf(path, {"general.architecture": "llama"}, {"w": tensor}, magic=magic, version=version)
    assert path.read_bytes()[:8] == magic.encode() + bytes([version, 0, 0, 0])
    with open_gguf(path) as file:
        assert (file.magic, file.version) == (magic, version)
        assert np.array_equal(file.load("w").data, tensor.data)
    # PowerInfer's files are GGUF except for the magic, so the package reads them once it is put back.
    path.write_bytes(b"GGUF" + path.read_bytes()[4:])
    assert [read_tensor.name for read_tensor in gguf.GGUFReader(path).tensors] == ["w"]


PLAIN = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=50),
)
KEYS = st.text("abcxyz0123456789._-", min_size=1, max_size=30).filter(lambda key: key != "general.alignment")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(KEYS, PLAIN, max_size=8), rows=st.lists(st.integers(1, 5), max_size=4))
def test_what_is_written_is_read(metadata: dict[str, Any], rows: list[int], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = {f"t{i}": quantise(weights(n, 32), "Q4_0") for i, n in enumerate(rows)}
    write_gguf(path, metadata, tensors)
    with open_gguf(path) as file:
        assert file.metadata == metadata
        assert [type(value) for value in file.metadata.values()] == [
            type(value) for value in metadata.values()
        ]
        assert list(file.tensors) == list(tensors)
        for name, tensor in tensors.items():
            assert np.array_equal(file.load(name).data, tensor.data)


def test_strings_across_the_readers_window(tmp_path: Path) -> None:
    """Strings of all lengths around the megabyte that is read at a time."""
    words = [
        "x" * n for n in (0, 7, 2**20 - 9, 2**20 - 8, 2**20, 2**20 + 1, 3, 300_000, 300_000, 900_000, 1)
    ] * 2
    path = tmp_path / "model.gguf"
    write_gguf(path, {"a": words, "b": "end"}, {})
    assert open_gguf(path).metadata == {"a": words, "b": "end"}


@settings(max_examples=150)
@example(texts=["a", "", "b"] * 3)
@example(texts=["a\0\0\0\0\0\0\0\0b", "c"])
@example(texts=["a", "x" * 255, "y" * 256, "\x01\0\0\0\0\0\0\0z", "b"])
@given(texts=st.lists(st.text("a\0\1\x08é字🦙", max_size=20) | st.just("ab" * 130), max_size=30))
def test_strings_are_taken_apart_where_they_end(texts: list[str]) -> None:
    """Texts may hold what looks like a length, and the file may end in the last of them."""
    data = b"".join(len(raw := text.encode()).to_bytes(8, "little") + raw for text in texts)
    cursor = Cursor(lambda at, n: data[at : at + n], len(data))
    assert cursor.strings(len(texts), "texts", "strict") == texts
    assert cursor.remaining == 0
    if texts:
        with pytest.raises(GGUFError, match="the file ends inside"):
            Cursor(lambda at, n: data[at : at + n], len(data) - 1).strings(len(texts), "texts", "strict")


def test_tensors_made_on_demand(tmp_path: Path) -> None:
    """A mapping that makes tensors when asked works, so that a converter need not hold a model."""

    class Lazy(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return quantise(weights(2, 32) + int(name), "F32")

    write_gguf(tmp_path / "model.gguf", {}, Lazy.fromkeys(["3", "1", "2"]))
    with open_gguf(tmp_path / "model.gguf") as file:
        for name in ("3", "1", "2"):
            assert np.array_equal(file.load(name).dequantise(), weights(2, 32) + int(name))


# --- what cannot be written ---

ROW = quantise(np.ones(32), "F32")


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        ({"": 1}, "key '': 1 to 65535"),
        ({"a\nb": 1}, r"key 'a\\nb'"),
        ({"clé": 1}, "key 'clé'"),
        ({"k" * 65536: 1}, "65536 bytes long: at most 65535"),
        ({"k": None}, "'k' is a NoneType: a number, text"),
        ({"k": b"bytes"}, "'k' is a bytes"),
        ({"k": {"a": 1}}, "'k' is a dict"),
        ({"k": [1, "a"]}, "int, str: numbers, texts or truth values"),
        ({"k": [True, 2]}, "bool, int"),
        ({"k": [[1], [2]]}, "holds list"),
        ({"k": np.zeros((2, 2), np.int32)}, "2 dimensions: only flat arrays"),
        ({"k": np.float16(1)}, "NumPy type float16: allowed are"),
        ({"k": np.array(["a"])}, "NumPy type <U1: allowed are"),
        ({"k": 2**64}, "no type of 64 bits covers"),
        ({"k": -(2**63) - 1}, "no type of 64 bits covers"),
        ({"k": [-1, 2**63]}, "no type of 64 bits covers"),
        ({"k": 10**5000}, "no type of 64 bits covers"),
        ({"k": 1e39}, r"1e\+39, too large for float32"),
        ({"k": [0.5, 10**5000]}, "too large for float32"),
        ({"k": "\ud800"}, "surrogate"),
        ({"k": "x" * (2**24 + 1)}, "16777217 bytes long: at most 16777216"),
        ({"tokenizer.chat_template": "x" * (2**20 + 1)}, "at most 1048576"),
        ({"k": [""] * (2**21 + 1)}, "2097153 strings in the value of 'k' declared: at most 2097152"),
        ({"general.alignment": 3}, "alignment is 3: a power of two"),
        ({"general.alignment": 2**31}, "alignment is 2147483648"),
        ({"general.alignment": "32"}, "string: uint32 is needed"),
        ({f"k{i}": 1 for i in range(2**16 + 1)}, "65537 metadata keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_that_cannot_be_written(metadata: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=pattern) as caught:
        write_gguf(tmp_path / "model.gguf", metadata, {"w": ROW})
    assert str(caught.value).isprintable()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "n" * 65, "a b", "a\0", "../w", "ü"])
def test_names_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"tensor name|name of tensor 0 is 65 bytes long"):
        write_gguf(tmp_path / "model.gguf", {}, {name: ROW})
    assert os.listdir(tmp_path) == []


def test_other_things_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(GGUFError, match="5 dimensions: 1 to 4"):
        write_gguf(path, {}, {"w": quantise(np.ones((1, 1, 1, 1, 32)), "F32")})
    for wrong in ({"magic": "GGML"}, {"version": 1}, {"version": 4}):
        with pytest.raises(GGUFError, match=r"GGUF or PWRI is needed|is not supported \(2 and 3 are\)"):
            write_gguf(path, {}, {}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(GGUFError, match="No such file"):
        write_gguf(tmp_path / "no" / "folder.gguf", {}, {})
    assert os.listdir(tmp_path) == []


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    class Failing(dict[str, Tensor]):
        asked = 0

        def __getitem__(self, name: str) -> Tensor:
            self.asked += 1
            if self.asked > 3:  # both for the header, then the first for its data
                raise KeyboardInterrupt
            return ROW

    path = tmp_path / "model.gguf"
    write_gguf(path, {"k": 1}, {})
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, {}, Failing(a=ROW, b=ROW))
    assert open_gguf(path).metadata == {"k": 1}
    assert os.listdir(tmp_path) == ["model.gguf"]


# --- fingerprint ---


def fingerprint(path: Path, tensors: dict[str, Tensor], **metadata: Any) -> str:
    write_gguf(path, metadata, tensors)
    with open_gguf(path) as file:
        return file.fingerprint()


def test_the_fingerprint_identifies_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    up, norm = "blk.0.ffn_up.weight", "output_norm.weight"
    base = {up: quantise(weights(64, 64), "F32"), norm: quantise(weights(64), "F32")}
    first = fingerprint(path, base)
    assert len(first) == 16
    # Metadata, order and alignment do not matter.
    assert fingerprint(path, dict(reversed(base.items())), name="x", **{"general.alignment": 128}) == first

    def changed(at: tuple[int, int]) -> dict[str, Tensor]:
        values = weights(64, 64)
        values[at] += 1
        return base | {up: quantise(values, "F32")}

    different = [
        fingerprint(path, changed((0, 0))),
        fingerprint(path, changed((63, 63))),
        fingerprint(path, base | {up: quantise(weights(64, 64), "F16")}),
        fingerprint(path, base | {up: quantise(weights(64, 64).reshape(32, 128), "F32")}),
        fingerprint(path, {"blk.1.ffn_up.weight": base[up], norm: base[norm]}),
        fingerprint(path, {up: base[up]}),
        fingerprint(path, base | {"blk.0.ffn_down.weight": base[up]}),
    ]
    assert len({first, *different}) == len(different) + 1


def test_the_fingerprint_never_changes(tmp_path: Path) -> None:
    """Sidecar files carry it, so its definition is part of the format: worked out by hand here."""
    data = bytes(range(256)) * 2
    tensor = Tensor(BLOCK_TYPES["F16"], (4, 64), np.frombuffer(data, np.uint8).reshape(4, 128))
    starts = [i * (512 - 64) // 7 for i in range(8)]
    digest = hashlib.sha256(
        b"a F32 32\n" + b"blk.0.ffn_up.weight F16 4x64\n" + b"".join(data[at : at + 64] for at in starts)
    )
    expected = digest.hexdigest()[:16]
    assert fingerprint(tmp_path / "model.gguf", {"blk.0.ffn_up.weight": tensor, "a": ROW}) == expected


def test_a_small_ffn_tensor_is_sampled_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    bias = np.zeros(4, np.float32)
    prints = {
        fingerprint(path, {"blk.0.ffn_up.bias": quantise(bias + np.eye(4)[i], "F32")}) for i in range(4)
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen2.5-coder-q4_k_m.gguf", "; did you mean qwen2.5-coder-q4_k_m.gguf?"),
        ("qwen2.5-coder-q4_k.gguf", "; did you mean qwen2.5-coder-q4_k_m.gguf?"),
        ("another.gguf", ""),
        ("Qwen/Coder-GGUF:Q4_K_M", ""),  # an absolute path is no name of the hub
    ],
)
def test_a_missing_file_is_a_kind_of_its_own(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "qwen2.5-coder-q4_k_m.gguf").write_bytes(b"")
    path = tmp_path / name
    with pytest.raises(FileNotFoundError) as caught:
        open_gguf(path)
    expected = f"{path}: cannot be opened: No such file or directory{hint.format(folder=tmp_path)}"
    assert str(caught.value) == expected
    assert isinstance(caught.value, GGUFError) and isinstance(
        pickle.loads(pickle.dumps(caught.value)), GGUFError
    )


@pytest.mark.parametrize("name", ["Qwen/Coder-GGUF:Q4_K_M", "Qwen/Coder-GGUF"])
def test_a_name_of_the_hub_is_shown_in_full(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError, match=f"; a model of the Hugging Face hub is hf.co/{name}$"):
        open_gguf(name)


def test_other_paths_that_cannot_be_opened_are_no_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path, "x" * 300, "a\0b"):
        with pytest.raises(GGUFError) as caught:
            open_gguf(path)
        assert not isinstance(caught.value, FileNotFoundError)
