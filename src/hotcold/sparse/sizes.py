"""What a model takes, by what is placed as one: a file's, or one of ``shapes.json``.

These have the dimensions of public configurations, and activity as arXiv 2312.12456 (tables 3 and 6,
figure 5) and 2406.05955 publish it: ``active`` is the mean share of neurons (of the routed experts) that
fire, ``skew`` the share with 80 % of all firings, ``predictors`` their part of the weights. The power law
``min(1, scale * rank ** -exponent)`` is fitted to both; ``source`` says what is assumed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, block_type
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import MAX_DECODE_ROWS, PAGE, SPARSE_ACTIVATIONS
from hotcold.model.config import Config
from hotcold.model.weights import check_tensors
from hotcold.sparse.predictor import check_predictors, find_predictors, predictor_names

Ints = npt.NDArray[np.int64]

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_bytes())

_CHUNK = 128  # prompt rows that the buffers of a step hold
_NEURONS, _PREDICTORS = r"ffn_(gate|up)\.|ffn_down(_t)?\.weight", r"predictor\.|fc[12]\."


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model. Arrays have one number per layer."""

    name: str
    fingerprint: str
    always: float  #: part of a neuron that is read whether it fires or not
    routed: float  #: part of the neurons that a router leaves
    dim: int
    attention: Ints  #: matrices, norms, and all else that is neither predictor nor neuron
    kv: Ints  #: keys and values of the whole context
    predictor: Ints
    neuron: Ints  #: one neuron's rows of gate, up and down
    neurons: Ints  #: N, of all experts together
    head: int  #: with the norm before it
    embedding: int
    tied: bool  #: head and embedding are one tensor
    buffers: int  #: of a step, on each device with a part in it
    shared: int = 1  #: neurons with down weights in one block: blocks lie along neurons in many files


def sizes_of_shape(name: str, type: BlockType, context: int, cache: str) -> Sizes:
    shape = SimpleNamespace(**SHAPES[name])
    shape.head_dim, shape.neurons = shape.dim // shape.heads, [shape.ffn * shape.experts] * shape.layers
    row = type.row_bytes(shape.dim)
    layer = {
        "attn_q.weight": 2 * (shape.heads + shape.kv_heads) * shape.head_dim * row,
        "ffn_up.weight": (2 + shape.gated) * shape.neurons[0] * row,
    }
    tensors = dict.fromkeys(("token_embd.weight", "output.weight"), shape.vocab * row)
    layer["fc1.weight"] = int(shape.predictors * (sum(layer.values()) + sum(tensors.values()) / shape.layers))
    tensors |= {f"blk.{i}.{part}": n for i in range(shape.layers) for part, n in layer.items()}
    facts = f"{name} {type.name}", f"{name} {type.name}", 0.0, shape.routed / shape.experts
    return _sizes(facts, shape, tensors, context, cache)


def sizes_of_file(file: GGUFFile, config: Config, context: int, cache: str) -> Sizes:
    """With the predictors that it has or that lie beside it; errors as in loading."""
    check_tensors(file, config, own := predictor_names(file))
    tensors = {name: info.nbytes for name, info in file.tensors.items() if name not in own}
    always, path, fingerprint = 1.0, find_predictors(file), file.fingerprint()
    if config.activation in SPARSE_ACTIVATIONS:
        always = 1 / (2 + config.gated)  # gates, or ups where there are none
        if path is not None:
            with open_gguf(path) as beside:
                check_predictors(beside, config, fingerprint)
                tensors |= {name: info.nbytes for name, info in beside.tensors.items()}
            always = 0.0
    downs = (info for name, info in file.tensors.items() if name.endswith(".ffn_down.weight"))
    blocks = [block_type(info.type).weights for info in downs if config.down_layout == "by_output"]
    sizes = _sizes((file.path.stem, fingerprint, always, 1.0), config, tensors, context, cache)
    return replace(sizes, shared=max(blocks, default=1))


def _sizes(
    facts: tuple[str, str, float, float], dims: Any, tensors: Mapping[str, int], context: int, cache: str
) -> Sizes:
    """``facts`` are the first fields, ``dims`` has a Config's dimensions, ``tensors`` are bytes by name."""
    parts, ends = {kind: np.zeros(dims.layers, np.int64) for kind in (_NEURONS, _PREDICTORS, "")}, 0
    for name, nbytes in tensors.items():
        if found := re.match(r"blk\.(\d+)\.", name):
            kind = next(kind for kind in parts if re.match(kind, name[found.end() :]))
            parts[kind][int(found[1])] += nbytes
        else:
            ends += nbytes
    embedding, tied = tensors["token_embd.weight"], "output.weight" not in tensors
    head, neurons = ends - embedding * (not tied), np.array(dims.neurons, np.int64)
    row = 2 * dims.kv_heads * BLOCK_TYPES[cache.upper()].row_bytes(dims.head_dim)
    kv = np.full(dims.layers, -(-context // PAGE) * PAGE * row)
    # As loading counts them.
    floats = 4 * dims.dim + 2 * (dims.heads + dims.kv_heads) * dims.head_dim
    buffers = 4 * ((MAX_DECODE_ROWS + _CHUNK) * floats + MAX_DECODE_ROWS * dims.vocab)
    weights = (parts[""], kv, parts[_PREDICTORS], -(-parts[_NEURONS] // neurons), neurons)
    return Sizes(*facts, dims.dim, *weights, head, embedding, tied, buffers)


def power_law(neurons: int, scale: float, exponent: float) -> npt.NDArray[np.float64]:
    """Shares of tokens ``[neurons]`` for which neurons fire, the most active first."""
    ranks = (np.arange(neurons) + 0.5) / neurons
    return np.asarray(np.minimum(1, scale * ranks**-exponent))
