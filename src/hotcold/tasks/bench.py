"""Benchmark of speed: a prompt, and one or more continuations of fixed lengths."""

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

from hotcold.api.llm import Model, source_of
from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.drafts import Drafter, look_up
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.errors import UserError
from hotcold.formats.files import output_file, write_text
from hotcold.formats.gguf import GGUFError, open_gguf
from hotcold.kernels.backend import DECODE_ROWS, ReadProbe
from hotcold.runtime.counters import DiskFigures, Figures
from hotcold.runtime.opening import opened
from hotcold.runtime.options import DRAFT_MAX, ModelOptions, Progress, check_loading
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.sparse.timeline import Handshake, Timeline
from hotcold.tasks.reports import Setup
from hotcold.values import printable, whole

#: Natural text, because activity depends on the text; repeated up to the prompt's length.
_TEXT = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "Every morning she carried water from the well and fed the hens, and in the evening she sat by the fire "
    "and listened to the wind in the trees. One day a stranger knocked at the door. He was tired and hungry, "
    "and his boots were full of holes. The grandmother gave him bread and milk, and he told them of the sea, "
    "of ships as tall as churches, and of an island where nobody was ever cold. "
)
_PROBE_S = 0.2
_WITH_RANGE = ("prompt_tok_s", "tok_s", "tok_s_per_sequence", "bandwidth_share")

MOST_SEQUENCES = 4096  #: limit for the sequences of one benchmark


@dataclass(frozen=True)
class Round(DiskFigures):
    """The figures of one round, mostly as in :class:`Figures`; None if not measured."""

    prompt_tok_s: float | None
    tok_s: float | None
    bytes_per_token: float | None
    gb_s: float | None
    active_share: float | None
    params_per_token: float | None
    python_share: float | None
    rows_per_step: float | None
    tokens_per_step: float | None  #: above ``rows_per_step`` by accepted draft tokens
    tok_s_per_sequence: float | None
    ttft_s: float | None  #: time to the first token of the first prompt
    read_bandwidth_gb_s: float | None  #: memory bandwidth, measured in the same round
    bandwidth_share: float | None  #: the share of it that generation used
    guessed: int = 0  #: draft tokens verified
    accepted: int = 0  #: draft tokens accepted


