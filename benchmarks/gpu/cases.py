"""Measures a slice of a model on a CPU, a GPU and both, contestants in turns.

One process of benchmarks/gpu/compare.py does this. Of each contestant: the time of a token (median,
P95, P99) by pieces in turns, prompts of some lengths, what it read, what share of the firing neurons the GPU
had, the handshake, its logits beside the CPU's, its memory on the device, and `plan`'s prediction for it.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu import slices
from gpu.placed import CONTESTANTS, CONTEXT, Pass, Placed, Subject, load_placement
from hotcold.placement.hardware import DEFAULT, Hardware, find_hardware
from hotcold.placement.placement import Placement
from hotcold.runtime.session import LoadedModel
from lib.contestants import random_tokens
from lib.processes import run_llama_bench

LOGITS_PROMPT, LOGITS_STEPS = 20, 6  #: more than decode rows, so that they are prompt rows
TRACED_STEPS, TRACED_S = 12, 1.0
#: Parts of a case's time after which nothing more is loaded, and no further round begins.
LOADING_SHARE, ROUNDS_SHARE = 0.5, 0.7
#: Contestants whose longer prompts are timed.
PROMPTED = ("CPU dense", "GPU dense", "solver", "GPU predicted", "CPU predicted")
BALANCE = 11  #: of a PC's bandwidths, of the card to the processor
LLAMA_PROMPT = 64
OUTPUTS = (8, 128, 512)  #: of the end-to-end metric

#: A model, how it is placed, and the seconds that loading took;
Loaded = tuple[LoadedModel, Placement | None, float]

Row = dict[str, Any]
Emit = Callable[[Row], None]


@dataclass(frozen=True)
class Task:
    """The measurements of one slice, as JSON; ``model`` is the fields of :class:`slices.Model`."""

    model: dict[str, Any]
    type: str
    taken: int
    shares: list[float]  #: budgets, as parts of the weights
    contestants: list[str]
    gpu: str
    folder: str  #: for the model's file
    hardware: str | None = None  #: a file that doctor wrote
    pretend: bool = False  #: that the GPU is a card: it is a processor that plays one
    threads: int | None = None
    seconds: float = 60.0
    rounds: int = 3
    tokens: int = 32  #: of a round
    prompts: tuple[int, ...] = (8, 64, 128)  #: lengths; the first comes before the timed continuations
    llama_bench: str | None = None

    @property
    def slice(self) -> slices.Slice:
        return slices.Slice(slices.Model(**self.model), self.taken, self.type)


def _read_prompt(prompt: int, seed: int, contestant: Placed) -> None:
    contestant.passes.append(contestant.run(prompt, 0, seed, 0.0))


def measured_machine(path: str | None, *, pretend: bool) -> tuple[Hardware, str]:
    """Returns what doctor wrote, and a note where something stands in for it. ``pretend``: what it says of
    the GPU is of a processor that plays one."""
    hardware = find_hardware(path or DEFAULT)
    if hardware.vram_bytes and not pretend:
        return hardware, "" if path else f"doctor has no figures: the preset {DEFAULT}"
    return with_gpu(hardware), "no GPU was measured: one with 11 times the processor's bandwidths is assumed"


def with_gpu(hardware: Hardware) -> Hardware:
    """With a GPU as a PC has beside its processor, and handshakes that cost nothing, so that layers are split
    however small they are: for trying the script where no card is."""
    stream = BALANCE * hardware.cpu_stream_gb_s
    return replace(
        hardware,
        vram_bytes=1 << 40,
        gpu_stream_gb_s=stream,
        gpu_rows_gb_s=stream,
        link_pinned_gb_s=stream,
        link_pageable_gb_s=stream,
        handshake_s=1e-9,
        step_s=0.0,
        kernels_gb_s={},
        layers_s={},
    )


class Case:
    """All contestants of one slice within one budget."""

    def __init__(
        self,
        task: Task,
        subject: Subject,
        share: float,
        loaded: dict[str | None, Loaded],
        emit: Emit,
        until: float,
    ) -> None:
        self.task, self.subject, self.share, self.until = task, subject, share, until
        self.start = time.monotonic()
        self._emit = emit
        self._loaded = loaded
        self.live: list[Placed] = []

    def run(self) -> None:
        """Measures what is most wanted first, as all may be ended from outside at any time."""
        try:
            self._load()
            for number in range(self.task.rounds):
                if number and self._used > ROUNDS_SHARE:
                    self._say("", f"only {number} of {self.task.rounds} rounds: time ran out")
                    break
                self._round(number)
                if number == 0:
                    self._tell_all(whole=False)
            self._read_prompts()
            self._tell_all(whole=True)
        finally:
            for contestant in self.live:
                contestant.close()

    @property
    def _used(self) -> float:
        """Part of the time that is over."""
        return (time.monotonic() - self.start) / max(1e-3, self.until - self.start)

    def _tell_all(self, *, whole: bool) -> None:
        rows: dict[str, Row] = {}

        def keep(contestant: Placed) -> None:
            row = self._figures(contestant) | self._logits_error(contestant)
            row |= self._handshake(contestant) if whole else {"provisional": True}
            rows[contestant.name] = row
            self._emit(row)

        for contestant in [*self.live]:
            self._guarded(contestant, keep)
        self._layer_split(rows, whole=whole)

    def _layer_split(self, rows: dict[str, Row], *, whole: bool) -> None:
        """With as many layers on the GPU as the whole model's budget holds: between none of them and all."""
        name = "layer split"
        if missing := [each for each in ("CPU dense", "GPU dense") if each not in rows]:
            if whole:
                self._say(name, f"it is made of {' and '.join(missing)}, which failed")
            return
        none, every = rows["CPU dense"], rows["GPU dense"]
        part, factor = self.subject.split_share(self.share, self.task.slice.factor), none["factor"]

        def between(low: float, high: float) -> float:
            return low + part * (high - low)

        python_ms = between(none["python_ms"], every["python_ms"])
        ms = between(none["ms"], every["ms"])
        full_ms = python_ms + (ms - python_ms) * factor
        row = self._key(name) | {"mode": "off", "factor": factor, "layers": none["layers"], "ms": ms}
        row |= {"full_ms": full_ms, "full_tok_s": 1e3 / full_ms, "split_share": part, "python_ms": python_ms}
        pairs = zip(none["round_ms"], every["round_ms"], strict=False)
        row["round_ms"] = [between(*pair) for pair in pairs]
        prompt_ms = {
            length: between(ms, every["prompt_ms"][length])
            for length, ms in none["prompt_ms"].items()
            if length in every["prompt_ms"]
        }
        row |= {"prompt_ms": prompt_ms, "end_to_end_tok_s": end_to_end(prompt_ms, full_ms)}
        if (measured := rows.get("some layers")) is not None:
            n = measured["gpu_layers"] / self.task.taken
            expected = none["ms"] + n * (every["ms"] - none["ms"])
            row["some_layers_over_expected"] = measured["ms"] / expected
        if not whole:
            row["provisional"] = True
        row["predicted_ratio"] = self.subject.predicted_ratio(self.share, factor, self.subject.hardware)
        row["predicted_ratio_pc"] = self.subject.predicted_ratio(self.share, factor, find_hardware(DEFAULT))
        self._emit(row)

    def _key(self, contestant: str) -> Row:
        task = self.task
        name = task.model["name"]
        key = {"part": "slices", "model": name, "type": task.type, "share": self.share}
        return key | {"contestant": contestant}

    def _say(self, contestant: str, why: str) -> None:
        self._emit(self._key(contestant) | {"failed": why[:400]})

    def _load(self) -> None:
        for name in self.task.contestants:
            kind, mode = CONTESTANTS[name]
            if kind not in self._loaded and self.live and self._used > LOADING_SHARE:
                self._say(name, "not loaded: time ran out")
                continue
            try:
                first = kind not in self._loaded
                if first:
                    self._loaded[kind] = self._load_one(kind, mode)
                model, placement, seconds = self._loaded[kind]
                contestant = Placed(name, mode, model, placement, seconds)
                if not first:  # the device holds other sessions, too
                    contestant.allocated_bytes = None
                self.live.append(contestant)
            except Exception as error:
                self._say(name, f"{type(error).__name__}: {error}")

    def _load_one(self, kind: str | None, mode: str) -> Loaded:
        task = self.task
        placement = None if kind is None else self.subject.place(kind, self.share)
        model, seconds = load_placement(self.subject, placement, mode, task.gpu, task.threads)
        return model, placement, seconds

    def _guarded(self, contestant: Placed, action: Callable[[Placed], None]) -> None:
        """Runs an action; a failure becomes a row, and its contestant takes no further part."""
        try:
            action(contestant)
        except Exception as error:
            self._say(contestant.name, f"{type(error).__name__}: {error}")
            self.live.remove(contestant)
            contestant.close()

    def _round(self, number: int) -> None:
        """A short prompt and a continuation of everyone, in alternating order; the first round warms."""
        task, short = self.task, self.task.prompts[0]
        tokens = random_tokens(LOGITS_PROMPT + LOGITS_STEPS, task.slice.vocab, 7)
        order = self.live[:: -1 if number % 2 else 1]
        each_s = max(0.3, (self.until - time.monotonic()) / (2 * max(1, len(order)) * task.rounds))

        def run(contestant: Placed) -> None:
            if number == 0:
                contestant.logits = contestant.read_logits(tokens[:LOGITS_PROMPT], tokens[LOGITS_PROMPT:])
            contestant.passes.append(contestant.run(short, task.tokens, 2 + number, each_s))
            if number == 0:
                self._emit(self._figures(contestant) | {"provisional": True})

        for contestant in order:
            self._guarded(contestant, run)

    def _read_prompts(self) -> None:
        """The longer ones, twice while there is time, of those whose requests are compared end to end."""
        for seed in range(2):
            for name in PROMPTED:
                contestant = next((each for each in self.live if each.name == name), None)
                for prompt in self.task.prompts[1:] if contestant else ():
                    if self._used < 1 and contestant in self.live:
                        self._guarded(contestant, partial(_read_prompt, prompt, seed))

    def _figures(self, contestant: Placed) -> Row:
        task, factor = self.task, self.task.slice.factor
        timed = [each for each in contestant.passes if each.counters is not None]
        steps = np.array([second for each in timed for second in each.steps_s]) * 1e3
        ms = float(np.median(steps))
        python_ms = ms * sum(each.python_s for each in timed) * 1e3 / float(steps.sum())
        full_ms = python_ms + (ms - python_ms) * factor
        row = self._key(contestant.name) | {
            "mode": contestant.mode,
            "layers": f"{task.taken} of {task.model['layers']}",
            "factor": factor,
            "tokens": len(steps),
            "ms": ms,
            "p95_ms": float(np.percentile(steps, 95)),
            "p99_ms": float(np.percentile(steps, 99)),
            "most_ms": float(steps.max()),
            "python_ms": python_ms,
            "full_ms": full_ms,
            "full_tok_s": 1e3 / full_ms,
            "round_ms": [statistics.median(each.steps_s) * 1e3 for each in timed],
            "load_s": contestant.load_s,
        }
        row |= self._prompts(contestant.passes, full_ms)
        return row | self._read(contestant, timed, ms) | self._placed(contestant, ms - python_ms)

    def _prompts(self, passes: Sequence[Pass], full_ms: float) -> Row:
        """Prompts in ms of the whole model, and the paper's metric."""
        factor = self.task.slice.factor
        prompt_ms = {}
        for length in self.task.prompts:
            seconds = [each.prompt_s for each in passes if each.prompt == length]
            if seconds:
                prompt_ms[length] = statistics.median(seconds) * 1e3 * factor
        return {"prompt_ms": prompt_ms, "end_to_end_tok_s": end_to_end(prompt_ms, full_ms)}

    def _read(self, contestant: Placed, timed: Sequence[Pass], ms: float) -> Row:
        figures = [contestant.figures(run.counters) for run in timed if run.counters is not None]
        nbytes = statistics.median(run.bytes_per_token or 0 for run in figures)
        hardware, hot = self.subject.hardware, bool(contestant.model.gpus)
        bandwidth = 0.0
        if not contestant.name.startswith("GPU"):
            bandwidth += hardware.cpu_stream_gb_s
        if hot:
            bandwidth += hardware.gpu_stream_gb_s
        gb_s = nbytes / ms / 1e6
        return {
            "mb_per_token": nbytes / 1e6,
            "gb_s": gb_s,
            "bandwidth_share": gb_s / bandwidth,
            "active_share": statistics.median(run.active_share or 0 for run in figures),
        }

    def _placed(self, contestant: Placed, program_ms: float) -> Row:
        """Returns what the GPU has, and plan's prediction, which knows of no time between the programs."""
        placement, subject = contestant.placement, self.subject
        predicted = subject.predicted_seconds(placement, contestant.mode) * 1e3
        row: Row = {"predicted_ms": predicted, "measured_over_predicted": program_ms / predicted}
        if placement is None:
            return row
        hot, every = contestant.pairs()
        sizes = subject.sizes[contestant.mode]
        neurons = sum(len(mask) for mask in placement.hot)
        return row | {
            "gpu_layers": len(placement.layers_of(0)),
            "gpu_head": placement.head == 0,
            "gpu_neuron_share": sum(int(mask.sum()) for mask in placement.hot) / neurons,
            "gpu_firing_share": hot / every if every else None,
            "gpu_firing_share_expected": subject.gpu_firing_share(placement),
            "spins": contestant.model.on_gpus[0].spin if contestant.model.on_gpus else None,
            "planned_bytes": placement.gpu_bytes(sizes),
            "allocated_bytes": contestant.allocated_bytes,
        }

    def _handshake(self, contestant: Placed) -> Row:
        if not contestant.splits:
            return {}
        timeline, steps = contestant.trace(TRACED_STEPS, TRACED_S)
        delays = timeline.handshake()
        waits = [span.end - span.start for span in timeline.spans() if span.name == "wait"]
        return {
            "split_layers": contestant.splits,
            "post_to_take_us": plausible(delays.post_to_take_us),
            "answer_to_collect_us": plausible(delays.answer_to_collect_us),
            "hot_waits_ms": sum(waits) / max(1, steps) / 1e3,
            "overlap": timeline.overlap(),
        }

    def _logits_error(self, contestant: Placed) -> Row:
        """Largest difference to the CPU in this mode, after a prompt and in decode steps; absolute, and in
        parts of the largest logit. What is dense is compared with ``exact``, which loses nothing."""
        name = "CPU predicted" if contestant.mode == "predicted" else "CPU exact"
        expected = next((each.logits for each in self.live if each.name == name), None)
        if expected is None or contestant.logits is None:
            return {}
        worst = float(np.abs(contestant.logits - expected).max())
        return {"logits_error": worst, "logits_error_share": worst / float(np.abs(expected).max())}


