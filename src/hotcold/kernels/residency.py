"""Residency of experts: which of a layer's experts, or of their rows, are in memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSlots:
    """Whole experts in memory. A step reads an expert without a slot from the file when a row chooses it."""

    slots: int  #: experts in memory at a time
    preloaded: tuple[int, ...] = ()  #: read at loading, the hottest first
    pinned: int = 0  #: number of experts, from the first of ``preloaded``, that keep their slots
    label: str = ""  #: names the layer and its file in errors


@dataclass(frozen=True)
class HotRows:
    """Rows of each expert's first neurons in memory. A step reads others from the file when it needs them."""

    neurons: tuple[int, ...]  #: number of first neurons in memory, by expert
    buffer_neurons: int  #: neurons per read, unless one expert has more
    gates: bool = False  #: whether other gate rows are read from the file too, where a mask names neurons
    label: str = ""  #: names the layer and its file in errors


Residency = ExpertSlots | HotRows
