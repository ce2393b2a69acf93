"""The placement: which GPU has which parts of a model. Reads and writes it as PowerInfer's ``.gpuidx``
(docs/formats.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import GGML_TYPES, Tensor
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.placement.sizes import Sizes
from hotcold.sparse.sidecar import SidecarError, check_model, read_numbers
from hotcold.values import shown

INDEX_BYTES = 4  #: bytes of a hot neuron's number on the GPU
MOST_GPUS = 4  #: limit for the GPUs of a placement

#: Kinds of rows in the bill, and the kinds that a file stores.
KINDS = ("attention", "kv", "states", "predictor", "neurons", "head", "embedding", "buffers")
WEIGHTS = ("attention", "predictor", "neurons", "head")

_KEY = "hotcold.placement."
_INDEX = "generic.gpu_index"  # ``general.architecture`` of a .gpuidx
_I32 = next(type for type in GGML_TYPES.values() if type.name == "I32")

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Placement:
    """The device of each part: the number of a GPU, or None for the CPU. The embedding table is on the
    CPU."""

    hot: Sequence[Bools]  #: mask of each layer's hot neurons ``[N]``, on its GPU; empty on the CPU
    where: tuple[int | None, ...]  #: device of each layer's attention, keys and values, and predictors
    head: int | None

    @classmethod
    def on_one(cls, hot: Sequence[Bools], layers: range, head: bool) -> Self:
        """Places these layers on GPU 0, and optionally the head."""
        where = tuple(0 if i in layers else None for i in range(len(hot)))
        return cls(hot, where, 0 if head else None)

    @property
    def gpus(self) -> list[int]:
        """GPUs with any part."""
        return sorted({each for each in (*self.where, self.head) if each is not None})

    @property
    def cpu_computes(self) -> bool:
        """True if the CPU computes layers, neurons or the head, besides the embedding."""
        return None in (*self.where, self.head) or not all(mask.all() for mask in self.hot)

    def layers_of(self, gpu: int) -> list[int]:
        return [i for i, where in enumerate(self.where) if where == gpu]

    def part_of(self, gpu: int) -> Self:
        """Returns the placement with only one GPU's parts on a GPU, and all else on the CPU."""
        hot = [mask & (where == gpu) for mask, where in zip(self.hot, self.where, strict=True)]
        where = tuple(gpu if each == gpu else None for each in self.where)
        return replace(self, hot=hot, where=where, head=gpu if self.head == gpu else None)

    @property
    def hot_share(self) -> float:
        """Share of neurons that are hot."""
        hot = np.concatenate(self.hot)
        return float(hot.mean()) if hot.size else 0.0

    def share_of(self, firing: Sequence[npt.NDArray[Any]]) -> float:
        """Returns the hot neurons' share of all activations; ``firing`` as in a profile, per layer
        ``[N]``."""
        hot = sum(float(each[mask].sum()) for each, mask in zip(firing, self.hot, strict=True))
        return hot / (sum(float(each.sum()) for each in firing) or 1)

    def bill(self, sizes: Sizes) -> list[dict[str, Any]]:
        """Returns rows that account for every byte: ``kind``, ``layer`` or None, ``gpu`` or None,
        ``gpu_bytes``, ``cpu_bytes``, ``hot_share``."""
        rows: list[dict[str, Any]] = []

        def add(kind: str, layer: int | None, gpu: int | None, on_gpu: int, cpu: int, **facts: float) -> None:
            places = {"gpu": gpu, "gpu_bytes": on_gpu, "cpu_bytes": cpu}
            rows.append({"kind": kind, "layer": layer, **places, **facts})

        def whole(kind: str, layer: int | None, gpu: int | None, nbytes: int) -> None:
            add(kind, layer, gpu, *((0, nbytes) if gpu is None else (nbytes, 0)))

        for i, (mask, gpu) in enumerate(zip(self.hot, self.where, strict=True)):
            for kind in ("attention", "kv", *(["states"] if sizes.states is not None else []), "predictor"):
                whole(kind, i, gpu, int(getattr(sizes, kind)[i]))
            hot, nbytes = int(mask.sum()), int(sizes.neuron_bytes[i])
            on_gpu, on_cpu = hot * (nbytes + INDEX_BYTES), (len(mask) - hot) * nbytes
            add("neurons", i, gpu, on_gpu, on_cpu, hot_share=hot / max(1, len(mask)))
        whole("head", None, self.head, sizes.head)
        # A tied head on the CPU is the embedding table.
        table = sizes.embedding * (self.head is not None or not sizes.tied)
        whole("embedding", None, None, table + sizes.inputs)
        whole("buffers", None, None, sizes.buffers)
        for gpu in self.gpus:
            layers, streamed = self.layers_of(gpu), self.streamed_bytes(sizes)
            widest = [max(int(self.hot[i].sum()), self._cold(i) if streamed[i] else 0) for i in layers]
            step = sizes.gpu_step(max(widest, default=None))
            step += max((streamed[i] for i in layers), default=0)
            whole("buffers", None, gpu, step + sizes.gpu_layer * len(layers))
        return rows

    def _cold(self, layer: int) -> int:
        """Returns the number of a layer's cold neurons."""
        return int((~self.hot[layer]).sum())

    def streamed_bytes(self, sizes: Sizes) -> list[int]:
        """Returns the bytes of each layer that prompts stream to its GPU."""
        on_gpu = ((i, gpu is not None) for i, gpu in enumerate(self.where))
        return [sizes.streamed_bytes(i, self._cold(i)) if on else 0 for i, on in on_gpu]

    def gpu_bytes(self, sizes: Sizes, kind: str = "") -> int:
        """Returns the bytes on GPUs, of one kind of the bill or of all kinds."""
        return sum(row["gpu_bytes"] for row in self.bill(sizes) if kind in ("", row["kind"]))


