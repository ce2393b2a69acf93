"""Model files: made from a checkpoint, with smaller block types, or trained for zeros."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hotcold.convert.conversion import Conversion, ConvertOptions, convert
from hotcold.quantize.quantization import Quantization, QuantizeOptions, quantize

if TYPE_CHECKING:
    from hotcold.training.sparsifying import Sparsified

_Place: TypeAlias = str | os.PathLike[str]
#: Called with the finished part of the work, and the total.
_Advance: TypeAlias = Callable[[int, int], None]


def convert_checkpoint(
    folder: _Place, output: _Place, *, progress: _Advance | None = None, **options: Any
) -> Conversion:
    """Converts a Hugging Face checkpoint to a GGUF file, as ``hotcold convert`` does.

    Args:
        folder: the checkpoint.
        output: file to write; it appears complete or not at all.
        progress: called with the bytes written so far, and their total.
        options: fields of :class:`~hotcold.convert.conversion.ConvertOptions`, such as ``type="Q8_0"``.

    UserError: the checkpoint is incomplete or not supported, or an option does not fit it."""
    return convert(Path(folder), Path(output), ConvertOptions(**options), progress)


def quantize_file(
    model: _Place, output: _Place, type: str, *, progress: _Advance | None = None, **options: Any
) -> Quantization:
    """Writes a GGUF file like another one with a smaller block type, as ``hotcold quantize`` does.

    Args:
        model: the GGUF file.
        output: file to write; it appears complete or not at all.
        type: block type or mixture, such as ``Q4_K_M``.
        progress: called with the bytes written so far, and their total.
        options: other fields of :class:`~hotcold.quantize.quantization.QuantizeOptions`, such as
            ``importance``, which :func:`hotcold.imatrix` returns.

    UserError: the type is unknown, or an option does not fit the file."""
    return quantize(Path(model), Path(output), QuantizeOptions(type, **options), progress)


def sparsify_checkpoint(
    checkpoint: _Place,
    files: Sequence[_Place],
    output: _Place,
    *,
    tokens: int,
    device: str | None = None,
    work: _Place | None = None,
    progress: _Advance | None = None,
    **options: Any,
) -> "Sparsified":
    """Trains a checkpoint until most of its neurons are zero, as ``hotcold sparsify`` does. Needs torch.

    Args:
        checkpoint: folder of a Hugging Face checkpoint.
        files: texts to train on: UTF-8, or rows in ``.jsonl`` and ``.parquet``.
        output: folder to write.
        tokens: tokens to train on.
        device: torch's name of the device; None is a GPU if there is one.
        work: folder for the state of the run (``OUTPUT.work``), from which the same call continues.
        progress: called with the tokens so far, and their total.
        options: other fields of :class:`~hotcold.training.sparsifying.SparsifyOptions`.

    UserError: torch is missing, a value is not allowed, or memory or disk space does not suffice."""
    from hotcold.training.sparsifying import SparsifyOptions, sparsify
    from hotcold.training.token_data import Source

    sources = [Source(Path(file)) for file in files]
    settings = SparsifyOptions(tokens, **options)
    folder = None if work is None else Path(work)
    advance = progress or (lambda done, total: None)
    place = Path(checkpoint)
    return sparsify(place, sources, Path(output), settings, device=device, work=folder, progress=advance)
