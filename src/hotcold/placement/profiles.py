"""Reads, writes and assumes profiles: how often each neuron of a model fires (docs/formats.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.files import naming
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.placement.sizes import SHAPES, Shape, Sizes, power_law
from hotcold.sparse.profiler import KEPT_EXPERTS
from hotcold.sparse.sidecar import SidecarError, check_model, read_numbers
from hotcold.values import printable

_KEY = "hotcold.profile."

#: The shape whose power law stands for an unknown model.
_ASSUMED = SHAPES["mistral-7b"]
_ASSUMED_SOURCE = "10 % fire, 26 % of them 80 % of all (assumed)"


@dataclass(frozen=True)
class Profile:
    firing: Sequence[npt.NDArray[Any]]  #: per layer ``[N]``: the share of tokens for which each neuron fires
    source: str
    #: per layer ``[E]``: the share of tokens that choose each expert; None: not counted
    routing: Sequence[npt.NDArray[Any]] | None = field(default=None, kw_only=True)
    #: per layer, the share of a token's experts that the token before chose, too; None: not counted
    kept_experts: Sequence[float] | None = field(default=None, kw_only=True)
    #: tokens that a file's shares are of, where it says so
    counted: int | None = field(default=None, kw_only=True)

    def routed(self, sizes: Sizes, layer: int) -> npt.NDArray[Any]:
        """The share of tokens for which a router chooses the expert of each neuron in a layer, ``[N]``."""
        n = int(sizes.neurons[layer])
        if self.routing is None:
            return np.full(n, sizes.share_of(layer))
        if layer in sizes.ordinary:
            return np.ones(n)
        return np.repeat(self.routing[layer], n // sizes.experts)


def find_profile(sizes: Sizes, path: Path | None, model: Path | None) -> Profile:
    """The profile at ``path``, else the one beside the model, else an assumed power law; without zeros all
    neurons fire. SidecarError as in :func:`read_profile`."""
    beside = model.with_suffix(".profile.gguf") if model else None
    if path is None and beside is not None and beside.exists():
        path = beside
    if path is not None:
        return read_profile(path, sizes)
    if sizes.always_read == 1:
        of_experts = "" if sizes.experts == 1 else " of an expert, which are chosen alike (assumed)"
        firing = [np.full(n, sizes.share_of(i)) for i, n in enumerate(sizes.neurons)]
        return Profile(firing, f"no zeros: all neurons{of_experts}")
    return power_law_profile(sizes, _ASSUMED, _ASSUMED_SOURCE)


def profile_beside(sizes: Sizes, model: Path, *, asked: bool) -> tuple[Profile, str]:
    """The profile beside a model, else an assumed one, and no note. If the one that lies there cannot be
    used: UserError where something that needs it was ``asked`` for, else an assumed one, and a note."""
    try:
        return find_profile(sizes, None, model), ""
    except UserError as error:
        if asked:
            raise
        return find_profile(sizes, None, None), f"no profile is used: {error}"


def power_law_profile(sizes: Sizes, shape: Shape, source: str = "") -> Profile:
    """A profile with the shape's power law in every layer and expert; ``source`` replaces the shape's, if
    given."""
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
            raise SidecarError("no neuron fires in it: make another")
        routing = None
        if sizes.experts > 1 and any(name.endswith(".routing") for name in file.tensors):
            routing = [
                np.ones(1) if i in sizes.ordinary else read_numbers(file, f"blk.{i}.routing", sizes.experts)
                for i in range(len(neurons))
            ]
        source = printable(f"{path.name}: {file.metadata.get(f'{_KEY}source')}")
        tokens = file.metadata.get(f"{_KEY}tokens")
        counted = int(tokens) if isinstance(tokens, int | np.integer) and tokens > 0 else None
        kept = file.metadata.get(f"{_KEY}{KEPT_EXPERTS}")
        shares = None if routing is None or kept is None else _shares(kept, len(neurons))
        return Profile(firing, source, routing=routing, kept_experts=shares, counted=counted)


def _shares(values: Any, layers: int) -> list[float]:
    """One share for each layer. SidecarError: it is something else."""
    found = np.asarray(values)
    if found.shape != (layers,) or found.dtype.kind != "f" or not ((found >= 0) & (found <= 1)).all():
        raise SidecarError(f"{_KEY}{KEPT_EXPERTS} must have a share for each of {layers} layers")
    return [float(each) for each in found]


def write_profile(path: Path, profile: Profile, facts: Mapping[str, Any]) -> None:
    """Writes a profile; nothing of layers without an FFN. ``facts`` are values of ``hotcold.profile.*``:
    ``model_fingerprint``, and facts for people."""
    metadata = {"general.type": "profile", f"{_KEY}source": profile.source}
    metadata |= {_KEY + name: value for name, value in facts.items()}
    tensors = {
        f"blk.{i}.profile": quantise(each, "F16") for i, each in enumerate(profile.firing) if each.size
    }
    routing = {i: each for i, each in enumerate(profile.routing or ()) if each.size > 1}
    tensors |= {f"blk.{i}.routing": quantise(each, "F16") for i, each in routing.items()}
    write_gguf(path, metadata, tensors)
