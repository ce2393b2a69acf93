"""Profiles and placements, and their files (docs/formats.md). A placement's is PowerInfer's ``.gpuidx``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import GGML_TYPES, Tensor, quantise
from hotcold.formats.files import naming, printable, shown
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.sparse.sizes import SHAPES, Sizes, power_law

#: Of a model of which nothing is known.
_ACTIVITY = SHAPES["mistral-7b"] | {"source": "10 % fire, 26 % of them 80 % of all (assumed)"}

INDEX_BYTES = 4  #: on the GPU, of a hot neuron's number

_KEY, _PROFILE = "hotcold.placement.", "hotcold.profile."
_INDEX = "generic.gpu_index"  # ``general.architecture`` of a .gpuidx
_I32 = next(type for type in GGML_TYPES.values() if type.name == "I32")


class SidecarError(ValueError):
    """A profile or placement that is another model's, or damaged."""


@dataclass(frozen=True)
class Profile:
    firing: Sequence[npt.NDArray[Any]]  #: per layer ``[N]``: share of tokens for which each neuron fires
    source: str


@dataclass(frozen=True)
class Placement:
    """What the GPU has; the CPU has the rest and the embedding table."""

    hot: Sequence[npt.NDArray[np.bool_]]  #: per layer ``[N]``; none outside ``layers``
    layers: range  #: whose attention, keys and values, and predictors it has
    head: bool

    def bill(self, sizes: Sizes) -> list[dict[str, Any]]:
        """Where every byte goes: ``kind``, ``layer`` or None, ``gpu_bytes``, ``cpu_bytes``; ``hot_share``."""
        rows: list[tuple[Any, ...]] = []
        for i, mask in enumerate(self.hot):
            for kind in ("attention", "kv", "predictor"):
                n = int(getattr(sizes, kind)[i])
                rows.append((kind, i, n * (i in self.layers), n * (i not in self.layers)))
            hot, n = int(mask.sum()), int(sizes.neuron[i])
            rows.append(("neurons", i, hot * (n + INDEX_BYTES), (len(mask) - hot) * n, hot / len(mask)))
        rows.append(("head", None, sizes.head * self.head, sizes.head * (not self.head)))
        # A tied head that is on the CPU is the embedding table.
        rows.append(("embedding", None, 0, sizes.embedding * (self.head or not sizes.tied)))
        rows.append(("buffers", None, sizes.buffers * bool(self.head or self.layers), sizes.buffers))
        names = ("kind", "layer", "gpu_bytes", "cpu_bytes", "hot_share")
        return [dict(zip(names, row, strict=False)) for row in rows]

    def gpu_bytes(self, sizes: Sizes, kind: str = "") -> int:
        return sum(row["gpu_bytes"] for row in self.bill(sizes) if kind in ("", row["kind"]))


