"""Describes a tensor to write to a GGUF file, and its source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from hotcold.convert.checkpoint import Checkpoint, Rearrange
from hotcold.convert.settings import ConvertError
from hotcold.convert.tensor_files import Array
from hotcold.formats.blocks import Tensor


@dataclass(frozen=True)
class Source:
    """A GGUF tensor, its shape in NumPy order, and the checkpoint's names for it."""

    name: str
    shape: tuple[int, ...]
    origins: tuple[str, ...]
    #: reads as :meth:`Checkpoint.load`, in GGUF's order, or gives finished blocks, or the parts of a stack
    load: Callable[[], Array | Tensor | Iterator[Array]] = field(compare=False)
    packed: str | None = None  #: the block type, if ``load`` gives finished blocks

    @property
    def origin(self) -> str:
        return self.origins[0]


def loaded(
    checkpoint: Checkpoint,
    target: str,
    origins: Sequence[str],
    shape: tuple[int, ...],
    rearrange: Rearrange = lambda values: values,
    result: tuple[int, ...] | None = None,
) -> Source:
    """A source of one tensor of this shape, or of several, stacked; ``result`` is the shape in GGUF's
    order."""
    for name in origins:
        check_shape(checkpoint, name, shape)
    result = result or shape
    if len(origins) == 1:
        return Source(target, result, tuple(origins), partial(checkpoint.load, origins[0], rearrange))

    def load() -> Iterator[Array]:
        for name in origins:
            yield checkpoint.load(name, rearrange)

    return Source(target, (len(origins), *result), tuple(origins), load)


def check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    if name not in checkpoint.files:
        raise ConvertError(f"{checkpoint.folder} has no tensor {name!r}: the checkpoint is not complete")
    if (shape := checkpoint.shape(name)) != expected:
        seen = f"tensor {name!r} has shape {list(shape)}: config.json implies {list(expected)}"
        raise ConvertError(f"{checkpoint.folder}: {seen}")
