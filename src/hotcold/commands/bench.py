"""Measures prompt and generation speed, bytes read, and the memory bandwidth at the same moment."""

import argparse
import json
import statistics
from typing import Any

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.engine.benchmark import Round, lengths_to_end_together, measure, prompt_of
from hotcold.engine.engine import Engine
from hotcold.errors import UserError
from hotcold.kernels.backend import MAX_DECODE_ROWS
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.sparse.timeline import Timeline

_WITH_RANGE = ("prompt_tok_s", "tok_s", "tok_s_per_sequence", "bandwidth_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, options.whole_number
    add("-p", "--n-prompt", type=number(1), default=128, metavar="N", help="prompt tokens (128)")
    add("-n", "--n-gen", type=number(2), default=64, metavar="N", help="tokens to generate (64)")
    add(
        "--parallel",
        type=number(1, 4096),
        default=1,
        metavar="N",
        help=f"sequences; {MAX_DECODE_ROWS} are decoded together, more wait for their turn (1)",
    )
    add("-r", "--repetitions", type=number(1), default=5, metavar="N", help="rounds to measure (5)")
    add(
        "--timeline",
        type=options.file_path,
        metavar="FILE",
        help="run one more round and write its Chrome trace: when each of two backends worked and waited. "
        "Needs --placement or --vram-budget",
    )
    options.add_model_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    session = options.load_session(args, sequences=min(args.parallel, MAX_DECODE_ROWS))
    model = session.model
    if args.timeline and model.hot is None:
        raise UserError("--timeline shows two backends: it needs --placement or --vram-budget")
    lengths = lengths_to_end_together(args.parallel, args.n_prompt, args.n_gen, model.chunk)
    need = args.n_prompt + lengths[0]
    if need > model.context:
        together = f", {args.parallel} sequences together," if args.parallel > 1 else ""
        asked = f"-p {args.n_prompt} and -n {args.n_gen}{together} need {need} positions"
        raise UserError(f"{asked}: the context holds {model.context}")
    engine = Engine(session)
    prompt = prompt_of(model, args.n_prompt)
    rounds = _rounds(engine, prompt, lengths, args.repetitions)
    report: dict[str, Any] = {
        "prompt_tokens": args.n_prompt,
        "generated_tokens": args.n_gen,
        "parallel": args.parallel,
        "repetitions": len(rounds),
    }
    for name in rounds[0]:
        values = sorted(value for each in rounds if (value := each[name]) is not None)
        report[name] = statistics.median(values) if values else None
        if name in _WITH_RANGE:
            report[f"{name}_range"] = values[:1] + values[-1:]
    report |= options.facts(session)
    if args.timeline and model.hot:
        timeline = Timeline(model.hot)
        session.trace(timeline)
        measure(engine, prompt, lengths, None, seed=0)
        args.timeline.write_text(json.dumps(timeline.trace()))
        report["overlap"] = timeline.overlap()
    _print(report)
    return options.end(args, report)


def _rounds(engine: Engine, prompt: list[int], lengths: list[int], repetitions: int) -> list[Round]:
    backend = engine.model.backend
    probe = ReadProbe(backend) if isinstance(backend, CPUBackend) else None
    rounds = []
    with progress("rounds") as advance:
        measure(engine, prompt, lengths, None, seed=0)  # warms memory and threads
        for seed in range(repetitions):
            rounds.append(measure(engine, prompt, lengths, probe, seed=seed))
            advance(seed + 1, repetitions)
    return rounds


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
