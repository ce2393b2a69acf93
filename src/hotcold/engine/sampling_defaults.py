"""How tokens are chosen where nobody says: as the model's file recommends (``general.sampling.*``), else as
:class:`SamplingParams` has it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotcold.engine.sampler import SamplingParams
from hotcold.errors import UserError
from hotcold.formats.files import shown

_PREFIX = "general.sampling."
#: llama.cpp's names of what a file may recommend, and ours.
_OF_FILES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}


def sampling_of_file(metadata: Mapping[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    """What a file recommends, and a note on each recommendation that is not followed."""
    found, notes = SamplingParams(), []
    for key, value in metadata.items():
        if not key.startswith(_PREFIX):
            continue
        name = _OF_FILES.get(key.removeprefix(_PREFIX))
        if name is None:
            notes.append(f"the file recommends {key} {shown(value, 40)}, which there is not here")
            continue
        try:
            found = replace(found, **{name: value})
        except UserError as error:
            notes.append(f"{key} of the file is not followed: {error}")
    return found, tuple(notes)
