"""Inputs of each layer's FFN for a text, to which predictors are fitted.

All inputs together are too large for memory (4 GiB for 8192 tokens of a 7B model). So they go to disk and are
read back by layer. The files are unnamed and vanish, or are in a folder, from which a killed run
continues."""

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.files import FileError, replacing
from hotcold.kernels.backend import Backend, Batch, Buffer, Chosen
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.scoring import Scorer

#: ``normed`` or ``residual`` -> ``[tokens, D]`` float32 (``normed`` has fewer values if a layer's experts
#: read fewer); ``ids`` -> ``[tokens, k]`` int32: experts
Inputs = Mapping[str, npt.NDArray[Any]]

_SAVED_EVERY = 5.0  #: seconds between two records of the progress in a folder
_DONE = "windows"  #: the file with that record


class FFNInputs(Sequence[Inputs]):
    """The inputs of each layer, in unnamed temporary files, which vanish with this object or its process, or
    in files of ``folder``. A layer's arrays are mapped read-only on demand."""

    def __init__(
        self, model: LoadedModel, names: Collection[str], tokens: int, folder: Path | None = None
    ) -> None:
        self._tokens, self._folder = tokens, folder
        self.files: list[dict[str, IO[bytes]]] = []
        self.close = weakref.finalize(self, _close, self.files)
        if folder is None:
            _check_disk(model, names, tokens)
        else:
            folder.mkdir(exist_ok=True)
        for layer in range(model.config.layers):
            self.files.append({})
            for name in names:
                if folder is None:
                    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
                else:
                    path = folder / f"layer-{layer:03}.{name}"
                    path.touch()
                    file = path.open("r+b", buffering=0)  # so that a write to a full disk fails at once
                self.files[-1][name] = file

    def windows_done(self) -> int:
        """Returns the number of windows whose inputs the folder has, as recorded by :meth:`note`."""
        note = self._folder and self._folder / _DONE
        return int(note.read_text(encoding="ascii")) if note and note.exists() else 0

    def note(self, windows: int) -> None:
        """Records in the folder that the files have the inputs of this many windows."""
        if self._folder is None:
            return
        for layer in self.files:
            for file in layer.values():
                os.fsync(file.fileno())
        with replacing(self._folder / _DONE) as file:
            file.write(str(windows).encode())

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, layer: int) -> Inputs: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Inputs]: ...
    def __getitem__(self, layer: int | slice) -> Inputs | list[Inputs]:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        arrays = {}
        for name, file in self.files[layer].items():
            file.flush()
            values = np.memmap(file, np.int32 if name == "ids" else np.float32, mode="r")
            arrays[name] = np.asarray(values.reshape(self._tokens, -1))
        return arrays


def _check_disk(model: LoadedModel, names: Collection[str], tokens: int) -> None:
    layers, folder = model.config.layers, tempfile.gettempdir()
    nbytes = input_bytes(model, names, tokens)
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        got = f"the inputs of {layers} layers for {tokens} tokens take {nbytes / 2**30:.2f} GiB"
        fix = "take fewer `tokens`, or set TMPDIR to a folder with more space"
        raise UserError(f"{got}, and {folder} has {free / 2**30:.2f} GiB free: {fix}")


def input_bytes(model: LoadedModel, names: Collection[str], tokens: int) -> int:
    """Returns the bytes of the files for a number of tokens."""
    layers = range(model.config.layers)
    return 4 * tokens * sum(_width(model, layer, name) for layer in layers for name in names)


def _width(model: LoadedModel, layer: int, name: str) -> int:
    """Returns the number of values of one token in a file."""
    if name == "ids":
        return model.config.chosen_of(layer)
    return model.config.ffn_width(layer) if name == "normed" else model.config.dim


def _close(files: list[dict[str, IO[bytes]]]) -> None:
    for layer in files:
        for file in layer.values():
            file.close()


def ffn_inputs(
    model: LoadedModel,
    windows: Sequence[Sequence[int]],
    names: Collection[str],
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FFNInputs:
    """Computes the inputs of each layer's FFN for all tokens of the windows except each last one, as in
    decoding with ``exact``.

    ``names``: ``normed``, ``residual`` or both; with experts, the chosen experts are also collected.
    ``folder`` stores the inputs; windows that it has are not computed again. UserError: the folder for
    temporary files is too full, or ``folder`` cannot be written. OSError: a temporary file cannot be
    written."""
    backends, decode = model.devices.layers, model.limits.decode
    buffers: list[dict[str, Buffer]] = []
    chosen_too = [*names, "ids"] if model.config.experts else [*names]
    inputs = FFNInputs(model, chosen_too, sum(len(window) - 1 for window in windows), folder)
    done = inputs.windows_done()
    if folder is not None:
        _drop_unfinished(model, inputs, sum(len(window) - 1 for window in windows[:done]))
    if done == len(windows):
        return inputs
    session = model.session("exact", wrap=lambda ffns: [*_watched(model, ffns, names, buffers)])
    scorer, routed = Scorer(session), session.transformer.chosen
    noted = time.monotonic()
    try:
        for number, window in enumerate(windows[done:], done + 1):
            for logits in scorer.logits(window):
                for layer, (ops, taps, files) in enumerate(zip(backends, buffers, inputs.files, strict=True)):
                    for name, buffer in taps.items():
                        _write(files[name], ops.read(buffer, 0, len(logits)))
                        ops.write(buffer, np.zeros((decode, _width(model, layer, name)), np.float32))
                for ops, chosen, files in zip(backends, routed, inputs.files, strict=False):
                    _write(files["ids"], ops.read(chosen.ids, 0, len(logits)))
            if number == len(windows) or time.monotonic() > noted + _SAVED_EVERY:
                inputs.note(number)
                noted = time.monotonic()
            if progress:
                progress(number, len(windows))
    except (OSError, FileError) as error:
        if folder is None:
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder}: {reason}: free some space and repeat the command, which continues"
        ) from None
    return inputs


def _watched(
    model: LoadedModel, ffns: Iterable[AnyFFN], names: Collection[str], buffers: list[dict[str, Buffer]]
) -> Iterator[AnyFFN]:
    """Yields FFNs that also add their inputs to new buffers, and appends these buffers to ``buffers``."""

    def watched(layer: int, ops: Backend, ffn: AnyFFN) -> AnyFFN:
        taps = {name: ops.zeros((model.limits.tokens, _width(model, layer, name))) for name in names}
        buffers.append(taps)

        def run(
            normed: Buffer,
            residual: Buffer,
            batch: Batch,
            out: Buffer,
            chosen: Chosen | None = None,
            gates: Buffer | None = None,
        ) -> None:
            for name, buffer in taps.items():  # adding to zeros is an op, so it can be recorded
                ops.add(buffer, normed if name == "normed" else residual, batch)
            ffn(normed, residual, batch, out, chosen, gates)

        return run

    for layer, (ops, ffn) in enumerate(zip(model.devices.layers, ffns, strict=False)):
        yield watched(layer, ops, ffn)


def _write(file: IO[bytes], values: npt.NDArray[Any]) -> None:
    """Writes all bytes: without a buffer, one call may write fewer."""
    data = memoryview(np.ascontiguousarray(values).data).cast("B")
    while data:
        data = data[file.write(data) :]


def _drop_unfinished(model: LoadedModel, inputs: FFNInputs, tokens: int) -> None:
    """Truncates the files after this many tokens: the rest belongs to an unfinished window."""
    for layer, files in enumerate(inputs.files):
        for name, file in files.items():
            file.truncate(4 * tokens * _width(model, layer, name))
            file.seek(0, os.SEEK_END)
