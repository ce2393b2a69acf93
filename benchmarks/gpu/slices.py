"""Files of large models' shapes, made in seconds: a slice of the layers, random blocks that repeat.

A slice has some of a model's layers and the same share of its vocabulary, hence this share of all bytes: what
a token takes of it, times ``layers / taken``, is what the whole model would take. The weights are those of
benchmarks/lib/models.py in PowerInfer's layout with predictors, except for two things that make them fast:
matrices of a layer repeat some random rows (copies in memory, so that reading them costs the same), and the
share of tokens for which a neuron is active is set by the quantile of a normal distribution, not counted.
These shares are the profile, which is written beside the file: placements are judged, not profiling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import block_type
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.placement.profiles import Profile, write_profile
from hotcold.placement.sizes import SHAPES, power_law
from lib.models import FEATURE, Bytes, Floats, Recipe, Shape, Weights, metadata, random_rows

POOL_ROWS = 1024  #: different random rows of a layer's matrix
#: A neuron that is always or never active has no quantile; no neuron of a real model is.
LEAST_SHARE, MOST_SHARE = 1e-4, 0.9995
LEAST_VOCAB = 600
PREDICTOR_TYPE = "Q8_0"  #: of rank RESERVED; as fit-predictor stores them


@dataclass(frozen=True)
class Model:
    """A model's dimensions, and after which of SHAPES its neurons are active."""

    name: str
    layers: int
    dim: int
    neurons: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool = True
    law: str = "mistral-7b"  #: 10 % of neurons are active, 26 % of them have 80 % of all activations


@dataclass(frozen=True)
class Slice:
    """Some layers of a model, with matrices of one block type."""

    model: Model
    taken: int
    type: str

    @property
    def factor(self) -> float:
        """By which times of the slice are multiplied."""
        return self.model.layers / self.taken

    @property
    def vocab(self) -> int:
        return max(LEAST_VOCAB, round(self.model.vocab / self.factor))

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's attention and FFN matrices."""
        model = self.model
        kv = model.kv_heads * (model.dim // model.heads)
        rows = 2 * model.dim + 2 * kv + (2 + model.gated) * model.neurons
        return rows * block_type(self.type).row_bytes(model.dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a dense token reads, without predictors."""
        return self.taken * self.layer_bytes + self.vocab * block_type(self.type).row_bytes(self.model.dim)

    def recipe(self, context: int, layout: str = "pwri") -> Recipe:
        model = self.model
        sizes = model.dim, model.neurons, self.taken, model.heads, model.kv_heads, self.vocab, context
        active = None if layout == "by_output" else SHAPES[model.law].active
        return Recipe(Shape(*sizes), self.type, active, layout, PREDICTOR_TYPE, gated=model.gated)


class SliceWeights(Weights):
    """Tensors of a slice; ``firing`` has of each layer that was made the share of tokens of each neuron."""

    def __init__(self, recipe: Recipe, law: str) -> None:
        self.law = law
        self.firing: list[npt.NDArray[np.float64]] = []
        self._pools: dict[tuple[int, float], Bytes] = {}
        super().__init__(recipe)

    def _random(self, name: str, rows: int, columns: int, std: float) -> Bytes:
        if not name.startswith("blk."):
            return super()._random(name, rows, columns, std)
        key = columns, std
        if key not in self._pools:
            self._pools[key] = random_rows(self._rng(f"pool {columns}"), self.type, POOL_ROWS, columns, std)
        out = np.empty((rows, self.type.row_bytes(columns)), np.uint8)
        for start in range(0, rows, POOL_ROWS):
            out[start : start + POOL_ROWS] = self._pools[key][: rows - start]
        return out

    def _biases(self, rng: np.random.Generator, gates: Floats) -> npt.NDArray[np.float64]:
        """Gates are sums of many features of either sign."""
        law = SHAPES[self.law]
        shares = rng.permutation(power_law(len(gates), law.scale, law.exponent))
        self.firing.append(np.clip(shares, LEAST_SHARE, MOST_SHARE))
        quantiles = np.array([NormalDist().inv_cdf(share) for share in self.firing[-1]])
        deviations: npt.NDArray[np.float64] = FEATURE * np.sqrt((gates**2).sum(axis=1))
        return quantiles * deviations


def write(path: Path, part: Slice, context: int) -> Profile:
    """Writes ``path``, of magic PWRI, and its profile beside it, which is returned."""
    recipe = part.recipe(context)
    weights = SliceWeights(recipe, part.model.law)
    write_gguf(path, metadata(recipe, path.stem), weights, magic="PWRI")
    profile = Profile(weights.firing, "the shares that the weights were made for")
    with open_gguf(path) as file:
        fingerprint = file.fingerprint()
    write_profile(path.with_suffix(".profile.gguf"), profile, {"model_fingerprint": fingerprint})
    return profile


def write_dense(path: Path, part: Slice, context: int) -> None:
    """A stock SiLU file of the same shape, for llama.cpp. ValueError: it has no such model without a gate."""
    if not part.model.gated:
        raise ValueError(f"{part.model.name} has no gate: llama.cpp's llama model needs one")
    recipe = part.recipe(context, "by_output")
    write_gguf(path, metadata(recipe, path.stem), SliceWeights(recipe, part.model.law))
