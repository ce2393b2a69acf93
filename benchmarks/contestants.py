"""The programs whose speed is compared, each behind the same few lines: ours, llama.cpp, PowerInfer.

A contestant's ``phases`` are one pass over what it can do. Each is the name of a measure and what is to be
timed; what lies between (filling caches for eight sequences, say) is not. All get random tokens as prompts,
because in the synthetic models a token's features decide which neurons fire.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llama_library import open_llama_cpp

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.counters import Figures
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

MEASURES = ("prompt", "generation", "parallel")
FIRST_TOKEN = 259  #: those before are control tokens and bytes


@dataclass(frozen=True)
class Lengths:
    """Tokens of one pass: a prompt and its continuation; several sequences and the continuation of each."""

    prompt: int = 128
    generate: int = 40
    sequences: int = 8
    parallel_prompt: int = 16  #: of each sequence; together one step of the engine
    parallel_generate: int = 12
    pieces: int = 1  #: of equal length, in which the continuation of the one is timed

    @property
    def piece(self) -> int:
        return self.generate // self.pieces

    @property
    def context(self) -> int:
        """Positions that one sequence needs, and as many as the prompts of all together: a step has no more
        rows than that."""
        longest = max(self.prompt + self.generate, self.parallel_prompt + self.parallel_generate)
        return max(longest, self.sequences * self.parallel_prompt) + 8


@dataclass(frozen=True)
class Measured:
    """``bytes`` of weights and KV cache that had to be read, None where that is not known."""

    tokens: int
    seconds: float
    bytes: float | None = None
    active_share: float | None = None

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def gb_s(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.seconds / 1e9


Phase = tuple[str, Callable[[], Measured]]


class Contestant(Protocol):
    def phases(self, seed: int) -> Iterator[Phase]:
        """One pass; the same ``seed`` gives all contestants the same prompts. Others may run in between."""
        ...


def random_tokens(length: int, vocab: int, seed: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(FIRST_TOKEN, vocab, length - 1).tolist()]


def read(engine: Engine, requests: Sequence[Request]) -> Measured:
    """Until each has its first token."""
    start = time.perf_counter()
    while not all(request.output for request in requests):
        engine.step()
    return Measured(sum(len(request.job.prompt) for request in requests), time.perf_counter() - start)


def generate(engine: Engine, requests: Sequence[Request], each: int) -> Measured:
    """So many more tokens of each."""
    had = sum(len(request.output) for request in requests)
    session = engine.session
    before, start = session.counters.copy(), time.perf_counter()
    for _ in range(each):
        engine.step()
    seconds = time.perf_counter() - start
    figures = Figures.of(session.counters.since(before), session.footprint)
    tokens = sum(len(request.output) for request in requests) - had
    assert tokens == each * len(requests)
    assert figures.bytes_per_token is not None
    return Measured(tokens, seconds, figures.bytes_per_token * tokens, figures.active_share)


class Ours:
    """This engine, by the clock of whoever calls ``step``: with scheduling and sampling."""

    def __init__(self, session: Session, lengths: Lengths) -> None:
        self.session, self.lengths = session, lengths
        self._engine = Engine(session)

    def phases(self, seed: int) -> Iterator[Phase]:
        lengths = self.lengths
        # The first token comes with the prompt, so one more makes as many steps.
        request = self._add(lengths.prompt, lengths.generate + 1, seed)
        yield "prompt", lambda: read(self._engine, [request])
        for _ in range(lengths.pieces):
            yield "generation", lambda: generate(self._engine, [request], lengths.piece)
        if lengths.sequences > 1:
            requests = [
                self._add(lengths.parallel_prompt, lengths.parallel_generate + 1, 1000 * (seed + 1) + i)
                for i in range(lengths.sequences)
            ]
            read(self._engine, requests)
            yield "parallel", lambda: generate(self._engine, requests, lengths.parallel_generate)

    def _add(self, prompt: int, generate: int, seed: int) -> Request:
        tokens = random_tokens(prompt, self.session.model.config.vocab, seed)
        request = Request(Job(tokens, SamplingParams(seed=seed), max_tokens=generate, ignore_eos=True))
        self._engine.add(request)
        return request


class LlamaCpp:
    """llama.cpp without anything around it: ``llama_decode`` on given tokens, no sampling, no text.

    One sequence and several have a llama.cpp context each. Its KV cache is F16 and a prompt is one batch.
    Flash attention is tried on and off; the faster is kept. Rows whose logits nobody asks for do not pass its
    last layer's FFN, which of a model of few layers would be much: with ``all_logits`` each row of a prompt
    is asked for, so that both engines compute the same layers.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """

    def __init__(self, path: Path, threads: int, lengths: Lengths, *, all_logits: bool = False) -> None:
        llama_cpp = self._lib = open_llama_cpp()
        self.lengths, self.threads, self.all_logits = lengths, threads, all_logits
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        with open_gguf(path) as file:
            self._vocab = file.tensors["token_embd.weight"].shape[0]
            # A head of its own is read in each step; else the embedding is the head.
            unread = {"token_embd.weight"} if "output.weight" in file.tensors else set()
            self._step_bytes = sum(info.nbytes for name, info in file.tensors.items() if name not in unread)
            keys = file.metadata
            arch = keys["general.architecture"]
            head_dim = keys.get(f"{arch}.attention.key_length")
            if head_dim is None:
                head_dim = keys[f"{arch}.embedding_length"] // keys[f"{arch}.attention.head_count"]
            kv_dim = keys[f"{arch}.attention.head_count_kv"] * head_dim
            self._position_bytes = int(keys[f"{arch}.block_count"]) * 2 * 2 * int(kv_dim)
        self._contexts: dict[str, Any] = {}
        self.flash_attention: dict[str, bool] = {}
        self._choose()

    def phases(self, seed: int) -> Iterator[Phase]:
        lengths = self.lengths
        self._clear("single")
        prompt = [random_tokens(lengths.prompt, self._vocab, seed)]
        yield "prompt", lambda: self._read("single", prompt[0])
        for at in range(lengths.prompt, lengths.prompt + lengths.generate, lengths.piece):
            yield "generation", lambda at=at: self._generate("single", at, lengths.piece, seed + at)
        if lengths.sequences > 1:
            self._clear("several")
            self._decode(
                "several",
                [
                    random_tokens(lengths.parallel_prompt, self._vocab, 1000 * (seed + 1) + i)
                    for i in range(lengths.sequences)
                ],
            )
            at, each = lengths.parallel_prompt, lengths.parallel_generate
            yield "parallel", lambda: self._generate("several", at, each, seed)

    def close(self) -> None:
        for context in self._contexts.values():
            self._lib.llama_free(context)
        self._lib.llama_model_free(self._model)
        self._contexts = {}

    def _choose(self) -> None:
        """Keeps of each kind of context the one, with flash attention or without, that is faster."""
        kinds = ("single", "several") if self.lengths.sequences > 1 else ("single",)
        for kind in kinds:
            made = {flash: self._new_context(kind, flash) for flash in (False, True)}
            times: dict[bool, list[float]] = {False: [], True: []}
            for attempt in range(4):
                for flash, context in made.items():
                    self._contexts[kind] = context
                    self._clear(kind)
                    count = 1 if kind == "single" else self.lengths.sequences
                    length = self.lengths.prompt if kind == "single" else self.lengths.parallel_prompt
                    prompts = [random_tokens(length, self._vocab, i) for i in range(count)]
                    seconds = self._decode(kind, prompts).seconds
                    seconds += self._generate(kind, length, self.lengths.parallel_generate, 0).seconds
                    if attempt:  # the first warms memory and threads
                        times[flash].append(seconds)
            faster = min(times, key=lambda flash: statistics.median(times[flash]))
            self._lib.llama_free(made[not faster])
            self._contexts[kind], self.flash_attention[kind] = made[faster], faster

    def _new_context(self, kind: str, flash: bool) -> Any:
        params, settings = self._lib.llama_context_default_params(), self._settings(kind, flash)
        for name, value in settings.items():
            setattr(params, name, value)
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {settings['n_ctx']} positions")
        return context

    def _settings(self, kind: str, flash: bool) -> dict[str, Any]:
        lengths = self.lengths
        sequences = 1 if kind == "single" else lengths.sequences
        return {
            "n_ctx": sequences * -(-lengths.context // 256) * 256,
            "n_seq_max": sequences,
            "n_batch": max(512, lengths.prompt),
            "n_ubatch": max(512, lengths.prompt),
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "flash_attn_type": int(flash),
            "type_k": self._lib.GGML_TYPE_F16,
            "type_v": self._lib.GGML_TYPE_F16,
        }

    def _clear(self, kind: str) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._contexts[kind]), True)

    def _read(self, kind: str, prompt: list[int], at: int = 0) -> Measured:
        return self._decode(kind, [prompt], at, self.all_logits)

    def _decode(self, kind: str, prompts: list[list[int]], at: int = 0, all_logits: bool = False) -> Measured:
        """One batch: the tokens of each sequence from position ``at`` on; logits of the last ones or all."""
        total = sum(map(len, prompts))
        batch = self._lib.llama_batch_init(total, 0, 1)
        try:
            batch.n_tokens = row = 0
            for sequence, tokens in enumerate(prompts):
                for i, token in enumerate(tokens):
                    batch.token[row], batch.pos[row] = token, at + i
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                    batch.logits[row] = all_logits or i == len(tokens) - 1
                    row += 1
            batch.n_tokens = total
            start = time.perf_counter()
            code = self._lib.llama_decode(self._contexts[kind], batch)
            self._lib.llama_synchronize(self._contexts[kind])
            seconds = time.perf_counter() - start
        finally:
            self._lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode of {total} tokens gave {code}")
        return Measured(total, seconds)

    def _generate(self, kind: str, at: int, steps: int, seed: int) -> Measured:
        """The time of the decode calls alone: filling batches from Python is not llama.cpp's."""
        count = self.lengths.sequences if kind.startswith("several") else 1
        tokens = np.random.default_rng(seed + 1).integers(FIRST_TOKEN, self._vocab, (steps, count)).tolist()
        seconds = sum(
            self._decode(kind, [[token] for token in row], at + i).seconds for i, row in enumerate(tokens)
        )
        positions = count * sum(at + i + 1 for i in range(steps))
        return Measured(
            steps * count, seconds, steps * self._step_bytes + positions * self._position_bytes, 1.0
        )


