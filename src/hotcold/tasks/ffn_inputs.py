"""What each layer's FFN is given for a text: what predictors are fitted to. The inputs of all layers are more
than memory should hold (4 GiB for 8192 tokens of a 7B model), so they go to disk and come back by layer."""

import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.kernels.backend import Backend, Batch, Buffer, Chosen
from hotcold.model.transformer import FFN
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.scoring import Scorer

#: ``normed`` or ``residual`` -> ``[tokens, D]`` float32; ``ids`` -> ``[tokens, k]`` int32: experts
Inputs = Mapping[str, npt.NDArray[Any]]


class FFNInputs(Sequence[Inputs]):
    """The inputs of each layer, in temporary files without a name: they are gone when this object is, however
    the process ends. A layer's arrays are mapped when it is asked for, and read-only."""

    def __init__(self, model: LoadedModel, names: Collection[str], tokens: int) -> None:
        self._tokens = tokens
        layers = model.config.layers
        nbytes = 4 * tokens * model.config.dim * layers * len(names)
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            seen = f"the inputs of {layers} layers for {tokens} tokens take {nbytes / 2**30:.2f} GiB"
            fix = "take fewer `tokens`, or set TMPDIR to a folder with more room"
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
            values = np.memmap(file, np.int32 if name == "ids" else np.float32, mode="r")
            found[name] = np.asarray(values.reshape(self._tokens, -1))
        return found


def _close(files: list[dict[str, IO[bytes]]]) -> None:
    for layer in files:
        for file in layer.values():
            file.close()


def ffn_inputs(model: LoadedModel, windows: Sequence[Sequence[int]], names: Collection[str]) -> FFNInputs:
    """What each layer's FFN is given for the tokens of the windows but the last ones, by the decode rule of
    ``exact``. ``names`` are those of ``normed`` and ``residual`` that are wanted, beside what tokens chose of
    experts, if there are any.

    UserError: the folder for temporary files has no room for them; OSError: it could not be written."""
    rows, dim = model.limits.tokens, model.config.dim
    backends = model.devices.layers
    buffers: list[dict[str, Buffer]] = []

    def watched(ops: Backend, ffn: FFN) -> FFN:
        own = {name: ops.zeros((rows, dim)) for name in names}
        buffers.append(own)

        def run(
            normed: Buffer, residual: Buffer, batch: Batch, out: Buffer, chosen: Chosen | None = None
        ) -> None:
            for name, buffer in own.items():  # added to zeros, since that is an op and can be recorded
                ops.add(buffer, normed if name == "normed" else residual, batch)
            ffn(normed, residual, batch, out, chosen)

        return run

    chosen_too = [*names, "ids"] if model.config.experts else names
    inputs = FFNInputs(model, chosen_too, sum(len(window) - 1 for window in windows))
    session = model.session("exact", wrap=lambda ffns: [*map(watched, backends, ffns)])
    scorer, routed = Scorer(session), session.transformer.chosen
    zeros = np.zeros((model.limits.decode, dim), np.float32)
    for window in windows:
        for logits in scorer.logits(window):
            for ops, layer, files in zip(backends, buffers, inputs.files, strict=True):
                for name, buffer in layer.items():
                    files[name].write(ops.read(buffer, 0, len(logits)).data)
                    ops.write(buffer, zeros)
            for ops, chosen, files in zip(backends, routed, inputs.files, strict=False):
                files["ids"].write(ops.read(chosen.ids, 0, len(logits)).data)
    return inputs
