"""Split GGUF files (``NAME-00001-of-00003.gguf``, ...): finds and checks the parts of one model.

Each part is a GGUF file with its own tensors. The first also has the model's metadata; the other parts only
state their number. ``llama-gguf-split`` makes them, and hubs store large models in this form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.formats.gguf_values import MAX_TENSORS, GGUFError
from hotcold.values import shown

#: The most parts of a model: each is kept open.
MAX_PARTS = 512

_NAME = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Split:
    """The split as a part's header states it."""

    part: int  #: number of the part, from 0
    parts: int
    tensors: int  #: number of tensors in all parts

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Split | None":
        """The split that ``metadata`` states; None for a model in one file. ``GGUFError``: impossible
        numbers."""
        parts = _number(metadata, "split.count", 0, MAX_PARTS)
        if parts <= 1:
            return None
        part = _number(metadata, "split.no", None, parts - 1)
        return cls(part, parts, _number(metadata, "split.tensors.count", None, MAX_TENSORS))


def _number(metadata: Mapping[str, Any], key: str, absent: int | None, most: int) -> int:
    value = metadata.get(key, absent)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        got = "is missing" if value is None else f"is {shown(value)}"
        raise GGUFError(f"{key} {got}: 0 to {most} is needed in a file of a split model")
    return value


def part_name(name: str) -> tuple[str, int, int] | None:
    """``("M", 0, 3)`` for ``M-00001-of-00003.gguf``; None for a name of another form."""
    match = _NAME.fullmatch(name)
    return (match["stem"], int(match["part"]) - 1, int(match["parts"])) if match else None


def part_names(name: str) -> list[str]:
    """The names of all parts, in order, from the name of one; for any other name, only that name."""
    numbered = part_name(name)
    if numbered is None:
        return [name]
    stem, part, parts = numbered
    if not 0 <= part < parts <= MAX_PARTS:
        said = f"part {part + 1} of {parts}: 1 to {MAX_PARTS} parts are allowed"
        raise GGUFError(f"the name of '{shown(name, 80)}' says {said}")
    return [f"{stem}-{number + 1:05}-of-{parts:05}.gguf" for number in range(parts)]


def other_parts(path: Path, split: Split) -> list[Path]:
    """Paths of the parts after the first, in the same folder. ``GGUFError``, without the path: this is not
    the first part, its name does not agree with its header, or parts are missing, which the message names."""
    numbered = part_name(path.name)
    which = f"part {split.part + 1} of {split.parts} of a split model"
    if numbered is None or numbered[1:] != (split.part, split.parts):
        needed = f"NAME-{split.part + 1:05}-of-{split.parts:05}.gguf"
        raise GGUFError(f"{which}, whose files are found by their names: rename this file to {needed}")
    names = part_names(path.name)
    if split.part:
        raise GGUFError(f"{which}: give the first one, {shown(names[0], 120)}")
    others = [path.with_name(name) for name in names[1:]]
    missing = [other.name for other in others if not other.exists()]
    if missing:
        further = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GGUFError(
            f"{which}, but {shown(missing[0], 120)}{further} is not in its folder: download all parts"
        )
    return others


def check_part(split: Split | None, first: Split, number: int) -> None:
    """Raises ``GGUFError`` unless the file is part ``number`` of the model that ``first`` begins."""
    if split is None:
        raise GGUFError(f"is not part of a split model: part {number + 1} of {first.parts} is needed")
    if (split.part, split.parts, split.tensors) != (number, first.parts, first.tensors):
        got = f"part {split.part + 1} of {split.parts} of a model of {split.tensors} tensors"
        needed = f"part {number + 1} of {first.parts} of a model of {first.tensors}"
        raise GGUFError(f"says that it is {got}: {needed} is needed; download it again")
