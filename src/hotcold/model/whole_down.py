"""Finds the layers that add all their neurons, although the activation gives zeros."""

from collections.abc import Iterable, Mapping

from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, is_dense


def whole_downs(
    downs: Iterable[tuple[str, str]], layout: str, tensors: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """The block type of each layer's down where it lies by output and nothing can be made of its blocks that
    lies by neuron; "" in the other layers, and where the activation gives no zeros. ``downs`` has the name
    of each layer's tensor ("" where there are no neurons) and its activation."""
    found = []
    for name, activation in downs:
        down = tensors.get(name) if activation in SPARSE_ACTIVATIONS else None
        whole = down is not None and is_dense(layout, down.type, activation)
        found.append(down.type.name if down is not None and whole else "")
    return tuple(found)
