"""Counts how often each neuron fires, every token of a text evaluated by the decode rule.

Commands find a profile that lies beside the model as MODEL.profile.gguf."""

import argparse
import colorsys
import html
from typing import Any

import numpy as np

from hotcold import __version__
from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf, printable
from hotcold.kernels.backend import SPARSE_ACTIVATIONS
from hotcold.model.config import Config
from hotcold.sparse.placement import Profile, write_profile
from hotcold.sparse.profiler import Firings, import_counts

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 580, 40, 380  # of the picture's axes
_DECADES, _NAMED = 4, 16  # of the vertical axis; layers beside it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, source = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=options.file_path, metavar="TEXT", help="the text, UTF-8")
    what = "PowerInfer's counts, activation_0.pt and so on; no pickle in them is executed"
    source.add_argument("--import", dest="counts", type=options.file_path, metavar="DIR", help=what)
    add("-o", "--output", type=options.new_file, required=True, metavar="FILE", help="the profile")
    what = "an SVG: how often the neurons of each layer fire, the most active first"
    add("--picture", type=options.new_file, metavar="FILE", help=what)
    what = "evenly from the text (all); with --import, that were counted (the largest count)"
    add("--tokens", type=options.whole_number(1), metavar="N", help=what)
    options.add_model_options(parser, sparsity=False)
    options.add_json_option(parser)
    parser.epilog = "The text is cut into windows of -c tokens (512 at most), as by hotcold perplexity."


def run(args: argparse.Namespace) -> int:
    with open_gguf(args.model or model_path()) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        name, facts = file.path.stem, dict[str, Any](model_fingerprint=file.fingerprint())
    if (kind := config.activation) not in SPARSE_ACTIVATIONS:
        raise ValueError(f"activation {kind} gives no zeros: {', '.join(SPARSE_ACTIVATIONS)} can be profiled")
    report: dict[str, Any] = {"model": name, "output": str(args.output)}
    if args.counts:
        firing, more = import_counts(args.counts, config.neurons, args.tokens), {}
        source = f"PowerInfer's counts, {args.counts.resolve().name}"
    else:
        firings = _count(args, config, report)
        firing, source = firings.firing, f"{args.file.name}, {firings.tokens} tokens"
        more, facts["tokens"] = firings.figures(), firings.tokens
    hottest = [np.sort(each)[-(len(each) // 5) :].sum() / (each.sum() or 1) for each in firing]
    columns = {"active": [each.mean() for each in firing], "hottest_fifth": hottest, **more}
    write_profile(args.output, Profile(firing, source), {"version": __version__} | facts | columns)
    if args.picture:
        args.picture.write_text(_picture(name, firing), encoding="utf-8")
    print(printable(f"{name}: {source}", 80))
    titles = [name.replace("union_", "in ").replace("_", " ") for name in columns]
    widths = [max(7, len(title) + 2) for title in titles]
    print("layer" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{i:5}" + "".join(f"{share:{width}.1%}" for share, width in zip(row, widths, strict=True)))
    if more:
        print("overlap: of a token's neurons, fired for the last one too; in N: in N tokens")
    return options.end(args, report | facts | {"source": source} | columns)


def _count(args: argparse.Namespace, config: Config, report: dict[str, Any]) -> Firings:
    from hotcold.engine.scoring import Scorer, cut_windows

    text, firings = options.read_text(args.file), Firings(config.neurons)
    base = options.load_model(args, sparsity="exact", default_context=512)
    rows = base.transformer.batch.limits.tokens
    model = base.with_sparsity("exact", wrap=lambda ffns: firings.watch(base.backend, ffns, rows))
    report |= options.facts(model)
    windows = cut_windows(model.tokenizer.encode(text, add_bos=False), model.context, model.tokenizer.bos_id)
    wanted = len(windows) if args.tokens is None else max(1, args.tokens // model.context)
    windows, scorer = windows[:: max(1, len(windows) // wanted)][:wanted], Scorer(model)
    with progress("windows") as advance:
        for done, window in enumerate(windows, 1):
            firings.restart()
            for logits in scorer.logits(window):
                firings.step(len(logits))
            advance(done, len(windows))
    return firings


def _picture(name: str, firing: list[Any]) -> str:
    """An SVG with a line per layer on logarithmic axes, where a power law is straight."""
    widest, centred = max(map(len, firing)), 'text-anchor="middle"'

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
    ]  # fmt: skip
    for share in 10.0 ** np.arange(-_DECADES, 1):
        x, y, words = x_of(share), y_of(share), f"{100 * share:g} %"
        parts += [f'<path d="M{_LEFT} {y:.0f}H{_RIGHT}" stroke="#ccc"/>', text(_LEFT - 38, y + 4, words)]
        if x >= _LEFT:
            parts += [f'<path d="M{x:.0f} {_TOP}V{_BOTTOM}" stroke="#ccc"/>', text(x, _BOTTOM + 20, words)]
    for i, shares in enumerate(firing):
        n, step = len(shares), -(-len(firing) // _NAMED)
        ranks = np.unique(np.append(np.geomspace(1, n, 60), np.linspace(n // 2, n, 30)).astype(int))
        points = zip(x_of(ranks / n), y_of(np.sort(shares)[::-1][ranks - 1]), strict=True)
        red, green, blue = (int(255 * c) for c in colorsys.hsv_to_rgb(0.65 * (1 - i / len(firing)), 1, 0.8))
        line, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in points), f"#{red:02x}{green:02x}{blue:02x}"
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if i % step == 0:
            parts.append(text(_RIGHT + 14, _TOP + 12 + 20 * i // step, f"layer {i}", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])
