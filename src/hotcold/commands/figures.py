"""Prints the figures of an answer in a line."""

import shutil
import sys
import textwrap

from hotcold.commands import options
from hotcold.commands.colours import quiet
from hotcold.engine.request import Request
from hotcold.runtime.counters import Figures
from hotcold.values import size


def print_figures(figures: list[str], *, plain: bool = False) -> None:
    """Prints figures on stderr. On a terminal, lines are broken only between figures, and letters are dim
    unless ``plain``."""
    if not sys.stderr.isatty():
        print(" | ".join(figures), file=sys.stderr)
        return
    whole = [figure.replace(" ", "\N{NO-BREAK SPACE}") for figure in figures]
    line = textwrap.fill("\N{NO-BREAK SPACE}| ".join(whole), shutil.get_terminal_size().columns)
    line = line.replace("\N{NO-BREAK SPACE}", " ")
    print(line if plain else quiet(line, sys.stderr), file=sys.stderr)


def disk_figures(figures: Figures) -> list[str]:
    """Returns the figures of reads of experts from the disk; empty if all experts are in memory."""
    share, nbytes = figures.expert_hit_share, figures.disk_bytes_per_token
    stalls, seconds = figures.stalls_per_token, figures.stall_s_per_token
    if share is None or nbytes is None or stalls is None or seconds is None:
        return []
    return [
        f"expert cache hit rate {share:.1%}",
        f"{size(int(nbytes))} from disk per token",
        f"{stalls:.1f} stalls per token, {seconds * 1e3:.1f} ms in all",
    ]


def short_figures(request: Request, figures: Figures) -> list[str]:
    """Returns the figures that end each answer: its tokens, their speed, and whether it was cut off."""
    n = len(request.output)
    speed = f", {figures.tok_s:.1f} tokens/s" if figures.tok_s else ""
    cancelled = ", interrupted" if request.finish_reason == "cancelled" else ""
    return [f"{n} token{'s' * (n != 1)}{speed}{cancelled}"]


def figures_of(request: Request, figures: Figures) -> list[str]:
    """Returns the figures of a request, without the ones that need a longer run."""
    parts = []
    if figures.prompt_tok_s:
        reused = f" ({request.reused} reused)" if request.reused else ""
        parts.append(f"prompt {len(request.job.prompt)} tokens{reused} {figures.prompt_tok_s:.1f} tok/s")
    if request.timings.ttft_s is not None:
        parts.append(f"first token {request.timings.ttft_s * 1e3:.1f} ms")
    if figures.tok_s and figures.params_per_token:
        parts.append(f"generation {len(request.output)} tokens {figures.tok_s:.1f} tok/s")
        parts.append(f"{figures.gb_s:.2f} GB/s read")
        if figures.active_share is not None and figures.active_share < 1:
            parts.append(f"{figures.active_share:.1%} of neurons active")
            parts.append(f"{options.scaled(figures.params_per_token)} parameters per token")
    parts += disk_figures(figures)
    if request.guessed:
        parts.append(f"{request.accepted} of {request.guessed} draft tokens accepted")
    if request.finish_reason == "cancelled":
        parts.append("interrupted")
    return parts
