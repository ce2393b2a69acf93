"""Reorders experts' neurons: rows of gate, up and down change places, and nothing is rounded. A neuron's rows
can also be interleaved in one tensor."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Bytes
from hotcold.formats.gguf import GGUFFile
from hotcold.formats.words import SIDE_BY_SIDE
from hotcold.model.config import Config
from hotcold.quantize.rewriting import Job, PlannedTensor, QuantizeError

Order: TypeAlias = npt.NDArray[np.int64]  #: the old place of each neuron of a layer, ``[E * N]``

PARTS = ("gate", "up", "down")  #: a neuron's matrices, in the order of their interleaved rows

_ROWS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down)_exps\.weight")
_OF_NEURONS = re.compile(r"blk\.\d+\.(ffn_\w+_exps\.(bias|scale)|ffn_gate_up_exps\..*)")


def rows_of_experts(name: str) -> int | None:
    """The layer of an experts' tensor whose rows are neurons; None for other tensors."""
    match = _ROWS.fullmatch(name)
    return int(match[1]) if match else None


def check_order(
    source: GGUFFile, config: Config, order: Mapping[int, Order], format: str, layouts: tuple[str, str]
) -> None:
    """Raises QuantizeError if this model's neurons cannot be reordered, or not in this order. ``layouts`` are
    down's layouts in the new and in the old file."""
    if config.experts is None or not config.gated:
        raise QuantizeError(
            "hot neurons can be stored first only in MoE models with gates: this model is not one"
        )
    if format != "gguf" or layouts != ("by_neuron", "by_neuron"):
        fix = "convert the model with `down=by_neuron`, and profile that file"
        raise QuantizeError(f"down is stored {layouts[1]}, and by_neuron is needed to reorder neurons: {fix}")
    if other := [name for name in source.tensors if _OF_NEURONS.fullmatch(name)]:
        raise QuantizeError(f"tensor {other[0]}: its neurons cannot be reordered")
    for layer, rows in order.items():
        one = config.neurons[layer] // config.experts.count
        by_expert = rows.reshape(config.experts.count, one)
        same = np.arange(len(rows)).reshape(by_expert.shape)
        if not np.array_equal(np.sort(by_expert, axis=1), same):
            raise ValueError(f"layer {layer}: neurons must stay within their expert")


def check_side_by_side(source: GGUFFile) -> None:
    """Raises QuantizeError if a neuron's rows cannot be interleaved in one tensor."""
    for name, info in source.tensors.items():
        layer = rows_of_experts(name)
        if layer is None:
            continue
        other = source.tensors.get(f"blk.{layer}.ffn_up_exps.weight")
        if other is None or other.type is not info.type:
            raise QuantizeError(
                f"tensor {name} is {info.type.name}: the type of up is needed, to store "
                "the rows of a neuron together"
            )


def side_by_side(source: GGUFFile, layer: int, order: Order) -> tuple[str, PlannedTensor]:
    """The tensor with the interleaved rows of a layer's gate, up and down, after its name."""
    parts = [reordered(source, f"blk.{layer}.ffn_{part}_exps.weight", order) for part in PARTS]
    count, neurons, dim = parts[0].shape

    def job(jobs: tuple[Job, ...]) -> Bytes:
        rows: Any = np.stack([make() for make in jobs], axis=1)
        return np.ascontiguousarray(rows.reshape(3 * neurons, -1))

    def jobs() -> Iterator[Job]:
        for three in zip(*(part.jobs() for part in parts), strict=True):
            yield partial(job, three)

    whole = PlannedTensor(parts[0].type, (count, 3 * neurons, dim), jobs)
    return f"blk.{layer}.{SIDE_BY_SIDE}.weight", whole


def reordered(source: GGUFFile, name: str, order: Order) -> PlannedTensor:
    """A tensor with the rows of each expert reordered."""
    info = source.tensors[name]
    count = info.shape[0]
    neurons = len(order) // count

    def job(expert: int) -> Bytes:
        first = expert * neurons
        rows: Any = source.read_rows(name, first, first + neurons)
        return np.ascontiguousarray(rows[order[first : first + neurons] - first])

    def jobs() -> Iterator[Job]:
        for expert in range(count):
            yield partial(job, expert)

    return PlannedTensor(info.type, info.shape, jobs)
