"""Importance matrices: the mean squared inputs of each matrix, by which a quantiser weighs its columns.

The file is llama.cpp's (tools/imatrix): GGUF with ``general.type`` = ``imatrix``, and for each matrix
``NAME.in_sum2``, sums of its squared inputs over tokens, and ``NAME.counts``, the number of tokens. Matrices
of experts have a row for each expert. llama.cpp's older binary form (``.dat``) is read, too."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.files import RegularFile, naming
from hotcold.formats.gguf import GGUFError, GGUFFile, open_gguf, write_gguf
from hotcold.values import printable, shown

Floats = npt.NDArray[np.float32]

IMATRIX_TYPE = "imatrix"  #: the file's ``general.type``

_DATASETS, _CHUNKS, _CHUNK_SIZE = (f"imatrix.{key}" for key in ("datasets", "chunk_count", "chunk_size"))
_SUMS, _COUNTS = ".in_sum2", ".counts"
_LARGEST_DAT = 1 << 31  # bytes; the file is read at once
_LONGEST_NAME = 1 << 12
_LONGEST_PATH = 1 << 16
_I32 = struct.Struct("<i")


class ImatrixError(UserError):
    """Raised for a file that is no importance matrix, or has impossible values."""


@dataclass(frozen=True, eq=False)
class Importance:
    """Sums over the inputs of a matrix, or of a layer's E experts."""

    sums: Floats  #: ``[E, I]``: sums of squared inputs; ``.dat`` has all experts in one row
    counts: Floats  #: ``[E]``: numbers of tokens; for ``.dat`` of chunks, and ``sums`` add their means

    def mean_squares(self, shape: Sequence[int], name: str = "the tensor") -> Floats:
        """Mean squared inputs ``[E, I]``, for a tensor of this shape: ``(O, I)`` or ``(E, O, I)``. An expert
        that no token chose has ones, so all of its inputs count equally.

        ImatrixError: these are not the inputs of a tensor of this shape."""
        *outer, _, columns = (1, 1, *shape)[-3:]
        experts = outer[0]
        if self.sums.size != experts * columns or experts % len(self.counts):
            got = f"{self.sums.size} values, {len(self.counts)} counts"
            needed = f"{experts} times {columns} are needed: this file belongs to another model"
            raise ImatrixError(f"importance matrix of {name} has {got}: {needed}")
        counts = np.repeat(self.counts, experts // len(self.counts))[:, None]
        sums = self.sums.reshape(experts, columns)
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(1)).astype(np.float32)
        return means


class ImportanceMatrix(dict[str, Importance]):
    """Importances by tensor name, such as ``blk.0.attn_q.weight``, and facts about the text."""

    def __init__(
        self,
        entries: Mapping[str, Importance],
        datasets: Sequence[str] = (),
        chunks: int = 0,
        chunk_size: int = 0,
    ) -> None:
        super().__init__(entries)
        self.datasets = tuple(datasets)  #: names of the text files
        self.chunks = chunks  #: windows of the text; 0: not stated
        self.chunk_size = chunk_size  #: tokens of each; 0: not stated


