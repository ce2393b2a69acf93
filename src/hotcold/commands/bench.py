"""Measures prompt and generation speed, bytes read, and the memory bandwidth at the same moment."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotcold.commands import options
from hotcold.commands.progress import count_progress

if TYPE_CHECKING:
    from hotcold.engine.engine import Engine
    from hotcold.engine.loading import LoadedModel
    from hotcold.engine.statistics import Figures

#: Natural text, since which neurons fire depends on it; repeated up to the prompt's length.
_TEXT = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "Every morning she carried water from the well and fed the hens, and in the evening she sat by the fire "
    "and listened to the wind in the trees. One day a stranger knocked at the door. He was tired and hungry, "
    "and his boots were full of holes. The grandmother gave him bread and milk, and he told them of the sea, "
    "of ships as tall as churches, and of an island where nobody was ever cold. "
)
_PROBE_S = 0.2


@dataclass(frozen=True)
class Round:
    """One repetition: what was measured, and the read bandwidth just before it (None if not measurable)."""

    figures: Figures
    ttft_s: float
    bandwidth_gb_s: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = options.whole_number(1)
    parser.add_argument("-p", "--n-prompt", type=length, default=128, metavar="N", help="prompt tokens (128)")
    parser.add_argument(
        "-n", "--n-gen", type=options.whole_number(2), default=64, metavar="N", help="tokens to generate (64)"
    )
    parser.add_argument("-r", "--repetitions", type=length, default=5, metavar="N", help="rounds (5)")
    options.add_model_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from hotcold.engine.engine import Engine

    model = options.load_model(args)
    need = args.n_prompt + args.n_gen
    if need > model.context:
        raise ValueError(
            f"-p {args.n_prompt} and -n {args.n_gen} need {need} positions: the context holds {model.context}"
        )
    engine, prompt = Engine(model), prompt_of(model, args.n_prompt)
    probe = bandwidth_probe(model)
    with count_progress("rounds") as progress:
        measure(engine, prompt, args.n_gen, None, seed=0)  # warms memory and threads
        rounds = []
        for seed in range(args.repetitions):
            rounds.append(measure(engine, prompt, args.n_gen, probe, seed=seed))
            progress(seed + 1, args.repetitions)
    report = _report(model, args, rounds)
    _print(report)
    if args.json:
        print(json.dumps(report))
    return 0


def prompt_of(model: LoadedModel, length: int) -> list[int]:
    """``length`` token ids of natural text, begun as the model wants it."""
    ids = model.tokenizer.encode(_TEXT)
    more = model.tokenizer.encode(_TEXT, add_bos=False)
    while len(ids) < length:
        ids += more
    return ids[:length]


def bandwidth_probe(model: LoadedModel) -> Callable[[], float] | None:
    """Streams through memory with the model's own threads, GB/s; None for a backend without a probe."""
    from hotcold.kernels.cpu import CPUBackend, ReadProbe

    if not isinstance(model.backend, CPUBackend):
        return None
    probe = ReadProbe(model.backend)
    return lambda: probe.measure(_PROBE_S)


def measure(
    engine: Engine, prompt: Sequence[int], n_generate: int, probe: Callable[[], float] | None, *, seed: int
) -> Round:
    """One prompt and its continuation. The first token belongs to the prompt, so one more is generated."""
    from hotcold.engine.request import Request
    from hotcold.engine.sampler import SamplingParams
    from hotcold.engine.statistics import Figures

    bandwidth = probe() if probe else None
    before = engine.model.counters.copy()
    request = Request(prompt, SamplingParams(seed=seed), max_tokens=n_generate, ignore_eos=True)
    engine.add(request)
    while not request.finished:
        engine.step()
    counters = engine.model.counters.since(before)
    assert request.timings.ttft_s is not None
    return Round(Figures.of(counters, engine.model.footprint), request.timings.ttft_s, bandwidth)


def _report(model: LoadedModel, args: argparse.Namespace, rounds: list[Round]) -> dict[str, Any]:
    def middle(of: Callable[[Round], float | None]) -> float | None:
        values = [value for value in map(of, rounds) if value is not None]
        return statistics.median(values) if values else None

    def spread(of: Callable[[Round], float | None]) -> list[float]:
        values = [value for value in map(of, rounds) if value is not None]
        return [min(values), max(values)] if values else []

    def share(r: Round) -> float | None:
        if r.bandwidth_gb_s is None or r.figures.gb_s is None:
            return None
        return r.figures.gb_s / r.bandwidth_gb_s

    return {
        "prompt_tokens": args.n_prompt,
        "generated_tokens": args.n_gen,
        "repetitions": len(rounds),
        "prompt_tok_s": middle(lambda r: r.figures.prompt_tok_s),
        "prompt_tok_s_range": spread(lambda r: r.figures.prompt_tok_s),
        "tok_s": middle(lambda r: r.figures.tok_s),
        "tok_s_range": spread(lambda r: r.figures.tok_s),
        "ttft_s": middle(lambda r: r.ttft_s),
        "bytes_per_token": middle(lambda r: r.figures.bytes_per_token),
        "gb_s": middle(lambda r: r.figures.gb_s),
        "read_bandwidth_gb_s": middle(lambda r: r.bandwidth_gb_s),
        "bandwidth_share": middle(share),
        "bandwidth_share_range": spread(share),
        "active_share": middle(lambda r: r.figures.active_share),
        "params_per_token": middle(lambda r: r.figures.params_per_token),
        "python_share": middle(lambda r: r.figures.python_share),
        "sparsity": model.sparsity,
        "notes": model.notes,
        "threads": model.threads,
        "context": model.context,
        "backend": model.backend.name,
        "model": model.name,
    }


def _print(report: dict[str, Any]) -> None:
    def with_range(name: str) -> str:
        low, high = report[f"{name}_range"]
        return f"{report[name]:.1f} tok/s (median; {low:.1f} to {high:.1f})"

    print(f"{report['model']}, sparsity {report['sparsity']}, {report['threads'] or 1} threads")
    print(f"prompt of {report['prompt_tokens']}: {with_range('prompt_tok_s')}")
    print(f"generation of {report['generated_tokens']}: {with_range('tok_s')}")
    print(
        f"{report['bytes_per_token'] / 1e6:.2f} MB read per token, {report['gb_s']:.2f} GB/s; "
        f"{report['active_share']:.1%} of neurons active; "
        f"{report['python_share']:.1%} of a step is Python's"
    )
    if report["bandwidth_share"] is not None:
        print(
            f"read bandwidth measured beside it {report['read_bandwidth_gb_s']:.1f} GB/s: "
            f"{report['bandwidth_share']:.0%} of it used"
        )