def find_profile(sizes: Sizes, path: Path | None, model: Path | None, activity: Any = _ACTIVITY) -> Profile:
    """The one at ``path``, else the one beside the model, else the same power law in every layer; where
    nothing is zero, all fire. SidecarError as in :func:`read_profile`."""
    if path is None and model and (beside := model.with_suffix(".profile.gguf")).exists():
        path = beside
    if path is not None:
        return read_profile(path, sizes)
    if sizes.always == 1:
        return Profile([np.ones(n) for n in sizes.neurons], "no zeros: all neurons")
    experts, law = activity["experts"], (activity["scale"], activity["exponent"])
    firing = [np.tile(sizes.routed * power_law(n // experts, *law), experts) for n in sizes.neurons]
    return Profile(firing, f"a power law in every layer; {activity['source']}")


def read_profile(path: Path, sizes: Sizes) -> Profile:
    """SidecarError: another model's, or damaged."""
    with open_gguf(path) as file, naming(path, SidecarError):
        _check_model(file, _PROFILE + "model_fingerprint", sizes)
        firing = [_read(file, f"blk.{i}.profile", n) for i, n in enumerate(sizes.neurons.tolist())]
        if not any(each.any() for each in firing):
            raise SidecarError("no neuron fires in it: make another")
        return Profile(firing, printable(f"{path.name}: {file.metadata.get(_PROFILE + 'source')}"))


def write_profile(path: Path, profile: Profile, facts: Mapping[str, Any]) -> None:
    """``facts`` are values of ``hotcold.profile.*``: ``model_fingerprint``, and what is for people."""
    keys = {"source": profile.source, **facts}
    tensors = {f"blk.{i}.profile": quantise(each, "F16") for i, each in enumerate(profile.firing)}
    write_gguf(path, {"general.type": "profile"} | {_PROFILE + k: v for k, v in keys.items()}, tensors)


def write_placement(path: Path, sizes: Sizes, placement: Placement, version: str = "") -> None:
    """Tensors in PowerInfer's order, by which it reads them; it passes over keys that it does not know.
    ``version`` is the writing program's, for people."""
    metadata = {
        "general.architecture": _INDEX, f"{_INDEX}.block_count": len(placement.hot),
        "split.vram_capacity": np.uint64(placement.gpu_bytes(sizes, "neurons")),
        _KEY + "version": version, _KEY + "model_fingerprint": sizes.fingerprint,
        _KEY + "first_layer": placement.layers.start, _KEY + "layers": len(placement.layers),
        _KEY + "head": placement.head,
    }  # fmt: skip
    tensors = {}
    for i, mask in enumerate(placement.hot):
        # It does not look at the list of a layer without hot neurons; no tensor is empty here.
        listed = np.flatnonzero(mask) if mask.any() else np.zeros(1)
        for name, values in (("gpu_idx", mask), ("gpu_bucket", listed)):
            data = values.astype("<i4").view(np.uint8)[None]
            tensors[f"blk.{i}.{name}"] = Tensor(_I32, values.shape, data)
    write_gguf(path, metadata, tensors, magic="PWRI")


def read_placement(path: Path, sizes: Sizes) -> Placement:
    """SidecarError as above. PowerInfer's own files mean all of attention and the head on the GPU."""
    with open_gguf(path) as file, naming(path, SidecarError):
        if file.metadata.get("general.architecture") != _INDEX:
            raise SidecarError(f"is no placement: general.architecture {_INDEX} is needed")
        count, hot = len(sizes.neurons), []
        facts: list[Any] = [0, count, True]
        if _KEY + "model_fingerprint" in file.metadata:
            _check_model(file, _KEY + "model_fingerprint", sizes)
            facts = [file.metadata.get(_KEY + key) for key in ("first_layer", "layers", "head")]
        first, layers, head = facts
        if not {type(first), type(layers)} <= {int} or not 0 <= first <= first + layers <= count:
            raise SidecarError(f"first_layer {shown(first)}, layers {shown(layers)}: the model has {count}")
        if len(file.tensors) > 2 * count:
            raise SidecarError(f"has {len(file.tensors)} tensors: the model has {count} layers, two for each")
        for i, n in enumerate(sizes.neurons.tolist()):
            hot.append(mask := _read(file, f"blk.{i}.gpu_idx", n) == 1)
            listed = _read(file, f"blk.{i}.gpu_bucket", int(mask.sum()), n - 1) if mask.any() else mask[:0]
            if len(wrong := np.flatnonzero(np.diff(listed) <= 0)):
                raise SidecarError(f"layer {i} lists neuron {listed[wrong[0] + 1]} twice or out of order")
            if not np.array_equal(listed, np.flatnonzero(mask)):
                raise SidecarError(f"layer {i} lists other neurons than gpu_idx marks")
            if mask.any() and not first <= i < first + layers:
                raise SidecarError(f"layer {i} has hot neurons, but its attention is on the CPU")
        return Placement(hot, range(first, first + layers), head is True)


def _check_model(file: GGUFFile, key: str, sizes: Sizes) -> None:
    if (seen := file.metadata.get(key)) != sizes.fingerprint:
        what = f"has no {key}" if seen is None else f"belongs to the model {shown(seen)}"
        raise SidecarError(f"{what}: a file for this model ({sizes.fingerprint!r}) is needed")


def _read(file: GGUFFile, name: str, n: int, most: int = 1) -> npt.NDArray[Any]:
    """A tensor ``[n]`` of numbers from 0 to ``most``."""
    if name not in file.tensors:
        raise SidecarError(f"tensor {name} is missing: every layer of the model needs one")
    if (info := file.tensors[name]).shape != (n,):
        raise SidecarError(f"tensor {name} has shape {info.shape}: ({n},) is needed")
    floats = info.type.supported
    values: npt.NDArray[Any] = file.load(name).dequantise() if floats else file.load_integers(name)
    if len(wrong := values[~((values >= 0) & (values <= most))]):
        raise SidecarError(f"tensor {name} holds {wrong[0]}: numbers from 0 to {most} are needed")
    return values
