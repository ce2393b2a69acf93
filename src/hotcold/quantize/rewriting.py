"""Streams the tensors of a GGUF file into a new one, a few rows at a time; memory stays bounded.

A plan names the tensors of the new file, in order, each with its type, its shape and the jobs that make its
bytes. Threads do the jobs of all tensors a bit ahead of the writer, so that small tensors keep them busy,
too. The file does not depend on the number of threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, BlockTypeError, Bytes, Floats, Tensor
from hotcold.formats.files import check_output, naming
from hotcold.formats.gguf import GGUFFile, write_gguf
from hotcold.formats.written import NewTensor
from hotcold.kernels.cores import available_cores

#: Weights of a piece, which are float32 at a time, unless one row has more.
PIECE_WEIGHTS = 1 << 17

_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")

Job: TypeAlias = Callable[[], Bytes]
Progress: TypeAlias = Callable[[int, int], None]


class QuantizeError(UserError):
    """Raised for a file that cannot be rewritten with these options. One line."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new file. ``jobs`` yields functions, which threads call; each returns the next bytes of
    the tensor, and all together :attr:`nbytes`."""

    type: BlockType
    shape: tuple[int, ...]  #: in NumPy order, outermost dimension first
    jobs: Callable[[], Iterable[Job]]

    @property
    def nbytes(self) -> int:
        return NewTensor(self.type, self.shape, lambda: ()).nbytes


@dataclass(frozen=True)
class Plan:
    """A new file: metadata for :func:`write_gguf` (:func:`kept_metadata` returns the old file's), and tensors
    in file order. ``magic`` is ``GGUF``, or ``PWRI`` for PowerInfer's files."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, PlannedTensor]
    magic: str = "GGUF"

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def rewrite(
    source: GGUFFile,
    output: Path,
    plan: Plan,
    progress: Progress | None = None,
    *,
    force: bool = False,
    threads: int | None = None,
) -> None:
    """Writes the planned file ``output`` from the tensors of ``source``, completely or not at all.

    ``progress`` is called with the bytes written so far and their total; ``threads`` is the number of threads
    (None: one per core). ``QuantizeError``: ``output`` is a file of ``source``, exists (without ``force``) or
    does not fit on the disk; ``GGUFError``: a file cannot be read or written; and errors of the jobs."""
    with naming(output, QuantizeError):
        if source.is_one_of_its_files(output):
            raise QuantizeError("the new file would replace the one that is read: give another name")
        check_output(output, plan.nbytes, force=force)
    with closing(_made_ahead(plan, threads or available_cores())) as pieces:
        tensors = _written_from(pieces, plan, progress or (lambda done, total: None))
        write_gguf(output, plan.metadata, tensors, magic=plan.magic)


def kept_metadata(source: GGUFFile) -> dict[str, Any]:
    """The metadata for a file with all tensors of ``source``, unchanged except for the keys of a split."""
    return {key: value for key, value in source.stored_metadata().items() if key not in _SPLIT_KEYS}


def copied(source: GGUFFile, name: str) -> PlannedTensor:
    """An unchanged tensor of any type. ``QuantizeError`` while writing: it holds NaN or infinity."""
    info = source.tensors[name]

    def job(start: int, stop: int) -> Bytes:
        rows = source.read_rows(name, start, stop)
        if info.type.decode and not Tensor(info.type, (stop - start, info.shape[-1]), rows).is_finite():
            raise _not_finite(name)
        return rows

    return PlannedTensor(info.type, info.shape, partial(_cut, info.shape, job))


def changed(
    source: GGUFFile, name: str, type: BlockType, code: Callable[[Floats, int], Bytes]
) -> PlannedTensor:
    """A tensor of another type. Threads call ``code`` with rows, float32 ``(rows, n)``, and the index of the
    first; it returns bytes ``(rows, row_bytes)``. Rows are counted over all outer dimensions.
    ``QuantizeError`` while writing: the tensor holds NaN or infinity, or values that the type cannot hold."""
    info = source.tensors[name]

    def job(start: int, stop: int) -> Bytes:
        stored = source.read_rows(name, start, stop)
        values = Tensor(info.type, (stop - start, info.shape[-1]), stored).dequantise()
        if not np.isfinite(values).all():
            raise _not_finite(name)
        try:
            return code(values, start)
        except BlockTypeError as error:
            raise QuantizeError(f"tensor {name} as {type.name}: {error}") from None

    return PlannedTensor(type, info.shape, partial(_cut, info.shape, job))


def _not_finite(name: str) -> QuantizeError:
    return QuantizeError(f"tensor {name} holds NaN or infinity: the file is damaged; make it again")


def _cut(shape: tuple[int, ...], job: Callable[[int, int], Bytes]) -> Iterator[Job]:
    """Jobs of about :data:`PIECE_WEIGHTS` weights each, from a function of the first and the last row."""
    if 0 in shape:
        return
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    step = max(1, PIECE_WEIGHTS // shape[-1])
    for start in range(0, rows, step):
        yield partial(job, start, min(rows, start + step))


def _made_ahead(plan: Plan, threads: int) -> Generator[Bytes, None, None]:
    """Yields the bytes of all tensors in order; each thread makes up to two pieces ahead."""
    pool = ThreadPoolExecutor(threads, "rewrite")
    ahead: deque[Future[Bytes]] = deque()
    try:
        for tensor in plan.tensors.values():
            for job in tensor.jobs():
                ahead.append(pool.submit(job))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _written_from(pieces: Iterator[Bytes], plan: Plan, progress: Progress) -> dict[str, NewTensor]:
    """The planned tensors, which take their bytes from ``pieces`` when they are written in this order."""
    done, total = 0, plan.nbytes

    def make(left: int) -> Iterator[Bytes]:
        nonlocal done
        while left > 0:
            progress(done, total)
            piece = next(pieces)
            left -= piece.nbytes
            done += piece.nbytes
            yield piece
        progress(done, total)

    return {
        name: NewTensor(tensor.type, tensor.shape, partial(make, tensor.nbytes))
        for name, tensor in plan.tensors.items()
    }
