"""States which parts of a model a GPU has; reads and writes it as PowerInfer's ``.gpuidx``
(docs/formats.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import GGML_TYPES, Tensor
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.placement.sizes import Sizes
from hotcold.sparse.sidecar import SidecarError, check_model, read_numbers
from hotcold.values import shown

INDEX_BYTES = 4  #: bytes of a hot neuron's number on the GPU

#: Kinds of rows in the bill, and those that a file has.
KINDS = ("attention", "kv", "predictor", "neurons", "head", "embedding", "buffers")
WEIGHTS = ("attention", "predictor", "neurons", "head")

_KEY = "hotcold.placement."
_INDEX = "generic.gpu_index"  # ``general.architecture`` of a .gpuidx
_I32 = next(type for type in GGML_TYPES.values() if type.name == "I32")

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Placement:
    """The parts that the GPU has; the CPU has the rest and the embedding table."""

    hot: Sequence[Bools]  #: mask of hot neurons per layer ``[N]``; empty outside ``layers``
    layers: range  #: layers whose attention, keys and values, and predictors it has
    head: bool

    @property
    def hot_share(self) -> float:
        """The share of neurons that are hot."""
        return float(np.concatenate(self.hot).mean())

    def share_of(self, firing: Sequence[npt.NDArray[Any]]) -> float:
        """The share of firings that hot neurons have; ``firing`` as in a profile, per layer ``[N]``."""
        hot = sum(float(each[mask].sum()) for each, mask in zip(firing, self.hot, strict=True))
        return hot / sum(float(each.sum()) for each in firing)

    def bill(self, sizes: Sizes) -> list[dict[str, Any]]:
        """The place of every byte: ``kind``, ``layer`` or None, ``gpu_bytes``, ``cpu_bytes``;
        ``hot_share``."""
        rows: list[dict[str, Any]] = []

        def add(kind: str, layer: int | None, gpu: int, cpu: int, **more: float) -> None:
            rows.append({"kind": kind, "layer": layer, "gpu_bytes": gpu, "cpu_bytes": cpu, **more})

        for i, mask in enumerate(self.hot):
            has = i in self.layers
            for kind in ("attention", "kv", "predictor"):
                nbytes = int(getattr(sizes, kind)[i])
                add(kind, i, nbytes * has, nbytes * (not has))
            hot, nbytes = int(mask.sum()), int(sizes.neuron_bytes[i])
            gpu, cpu = hot * (nbytes + INDEX_BYTES), (len(mask) - hot) * nbytes
            add("neurons", i, gpu, cpu, hot_share=hot / len(mask))
        add("head", None, sizes.head * self.head, sizes.head * (not self.head))
        # A tied head that is on the CPU is the embedding table.
        add("embedding", None, 0, sizes.embedding * (self.head or not sizes.tied))
        on_gpu = sizes.gpu_layer * len(self.layers)
        if self.head or self.layers:
            on_gpu += sizes.gpu_step(
                max((int(self.hot[i].sum()) for i in self.layers), default=None), self.head
            )
        add("buffers", None, on_gpu, sizes.buffers)
        return rows

    def gpu_bytes(self, sizes: Sizes, kind: str = "") -> int:
        """Bytes on the GPU, of one kind of the bill or of all."""
        return sum(row["gpu_bytes"] for row in self.bill(sizes) if kind in ("", row["kind"]))


def write_placement(path: Path, sizes: Sizes, placement: Placement, version: str = "") -> None:
    """Writes the file. Tensors are in PowerInfer's order, by which it reads them; it ignores unknown keys.
    ``version`` is that of the writing program, for people."""
    metadata = {
        "general.architecture": _INDEX,
        f"{_INDEX}.block_count": len(placement.hot),
        "split.vram_capacity": np.uint64(placement.gpu_bytes(sizes, "neurons")),
        f"{_KEY}version": version,
        f"{_KEY}model_fingerprint": sizes.fingerprint,
        f"{_KEY}first_layer": placement.layers.start,
        f"{_KEY}layers": len(placement.layers),
        f"{_KEY}head": placement.head,
    }
    tensors = {}
    for i, mask in enumerate(placement.hot):
        # PowerInfer ignores the list of a layer without hot neurons; tensors must not be empty here.
        listed = np.flatnonzero(mask) if mask.any() else np.zeros(1)
        tensors[f"blk.{i}.gpu_idx"] = _integers(mask)
        tensors[f"blk.{i}.gpu_bucket"] = _integers(listed)
    write_gguf(path, metadata, tensors, magic="PWRI")


def _integers(values: npt.NDArray[Any]) -> Tensor:
    return Tensor(_I32, values.shape, values.astype("<i4").view(np.uint8)[None])


def read_placement(path: Path, sizes: Sizes) -> Placement:
    """Reads the file; PowerInfer's own files mean all of attention and the head on the GPU. SidecarError: it
    is damaged, or another model's."""
    with open_gguf(path) as file, naming(path, SidecarError):
        if file.metadata.get("general.architecture") != _INDEX:
            raise SidecarError(f"is no placement: general.architecture {_INDEX} is needed")
        layers, head = _gpu_parts(file, sizes)
        count = len(sizes.neurons)
        if len(file.tensors) > 2 * count:
            raise SidecarError(f"has {len(file.tensors)} tensors: the model has {count} layers, two for each")
        hot = [_hot_neurons(file, i, n) for i, n in enumerate(sizes.neurons.tolist())]
        for i, mask in enumerate(hot):
            if mask.any() and i not in layers:
                raise SidecarError(f"layer {i} has hot neurons, but its attention is on the CPU")
        return Placement(hot, layers, head)


def _gpu_parts(file: GGUFFile, sizes: Sizes) -> tuple[range, bool]:
    """The layers whose attention the GPU has, and whether it has the head."""
    count = len(sizes.neurons)
    if f"{_KEY}model_fingerprint" not in file.metadata:  # PowerInfer's own
        return range(count), True
    check_model(file, f"{_KEY}model_fingerprint", sizes.fingerprint)
    first: Any = file.metadata.get(f"{_KEY}first_layer")
    layers: Any = file.metadata.get(f"{_KEY}layers")
    head = file.metadata.get(f"{_KEY}head")
    whole = type(first) is int and type(layers) is int
    if not whole or not 0 <= first <= first + layers <= count:
        raise SidecarError(f"first_layer {shown(first)}, layers {shown(layers)}: the model has {count}")
    return range(first, first + layers), head is True


def _hot_neurons(file: GGUFFile, layer: int, n: int) -> Bools:
    """The mask ``[n]`` of a layer; checks that the list beside it agrees."""
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
