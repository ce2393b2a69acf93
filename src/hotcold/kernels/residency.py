"""States how much of a layer of experts is in memory, where the model's file keeps the others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSlots:
    """Whole experts in memory. A step reads an expert without a slot from the file when a row chooses it."""

    slots: int  #: experts in memory at a time
    preloaded: tuple[int, ...] = ()  #: read at loading, the hottest first
    pinned: int = 0  #: the first of ``preloaded``, which keep their slots
    label: str = ""  #: names the layer and its file in errors


@dataclass(frozen=True)
class HotRows:
    """Rows of each expert's first neurons in memory. A step reads the others' rows of up and down from the
    file when it needs them."""

    neurons: tuple[int, ...]  #: by expert, how many of its first neurons are in memory
    buffer_neurons: int  #: neurons that are read at a time, unless one expert has more
    gates: bool = False  #: the others' rows of gate are read as well, where a mask names neurons
    label: str = ""  #: names the layer and its file in errors


Residency = ExpertSlots | HotRows
