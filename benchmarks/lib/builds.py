"""Processes that answer questions while the others wait: two builds of Hotcold in turns, or another engine.

Nothing here imports Hotcold: the process of a build has that build's package on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Child:
    """A process that answers each line of JSON with one. ``first`` is what it said when it was ready.

    Raises:
        RuntimeError: it has ended.
    """

    def __init__(
        self, command: Iterable[str | Path], environment: Mapping[str, str] | None = None, stderr: Any = None
    ) -> None:
        self._command = [*map(str, command)]
        self._process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            text=True,
        )  # fmt: skip
        self.first = self._answer()

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """The end of its input ends it."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.returncode}")
        return json.loads(line)


def build(where: Path | None, script: str, *arguments: object) -> Child:
    """Runs ``script --serve ARGUMENTS`` with a build: an interpreter, or a src folder with a built package;
    None is the build of this process."""
    environment = {**os.environ, "HOTCOLD_GPU": "off"}
    if where is not None and where.is_dir():
        environment["PYTHONPATH"] = str(where.resolve())
    python = where if where is not None and not where.is_dir() else sys.executable
    return Child([python, script, "--serve", *map(str, arguments)], environment)


def serve(answer: Callable[[Any], Any], first: Any = "ready") -> None:
    """Answers questions for as long as there are some: what a :class:`Child` does."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def turns(count: int, round: int) -> list[int]:
    """The order of a round: forwards and backwards by turns."""
    return [*range(count)][:: -1 if round % 2 else 1]


def in_turns(builds: Sequence[Child], question: Any, round: int) -> list[Any]:
    """Each build's answer; the round says who is asked first."""
    answers: list[Any] = [None] * len(builds)
    for at in turns(len(builds), round):
        answers[at] = builds[at].ask(question)
    return answers
