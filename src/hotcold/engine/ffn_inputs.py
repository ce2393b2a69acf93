"""What each layer's FFN is given for a text: what predictors are fitted to. The inputs of all layers are more
than memory should hold (4 GiB for 8192 tokens of a 7B model), so they go to disk and come back by layer."""

import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import IO, overload

import numpy as np

from hotcold.engine.scoring import Scorer
from hotcold.engine.session import LoadedModel
from hotcold.errors import UserError
from hotcold.kernels.backend import Backend, Batch, Buffer, Floats
from hotcold.model.transformer import FFN

Inputs = Mapping[str, Floats]  #: ``normed`` or ``residual`` -> ``[tokens, D]`` float32


class FFNInputs(Sequence[Inputs]):
    """The inputs of each layer, in temporary files without a name: they are gone when this object is, however
    the process ends. A layer's arrays are mapped when it is asked for, and read-only."""

    def __init__(self, model: LoadedModel, names: Collection[str], tokens: int) -> None:
        self._shape = (tokens, model.config.dim)
        layers = model.config.layers
        nbytes = 4 * tokens * model.config.dim * layers * len(names)
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            seen = f"the inputs of {layers} layers for {tokens} tokens take {nbytes / 2**30:.2f} GiB"
            fix = "take fewer --tokens, or set TMPDIR to a folder with more room"
            raise UserError(f"{seen}, and {folder} has {free / 2**30:.2f} GiB free: {fix}")
        self.files: list[dict[str, IO[bytes]]] = []
        self.close = weakref.finalize(self, _close, self.files)
        for _ in range(layers):
            self.files.append({})
            for name in names:
                self.files[-1][name] = tempfile.TemporaryFile()  # noqa: SIM115

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, layer: int) -> Inputs: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Inputs]: ...
    def __getitem__(self, layer: int | slice) -> Inputs | list[Inputs]:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        found = {}
        for name, file in self.files[layer].items():
            file.flush()
            found[name] = np.asarray(np.memmap(file, np.float32, mode="r", shape=self._shape))
        return found


def _close(files: list[dict[str, IO[bytes]]]) -> None:
    for layer in files:
        for file in layer.values():
            file.close()


def ffn_inputs(model: LoadedModel, windows: Sequence[Sequence[int]], names: Collection[str]) -> FFNInputs:
    """What each layer's FFN is given for the tokens of the windows but the last ones, by the decode rule of
    ``exact``. ``names`` are those of ``normed`` and ``residual`` that are wanted.

    UserError: the folder for temporary files has no room for them; OSError: it could not be written."""
    rows, dim = model.limits.tokens, model.config.dim
    backends = model.devices.layers
    buffers: list[dict[str, Buffer]] = []

    def watched(ops: Backend, ffn: FFN) -> FFN:
        own = {name: ops.zeros((rows, dim)) for name in names}
        buffers.append(own)

        def run(normed: Buffer, residual: Buffer, batch: Batch, out: Buffer) -> None:
            for name, buffer in own.items():  # added to zeros, since that is an op and can be recorded
                ops.add(buffer, normed if name == "normed" else residual, batch)
            ffn(normed, residual, batch, out)

        return run

    inputs = FFNInputs(model, names, sum(len(window) - 1 for window in windows))
    scorer = Scorer(model.session("exact", wrap=lambda ffns: [*map(watched, backends, ffns)]))
    zeros = np.zeros((model.limits.decode, dim), np.float32)
    for window in windows:
        for logits in scorer.logits(window):
            for ops, layer, files in zip(backends, buffers, inputs.files, strict=True):
                for name, buffer in layer.items():
                    files[name].write(ops.read(buffer, 0, len(logits)).data)
                    ops.write(buffer, zeros)
    return inputs
