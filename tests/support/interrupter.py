"""KeyboardInterrupt at one instruction of the package."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import hotcold

PACKAGE = str(Path(hotcold.__file__).parent)

Where: TypeAlias = tuple[str, int]  #: a function of the package, and an instruction of it


class Interrupter:
    """Raises KeyboardInterrupt once, when an instruction is about to run for the ``turn``-th time; counts how
    often each has run."""

    def __init__(self, where: Where | None = None, turn: int = 0) -> None:
        self.where, self.turn = where, turn
        self.passed: Counter[Where] = Counter()
        self.came = False

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            where = frame.f_code.co_qualname, frame.f_lasti
            self.passed[where] += 1
            if where == self.where and self.passed[where] == self.turn:
                self.came = True
                raise KeyboardInterrupt
        return self._trace
