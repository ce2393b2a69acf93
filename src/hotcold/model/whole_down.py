"""Finds the layers that add all their neurons, although the activation gives zeros."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import is_dense

if TYPE_CHECKING:
    from hotcold.model.config import Config


def whole_downs(config: "Config", tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """The block type of each layer's down where it lies by output and nothing can be made of its blocks that
    lies by neuron; "" in the other layers, and where the activation gives no zeros."""
    found = []
    for i, skips in enumerate(config.skips):
        name = "ffn_down_exps" if config.experts_of(i) else config.family.ffn_names[1]
        down = tensors.get(f"blk.{i}.{name}.weight") if config.neurons[i] and skips else None
        whole = down is not None and is_dense(config.down_layout, down.type, config.activation_of(i))
        found.append(down.type.name if down is not None and whole else "")
    return tuple(found)
