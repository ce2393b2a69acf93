"""Measures how well a model predicts a text. Every token is computed as in decoding."""

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hotcold.commands import control_tokens, options
from hotcold.commands.progress import LOADING, progress
from hotcold.errors import UserError
from hotcold.tasks import scoring
from hotcold.tasks.windows import shared_windows, text_windows
from hotcold.values import printable

if TYPE_CHECKING:
    from hotcold.runtime.session import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--file", type=options.file_path, required=True, metavar="TEXT", help="UTF-8 text file"
    )
    parser.add_argument(
        "--chunks",
        type=options.whole_number(1),
        metavar="N",
        help="score the first N windows (default: all)",
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--compare",
        choices=("off", "exact", "predicted"),
        metavar="MODE",
        help="also score this sparsity mode, and report how much --sparsity differs from it",
    )
    compared.add_argument(
        "--compare-file",
        type=options.model_file,
        metavar="BASE",
        help="also score this file, and report how much -m, the candidate, differs from it: BASE is the "
        "more exact file, such as the one in F16, and all its neurons are computed",
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
        "it; an incomplete last window is dropped. A comparison is by token: KL(base || candidate) in nats, "
        "the ratio of perplexities, and how often both find the same token the most likely. Two files are "
        "in memory at the same time."
    )


def run(args: argparse.Namespace) -> int:
    text = options.read_text(args.file)
    session = options.load_session(
        args, default_context=options.TEXT_WINDOW, second_sparsity=args.compare, draft_max=0
    )
    math = session.model.backend.prompt_math
    if math != "same" and session.sparsity == "predicted":
        subjects = f"`prompt_math={math}` concerns prompts, predictors concern decoding"
        raise UserError(f"{subjects}: perplexity measures one of them; add `sparsity=off`")
    model, base_model = session.model, _base_model(args)
    if base_model is None:
        windows = text_windows(model.tokenizer, text, model.context, special=args.special)
    else:
        windows = shared_windows(model, base_model, text, special=args.special)
    windows = windows[: args.chunks]
    control_tokens.note_names(args, model.tokenizer, text, str(args.file))
    options.note_left_out(model.tokenizer, text)
    scorer, base = scoring.Scorer(session, prompt=math != "same"), None
    if args.compare or base_model:
        base = scoring.Scorer((base_model or model).session(args.compare or "off"))
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
        "active_share": scorer.figures.active_share or None,  # prompt rows are not counted
        "active_share_by_layer": scorer.figures.active_share_by_layer,
        "tok_s": len(nll) / seconds,
        **options.facts(session),
        "context": min(each.context for each in (model, base_model or model)),
    }
    _print(report)
    if divergence is not None:
        named = {} if base_model is None else {"base": base_model.path.name, "candidate": model.path.name}
        subject = "candidate {candidate} against base {base}" if named else f"against {args.compare}"
        print(*divergence.lines(printable(subject.format(**named)), args.seed), sep="\n")
        figures = divergence.summary(args.seed)
        report["compare"] = {**named, "sparsity": args.compare or "off", **figures, "seed": args.seed}
    return options.end(args, report)


def _base_model(args: argparse.Namespace) -> "LoadedModel | None":
    """Loads the file of ``--compare-file`` with the options of the candidate; None without this option."""
    if args.compare_file is None:
        return None
    from hotcold.runtime.loading import load

    path = options.local_model(args.compare_file)
    overrides = {"sparsity": "off", "predictor": None, "draft_max": 0, "default_context": options.TEXT_WINDOW}
    settings = options.model_options(args) | overrides
    if args.placement is not None:  # for the candidate's neurons, together with the options that need it
        settings |= {"placement": None, "hot_backend": None, "hot_threads": None}
    with progress(LOADING, in_bytes=True) as advance:
        return load(path, settings, advance)


def _print(report: dict[str, Any]) -> None:
    print(
        "perplexity {ppl:.4f}{error} over {tokens} tokens ({chunks} windows of {context}), "
        "sparsity {sparsity}, {tok_s:.0f} tok/s".format(
            error="" if report["ppl_se"] is None else f" +- {report['ppl_se']:.4f}", **report
        )
    )
    if report["active_share"]:
        shares = " ".join(f"{share:.3f}" for share in report["active_share_by_layer"])
        print(f"neurons active: {report['active_share']:.4f}; by layer: {shares}")
