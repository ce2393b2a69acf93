"""A folder with the results of a long run so far, so that the same command continues a killed run."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import FileError, replacing
from hotcold.values import not_utf8, printable, shown

_FACTS = "run.json"


def open_work_folder(path: str | os.PathLike[str], facts: Mapping[str, Any]) -> Path:
    """Makes a new folder for the run that ``facts`` describe, or opens the folder of such a run.

    UserError: the folder cannot be made, has other content, or belongs to a run with other facts."""
    folder, name = Path(path), printable(str(path), 4096)
    try:
        folder.mkdir(exist_ok=True)
        for left in folder.glob(".*.partial"):  # of a killed run
            left.unlink()
        begun = folder / _FACTS
        if begun.exists():
            check_identity(folder, json.loads(begun.read_text(encoding="utf-8")), facts)
        elif any(folder.iterdir()):
            raise UserError(f"{name} has other files: give a folder that is new, empty, or of such a run")
        else:
            with replacing(begun) as file:
                file.write(json.dumps(dict(facts), indent=1).encode())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError, FileError) as error:
        wrong = f"a file {not_utf8(error)}" if isinstance(error, UnicodeDecodeError) else error
        reason = getattr(error, "strerror", None) or wrong
        raise UserError(f"{name} cannot be used: {reason}; give another folder") from None
    return folder


def check_space(folder: Path, nbytes: int) -> None:
    """Raises UserError if the disk has less space than a run needs, minus the files of its folder."""
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if nbytes - held > free:
        got = f"{(nbytes - held) / 2**30:.2f} GiB are needed, and {free / 2**30:.2f} GiB are free"
        fix = "use fewer `tokens`, or free some space"
        raise UserError(f"{printable(str(folder), 4096)}: {got}: {fix}")


def check_identity(folder: Path, begun: Any, wanted: Mapping[str, Any]) -> None:
    """Raises UserError if the run in a folder has other inputs than the wanted run."""
    name = printable(str(folder), 4096)
    if not isinstance(begun, dict):
        raise UserError(f"{name} has a damaged record of its run: give another folder")
    for key, value in wanted.items():
        if begun.get(key) != value:
            got = f"holds a run with {key} {shown(begun.get(key))}, not {shown(value)}"
            raise UserError(f"{name} {got}: give the same value, or another `work`")