def write_placement(path: Path, sizes: Sizes, placement: Placement, version: str = "") -> None:
    """Writes the file, with tensors in the order in which PowerInfer reads them; it ignores unknown keys.
    ``version``: version of the writing program, for people."""
    metadata = {
        "general.architecture": _INDEX,
        f"{_INDEX}.block_count": len(placement.hot),
        "split.vram_capacity": np.uint64(placement.gpu_bytes(sizes, "neurons")),
        f"{_KEY}version": version,
        f"{_KEY}model_fingerprint": sizes.fingerprint,
        f"{_KEY}where": [-1 if gpu is None else gpu for gpu in (*placement.where, placement.head)],
    }
    tensors = {}
    for i, mask in enumerate(placement.hot):
        if not mask.size:  # a layer without an FFN
            continue
        # PowerInfer ignores the list of a layer without hot neurons; tensors must not be empty here.
        listed = np.flatnonzero(mask) if mask.any() else np.zeros(1)
        tensors[f"blk.{i}.gpu_idx"] = _integers(mask)
        tensors[f"blk.{i}.gpu_bucket"] = _integers(listed)
    write_gguf(path, metadata, tensors, magic="PWRI")


def _integers(values: npt.NDArray[Any]) -> Tensor:
    return Tensor(_I32, values.shape, values.astype("<i4").view(np.uint8)[None])


def read_placement(path: Path, sizes: Sizes) -> Placement:
    """Reads the file; PowerInfer's own files mean all of attention and the head on one GPU. SidecarError: it
    is damaged, or another model's."""
    with open_gguf(path) as file, naming(path, SidecarError):
        if not file.says("general.architecture", _INDEX):
            raise SidecarError(f"is not a placement: general.architecture {_INDEX} is needed")
        *where, head = _where(file, sizes)
        count = len(sizes.neurons)
        if len(file.tensors) > 2 * count:
            raise SidecarError(f"has {len(file.tensors)} tensors: the model has {count} layers, two for each")
        hot = [_hot_neurons(file, i, n) for i, n in enumerate(sizes.neurons.tolist())]
        for i, mask in enumerate(hot):
            if mask.any() and where[i] is None:
                raise SidecarError(f"layer {i} has hot neurons, but its attention is on the CPU")
        return Placement(hot, tuple(where), head)


def _where(file: GGUFFile, sizes: Sizes) -> list[int | None]:
    """Returns the device of each layer's attention, and of the head."""
    count = len(sizes.neurons)
    if f"{_KEY}model_fingerprint" not in file.metadata:  # written by PowerInfer
        return [0] * (count + 1)
    check_model(file, f"{_KEY}model_fingerprint", sizes.fingerprint)
    stored: Any = file.metadata.get(f"{_KEY}where")
    if stored is None:  # written by a version for one GPU
        return _run(file, count)
    where = np.asarray(stored)
    valid = where.shape == (count + 1,) and where.dtype.kind == "i" and where.min() >= -1
    if not valid or where.max() >= MOST_GPUS:
        needed = f"for {count} layers and the head, each a GPU's number below {MOST_GPUS} or -1, the CPU"
        raise SidecarError(f"where is {shown(stored)}: {needed}, are needed")
    return [None if gpu < 0 else gpu for gpu in where.tolist()]


def _run(file: GGUFFile, count: int) -> list[int | None]:
    first: Any = file.metadata.get(f"{_KEY}first_layer")
    layers: Any = file.metadata.get(f"{_KEY}layers")
    whole = type(first) is int and type(layers) is int
    if not whole or not 0 <= first <= first + layers <= count:
        raise SidecarError(f"first_layer {shown(first)}, layers {shown(layers)}: the model has {count}")
    on_gpu = [first <= i < first + layers for i in range(count)]
    return [0 if each else None for each in (*on_gpu, file.metadata.get(f"{_KEY}head") is True)]


def _hot_neurons(file: GGUFFile, layer: int, n: int) -> Bools:
    """Returns the mask ``[n]`` of a layer; checks that the list of neurons agrees."""
    if not n:
        return np.zeros(0, np.bool_)
    mask: Bools = read_numbers(file, f"blk.{layer}.gpu_idx", n) == 1
    if not mask.any():
        return mask
    listed = read_numbers(file, f"blk.{layer}.gpu_bucket", int(mask.sum()), n - 1)
    wrong = np.flatnonzero(np.diff(listed) <= 0)
    if len(wrong):
        raise SidecarError(f"layer {layer} lists neuron {listed[wrong[0] + 1]} twice or out of order")
    if not np.array_equal(listed, np.flatnonzero(mask)):
        raise SidecarError(f"layer {layer} lists other neurons than gpu_idx marks")
    return mask
