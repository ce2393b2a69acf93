"""Continues a text. The text goes to stdout as it is written, one line of figures to stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from hotcold.commands import options

if TYPE_CHECKING:
    from hotcold.engine.engine import Engine
    from hotcold.engine.loading import LoadedModel
    from hotcold.engine.request import Request
    from hotcold.engine.statistics import Figures

_EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prompt_options(parser)
    parser.add_argument(
        "-n", "--n-predict", type=options.whole_number(1), default=200, metavar="N", help="tokens (200)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not let the model end the text")
    options.add_model_options(parser)
    options.add_sampling_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from hotcold.engine.engine import Engine
    from hotcold.engine.request import Request
    from hotcold.engine.statistics import Figures

    params = options.sampling_params(args)
    prompt = options.read_prompt(args)
    model = options.load_model(args)
    ids = model.tokenizer.encode(prompt)
    request = Request(ids, params, max_tokens=args.n_predict, ignore_eos=args.ignore_eos)
    engine = Engine(model)
    engine.check(request)
    if not args.json:
        _write(prompt)
    text, interrupted = _generate(engine, request, echo=not args.json)
    figures = Figures.of(model.counters, model.footprint)
    if not args.json:
        _write("\n")
    if request.context_full:
        _say(f"note: stopped at the end of the context, {model.context} positions (see -c)")
    _say(_line(request, figures, model))
    if args.json:
        print(json.dumps(_report(text, request, figures, model)))
    return _EXIT_INTERRUPTED if interrupted else 0


def _generate(engine: Engine, request: Request, *, echo: bool) -> tuple[str, bool]:
    """The continuation, and whether Ctrl-C ended it."""
    from hotcold.engine.llm import TextStream

    stream = TextStream(request, engine.model.tokenizer)
    pieces: list[str] = []

    def take() -> None:
        pieces.append(stream.take())
        if echo and pieces[-1]:
            _write(pieces[-1])

    engine.add(request)
    try:
        while not request.finished:
            engine.step()
            take()
    except KeyboardInterrupt:
        engine.abort(request)
        take()
    return "".join(pieces), request.finish_reason == "cancelled"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr)


def _line(request: Request, figures: Figures, model: LoadedModel) -> str:
    """One line of figures; those that a run too short does not have are left out."""
    parts = [f"{model.name}", f"sparsity {model.sparsity}"]
    if figures.prompt_tok_s:
        parts.append(f"prompt {len(request.prompt)} tokens {figures.prompt_tok_s:.1f} tok/s")
    if request.timings.ttft_s is not None:
        parts.append(f"first token {request.timings.ttft_s * 1e3:.1f} ms")
    if figures.tok_s:
        parts.append(f"generation {len(request.output)} tokens {figures.tok_s:.1f} tok/s")
        parts.append(f"{figures.gb_s:.2f} GB/s read")
        parts.append(f"{figures.active_share:.1%} of neurons active")
        parts.append(f"{_count(figures.params_per_token)} parameters per token")
    if request.finish_reason == "cancelled":
        parts.append("interrupted")
    return " | ".join(parts)


def _count(number: float | None) -> str:
    value = number or 0.0
    for unit in ("", "K", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def _report(text: str, request: Request, figures: Figures, model: LoadedModel) -> dict[str, Any]:
    return {
        "text": text,
        "ids": request.output,
        "finish_reason": request.finish_reason,
        "context_full": request.context_full,
        "prompt_tokens": len(request.prompt),
        "generated_tokens": len(request.output),
        "prompt_tok_s": figures.prompt_tok_s,
        "tok_s": figures.tok_s,
        "ttft_s": request.timings.ttft_s,
        "gb_s": figures.gb_s,
        "bytes_per_token": figures.bytes_per_token,
        "active_share": figures.active_share,
        "active_share_by_layer": figures.active_by_layer,
        "params_per_token": figures.params_per_token,
        "sparsity": model.sparsity,
        "notes": model.notes,
        "seed": request.seed,
        "threads": model.threads,
        "context": model.context,
        "model": model.name,
    }
