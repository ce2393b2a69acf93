"""The state of a training run on disk: written completely or not at all, and valid only for this run."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import FileError, replacing
from hotcold.training.libraries import torch
from hotcold.training.work_folder import check_identity
from hotcold.values import printable

_STATE = "state.pt"


class RunState:
    """A folder with the last state of a run; ``identity`` has all inputs that decide its result."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self._identity = folder, dict(identity)

    def load(self) -> dict[str, Any] | None:
        """The last state, if there is one. UserError: it is another run's, or damaged."""
        path = self.folder / _STATE
        for partial in self.folder.glob(f".{_STATE}.*.partial"):  # of a killed run
            with contextlib.suppress(OSError):
                partial.unlink()
        if not path.exists():
            return None
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            identity = json.loads(saved.pop("identity"))
        except Exception:
            raise UserError(f"{path} is damaged, or not the state of a run: give another `work`") from None
        check_identity(self.folder, identity, json.loads(json.dumps(self._identity)))
        return dict(saved)

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes a state. UserError: it cannot be written, and the last state is still there."""
        path = self.folder / _STATE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                torch.save({**state, "identity": json.dumps(self._identity)}, file)
        except (OSError, RuntimeError, FileError) as error:  # torch raises RuntimeError for a full disk
            said = printable(" ".join(str(error).split())[:120])
            raise UserError(f"{path} cannot be saved ({said}): the state before it is kept") from None

    def exists(self) -> bool:
        return (self.folder / _STATE).exists()

    def beside(self, name: str) -> "RunState":
        """The state of another run with the same inputs, in a folder inside this one."""
        return RunState(self.folder / name, self._identity)
