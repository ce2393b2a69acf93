"""Profiles: how often each neuron of a model is active (docs/formats.md). Reads, writes and assumes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import GGML_TYPES, Tensor, quantise
from hotcold.formats.files import naming
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.placement.sizes import SHAPES, Shape, Sizes, power_law
from hotcold.sparse.sidecar import SidecarError, check_model, read_numbers
from hotcold.values import printable

_KEY = "hotcold.profile."
_I16 = next(type for type in GGML_TYPES.values() if type.name == "I16")

#: The shape whose power law stands for an unknown model.
_ASSUMED = SHAPES["mistral-7b"]
_ASSUMED_SOURCE = "26 % of neurons, 80 % of activations (assumed)"


@dataclass(frozen=True)
class Profile:
    firing: Sequence[npt.NDArray[Any]]  #: per layer ``[N]``: share of tokens for which each neuron is active
    source: str
    #: per layer ``[E]``: share of tokens that choose each expert; None: not counted
    routing: Sequence[npt.NDArray[Any]] | None = field(default=None, kw_only=True)
    #: per layer ``[T, k]``: experts that consecutive tokens of a text chose; None: not counted
    routes: Sequence[npt.NDArray[Any]] | None = field(default=None, kw_only=True)
    counted: int | None = field(default=None, kw_only=True)  #: number of tokens; None: not in the file

    def routed(self, sizes: Sizes, layer: int) -> npt.NDArray[Any]:
        """Returns the share of tokens that choose the expert of each neuron in a layer, ``[N]``."""
        n = int(sizes.neurons[layer])
        if self.routing is None:
            return np.full(n, sizes.share_of(layer))
        if layer in sizes.ordinary:
            return np.ones(n)
        return np.repeat(self.routing[layer], n // sizes.experts)


def find_profile(sizes: Sizes, path: Path | None, model: Path | None) -> Profile:
    """Returns the profile at ``path``, else the model's sidecar, else an assumed power law; without zeros,
    one in which all neurons are active. SidecarError as in :func:`read_profile`."""
    beside = model.with_suffix(".profile.gguf") if model else None
    if path is None and beside is not None and beside.exists():
        path = beside
    if path is not None:
        return read_profile(path, sizes)
    if sizes.always_read == 1:
        of_experts = "" if sizes.experts == 1 else " of an expert, all experts chosen equally often (assumed)"
        firing = [np.full(n, sizes.share_of(i)) for i, n in enumerate(sizes.neurons)]
        return Profile(firing, f"no zeros: all neurons{of_experts}")
    return power_law_profile(sizes, _ASSUMED, _ASSUMED_SOURCE)


def profile_beside(sizes: Sizes, model: Path, *, asked: bool) -> tuple[Profile, str]:
    """Returns the profile of a model's sidecar, or an assumed one, and a note. If the sidecar is unusable:
    UserError if a feature that needs it was ``asked`` for, else an assumed profile and a note."""
    try:
        return find_profile(sizes, None, model), ""
    except UserError as error:
        if asked:
            raise
        return find_profile(sizes, None, None), f"no profile is used: {error}"


def power_law_profile(sizes: Sizes, shape: Shape, source: str = "") -> Profile:
    """Returns a profile with the shape's power law in every layer and expert; ``source`` replaces the
    shape's, if given."""
    firing = []
    for i, n in enumerate(sizes.neurons.tolist()):
        experts = sizes.experts_of(i)
        of_an_expert = power_law(n // experts, shape.scale, shape.exponent)
        firing.append(np.tile(sizes.share_of(i) * of_an_expert, experts))
    return Profile(firing, f"a power law in every layer; {source or shape.source}")


def read_profile(path: Path, sizes: Sizes) -> Profile:
    """Reads a profile. SidecarError: it is damaged, or another model's."""
    with open_gguf(path) as file, naming(path, SidecarError):
        check_model(file, f"{_KEY}model_fingerprint", sizes.fingerprint)
        neurons = sizes.neurons.tolist()
        firing = [
            read_numbers(file, f"blk.{i}.profile", n) if n else np.zeros(0) for i, n in enumerate(neurons)
        ]
        if not any(each.any() for each in firing):
            raise SidecarError("no neuron is active in it: make another with hotcold profile")
        routing = routes = None
        if sizes.experts > 1 and any(name.endswith(".routing") for name in file.tensors):
            routing = [
                np.ones(1) if i in sizes.ordinary else read_numbers(file, f"blk.{i}.routing", sizes.experts)
                for i in range(len(neurons))
            ]
        if routing is not None and any(name.endswith(".routes") for name in file.tensors):
            none = np.zeros((0, 0), np.int16)
            routes = [
                none if i in sizes.ordinary else _routes(file, f"blk.{i}.routes", sizes.experts)
                for i in range(len(neurons))
            ]
        source = printable(f"{path.name}: {file.metadata.get(f'{_KEY}source')}")
        tokens = file.metadata.get(f"{_KEY}tokens")
        counted = int(tokens) if isinstance(tokens, int | np.integer) and tokens > 0 else None
        return Profile(firing, source, routing=routing, routes=routes, counted=counted)


def _routes(file: GGUFFile, name: str, experts: int) -> npt.NDArray[Any]:
    """Returns the experts that tokens chose, ``[T, k]``. SidecarError: missing or invalid."""
    if name not in file.tensors:
        raise SidecarError(f"tensor {name} is missing: every layer of experts needs one")
    routes = file.load_integers(name)
    if routes.ndim != 2 or not 1 <= routes.shape[1] <= experts:
        raise SidecarError(f"tensor {name} has shape {routes.shape}: (tokens, 1 to {experts}) is needed")
    wrong = routes[(routes < 0) | (routes >= experts)]
    if wrong.size:
        raise SidecarError(f"tensor {name} holds {wrong[0]}: experts from 0 to {experts - 1} are needed")
    return routes


def write_profile(path: Path, profile: Profile, facts: Mapping[str, Any]) -> None:
    """Writes a profile, without layers that have no FFN. ``facts``: values of ``hotcold.profile.*``, with
    ``model_fingerprint`` and facts for people."""
    metadata = {"general.type": "profile", f"{_KEY}source": profile.source}
    metadata |= {_KEY + name: value for name, value in facts.items()}
    tensors = {
        f"blk.{i}.profile": quantise(shares, "F16") for i, shares in enumerate(profile.firing) if shares.size
    }
    routing = {i: shares for i, shares in enumerate(profile.routing or ()) if shares.size > 1}
    tensors |= {f"blk.{i}.routing": quantise(shares, "F16") for i, shares in routing.items()}
    for i, ids in enumerate(profile.routes or ()):
        if ids.size:
            tensors[f"blk.{i}.routes"] = Tensor(
                _I16, ids.shape, np.ascontiguousarray(ids, "<i2").view(np.uint8)
            )
    write_gguf(path, metadata, tensors)