def write_imatrix(path: Path, matrix: ImportanceMatrix) -> None:
    """Writes the GGUF form, completely or not at all. GGUFError: it cannot be written."""
    tensors: dict[str, Tensor] = {}
    for name in sorted(matrix):
        sums_of_inputs = matrix[name]
        tensors[name + _SUMS] = quantise(sums_of_inputs.sums, "F32")
        tensors[name + _COUNTS] = quantise(sums_of_inputs.counts[:, None], "F32")
    metadata = {
        "general.type": IMATRIX_TYPE,
        _DATASETS: [*matrix.datasets],
        _CHUNKS: np.uint32(matrix.chunks),
        _CHUNK_SIZE: np.uint32(matrix.chunk_size),
    }
    write_gguf(path, metadata, tensors)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Reads either form; the first four bytes tell which. ImatrixError, with the path: it is neither, it is
    damaged, or values are negative or not finite."""
    with naming(path, ImatrixError):
        file = RegularFile(path)
        if file.size < 4:
            raise ImatrixError(f"has {file.size} bytes: an importance matrix is needed")
        is_gguf = file.read(0, 4) == b"GGUF"
        if not is_gguf and file.size > _LARGEST_DAT:
            raise ImatrixError(f"has {file.size} bytes: an importance matrix is needed")
        matrix = None if is_gguf else _read_dat(file.read(0, file.size))
        file.close()
        if matrix is None:
            try:
                with open_gguf(path) as gguf:
                    matrix = _read_gguf(gguf)
            except GGUFError as error:
                raise ImatrixError(str(error).removeprefix(f"{printable(str(path), 4096)}: ")) from None
        for name, sums_of_inputs in matrix.items():
            for values in (sums_of_inputs.sums, sums_of_inputs.counts):
                if not (np.isfinite(values) & (values >= 0)).all():
                    got = f"{printable(name, 80)} holds values that are negative or not finite"
                    raise ImatrixError(f"{got}: the file is damaged")
        return matrix


def _read_gguf(file: GGUFFile) -> ImportanceMatrix:
    kind = file.metadata.get("general.type")
    names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
    if not (kind is None or file.says("general.type", IMATRIX_TYPE)) or not names:
        got = f"general.type {shown(kind)} and {len(names)} tensors NAME{_SUMS}"
        raise ImatrixError(f"has {got}: an importance matrix of hotcold imatrix or llama.cpp is needed")
    entries = {}
    for name in names:
        if name + _COUNTS not in file.tensors:
            raise ImatrixError(f"tensor {name}{_COUNTS} is missing: the file is damaged")
        infos = [file.tensors[name + part] for part in (_SUMS, _COUNTS)]
        if any(info.type.name != "F32" for info in infos):
            raise ImatrixError(f"tensors {name}{_SUMS} and {_COUNTS} must be F32: the file is damaged")
        counts = file.load(name + _COUNTS).dequantise().reshape(-1)
        sums = file.load(name + _SUMS).dequantise()
        if sums.size % len(counts):
            got = f"{sums.size} sums and {len(counts)} counts"
            raise ImatrixError(f"{name} has {got}: the same number of sums for each count is needed")
        entries[name] = Importance(sums.reshape(len(counts), -1), counts)
    datasets, chunks, size = (file.metadata.get(key) for key in (_DATASETS, _CHUNKS, _CHUNK_SIZE))
    return ImportanceMatrix(
        entries,
        [each for each in datasets if isinstance(each, str)] if isinstance(datasets, list) else [],
        _counted(chunks),
        _counted(size),
    )


def _counted(value: object) -> int:
    """A number that only users read, stored as uint32; 0 if it is invalid."""
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else 0


def _read_dat(data: bytes) -> ImportanceMatrix:
    """Reads the older form: the number of entries; for each entry its name, its number of chunks, and float32
    sums of the chunks' means; then the number of chunks and the name of the text, which may be missing."""
    cursor = _Dat(data)
    entries = {}
    n = cursor.number("entries", 1, 1 << 20)
    for i in range(n):
        name = cursor.text(f"name {i}", _LONGEST_NAME)
        chunks = cursor.number(f"chunks of {printable(name, 80)}", 0, 1 << 31)
        width = cursor.number(f"values of {printable(name, 80)}", 1, 1 << 31)
        sums = np.frombuffer(cursor.take(4 * width, f"values of {printable(name, 80)}"), "<f4")
        entries[name] = Importance(sums[None], np.array([chunks], np.float32))
    if not cursor.left:
        return ImportanceMatrix(entries)
    chunks = cursor.number("chunks", 0, 1 << 31)
    return ImportanceMatrix(entries, [cursor.text("text", _LONGEST_PATH)] if cursor.left else [], chunks)


class _Dat:
    """A reader of a ``.dat`` file; errors name the part at which the file ends or has a wrong number."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, n: int, label: str) -> bytes:
        if n > self.left:
            short = f"{n} bytes needed, {self.left} remain"
            raise ImatrixError(f"ends inside {label}: {short}; it is cut short, or not an importance matrix")
        self._at += n
        return self._data[self._at - n : self._at]

    def number(self, label: str, low: int, high: int) -> int:
        value = int(_I32.unpack(self.take(4, label))[0])
        if not low <= value <= high:
            got = f"the number of {label} is {value}"
            raise ImatrixError(f"{got}: {low} to {high} are possible; this is not an importance matrix")
        return value

    def text(self, label: str, most: int) -> str:
        return self.take(self.number(f"bytes of the {label}", 0, most), label).decode(errors="replace")