@dataclass(frozen=True)
class Benchmark:
    """The figures of all rounds; ``str()`` gives the lines that ``hotcold bench`` prints."""

    prompt_tokens: int
    generated_tokens: int  #: tokens of each sequence
    parallel: int  #: number of sequences
    setup: Setup
    rounds: tuple[Round, ...] = field(repr=False)
    #: of two backends with a timeline: the share of the cold one's busy time in which the hot one was busy,
    #: and the delays between them
    overlap: float | None = None
    handshake: Handshake | None = None

    def median(self, name: str) -> float | None:
        """Returns the median of one figure of :class:`Round` over all rounds."""
        values = self._values(name)
        return statistics.median(values) if values else None

    def _values(self, name: str) -> list[float]:
        return sorted(value for each in self.rounds if (value := getattr(each, name)) is not None)

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``: the medians, and the ranges of speeds."""
        figures: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "parallel": self.parallel,
            "repetitions": len(self.rounds),
        }
        for column in fields(Round):
            figures[column.name] = self.median(column.name)
            if column.name in _WITH_RANGE:
                values = self._values(column.name)
                figures[f"{column.name}_range"] = values[:1] + values[-1:]
        figures |= asdict(self.setup)
        if self.handshake is not None:
            figures |= {"overlap": self.overlap, **self.handshake._asdict()}
        return figures

    def __str__(self) -> str:
        setup, figures = self.setup, self.report()

        def with_range(name: str) -> str:
            low, high = figures[f"{name}_range"]
            return f"{figures[name]:.1f} tok/s (median; {low:.1f} to {high:.1f})"

        cores = f"{setup.threads or 1} threads, {setup.isa or setup.backend}"
        lines = [
            f"{setup.model}, sparsity {setup.sparsity}, {cores}, {setup.processor}",
            f"prompt of {self.prompt_tokens}: {with_range('prompt_tok_s')}",
        ]
        if self.parallel == 1:
            lines.append(f"generation of {self.generated_tokens}: {with_range('tok_s')}")
        else:
            together = "in {parallel} sequences, {rows_per_step:.3g} at a time".format(**figures)
            lines.append(f"generation of {self.generated_tokens} {together}: {with_range('tok_s')} in all")
            lines.append(f"each of them: {with_range('tok_s_per_sequence')}")
        if figures["guessed"]:
            right = "{accepted:.0f} of {guessed:.0f} draft tokens were accepted".format(**figures)
            lines.append(f"{right}: {figures['tokens_per_step']:.3g} tokens per step")
        counts = (
            "{gb_s:.2f} GB/s; {active_share:.1%} of neurons active; {python_share:.1%} of a step in Python"
        )
        lines.append(f"{figures['bytes_per_token'] / 1e6:.2f} MB read per token, {counts.format(**figures)}")
        if self.overlap is not None:
            lines.append(f"the GPU was busy for {self.overlap:.0%} of the time that the CPU was busy")
        if self.handshake is not None and None not in self.handshake:
            heard = "the CPU saw the GPU's data after {:.1f} us, the GPU the CPU's result after {:.1f} us"
            lines.append(f"{heard.format(*self.handshake)} (medians)")
        if figures["bandwidth_share"] is not None:
            used = "{read_bandwidth_gb_s:.1f} GB/s, {bandwidth_share:.0%} of it used".format(**figures)
            lines.append(f"memory bandwidth measured {used}")
        return "\n".join(lines)


def bench(
    model: Model = None,
    *,
    n_prompt: int = 128,
    n_gen: int = 64,
    parallel: int = 1,
    repetitions: int = 5,
    draft: str | None = None,
    draft_max: int = DRAFT_MAX,
    timeline: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ModelOptions],
) -> Benchmark:
    """Measures the speed of prompts and of generation, the bytes read, and the bandwidth of memory.

    >>> print(hotcold.bench("model.gguf", parallel=8, threads=4))

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        n_prompt: tokens of the prompt, 1 or more.
        n_gen: tokens to generate in each sequence, 2 or more.
        parallel: number of sequences. If the model cannot decode all together, some wait in the queue.
        repetitions: rounds to measure, after one that is not counted.
        draft: source of draft tokens: ``look-up`` (prompt lookup) or ``none``. None: the file's draft block,
            if it has one.
        draft_max: limit for the draft tokens of a sequence in a step.
        timeline: a file for the Chrome trace of one more round: when each of two backends computed and
            waited. It needs a GPU with a part of the model.
        force: whether to replace an existing ``timeline``.
        progress: called with the phases ``loading`` and ``rounds``.
        options: as in :class:`LLM`, for a model that is not loaded yet.

    UserError: a number is not allowed, the context is too small, or loading fails."""
    check_loading(options, ModelOptions)
    n_prompt, n_gen = whole("n_prompt", n_prompt, 1), whole("n_gen", n_gen, 2)
    parallel = whole("parallel", parallel, 1, MOST_SEQUENCES)
    repetitions = whole("repetitions", repetitions, 1)
    draft_max = whole("draft_max", draft_max, 1, DECODE_ROWS - 1)
    if draft not in (None, "look-up", "none"):
        raise UserError(f"`draft` is {printable(draft, 40)!r}: allowed are look-up and none")
    to_write = output_file(timeline, force=force, inputs=[model])
    source = source_of(model)
    fixed: dict[str, Any] = {}
    if not isinstance(source, LoadedModel):
        drafts = draft_max if draft not in (None, "none") or (draft is None and _has_block(source)) else 0
        fixed = {"sequences": min(parallel, DECODE_ROWS), "state_copies": 0, "draft_max": drafts}
    base = opened(source, options, progress, **fixed)
    if to_write is not None and not base.gpus:
        raise UserError("`timeline` shows a GPU and the CPU: it needs `gpu`, `placement` or `vram_budget`")
    together = min(parallel, base.limits.sequences)
    lengths = lengths_to_end_together(parallel, n_prompt, n_gen, base.limits.chunk, together)
    need = n_prompt + lengths[0]
    if need > base.context:
        several = f", {parallel} sequences together," if parallel > 1 else ""
        asked = f"`n_prompt={n_prompt}` and `n_gen={n_gen}`{several} need {need} positions"
        raise UserError(f"{asked}: the context holds {base.context}")
    if draft not in (None, "none") and base.plan.slots and not base.plan.spare_slots:
        got = f"{printable(base.path.name)} was loaded without states for draft tokens"
        raise UserError(f"`draft={printable(draft, 40)}`: {got} (`draft_max`): leave `draft` out")
    prompt = prompt_of(base, n_prompt)
    with closing(base.session()) as session:
        drafter = _drafter_for(session, draft)
        speculation = Speculation([drafter], draft_max, base.limits.decode) if drafter else None
        engine = Engine(session, speculation=speculation)
        rounds = _rounds(engine, prompt, lengths, repetitions, progress)
        result = Benchmark(n_prompt, n_gen, parallel, Setup.from_session(session), rounds)
        if to_write is None:
            return result
        traced = _trace(engine, prompt, lengths)
    write_text(to_write, json.dumps(traced.trace()))
    return replace(result, overlap=traced.overlap(), handshake=traced.handshake())


def _rounds(
    engine: Engine,
    prompt: Sequence[int],
    lengths: Sequence[int],
    repetitions: int,
    progress: Progress | None,
) -> tuple[Round, ...]:
    probe = engine.model.backend.read_probe()
    measure(engine, prompt, lengths, None, seed=0)  # warms up memory and threads
    rounds = []
    for seed in range(repetitions):
        rounds.append(measure(engine, prompt, lengths, probe, seed=seed))
        if progress:
            progress("rounds", seed + 1, repetitions)
    return tuple(rounds)


def _trace(engine: Engine, prompt: Sequence[int], lengths: Sequence[int]) -> Timeline:
    """Runs one more round and returns its timeline."""
    timeline = Timeline(engine.model.backend)
    engine.session.trace(timeline)
    try:
        measure(engine, prompt, lengths, None, seed=0)
    finally:
        engine.session.trace(None)
    return timeline


def prompt_of(model: LoadedModel, length: int) -> list[int]:
    """Returns ``length`` tokens of text, with BOS if the model's file asks for it."""
    text_tokens = model.tokenizer.encode(_TEXT, add_bos=False)
    return [*model.tokenizer.encode(_TEXT), *text_tokens * (length // len(text_tokens))][:length]


def lengths_to_end_together(
    parallel: int, n_prompt: int, n_generate: int, chunk: int, together: int
) -> list[int]:
    """Returns the number of tokens to generate for each sequence: ``n_generate`` or a few more, if
    ``together`` run at a time. Prompts are read one after the other, so the first sequence generates while
    the other prompts are read. With these lengths, concurrent sequences end together, and each step without
    prompt rows has all of them."""
    ready = [-(-(i % together + 1) * n_prompt // chunk) for i in range(parallel)]
    last = [max(ready[i - i % together :][:together]) for i in range(parallel)]
    return [n_generate + end - start for start, end in zip(ready, last, strict=True)]


def measure(
    engine: Engine, prompt: Sequence[int], lengths: Sequence[int], probe: ReadProbe | None, *, seed: int
) -> Round:
    """Measures one prompt and one continuation per length, after a probe of the read bandwidth. The prompt
    gives the first token, so generation is measured on the tokens after it."""
    bandwidth = probe.measure(_PROBE_S) if probe else None
    before = engine.session.counters.copy()
    requests = _requests(prompt, lengths, seed)
    engine.run(requests)
    figures = Figures.from_counters(engine.session.counters.since(before), engine.session.footprint)
    columns = asdict(figures)
    del columns["active_share_by_layer"]
    per_sequence = None
    if figures.tok_s and figures.rows_per_step:
        per_sequence = figures.tok_s / figures.rows_per_step
    return Round(
        **columns,
        tok_s_per_sequence=per_sequence,
        ttft_s=requests[0].timings.ttft_s,
        read_bandwidth_gb_s=bandwidth,
        bandwidth_share=bandwidth and figures.gb_s and figures.gb_s / bandwidth,
        guessed=sum(each.guessed for each in requests),
        accepted=sum(each.accepted for each in requests),
    )


def _requests(prompt: Sequence[int], lengths: Sequence[int], seed: int) -> list[Request]:
    return [
        Request(Job(prompt, SamplingParams(seed=seed + i), max_tokens=length, ignore_eos=True, cache=False))
        for i, length in enumerate(lengths)
    ]


def _has_block(source: str | os.PathLike[str] | None) -> bool:
    """Returns whether a file declares a draft block; loading reports a block that it cannot read."""
    if source is None:
        return False
    try:
        with open_gguf(Path(source)) as file:
            key = f"{file.metadata.get('general.architecture')}.nextn_predict_layers"
            count = file.metadata.get(key)
            return isinstance(count, int) and count > 0
    except GGUFError:
        return False


def _drafter_for(session: Session, draft: str | None) -> Drafter | None:
    if draft is not None:
        return look_up if draft == "look-up" else None
    slots = session.slots
    if session.draft_block is None or (slots is not None and not slots.spare):
        return None
    return BlockDrafts(session.draft_block, session.transformer.batch)
