"""Checks shaders by spirv-val with the constants of pipelines: by itself it checks defaults alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

_DECORATE, _SPEC_ID = 71, 1
_TRUE, _FALSE = 48, 49  # OpSpecConstantTrue, OpSpecConstantFalse
_TARGET = "vulkan1.3"


def _instructions(module: bytes) -> Iterator[tuple[int, list[int]]]:
    words = np.frombuffer(module, "<u4").tolist()
    at = 5
    while at < len(words):
        length = words[at] >> 16
        yield words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length


def _truths(module: bytes) -> set[int]:
    """The numbers of constants that are true or false."""
    found = [*_instructions(module)]
    results = {operands[1] for op, operands in found if op in (_TRUE, _FALSE)}
    return {
        operands[2]
        for op, operands in found
        if op == _DECORATE and operands[1] == _SPEC_ID and operands[0] in results
    }


def problem(shader: Path, constants: Sequence[int], folder: Path) -> str:
    """Returns the error of a module with these values of specialisation constants 0, 1, ...; "" if none."""
    truths = _truths(shader.read_bytes())
    pairs = [
        f"{i}:{('false', 'true')[bool(value)] if i in truths else value & 0xFFFFFFFF}"
        for i, value in enumerate(constants)
    ]
    frozen = folder / "frozen.spv"
    given = ["--set-spec-const-default-value", " ".join(pairs)] if pairs else []
    steps = (
        [
            "spirv-opt",
            f"--target-env={_TARGET}",
            *given,
            "--freeze-spec-const",
            "--fold-spec-const-op-composite",
        ]
        + [str(shader), "-o", str(frozen)],
        ["spirv-val", "--target-env", _TARGET, str(frozen)],
    )
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{shader.stem} {list(constants)}: {command[0]}: {(done.stdout + done.stderr).strip()}"
    return ""
