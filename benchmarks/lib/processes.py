"""Contestants of ``compare_cpu.py --quick`` that run in processes of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.gguf import open_gguf, write_gguf
from lib.builds import Child
from lib.contestants import FILL, Plan, Run, number
from lib.long_contestants import Measured


class LlamaBench:
    """A ``llama-bench`` of llama.cpp's family: ik_llama.cpp's, one process for each sample.

    Flash attention is on; with repacking at run time where that is faster for a prompt, or for a token. A
    cache of many positions is computed by each process, so that generation after it has one sample. The
    others are medians of three, and one a round. The last layer's FFN is computed for a prompt's last token
    alone, so of models of fewer than ``LEAST_LAYERS`` prompts are not measured."""

    LEAST_LAYERS = 4

    def __init__(self, binary: Path, path: Path, threads: int, plan: Plan) -> None:
        self._command = [str(binary), "-m", str(path), "-t", str(threads), "-fa", "1", "-o", "json"]
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
            short = "decode at 0" if first == "decode" else measure
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
            what, tokens = ["-p", str(n), "-n", "0"], n
        elif n:
            what, tokens = ["-p", "0", "-n", "0", "-gp", f"{n},{steps}"], steps
        else:
            what, tokens = ["-p", "0", "-n", str(steps)], steps
        done = subprocess.run(
            [*self._command, "-rtr", repack, "-r", repeat, *what],
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{self._command[0]} ended with {done.returncode}: {last[:200]}")
        return Measured(tokens, tokens / speed_of(done.stdout))


def speed_of(text: str) -> float:
    """Tokens a second: the median of the samples in a report of one test, in JSON."""
    try:
        tests = json.loads(text[text.index("[\n") :])
        return float(np.median(tests[0]["samples_ts"]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"llama-bench's report is not understood: {error}") from None


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
    """The vocabulary in the form that OpenVINO reads; nobody uses what the tokens say."""
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
