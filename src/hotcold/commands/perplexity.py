"""Measures how well a model predicts a text. Every token is computed as in decoding."""

import argparse
import time
from typing import Any

import numpy as np

from hotcold.commands import control_tokens, options
from hotcold.commands.progress import progress
from hotcold.tasks import scoring
from hotcold.tasks.windows import text_windows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", type=options.file_path, required=True, metavar="TEXT", help="file of text, UTF-8"
    )
    parser.add_argument(
        "--chunks",
        type=options.whole_number(1),
        metavar="N",
        help="score the first N windows (default: all)",
    )
    parser.add_argument(
        "--compare",
        choices=("off", "exact", "predicted"),
        metavar="MODE",
        help="score this sparsity mode, too, and report how much --sparsity differs from it",
    )
    parser.add_argument(
        "--seed",
        type=options.whole_number(0),
        default=0,
        metavar="N",
        help="seed of the bootstrap (default: 0)",
    )
    options.add_model_options(parser, context=options.TEXT_WINDOW)
    control_tokens.add_option(parser)
    options.add_json_option(parser)
    parser.epilog = (
        "The text is encoded once and cut into consecutive windows of -c tokens (default: the model's "
        f"context, {options.TEXT_WINDOW} at most). Each window begins with BOS if the model's file asks for "
        "it; an incomplete last window is dropped."
    )


def run(args: argparse.Namespace) -> int:
    text = options.read_text(args.file)
    session = options.load_session(
        args, default_context=options.TEXT_WINDOW, second_sparsity=args.compare, draft_max=0
    )
    model = session.model
    windows = text_windows(model.tokenizer, text, model.context, special=args.special)[: args.chunks]
    control_tokens.note_names(args, model.tokenizer, text, str(args.file))
    options.note_left_out(model.tokenizer, text)
    scorer = scoring.Scorer(session)
    base = scoring.Scorer(model.session(args.compare)) if args.compare else None
    start = time.perf_counter()
    parts: list[Any] = []
    with progress("windows") as advance:
        for done, window in enumerate(windows, 1):
            parts.append(scoring.compare(scorer, base, window) if base else scoring.score(scorer, window))
            advance(done, len(windows))
    seconds = time.perf_counter() - start
    divergence = scoring.join(parts) if base else None
    nll = divergence.nll if divergence else np.concatenate(parts)
    report = {
        "ppl": scoring.perplexity(nll),
        "ppl_se": scoring.perplexity_error(nll) if len(nll) > 1 else None,
        "nll": float(nll.mean()),
        "tokens": len(nll),
        "chunks": len(windows),
        "active_share": scorer.figures.active_share,
        "active_share_by_layer": scorer.figures.active_share_by_layer,
        "tok_s": len(nll) / seconds,
        **options.facts(session),
    }
    if divergence is not None:
        report["compare"] = {"sparsity": args.compare, **divergence.summary(args.seed), "seed": args.seed}
    _print(report)
    return options.end(args, report)


def _print(report: dict[str, Any]) -> None:
    print(
        "perplexity {ppl:.4f}{error} over {tokens} tokens (windows of {context}: {chunks}), "
        "sparsity {sparsity}, {tok_s:.0f} tok/s".format(
            error="" if report["ppl_se"] is None else f" +- {report['ppl_se']:.4f}", **report
        )
    )
    shares = " ".join(f"{share:.3f}" for share in report["active_share_by_layer"])
    print(f"neurons active: {report['active_share']:.4f}; by layer: {shares}")
    compare = report.get("compare")
    if not compare:
        return
    if compare["ppl_ratio_low"] is None:
        interval = f"(no 95 % interval: it takes {scoring.LEAST_TOKENS} tokens or more)"
    else:
        interval = "[{ppl_ratio_low:.5f}, {ppl_ratio_high:.5f}] (95 %, paired bootstrap)".format(**compare)
    print("against {sparsity} (perplexity {ppl:.4f}): ratio {ppl_ratio:.5f}".format(**compare), interval)
    print(
        "KL divergence mean {kl_mean:.3g}, P99 {kl_p99:.3g} nats; "
        "same most likely token {top1_agreement:.2%}".format(**compare)
    )
