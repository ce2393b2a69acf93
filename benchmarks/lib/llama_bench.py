"""Runs llama.cpp's `llama-bench`, of a build with a GPU, on a model file with some layers on the GPU."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

PROMPT, GENERATE, REPETITIONS = 64, 32, 3


def measure(
    binary: Path, model: Path, gpu_layers: int, threads: int | None, seconds: float
) -> dict[str, float]:
    """Milliseconds of a generated token and of a prompt of :data:`PROMPT`.

    ``gpu_layers`` last layers and the head are on the GPU, none where it is 0. OSError: no such program;
    RuntimeError: it fails; subprocess.TimeoutExpired: it takes longer than that many seconds."""
    command = [
        str(binary), "-m", str(model), "-p", str(PROMPT), "-n", str(GENERATE), "-r", str(REPETITIONS),
        "-ngl", str(gpu_layers + 1 if gpu_layers else 0), "-o", "json",
    ]  # fmt: skip
    if threads:
        command += ["-t", str(threads)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=seconds
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"llama-bench ended with {done.returncode}: {last[:300]}")
    return parse(done.stdout)


def parse(text: str) -> dict[str, float]:
    """Its report in JSON. RuntimeError: it holds no speed of a prompt or of generation."""
    found: dict[str, float] = {}
    try:
        begin = re.search(r"^\[", text, re.MULTILINE)
        for test in json.loads(text[begin.start() :] if begin else text):
            speed = float(test["avg_ts"])
            if test["n_gen"]:
                found["ms"] = 1e3 / speed
            else:
                found["prompt_ms"] = 1e3 * test["n_prompt"] / speed
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RuntimeError(f"llama-bench's report is not understood: {error}") from None
    if found.keys() != {"ms", "prompt_ms"}:
        raise RuntimeError("llama-bench's report lacks a prompt or a generation")
    return found


def scaled(found: dict[str, float], factor: float) -> dict[str, Any]:
    """As rows of benchmarks/gpu/compare.py have it, of the whole model."""
    full_ms = found["ms"] * factor
    return {
        "mode": "off",
        "ms": found["ms"],
        "full_ms": full_ms,
        "full_tok_s": 1e3 / full_ms,
        "prompt_ms": {PROMPT: found["prompt_ms"] * factor},
    }
