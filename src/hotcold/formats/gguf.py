"""GGUF files, and PowerInfer's, which differ in the first four bytes: open, load tensors, write.

Opening reads only the header. :meth:`GGUFFile.load` reads one tensor with ``pread`` from the checked
descriptor, so a file that is replaced or truncated later gives an error and never a fault. Files are
untrusted: see ``gguf_values`` for the bounds, and docs/formats.md for the layout."""

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.formats import gguf_split
from hotcold.formats import gguf_values as values
from hotcold.formats.blocks import GGML_TYPES, BlockType, BlockTypeError, Bytes, Tensor, block_type
from hotcold.formats.files import FileError, RegularFile, naming, replacing
from hotcold.formats.gguf_split import Split
from hotcold.formats.gguf_values import Cursor, GGUFError, MissingFileError, StoredValue
from hotcold.formats.stored import StoredTensor
from hotcold.formats.words import SIDE_BY_SIDE, SIDE_BY_SIDE_KEY
from hotcold.formats.written import PIECE_BYTES, Writable
from hotcold.values import printable

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "open_gguf", "printable", "write_gguf"]

MAGICS = ("GGUF", "PWRI")
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_SAMPLES, _SAMPLE_BYTES = 8, 64  # samples of each FFN tensor for the fingerprint, and their bytes
_KEY_BYTES = 8 + 1 + 4 + 1  # the smallest key with its value
_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # the smallest tensor entry


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  #: in NumPy order, outermost dimension first
    type: BlockType  #: may be a type that can only be listed
    offset: int  #: position of the first byte in the file
    nbytes: int  #: without padding
    part: int = 0  #: number of the file in a split model


