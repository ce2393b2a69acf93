"""Layers that add all their neurons although the activation gives zeros."""

from collections.abc import Iterable, Mapping

from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, is_dense


def whole_downs(
    downs: Iterable[tuple[str, str]], layout: str, tensors: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """Returns the block type of each layer's down that is by output and has neither rows by neuron nor
    panels. The other layers have "", also without zeros in the activation. ``downs`` has each layer's tensor
    name ("" without neurons) and activation."""
    types = []
    for name, activation in downs:
        down = tensors.get(name) if activation in SPARSE_ACTIVATIONS else None
        whole = down is not None and is_dense(layout, down.type, activation)
        types.append(down.type.name if down is not None and whole else "")
    return tuple(types)
