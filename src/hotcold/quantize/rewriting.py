"""Streams the tensors of a GGUF file into a new one, through functions of a few rows; memory stays bounded.

A plan names the tensors of the new file, in order, each with its type, its shape and the jobs that make its
bytes. Threads do the jobs of all tensors some way ahead of the writer, so that small tensors keep them busy,
too; the file is the same whatever their number."""

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

#: Weights of a piece that are float32 at a time, unless one row has more.
PIECE_WEIGHTS = 1 << 17

_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")

Job: TypeAlias = Callable[[], Bytes]
Progress: TypeAlias = Callable[[int, int], None]


class QuantizeError(UserError):
    """Raised for a file that cannot be rewritten as asked. One line."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the new file. ``jobs`` gives functions, which threads call, each for the next bytes of the
    tensor; together they must give its :attr:`nbytes`."""

    type: BlockType
    shape: tuple[int, ...]  #: in NumPy order, outermost dimension first
    jobs: Callable[[], Iterable[Job]]

    @property
    def nbytes(self) -> int:
        return NewTensor(self.type, self.shape, lambda: ()).nbytes


@dataclass(frozen=True)
class Plan:
    """A new file: metadata as :func:`write_gguf` takes it (:func:`kept_metadata` gives the old file's), and
    tensors in the order of the file. ``magic`` is ``GGUF``, or ``PWRI`` for PowerInfer's files."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, PlannedTensor]
    magic: str = "GGUF"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
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
    """Writes ``output`` as planned from the tensors of ``source``: whole, or not at all.

    ``progress`` is called with the bytes written so far and their total; ``threads`` is the number of
    threads (None: one per core). ``QuantizeError``: ``output`` is a file of ``source``, exists (without
    ``force``) or does not fit on the disk; ``GGUFError``: a file cannot be read or written; and what the
    jobs raise."""
    with naming(output, QuantizeError):
        if source.is_one_of_its_files(output):
            raise QuantizeError("the new file would replace the one that is read: give another name")
        check_output(output, plan.nbytes, force=force)
    with closing(_made_ahead(plan, threads or available_cores())) as pieces:
        tensors = _written_from(pieces, plan, progress or (lambda done, total: None))
        write_gguf(output, plan.metadata, tensors, magic=plan.magic)


def kept_metadata(source: GGUFFile) -> dict[str, Any]:
    """The metadata for a file with all tensors of ``source``, unchanged but for what says that it is
    split."""
    return {key: value for key, value in source.stored_metadata().items() if key not in _SPLIT_KEYS}


def copied(source: GGUFFile, name: str) -> PlannedTensor:
    """A tensor as it is, of any type. ``QuantizeError`` while writing: it holds NaN or infinity."""
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
    """A tensor of another type. ``code`` turns some rows, float32 ``(rows, n)``, and the number of the first
    into bytes ``(rows, row_bytes)``; threads call it. Rows are counted over all outer dimensions.
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
    """Jobs of about :data:`PIECE_WEIGHTS` weights each, given a function of the first and the last row."""
    if 0 in shape:
        return
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    step = max(1, PIECE_WEIGHTS // shape[-1])
    for start in range(0, rows, step):
        yield partial(job, start, min(rows, start + step))


def _made_ahead(plan: Plan, threads: int) -> Generator[Bytes, None, None]:
    """The bytes of all tensors in order; threads make up to two pieces each ahead."""
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
    """The planned tensors, which take their bytes from ``pieces`` while they are written in this order."""
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