def plausible(microseconds: float | None) -> float | None:
    """None where one of the two moments was not told, as by a device without clocks."""
    return microseconds if microseconds is not None and 0 <= microseconds < 1e6 else None


def end_to_end(prompt_ms: dict[int, float], token_ms: float) -> dict[str, float]:
    """Tokens a second of requests, the prompt's time counted: the paper's metric, by lengths "in+out"."""
    return {
        f"{length}+{out}": out / (ms + out * token_ms) * 1e3
        for length, ms in prompt_ms.items()
        for out in OUTPUTS
    }


def run(task: Task, emit: Emit) -> None:
    """Emits a row for each contestant within each budget; what fails is a row, too."""
    start = time.monotonic()
    part = task.slice
    path = Path(task.folder) / f"{part.model.name}-{part.type}.gguf".lower()
    hardware, note = measured_machine(task.hardware, pretend=task.pretend)
    profile = slices.write(path, part, CONTEXT)
    made_s = time.monotonic() - start
    subject = Subject.of(path, profile, hardware, task.gpu)
    emit(
        {
            "part": "made",
            "model": part.model.name,
            "type": part.type,
            "layers": f"{part.taken} of {part.model.layers}",
            "gb": path.stat().st_size / 1e9,
            "seconds": made_s,
            "note": note,
        }
    )
    try:
        same: dict[str | None, Loaded] = {}  # within every budget
        for share, until in zip(task.shares, ending_times(start, task), strict=False):
            loaded = {**same}
            Case(task, subject, share, loaded, emit, until).run()
            same = {kind: each for kind, each in loaded.items() if kind in (None, "GPU")}
    finally:
        path.unlink()
    if task.llama_bench:
        for row in llama_rows(task, subject):
            emit(row)


