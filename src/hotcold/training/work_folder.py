"""A folder with the results of a long run so far, so that the same command continues a killed run."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotcold.errors import UserError
from hotcold.formats.files import FileError, replacing
from hotcold.values import not_utf8, printable

_FACTS = "run.json"


@dataclass(frozen=True)
class WorkFolder:
    path: Path

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], facts: Mapping[str, str | int | float | bool]
    ) -> "WorkFolder":
        """Makes a new folder for the run that ``facts`` describe, or opens the folder of such a run.

        UserError: the folder cannot be made, has other content, or belongs to a run with other facts."""
        folder = cls(Path(path))
        shown = printable(str(folder.path), 4096)
        try:
            folder.path.mkdir(exist_ok=True)
            for left in folder.path.glob(".*.partial"):  # of a killed run
                left.unlink()
            begun = folder.path / _FACTS
            if begun.exists():
                _compare(shown, json.loads(begun.read_text(encoding="utf-8")), facts)
            elif any(folder.path.iterdir()):
                raise UserError(
                    f"{shown} has other files: give a folder that is new, empty, or of such a run"
                )
            else:
                folder.write(_FACTS, json.dumps(dict(facts), indent=1).encode())
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            wrong = f"a file {not_utf8(error)}" if isinstance(error, UnicodeDecodeError) else error
            reason = getattr(error, "strerror", None) or wrong
            raise UserError(f"{shown} cannot be used: {reason}; give another folder") from None
        return folder

    def write(self, name: str, data: bytes) -> None:
        """Writes a file in the folder, completely or not at all."""
        try:
            with replacing(self.path / name) as file:
                file.write(data)
        except FileError as error:
            raise UserError(f"{printable(str(self.path / name), 4096)}: {error}") from None

    def need(self, nbytes: int) -> None:
        """Raises UserError if the disk has less space than the run needs, minus the files of this folder."""
        held = sum(each.stat().st_size for each in self.path.rglob("*") if each.is_file())
        free = shutil.disk_usage(self.path).free
        if nbytes - held > free:
            got = f"{(nbytes - held) / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB are free"
            raise UserError(
                f"{printable(str(self.path), 4096)}: {got}: use fewer `tokens`, or free some space"
            )


def _compare(shown: str, begun: object, facts: Mapping[str, str | int | float | bool]) -> None:
    if not isinstance(begun, dict):
        raise UserError(f"{shown} has a damaged {_FACTS}: give another folder")
    for name, value in facts.items():
        if begun.get(name) != value:
            got = f"was started with {name} {printable(repr(begun.get(name)))}, not {value!r}"
            raise UserError(f"{shown} {got}: give the same value, or another folder")
