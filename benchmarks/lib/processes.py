"""Contestants that run in processes of their own."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.gguf import open_gguf, write_gguf
from lib.builds import Child
from lib.contestants import DECODE, FILL, Measured, Plan, Run, number


def run_llama_bench(command: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Its tests, each with ``tok_s``, the median of the samples. OSError: no such program; RuntimeError: it
    fails; subprocess.TimeoutExpired: it takes longer than that."""
    report = run([command[0], "-o", "json", *command[1:]], seconds).stdout
    try:
        begin = re.search(r"^\[", report, re.MULTILINE)
        tests: list[dict[str, Any]] = json.loads(report[begin.start() :] if begin else report)
        return [test | {"tok_s": statistics.median(test["samples_ts"])} for test in tests]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"llama-bench's report is not understood: {error}") from None


def run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A program of another project, which has to succeed: else a RuntimeError with its last words."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL,
        timeout=seconds,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {last[:300]}")
    return done


class LlamaBench:
    """A ``llama-bench`` of llama.cpp's family: ik_llama.cpp's, one process for each sample.

    Flash attention is on; with repacking at run time where that is faster for a prompt, or for a token. A
    cache of many positions is computed by each process, so that generation after it has one sample. The
    others are medians of three, and one a round. The last layer's FFN is computed for a prompt's last token
    alone, so of models of fewer than ``LEAST_LAYERS`` prompts are not measured."""

    LEAST_LAYERS = 4

    def __init__(self, binary: Path, path: Path, threads: int, plan: Plan) -> None:
        self._command = [str(binary), "-m", str(path), "-t", str(threads), "-fa", "1"]
        self.plan = plan
        self.settings: dict[str, str] = {}
        self._deep = False  #: whether it has been measured after many positions

    def can(self, measure: str, turn: int) -> bool:
        if measure.startswith("decode") and number(measure):
            return not self._deep
        if measure.startswith("prompt") and self.plan.layers < self.LEAST_LAYERS:
            return False
        return turn == 0 and not measure.endswith("sequences")

    def warm(self, measure: str) -> None:
        """Tries repacking once for all prompts, and once for all generation."""
        first = measure.split()[0]
        if first not in self.settings:
            short = DECODE if first == "decode" else measure
            times = {repack: self._run(short, repack) for repack in "01"}
            self.settings[first] = min(times, key=lambda repack: times[repack].seconds)

    def prepare(self, measure: str, seed: int) -> Run:
        first = measure.split()[0]
        if first == "decode" and number(measure):
            self._deep = True
        return lambda: self._run(measure, self.settings[first])

    def _run(self, measure: str, repack: str) -> Measured:
        n, steps = number(measure), self.plan.generate
        repeat = "1" if n > FILL else "3"
        if measure.startswith("prompt"):
            arguments, tokens = ["-p", str(n), "-n", "0"], n
        elif n:
            arguments, tokens = ["-p", "0", "-n", "0", "-gp", f"{n},{steps}"], steps
        else:
            arguments, tokens = ["-p", "0", "-n", str(steps)], steps
        (test,) = run_llama_bench([*self._command, "-rtr", repack, "-r", repeat, *arguments], 600)
        return Measured(tokens, tokens / test["tok_s"])


class PowerInfer:
    """PowerInfer's ``main`` on a PWRI file, loaded anew for each sample.

    Its own report is taken: *eval time* is the sum over ``llama_decode`` calls of one token, without sampling
    and printing. The prompt is short, as the others'. Its sparse FFN computes F16 and Q4_0 alone.
    """

    PROMPT = " ".join("etaoinshrdlcumwf")
    PATTERN = re.compile(r" eval time =\s*([\d.]+) ms /\s*(\d+) runs")

    def __init__(self, binary: Path, path: Path, threads: int, plan: Plan) -> None:
        self._command = [
            str(binary), "-m", str(path), "-t", str(threads), "-n", str(plan.generate + 1), "-c", "512",
            "-b", "512", "-p", self.PROMPT, "--ignore-eos", "--temp", "0.8", "--top-k", "40", "--log-disable",
        ]  # fmt: skip

    def can(self, measure: str, turn: int) -> bool:
        return measure == DECODE and turn == 0

    def warm(self, measure: str) -> None:
        """Each sample is a process: nothing stays warm."""

    def prepare(self, measure: str, seed: int) -> Run:
        return lambda: self._run(seed)

    def _run(self, seed: int) -> Measured:
        report = run([*self._command, "-s", str(seed)], 600).stderr
        match = self.PATTERN.search(report)
        if match is None:
            raise RuntimeError(f"PowerInfer's report is not understood: {report[-200:]}")
        return Measured(int(match[2]), float(match[1]) / 1000)


class OpenVINO:
    """OpenVINO GenAI, which reads GGUF files; several sequences it would run by another way than one.

    Raises:
        RuntimeError: it does not start on this file.
    """

    def __init__(self, python: Path, path: Path, threads: int, plan: Plan) -> None:
        self.plan = plan
        self._copy = path.with_suffix(".openvino.gguf")  # it knows a GGUF file by its name alone
        with open_gguf(path) as file:
            self._vocab = file.tensors["token_embd.weight"].shape[0]
            tensors = {name: file.load(name) for name in file.tensors}
            write_gguf(self._copy, file.metadata | byte_level(file.metadata), tensors)
        script = Path(__file__).with_name("openvino_process.py")
        self._deep = False
        try:
            self._child = Child([python, script, self._copy, threads], stderr=subprocess.DEVNULL)
        except RuntimeError:
            self._copy.unlink()
            raise
        self.settings = {"version": str(self._child.first)}

    def can(self, measure: str, turn: int) -> bool:
        if measure.startswith("decode") and number(measure):
            return not self._deep  # it computes the positions before
        return not measure.endswith("sequences")

    def warm(self, measure: str) -> None:
        if number(measure) <= FILL:
            self.prepare(measure, 0)()

    def prepare(self, measure: str, seed: int) -> Run:
        n, decode = number(measure), measure.startswith("decode")
        self._deep |= decode and n > 0
        steps = self.plan.generate if decode else 0
        prompt = (n or self.plan.parallel_prompt) if decode else n
        asked = {"prompt": prompt, "generate": steps, "vocab": self._vocab, "seed": seed}
        return lambda: Measured(steps or prompt, float(self._child.ask(asked)))

    def close(self) -> None:
        self._child.close()
        self._copy.unlink()


def byte_level(metadata: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary in the form that OpenVINO reads; the texts of tokens are not used."""
    tokens = [token.replace("\u2581", "\u0120") for token in metadata["tokenizer.ggml.tokens"]]
    return {
        "general.file_type": np.uint32(2),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["e t", "t a"],
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(tokens) - 3), np.int32),
        "tokenizer.chat_template": "{{ messages }}",
    }