def ending_times(start: float, task: Task) -> Iterator[float]:
    """Each budget gets an equal part of what is left when its turn comes."""
    for i in range(len(task.shares)):
        left = start + task.seconds - time.monotonic()
        yield time.monotonic() + left / (len(task.shares) - i)


def llama_layers(task: Task, model: Path, gpu_layers: int) -> Row:
    """Times of the whole model with some last layers and the head on the GPU; 0: none."""
    command = [str(task.llama_bench), "-m", str(model), "-p", str(LLAMA_PROMPT), "-n", "32", "-r", "3"]
    command += ["-ngl", str(gpu_layers + 1 if gpu_layers else 0)]
    command += ["-t", str(task.threads)] if task.threads else []
    tests, factor = run_llama_bench(command, task.seconds), task.slice.factor
    generation = [test for test in tests if test["n_gen"]]
    prompts = [test for test in tests if not test["n_gen"]]
    if not generation or not prompts:
        raise RuntimeError("llama-bench's report lacks a prompt or a generation")
    ms, prompt_ms = 1e3 / generation[0]["tok_s"], 1e3 * LLAMA_PROMPT / prompts[0]["tok_s"]
    full_ms = ms * factor
    return {
        "mode": "off", "ms": ms, "full_ms": full_ms, "full_tok_s": 1e3 / full_ms,
        "prompt_ms": {LLAMA_PROMPT: prompt_ms * factor},
    }  # fmt: skip


def llama_rows(task: Task, subject: Subject) -> Iterator[Row]:
    """llama.cpp's layer split of a dense file of the same shape, with as many layers as fit each budget."""
    part, name = task.slice, "llama.cpp"
    path = Path(task.folder) / "dense.gguf"
    try:
        slices.write_dense(path, part, CONTEXT)
        for share in task.shares:
            key = {"part": "slices", "model": part.model.name, "type": part.type, "share": share}
            layers = round(subject.split_share(share, part.factor) * part.taken)
            for title, on_gpu in ((name, layers), (f"{name} GPU", part.taken)):
                row = key | {"contestant": title, "gpu_layers": on_gpu}
                try:
                    yield row | llama_layers(task, path, on_gpu)
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                    yield row | {"failed": str(error)[:400]}
    except ValueError as error:
        yield {
            "part": "slices",
            "model": part.model.name,
            "type": part.type,
            "share": task.shares[0],
            "contestant": name,
            "failed": str(error),
        }
    finally:
        path.unlink(missing_ok=True)