class PowerInfer:
    """PowerInfer's ``main`` on a PWRI file, loaded anew for each sample, so these are longer.

    Its own report is taken: *eval time* is the sum over ``llama_decode`` calls of one token, without
    sampling and printing; *prompt eval time* that of the prompt's. The prompt is short, which spares time and
    favours PowerInfer a little: its tokens attend to fewer positions than those of the others.
    """

    PROMPT = " ".join("etaoinshrdlcumwf")
    PATTERN = re.compile(r"(prompt eval|eval) time =\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)")

    def __init__(self, binary: Path, path: Path, threads: int, generate: int) -> None:
        self._command = [
            str(binary), "-m", str(path), "-t", str(threads), "-n", str(generate + 1), "-c", "512",
            "-b", "512", "-p", self.PROMPT, "--ignore-eos", "--temp", "0.8", "--top-k", "40", "--log-disable",
        ]  # fmt: skip

    def phases(self, seed: int) -> Iterator[Phase]:
        yield "generation", lambda: self._run(seed)

    def _run(self, seed: int) -> Measured:
        done = subprocess.run(
            [*self._command, "-s", str(seed)], capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
        report = done.stderr.decode(errors="replace")
        found = {what: (float(ms), int(n)) for what, ms, n in self.PATTERN.findall(report)}
        if done.returncode or "eval" not in found:
            last = (report.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"PowerInfer ended with {done.returncode}: {last[:200]}")
        milliseconds, tokens = found["eval"]
        return Measured(tokens, milliseconds / 1000)
