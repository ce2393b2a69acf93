"""Counts how often each neuron fires, every token of a text evaluated by the decode rule.

Commands find a profile that lies beside the model as MODEL.profile.gguf."""

import argparse
import colorsys
import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold import __version__
from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf, printable
from hotcold.kernels.backend import SPARSE_ACTIVATIONS
from hotcold.model.config import Config
from hotcold.sparse.profiler import Firings, import_counts
from hotcold.sparse.profiles import Profile, write_profile

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 580, 40, 380  # of the picture's axes
_DECADES, _NAMED = 4, 16  # of the vertical axis; layers beside it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=options.file_path, metavar="TEXT", help="the text, UTF-8")
    source.add_argument(
        "--import",
        dest="counts_folder",
        type=options.file_path,
        metavar="DIR",
        help="folder with PowerInfer's counts, activation_0.pt and so on; no pickle in them is executed",
    )
    add("-o", "--output", type=options.new_file, required=True, metavar="FILE", help="the profile")
    add(
        "--picture",
        type=options.new_file,
        metavar="FILE",
        help="an SVG: how often the neurons of each layer fire, the most active first",
    )
    add(
        "--tokens",
        type=options.whole_number(1),
        metavar="N",
        help="With -f: sample N tokens spread over the text (default: all). With --import: number of tokens "
        "the counts cover (default: the largest count).",
    )
    options.add_model_options(parser, sparsity=False)
    options.add_json_option(parser)
    parser.epilog = "The text is cut into windows of -c tokens (512 at most), as by hotcold perplexity."


def run(args: argparse.Namespace) -> int:
    with open_gguf(args.model or model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        name, fingerprint = file.path.stem, file.fingerprint()
    if config.activation not in SPARSE_ACTIVATIONS:
        allowed = ", ".join(SPARSE_ACTIVATIONS)
        raise UserError(f"activation {config.activation} gives no zeros: {allowed} can be profiled")
    report: dict[str, Any] = {"model": name, "output": str(args.output), "model_fingerprint": fingerprint}
    figures: dict[str, list[float]] = {}
    if args.counts_folder:
        firing = import_counts(args.counts_folder, config.neurons, args.tokens)
        source = f"PowerInfer's counts, {args.counts_folder.resolve().name}"
    else:
        firings = _count(args, config, report)
        firing = firings.firing
        figures = firings.figures()
        source = f"{args.file.name}, {firings.tokens} tokens"
        report["tokens"] = firings.tokens
    columns = _skew(firing) | figures
    facts = {key: report[key] for key in ("model_fingerprint", "tokens") if key in report}
    write_profile(args.output, Profile(firing, source), {"version": __version__} | facts | columns)
    if args.picture:
        args.picture.write_text(_picture(name, firing), encoding="utf-8")
    print(printable(f"{name}: {source}", 80))
    _print(columns)
    if figures:
        print("overlap: of a token's neurons, fired for the last one too; in N: in N tokens")
    return options.end(args, report | {"source": source} | columns)


def _count(args: argparse.Namespace, config: Config, report: dict[str, Any]) -> Firings:
    """Runs the model over the text; adds to the report how it ran."""
    from hotcold.engine.scoring import Scorer
    from hotcold.engine.windows import evenly, text_windows

    text = options.read_text(args.file)
    firings = Firings(config.neurons)
    model = options.load_model(args, sparsity="exact", default_context=512)
    rows = model.limits.tokens
    session = model.session("exact", wrap=lambda ffns: firings.watch(model.backend, ffns, rows))
    report |= options.facts(session)
    windows = text_windows(model.tokenizer, text, model.context)
    if args.tokens is not None:
        windows = evenly(windows, max(1, args.tokens // model.context))
    scorer = Scorer(session)
    with progress("windows") as advance:
        for done, window in enumerate(windows, 1):
            firings.restart()
            for logits in scorer.logits(window):
                firings.step(len(logits))
            advance(done, len(windows))
    return firings


def _skew(firing: Sequence[npt.NDArray[Any]]) -> dict[str, list[float]]:
    """By layer, the mean share of neurons that fire, and the share of firings that the hottest fifth has."""
    hottest = [np.sort(each)[-(len(each) // 5) :].sum() / (each.sum() or 1) for each in firing]
    return {"active": [float(each.mean()) for each in firing], "hottest_fifth": [float(h) for h in hottest]}


def _print(columns: dict[str, list[float]]) -> None:
    titles = [name.replace("union_", "in ").replace("_", " ") for name in columns]
    widths = [max(7, len(title) + 2) for title in titles]
    print("layer" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    for layer, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{layer:5}" + "".join(f"{share:{width}.1%}" for share, width in zip(row, widths, strict=True)))


def _picture(name: str, firing: list[Any]) -> str:
    """An SVG with a line per layer on logarithmic axes, where a power law is straight."""
    widest = max(map(len, firing))
    centred = 'text-anchor="middle"'

    def text(x: float, y: float, words: str, more: str = centred) -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{html.escape(words)}</text>'

    def x_of(share: Any) -> Any:
        return _RIGHT + (_RIGHT - _LEFT) * np.log10(share) / np.log10(widest)

    def y_of(share: Any) -> Any:
        return _TOP + (_TOP - _BOTTOM) * np.log10(np.maximum(share, 10.0**-_DECADES)) / _DECADES

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_RIGHT + 100} {_BOTTOM + 60}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        text((_LEFT + _RIGHT) / 2, _TOP - 14, f"How often neurons fire: {name}"),
        text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, "neurons of the layer, the most active first"),
        text(-(_TOP + _BOTTOM) / 2, 16, "tokens for which one fires", centred + ' transform="rotate(-90)"'),
    ]
    for share in 10.0 ** np.arange(-_DECADES, 1):
        x, y = x_of(share), y_of(share)
        words = f"{100 * share:g} %"
        parts += [f'<path d="M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#ccc"/>', text(_LEFT - 38, y + 4, words)]
        if x >= _LEFT:
            parts += [f'<path d="M{x:.0f} {_TOP}V{_BOTTOM}" stroke="#ccc"/>', text(x, _BOTTOM + 20, words)]
    for i, shares in enumerate(firing):
        n = len(shares)
        step = -(-len(firing) // _NAMED)
        ranks = np.unique(np.append(np.geomspace(1, n, 60), np.linspace(n // 2, n, 30)).astype(int))
        points = zip(x_of(ranks / n), y_of(np.sort(shares)[::-1][ranks - 1]), strict=True)
        red, green, blue = (int(255 * c) for c in colorsys.hsv_to_rgb(0.65 * (1 - i / len(firing)), 1, 0.8))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = f"#{red:02x}{green:02x}{blue:02x}"
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if i % step == 0:
            parts.append(text(_RIGHT + 14, _TOP + 12 + 20 * i // step, f"layer {i}", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])
