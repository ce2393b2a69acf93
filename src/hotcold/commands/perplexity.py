"""Measures how well a model predicts a text, every token judged by the sparsity mode's decode rule."""

import argparse
import time
from typing import Any

import numpy as np

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.engine import scoring

#: Window of long-context models, as is usual for this measurement.
_DEFAULT_CONTEXT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count, seed = parser.add_argument, options.whole_number(1), options.whole_number(0)
    add("-f", "--file", type=options.file_path, required=True, metavar="TEXT", help="the text, UTF-8")
    add("--chunks", type=count, metavar="N", help="score the first N windows (default: all)")
    compare = "score this sparsity mode too, and report how far --sparsity is from it"
    add("--compare", choices=("off", "exact", "predicted"), metavar="MODE", help=compare)
    add("--seed", type=seed, default=0, metavar="N", help="of the bootstrap (0)")
    options.add_model_options(parser)
    options.add_json_option(parser)
    parser.epilog = (
        "The text is encoded once and cut into consecutive windows of -c tokens (default: the model's "
        f"context, {_DEFAULT_CONTEXT} at most), each begun by BOS; an incomplete last one is dropped."
    )


def run(args: argparse.Namespace) -> int:
    text = options.read_text(args.file)
    model = options.load_model(args, default_context=_DEFAULT_CONTEXT)
    ids = model.tokenizer.encode(text, add_bos=False)
    windows = scoring.cut_windows(ids, model.context, model.tokenizer.bos_id)[: args.chunks]
    scorer = scoring.Scorer(model)
    base = scoring.Scorer(model.with_sparsity(args.compare)) if args.compare else None
    start = time.perf_counter()
    parts: list[Any] = []
    with progress("windows") as advance:
        for done, window in enumerate(windows, 1):
            parts.append(scoring.compare(scorer, base, window) if base else scoring.score(scorer, window))
            advance(done, len(windows))
    divergence = scoring.join(parts) if base else None
    nll = divergence.nll if divergence else np.concatenate(parts)
    seconds, figures = time.perf_counter() - start, scorer.figures
    report = {
        "ppl": scoring.perplexity(nll), "ppl_se": scoring.perplexity_error(nll) if len(nll) > 1 else None,
        "nll": float(nll.mean()), "tokens": len(nll), "chunks": len(windows),
        "active_share": figures.active_share, "active_share_by_layer": figures.active_share_by_layer,
        "tok_s": len(nll) / seconds,
    } | options.facts(model)  # fmt: skip
    if divergence is not None:
        report["compare"] = {"sparsity": args.compare, **divergence.summary(args.seed), "seed": args.seed}
    _print(report)
    return options.end(args, report)


def _print(report: dict[str, Any]) -> None:
    print(f"perplexity {report['ppl']:.4f} +- {report['ppl_se'] or 0:.4f}", end=" ")
    how = "(windows of {context}: {chunks}), sparsity {sparsity}, {tok_s:.0f} tok/s".format(**report)
    print(f"over {report['tokens']} tokens {how}")
    shares = " ".join(f"{share:.3f}" for share in report["active_share_by_layer"])
    print(f"neurons active: {report['active_share']:.4f}; by layer: {shares}")
    if compare := report.get("compare"):
        ratio = "ratio {ppl_ratio:.5f} [{ppl_ratio_low:.5f}, {ppl_ratio_high:.5f}]".format(**compare)
        base = "against {sparsity} (perplexity {ppl:.4f})".format(**compare)
        print(f"{base}: {ratio} (95 %, paired bootstrap)")
        kl = "KL divergence mean {kl_mean:.3g}, P99 {kl_p99:.3g} nats".format(**compare)
        print(f"{kl}; same most likely token {compare['top1_agreement']:.2%}")
