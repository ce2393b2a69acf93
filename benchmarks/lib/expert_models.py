"""Writes model files with experts and random weights, for speed measurements, as synthetic.py does others.

    python benchmarks/lib/expert_models.py --shape mixtral -o mixtral.gguf                  # SiLU experts
    python benchmarks/lib/expert_models.py --shape mixtral -o sparse.gguf --active 0.1      # ReLU, sparse

Shapes are Mixtral's (8 experts of 14336 neurons, 2 chosen) and Qwen3 30B A3B's (128 of 768, 8 chosen), with
few layers and a vocabulary cut alike, so that experts, attention and head have about their share of what a
token reads. Files are stock ones, down by output, which llama.cpp loads.

The weights of a sparse file cause its activity: which neurons of an expert fire follows from a token's
features, as in synthetic.py, and so do the experts that its router chooses. With it comes a predictor beside
the file (``*.predictor.gguf``): the gates over the features alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import Tensor, block_type, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.sparse.predictor import write_sidecar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import models as synthetic
from lib.models import CONSTANT, RESERVED, Bytes, Recipe

ROUTER_STD = 0.15  #: of a router's weights over the features: logits of about 2


@dataclass(frozen=True)
class ExpertShape(synthetic.Shape):
    """``neurons`` are those of one expert."""

    architecture: str
    experts: int
    chosen: int
    head_dim: int
    qk_norm: bool


SHAPES = {
    "mixtral": ExpertShape(4096, 14336, 2, 32, 8, 8192, 2048, "llama", 8, 2, 128, qk_norm=False),
    "qwen3moe": ExpertShape(2048, 768, 4, 32, 4, 16000, 2048, "qwen3moe", 128, 8, 128, qk_norm=True),
}


class ExpertWeights(synthetic.Weights):
    """The tensors of one model; see synthetic.Weights."""

    shape: ExpertShape

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if "_exps." not in name:
            return tensor
        rows, columns = tensor.shape
        return replace(tensor, shape=(self.shape.experts, rows // self.shape.experts, columns))

    def _plan_attention(self, prefix: str) -> None:
        shape = self.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._norm(prefix + "attn_norm.weight")
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            self._matrix(f"{prefix}{name}.weight", rows, shape.dim)
        ones = quantise(np.ones(shape.head_dim, np.float32), "F32")
        for part in ("q", "k") if shape.qk_norm else ():
            self._add(f"{prefix}attn_{part}_norm.weight", 0, shape.head_dim, lambda: ones.data, ones.type)
        name = prefix + "attn_output.weight"
        self._add(name, shape.dim, q, lambda: self._output(name, q))

    def _output(self, name: str, columns: int) -> Bytes:
        rows = self._random(name, self.shape.dim, columns, synthetic.UPDATE_STD / columns**0.5)
        rows[-RESERVED:] = quantise(np.zeros((1, columns), np.float32), self.type).data
        return rows

    def _plan_ffn(self, prefix: str) -> None:
        shape = self.shape
        rows = shape.experts * shape.neurons
        self._norm(prefix + "ffn_norm.weight")
        router = block_type("F32")
        self._add(
            prefix + "ffn_gate_inp.weight", shape.experts, shape.dim, lambda: self._router(prefix), router
        )
        self._matrix(prefix + "ffn_up_exps.weight", rows, shape.dim)
        gate = prefix + "ffn_gate_exps.weight"
        if self.recipe.active is None:
            self._matrix(gate, rows, shape.dim)
        else:
            self._add(gate, rows, shape.dim, lambda: self._each(self._sparse_gate, prefix))
        down = prefix + "ffn_down_exps.weight"
        self._add(down, shape.experts * shape.dim, shape.neurons, lambda: self._each(self._down, prefix))

    def _each(self, make: Callable[[str], Bytes], prefix: str) -> Bytes:
        """Of all experts, one after another."""
        return np.concatenate([make(f"{prefix}{expert}.") for expert in range(self.shape.experts)])

    def _router(self, prefix: str) -> Bytes:
        values = np.zeros((self.shape.experts, self.shape.dim), np.float32)
        size = self.shape.experts, RESERVED - CONSTANT
        values[:, -RESERVED:-CONSTANT] = ROUTER_STD * self._rng(prefix + "router").standard_normal(size)
        return quantise(values, "F32").data


def metadata(recipe: Recipe, name: str) -> dict[str, Any]:
    shape = recipe.shape
    assert isinstance(shape, ExpertShape)
    plain = synthetic.metadata(recipe, name, None)
    keys = {key.replace("llama.", f"{shape.architecture}.", 1): value for key, value in plain.items()}
    own = {
        "expert_count": shape.experts, "expert_used_count": shape.chosen,
        "expert_feed_forward_length": shape.neurons, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.dimension_count": shape.head_dim,
    }  # fmt: skip
    keys |= {f"{shape.architecture}.{key}": np.uint32(value) for key, value in own.items()}
    return keys | {"general.architecture": shape.architecture}


def write(path: Path, recipe: Recipe) -> None:
    """The file and, of a sparse one, the predictor beside it."""
    write_gguf(path, metadata(recipe, path.stem), ExpertWeights(recipe))
    if recipe.active is None:
        return
    layers, type = [], block_type(recipe.type)
    with open_gguf(path) as file:
        first = np.zeros((RESERVED, recipe.shape.dim), np.float32)
        first[:, -RESERVED:] = np.eye(RESERVED)
        for layer in range(recipe.shape.layers):
            gate = file.load(f"blk.{layer}.ffn_gate_exps.weight").data
            own = np.ascontiguousarray(gate[:, -type.row_bytes(RESERVED) :])
            second = Tensor(type, (len(gate), RESERVED), own)
            none = np.zeros(len(gate), np.float32)
            layers.append(PredictorTensors(quantise(first, "Q8_0"), second, none, relu=False))
        facts = {"input": "normed", "pays": [True] * recipe.shape.layers}
        write_sidecar(path.with_suffix(".predictor.gguf"), file.fingerprint(), layers, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="mixtral")
    parser.add_argument("--type", default="Q4_0", help="block type of every matrix (Q4_0)")
    parser.add_argument("--active", type=float, help="mean share of a chosen expert's neurons that fire")
    parser.add_argument("--layers", type=int, help="(2 of mixtral, 4 of qwen3moe)")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    write(args.output, Recipe(shape, args.type, args.active))
    print(f"{args.output}: {args.output.stat().st_size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