class GGUFFile:
    """An open model file, or all files of a split model: metadata and tensors. Made by :func:`open_gguf`.

    ``magic`` is ``GGUF``, or ``PWRI`` for PowerInfer's files. ``metadata`` holds numbers, str, list[str]
    or one-dimensional NumPy arrays of the stored type; a split model has the metadata of its first file.
    ``tensors`` are in file order. ``path`` is the first file's, ``size`` the sum of all files."""

    def __init__(self, first: "_Part", others: "Iterable[_Part]" = ()) -> None:
        self.path, self.magic, self.version = first.path, first.magic, first.version
        self.metadata, self._lying = first.metadata, dict(first.tensors)
        self._spans = first.spans
        self._parts = [first]
        for part in others:
            _join(self._lying, part, first)
            self._parts.append(part)
        #: tensors that the file stores with interleaved rows in one tensor -> that tensor's name
        self.side_by_side: dict[str, str] = {}
        self._turn_of: dict[str, int] = {}
        with naming(self.path, GGUFError):
            self.tensors = self._taken_apart()
        self.size = sum(part.file.size for part in self._parts)

    @property
    def count(self) -> int:
        """The number of tensors in the file; several tensors with interleaved rows count as one."""
        return len(self._lying)

    def load(self, name: str) -> Tensor:
        """Reads a tensor into new memory at each call. ``GGUFError``: no such tensor, an unsupported type, no
        memory, or the file has changed."""
        info, kind = self._supported(name)
        if name in self.side_by_side:
            rows, _ = kind.data_shape(info.shape)
            return Tensor(kind, info.shape, self.read_rows(name, 0, rows))
        return Tensor(kind, info.shape, self._read(info))

    def stored(self, name: str) -> StoredTensor:
        """The tensor, not yet read; it can be read while the file is open. Errors as in :meth:`load`."""
        info, kind = self._supported(name)
        rows, row_bytes = kind.data_shape(info.shape)
        part = self._parts[info.part]
        if name in self.side_by_side:
            whole = self._lying[self.side_by_side[name]]
            all_rows, _ = kind.data_shape(whole.shape)
            tensor = StoredTensor(kind, info.shape, part.file, whole.offset, all_rows, row_bytes, part.named)
            return replace(tensor, chosen=np.arange(self._turn_of[name], all_rows, all_rows // rows))
        return StoredTensor(kind, info.shape, part.file, info.offset, rows, row_bytes, part.named)

    def pieces(self, name: str, most: int = PIECE_BYTES) -> Iterator[Bytes]:
        """Yields the bytes of a tensor of any type, in order, in pieces of whole rows: one, or as many as fit
        into ``most`` bytes. Pieces are new arrays ``(rows, row_bytes)``. ``GGUFError`` as in :meth:`load`."""
        with naming(self.path, GGUFError):
            info = self._info(name)
        if not info.nbytes:
            return
        rows, row_bytes = info.type.data_shape(info.shape)
        step = max(1, most // row_bytes)
        for start in range(0, rows, step):
            yield self.read_rows(name, start, min(rows, start + step))

    def read_rows(self, name: str, start: int, stop: int) -> Bytes:
        """Reads rows ``start`` to ``stop`` of a tensor of any type as new uint8 ``(rows, row_bytes)``.
        Several threads may call it at once. ``GGUFError`` as in :meth:`load`."""
        with naming(self.path, GGUFError):
            info = self._info(name)
        if name in self.side_by_side:
            whole = self.side_by_side[name]
            turns = self._lying[whole].nbytes // info.nbytes
            rows = self.read_rows(whole, start * turns, stop * turns)
            return np.ascontiguousarray(rows[self._turn_of[name] :: turns])
        part = self._parts[info.part]
        row_bytes = info.type.row_bytes(info.shape[-1])
        with naming(part.path, GGUFError):
            data = np.empty((stop - start, row_bytes), np.uint8)
            part.file.read_into(data.data.cast("B"), info.offset + start * row_bytes)
        return data

    def stored_metadata(self) -> dict[str, StoredValue]:
        """The metadata in stored form, to copy it unchanged to another file. (``metadata`` loses the types of
        numbers, and bytes that are not text.)"""
        first = self._parts[0]
        values = {}
        with naming(first.path, GGUFError):
            for key, (start, stop) in self._spans.items():
                data = first.file.read(start, stop - start)
                values[key] = StoredValue(int.from_bytes(data[:4], "little"), data[4:])
        return values

    def says(self, key: str, text: str) -> bool:
        """True if the value of a key is this text. An array is never equal (``==`` returns an array)."""
        value = self.metadata.get(key)
        return isinstance(value, str) and value == text

    def is_one_of_its_files(self, path: Path) -> bool:
        """True if ``path`` is the file, or one of the files, from which the tensors are read."""
        return path.exists() and any(path.samefile(part.path) for part in self._parts)

    def load_integers(self, name: str) -> npt.NDArray[np.signedinteger[Any]]:
        """Reads a tensor of type I8, I16, I32 or I64 as an array of its shape; errors as in :meth:`load`."""
        with naming(self.path, GGUFError):
            info = self._info(name)
            if info.type.name not in ("I8", "I16", "I32", "I64"):
                raise GGUFError(f"tensor {name} is {info.type.name}: I8, I16, I32 or I64 is needed")
        integers: npt.NDArray[np.signedinteger[Any]] = self._read(info).view(f"<i{info.type.nbytes}")
        return integers.reshape(info.shape)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the weights; sidecar files carry them.

        They begin the SHA-256 of every tensor's name, type and shape, in order of names, and, for tensors of
        the FFN (``.ffn_`` in the name), eight samples of 64 bytes, evenly spaced from first to last byte.
        Metadata, the order in the file, and the split into files do not matter."""
        digest = hashlib.sha256()
        for name in sorted(self._lying):
            info = self._lying[name]
            digest.update(f"{name} {info.type.name} {'x'.join(map(str, info.shape))}\n".encode())
            if ".ffn_" in name:
                length = min(_SAMPLE_BYTES, info.nbytes)
                part = self._parts[info.part]
                with naming(part.path, GGUFError):
                    for i in range(_SAMPLES):
                        at = info.offset + i * (info.nbytes - length) // (_SAMPLES - 1)
                        digest.update(part.file.read(at, length))
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Closes the file; loading raises afterwards. Also done when the object is collected."""
        for part in self._parts:
            part.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _taken_apart(self) -> dict[str, TensorInfo]:
        """The tensors; a stored tensor with the interleaved rows of several becomes several entries. Their
        ``offset`` is their first byte's, and their bytes are not contiguous."""
        turns, infos = self._turns(), {}
        for name, info in self._lying.items():
            if not turns or f".{SIDE_BY_SIDE}." not in name:
                infos[name] = info
                continue
            rows = info.shape[-2] if len(info.shape) > 1 else 0
            if not rows or rows % len(turns):
                needed = f"rows of {len(turns)} tensors are needed"
                raise GGUFError(f"tensor {name} has shape {info.shape}: {needed}")
            for turn, part_name in enumerate(turns):
                full_name = name.replace(SIDE_BY_SIDE, part_name)
                if full_name in self._lying or full_name in infos:
                    raise GGUFError(f"tensor {full_name} is in {name} as well: the file is damaged")
                shape = (*info.shape[:-2], rows // len(turns), info.shape[-1])
                row = info.type.row_bytes(info.shape[-1])
                at, nbytes = info.offset + turn * row, info.nbytes // len(turns)
                infos[full_name] = replace(info, name=full_name, shape=shape, offset=at, nbytes=nbytes)
                self.side_by_side[full_name], self._turn_of[full_name] = name, turn
        return infos

    def _turns(self) -> list[str]:
        """The names of the tensors with interleaved rows, in the order of their rows."""
        names = self.metadata.get(SIDE_BY_SIDE_KEY, [])
        if not isinstance(names, list) or len(names) == 1 or len({*names}) != len(names):
            got = printable(repr(names), 80)
            raise GGUFError(f"{SIDE_BY_SIDE_KEY} is {got}: names of two tensors or more are needed")
        for name in names:
            values.check_name(name)
        return names

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name) or self._lying.get(name)
        if info is None:
            raise GGUFError(f"has no tensor '{printable(name, 80)}' among its {len(self.tensors)}")
        return info

    def _supported(self, name: str) -> tuple[TensorInfo, BlockType]:
        with naming(self.path, GGUFError):
            info = self._info(name)
            try:
                return info, block_type(info.type)
            except BlockTypeError as error:
                raise GGUFError(f"tensor {name}: {error}") from None

    def _read(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        part = self._parts[info.part]
        with naming(part.path, GGUFError):
            try:
                data = np.empty(info.type.data_shape(info.shape), np.uint8)
            except MemoryError:
                raise GGUFError(f"tensor {info.name}: no memory for its {info.nbytes} bytes") from None
            part.file.read_into(data.data.cast("B"), info.offset)
            return data


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF or PowerInfer file and checks its header; reads no tensor. ``path`` of a split model is
    its first file; the other files are in the same folder.

    ``GGUFError``: not a regular file, cannot be opened, a wrong header, or files of a split model are missing
    or belong to another one. Tensors of unsupported types are listed; :meth:`GGUFFile.load` refuses them."""
    try:
        first = _Part(Path(path), 0)
    except GGUFError as error:
        place = Path(path)
        if _is_missing(place):
            raise MissingFileError(f"{error}{_hub_hint(place)}") from None
        raise GGUFError(f"{error}{_of_checkpoint(place)}") from None
    split = first.split
    if split is None:
        return GGUFFile(first)
    with naming(first.path, GGUFError):
        others = gguf_split.other_parts(first.path, split)
    file = GGUFFile(first, (_Part(other, number, split) for number, other in enumerate(others, 1)))
    if file.count != split.tensors:
        got = f"the {split.parts} files have {file.count} tensors together"
        with naming(first.path, GGUFError):
            raise GGUFError(f"{got}, but split.tensors.count is {split.tensors}: download them again")
    return file


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # another error, or no path
        pass
    return False


def _hub_hint(path: Path) -> str:
    """A hint at a name of the Hugging Face hub, if the path of a missing file looks like one."""
    if _HUB_NAME.fullmatch(path.as_posix()) and not path.parent.exists():
        return f"; a model of the Hugging Face hub is hf.co/{path.as_posix()}"
    return ""


def _of_checkpoint(path: Path) -> str:
    """A hint for a path of a checkpoint's folder or one of its files."""
    folder = path.parent if path.suffix == ".safetensors" else path
    if not os.path.isfile(folder / "config.json"):
        return ""
    return f"; `hotcold convert {printable(str(folder), 4096)}` makes a GGUF file of the checkpoint"


class _Part:
    """One file with a checked header: a model, or part ``number`` of a model."""

    def __init__(self, path: Path, number: int, first: Split | None = None) -> None:
        self.path = path
        with naming(path, GGUFError):
            self.file = RegularFile(path)
            cursor = Cursor(self.file.read, self.file.size)
            self.magic, self.version, metadata, tensors, self.spans = _read_header(cursor)
            _check_layout(tensors, self.file.size)
            self.split = Split.from_metadata(metadata)
            if first is not None:
                gguf_split.check_part(self.split, first, number)
        self.metadata = {} if number else metadata  # only the first part's is used
        self.tensors = {name: replace(info, part=number) for name, info in tensors.items()}

    def named(self, error: FileError) -> GGUFError:
        return GGUFError(f"{printable(str(self.path), 4096)}: {error}")


def _join(tensors: dict[str, TensorInfo], part: _Part, first: _Part) -> None:
    """Adds the tensors of another part. Their names must be new; the first part states the total number."""
    with naming(part.path, GGUFError):
        if twice := part.tensors.keys() & tensors.keys():
            raise GGUFError(
                f"tensor {min(twice)} is in an earlier file of the model as well: the file is damaged"
            )
        tensors |= part.tensors
        most = first.split.tensors if first.split else 0
        if len(tensors) > most:
            raise GGUFError(
                f"brings the tensors to {len(tensors)}: split.tensors.count is {most}; the file is damaged"
            )


# --- the header ---


_Spans: TypeAlias = dict[str, tuple[int, int]]  # offsets of the type and the value of each key


def _read_header(cursor: Cursor) -> tuple[str, int, dict[str, Any], dict[str, TensorInfo], _Spans]:
    magic, version = _read_magic(cursor)
    n_tensors = cursor.count("tensors", _INFO_BYTES, values.MAX_TENSORS)
    n_keys = cursor.count("metadata keys", _KEY_BYTES, values.MAX_KEYS)
    metadata, spans, alignment = _read_metadata(cursor, n_keys)
    return magic, version, metadata, _read_infos(cursor, n_tensors, alignment), spans


def _read_magic(cursor: Cursor) -> tuple[str, int]:
    if cursor.remaining == 0:
        raise GGUFError("the file is empty; a GGUF file is needed")
    raw = cursor.take(4, "the magic")
    magic = raw.decode("ascii", "replace")
    if magic not in MAGICS:
        raise GGUFError(f"the file starts with {raw!r}: GGUF or PWRI is needed; this is not a GGUF file")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = version.to_bytes(4, "little") in [v.to_bytes(4, "big") for v in (1, *VERSIONS)]
        fix = "a big-endian file; convert it to little-endian" if swapped else "convert it again"
        raise GGUFError(f"GGUF version {version} is not supported (2 and 3 are): {fix}")
    return magic, version


def _read_metadata(cursor: Cursor, n: int) -> tuple[dict[str, Any], _Spans, int]:
    metadata: dict[str, Any] = {}
    spans: _Spans = {}
    alignment = values.DEFAULT_ALIGNMENT
    for i in range(n):
        key = cursor.string(f"metadata key {i}", values.MAX_KEY_BYTES)
        values.check_key(key)
        if key in metadata:
            raise GGUFError(f"metadata key '{printable(key, 80)}' occurs twice")
        start = cursor.position
        kind, metadata[key] = values.read_value(cursor, key)
        spans[key] = start, cursor.position
        if key == "general.alignment":
            alignment = values.check_alignment(kind, metadata[key])
    return metadata, spans, alignment


def _read_infos(cursor: Cursor, n: int, alignment: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for i in range(n):
        name = cursor.string(f"the name of tensor {i}", values.MAX_NAME_BYTES)
        values.check_name(name)
        if name in infos:
            raise GGUFError(f"tensor name {name} occurs twice")
        infos[name] = _read_info(cursor, name, alignment)
    start = _aligned(cursor.position, alignment)
    return {name: replace(info, offset=start + info.offset) for name, info in infos.items()}


#: Types that ggml removed, or that only a fork has.
_GONE = {
    4: "Q4_2, which ggml dropped", 5: "Q4_3, which ggml dropped", 31: "Q4_0_4_4, which ggml dropped",
    32: "Q4_0_4_8, which ggml dropped", 33: "Q4_0_8_8, which ggml dropped", 36: "bitnet.cpp's I2_S",
}  # fmt: skip


def _read_info(cursor: Cursor, name: str, alignment: int) -> TensorInfo:
    """Reads one entry; its offset is still relative to the start of tensor data."""
    dimensions = cursor.u32(f"the dimensions of tensor {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise GGUFError(f"tensor {name} has {dimensions} dimensions: 1 to {MAX_DIMENSIONS} are allowed")
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"the shape of tensor {name}"))
    shape = tuple(reversed(sizes))
    number = cursor.u32(f"the type of tensor {name}")
    kind = GGML_TYPES.get(number)
    if kind is None:
        names = ", ".join(type.name for type in GGML_TYPES.values() if type.supported)
        got = f"{number} ({_GONE[number]})" if number in _GONE else number
        raise GGUFError(f"tensor {name} has unknown block type number {got}: supported are {names}")
    empty = shape == (0,) and kind.name == "I32"  # PowerInfer's list for a layer without hot neurons
    if not empty and not all(1 <= size < 1 << 63 for size in shape):
        raise GGUFError(f"tensor {name} has shape {shape}: each dimension must be from 1 to 2^63 - 1")
    try:
        nbytes = 0 if empty else math.prod(kind.data_shape(shape))
    except BlockTypeError as error:
        raise GGUFError(f"tensor {name}: {error}") from None
    offset = cursor.u64(f"the offset of tensor {name}")
    if offset % alignment:
        needed = f"a multiple of the alignment {alignment} is needed"
        raise GGUFError(f"tensor {name} starts at offset {offset}: {needed}")
    return TensorInfo(name, shape, kind, offset, nbytes)


def _check_layout(tensors: Mapping[str, TensorInfo], size: int) -> None:
    """Checks that every tensor is inside the file and that none overlap."""
    end, last = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset + info.nbytes > size:
            beyond = f"beyond the end of the file ({size} bytes), which is cut short or damaged"
            raise GGUFError(f"tensor {info.name} ({info.nbytes} bytes at {info.offset}) reaches {beyond}")
        if info.offset < end:
            where = f"overlap at byte {info.offset}: the file is damaged"
            raise GGUFError(f"tensors {last} and {info.name} {where}")
        end, last = info.offset + info.nbytes, info.name


def _aligned(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


# --- writing ---


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Writable],
    *,
    magic: str = "GGUF",
    version: int = 3,
) -> None:
    """Writes a file that :func:`open_gguf` accepts, atomically: complete under its name, or not at all.

    :func:`~hotcold.formats.gguf_values.encode_value` lists the values of metadata; ``general.alignment`` sets
    the alignment (default 32). Each tensor is taken from the mapping twice, first for its shape and then for
    its data. So a mapping that makes tensors on demand holds one at a time, and a tensor that makes its
    :meth:`~Writable.pieces` on demand is never complete in memory. ``GGUFError``: the format does not allow a
    value, or the file cannot be written."""
    path = Path(path)
    with naming(path, GGUFError):
        header, alignment = _encode_header(metadata, tensors, magic, version)
        with replacing(path) as file:
            file.write(header)
            for name in tensors:
                tensor = tensors[name]
                end = file.tell() + tensor.nbytes
                for piece in tensor.pieces():
                    file.write(piece.data.cast("B"))
                if file.tell() != end:
                    raise ValueError(f"pieces of tensor {name} are not its {tensor.nbytes} bytes")
                file.write(b"\0" * (-end % alignment))


def _encode_header(
    metadata: Mapping[str, Any], tensors: Mapping[str, Writable], magic: str, version: int
) -> tuple[bytes, int]:
    """All bytes before the tensor data, padded, and the alignment. The reader's checks define validity."""
    alignment = values.DEFAULT_ALIGNMENT
    parts = [magic.encode(), struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = values.encode_value(key, value)
        if key == "general.alignment":
            alignment = values.check_alignment(kind, int.from_bytes(data, "little"))
        parts += [values.encode_string(key, "a metadata key"), struct.pack("<I", kind), data]
    offset = 0
    for name in tensors:
        tensor = tensors[name]
        dimensions = len(tensor.shape)
        shape = struct.pack(f"<I{dimensions}Q", dimensions, *reversed(tensor.shape))
        place = struct.pack("<IQ", tensor.type.id, offset)
        parts += [values.encode_string(name, "a tensor name"), shape, place]
        offset = _aligned(offset + tensor.nbytes, alignment)
    header = b"".join(parts)
    _read_header(Cursor(lambda at, n: header[at : at + n], len(header)))
    return header.ljust(_aligned(len(header), alignment), b"\0"), alignment
