"""Measures prompt and generation speed, bytes read, and the memory bandwidth at the same moment."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.engine.engine import Engine
from hotcold.engine.loading import LoadedModel
from hotcold.engine.request import Request
from hotcold.engine.sampler import SamplingParams
from hotcold.engine.statistics import Figures
from hotcold.kernels.backend import MAX_DECODE_ROWS
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.sparse.timeline import Timeline

#: Natural text, since which neurons fire depends on it; repeated up to the prompt's length.
_TEXT = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "Every morning she carried water from the well and fed the hens, and in the evening she sat by the fire "
    "and listened to the wind in the trees. One day a stranger knocked at the door. He was tired and hungry, "
    "and his boots were full of holes. The grandmother gave him bread and milk, and he told them of the sea, "
    "of ships as tall as churches, and of an island where nobody was ever cold. "
)
_PROBE_S = 0.2
_WITH_RANGE = ("prompt_tok_s", "tok_s", "tok_s_per_sequence", "bandwidth_share")

#: One round's figures by the names they have in the report; None for what could not be measured.
Round = dict[str, float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, options.whole_number
    add("-p", "--n-prompt", type=number(1), default=128, metavar="N", help="prompt tokens (128)")
    add("-n", "--n-gen", type=number(2), default=64, metavar="N", help="tokens to generate (64)")
    parallel = "sequences; 16 are decoded together, more wait for their turn (1)"
    add("--parallel", type=number(1, 4096), default=1, metavar="N", help=parallel)
    add("-r", "--repetitions", type=number(1), default=5, metavar="N", help="rounds (5)")
    what = "write a Chrome trace of one more round on two backends, and print how far these overlap"
    add("--timeline", type=options.file_path, metavar="FILE", help=what)
    options.add_model_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    model = options.load_model(args, sequences=min(args.parallel, MAX_DECODE_ROWS))
    if args.timeline and model.hot is None:
        raise ValueError("--timeline shows two backends: it needs --placement or --vram-budget")
    lengths = lengths_to_end_together(args.parallel, args.n_prompt, args.n_gen, model.chunk)
    need = args.n_prompt + lengths[0]
    if need > model.context:
        together = f", {args.parallel} sequences together," if args.parallel > 1 else ""
        asked = f"-p {args.n_prompt} and -n {args.n_gen}{together} need {need} positions"
        raise ValueError(f"{asked}: the context holds {model.context}")
    engine, prompt = Engine(model), prompt_of(model, args.n_prompt)
    probe = ReadProbe(model.backend) if isinstance(model.backend, CPUBackend) else None
    with progress("rounds") as advance:
        measure(engine, prompt, lengths, None, seed=0)  # warms memory and threads
        rounds = []
        for seed in range(args.repetitions):
            rounds.append(measure(engine, prompt, lengths, probe, seed=seed))
            advance(seed + 1, args.repetitions)
    report: dict[str, Any] = {
        "prompt_tokens": args.n_prompt, "generated_tokens": args.n_gen, "parallel": args.parallel,
        "repetitions": len(rounds),
    }  # fmt: skip
    for name in rounds[0]:
        values = sorted(value for each in rounds if (value := each[name]) is not None)
        report[name] = statistics.median(values) if values else None
        if name in _WITH_RANGE:
            report[f"{name}_range"] = values[:1] + values[-1:]
    report |= options.facts(model)
    if args.timeline and model.hot:
        model.trace(timeline := Timeline(model.hot))
        measure(engine, prompt, lengths, None, seed=0)
        args.timeline.write_text(json.dumps(timeline.trace()))
        report["overlap"] = timeline.overlap()
    _print(report)
    return options.end(args, report)


def lengths_to_end_together(parallel: int, n_prompt: int, n_generate: int, chunk: int) -> list[int]:
    """Tokens to generate of each sequence, ``n_generate`` or a few more.

    Prompts are read one after the other, so the first to be ready generates beside the others' prompts. With
    these lengths those that run together end together, and steps without prompt rows hold all of them."""
    ready = [-(-(i % MAX_DECODE_ROWS + 1) * n_prompt // chunk) for i in range(parallel)]
    last = [max(ready[i - i % MAX_DECODE_ROWS :][:MAX_DECODE_ROWS]) for i in range(parallel)]
    return [n_generate + end - start for start, end in zip(ready, last, strict=True)]


def prompt_of(model: LoadedModel, length: int) -> list[int]:
    more = model.tokenizer.encode(_TEXT, add_bos=False)
    return [*model.tokenizer.encode(_TEXT), *more * (length // len(more))][:length]


def measure(
    engine: Engine, prompt: Sequence[int], lengths: list[int], probe: ReadProbe | None, *, seed: int
) -> Round:
    """One prompt and as many continuations as there are lengths, after a probe of the read bandwidth. The
    first token belongs to the prompt, so generation is measured on those after it."""
    bandwidth = probe.measure(_PROBE_S) if probe else None
    before = engine.model.counters.copy()
    requests = []
    for i, length in enumerate(lengths):
        params = SamplingParams(seed=seed + i)
        requests.append(Request(prompt, params, max_tokens=length, ignore_eos=True))
    engine.run(requests)
    round = asdict(Figures.of(engine.model.counters.since(before), engine.model.footprint))
    del round["active_share_by_layer"]
    return round | {
        "tok_s_per_sequence": round["tok_s"] and round["tok_s"] / round["rows_per_step"],
        "ttft_s": requests[0].timings.ttft_s,
        "read_bandwidth_gb_s": bandwidth,
        "bandwidth_share": bandwidth and round["gb_s"] and round["gb_s"] / bandwidth,
    }


def _print(report: dict[str, Any]) -> None:
    def with_range(name: str) -> str:
        low, high = report[f"{name}_range"]
        return f"{report[name]:.1f} tok/s (median; {low:.1f} to {high:.1f})"

    cores = f"{report['threads'] or 1} threads, {report['isa'] or report['backend']}"
    print(f"{report['model']}, sparsity {report['sparsity']}, {cores}, {report['processor']}")
    print(f"prompt of {report['prompt_tokens']}: {with_range('prompt_tok_s')}")
    if report["parallel"] == 1:
        print(f"generation of {report['generated_tokens']}: {with_range('tok_s')}")
    else:
        together = "in {parallel} sequences, {rows_per_step:.3g} at a time".format(**report)
        print(f"generation of {report['generated_tokens']} {together}: {with_range('tok_s')} in all")
        print(f"each of them: {with_range('tok_s_per_sequence')}")
    counts = "{gb_s:.2f} GB/s; {active_share:.1%} of neurons active; {python_share:.1%} of a step is Python's"
    print(f"{report['bytes_per_token'] / 1e6:.2f} MB read per token, {counts.format(**report)}")
    if report.get("overlap") is not None:
        print(f"the hot side was busy for {report['overlap']:.0%} of the time that the cold side was")
    if report["bandwidth_share"] is not None:
        used = "{read_bandwidth_gb_s:.1f} GB/s: {bandwidth_share:.0%} of it used".format(**report)
        print(f"read bandwidth measured beside it {used}")
