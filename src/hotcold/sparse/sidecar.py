"""Checks files with numbers for the neurons of one model: profiles and placements."""

from typing import Any

import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile
from hotcold.values import shown


class SidecarError(UserError):
    """Raised for a profile or placement that is another model's, or damaged."""


def check_model(file: GGUFFile, key: str, fingerprint: str) -> None:
    """Raises SidecarError unless ``key`` holds the model's fingerprint."""
    stored = file.metadata.get(key)
    if not file.says(key, fingerprint):
        problem = f"has no {key}" if stored is None else f"belongs to the model {shown(stored)}"
        raise SidecarError(f"{problem}: a file for this model ({fingerprint!r}) is needed")


def read_numbers(file: GGUFFile, name: str, n: int, most: int = 1) -> npt.NDArray[Any]:
    """A tensor ``[n]`` of numbers from 0 to ``most``. SidecarError: it is missing or has other numbers."""
    if name not in file.tensors:
        raise SidecarError(f"tensor {name} is missing: every layer of the model needs one")
    info = file.tensors[name]
    if info.shape != (n,):
        raise SidecarError(f"tensor {name} has shape {info.shape}: ({n},) is needed")
    floats = info.type.supported
    values: npt.NDArray[Any] = file.load(name).dequantise() if floats else file.load_integers(name)
    wrong = values[~((values >= 0) & (values <= most))]
    if len(wrong):
        raise SidecarError(f"tensor {name} holds {wrong[0]}: numbers from 0 to {most} are needed")
    return values
