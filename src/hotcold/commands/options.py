"""Flags that several verbs share, each defined once. Names follow llama.cpp's."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotcold.commands.progress import bytes_progress

if TYPE_CHECKING:
    from hotcold.engine.loading import LoadedModel
    from hotcold.engine.sampler import SamplingParams

SPARSITY_MODES = ("auto", "exact", "predicted", "off")
_LARGEST = 2**31 - 1


def whole_number(low: int, high: int = _LARGEST) -> Callable[[str], int]:
    """A parser of integers in ``low..high`` whose error names what is allowed."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def number(text: str) -> float:
    """A parser of finite numbers; what range makes sense is for those who use them to say."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", type=Path, metavar="FILE", help="GGUF file (default: built in)")
    group.add_argument(
        "-t", "--threads", type=whole_number(1, 1024), metavar="N", help="default: the cores we may use"
    )
    group.add_argument(
        "-c", "--ctx-size", type=whole_number(2), metavar="N",
        help="positions of the context (default: the model's, 4096 at most)",
    )  # fmt: skip
    group.add_argument(
        "--sparsity", choices=SPARSITY_MODES, default="auto",
        help="which neurons are computed (default: auto, which says what it chose)",
    )  # fmt: skip
    group.add_argument(
        "--backend", choices=("cpu", "reference"), default="cpu", help="reference is NumPy: slow, for checks"
    )


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    group.add_argument("-f", "--file", type=Path, metavar="FILE", help="file with the text to continue")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=number, default=0.8, metavar="X", help="temperature; 0 is greedy (0.8)")
    group.add_argument("--top-k", type=whole_number(0), default=40, metavar="N", help="0 is all (40)")
    group.add_argument("--top-p", type=number, default=0.95, metavar="P", help="1 is all (0.95)")
    group.add_argument("--min-p", type=number, default=0.05, metavar="P", help="0 is all (0.05)")
    group.add_argument("--repeat-penalty", type=number, default=1.0, metavar="X", help="1 is none (1.0)")
    seed = whole_number(-1, 2**63 - 1)
    group.add_argument("--seed", type=seed, default=-1, metavar="N", help="-1 is random (-1)")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="end stdout with a line of JSON")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises ValueError where a value is out of range."""
    from hotcold.engine.sampler import SamplingParams

    seed: dict[str, Any] = {} if args.seed < 0 else {"seed": args.seed}
    return SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        repeat_penalty=args.repeat_penalty, **seed,
    )  # fmt: skip


def read_text(path: Path) -> str:
    """A UTF-8 text file as it is.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 text: byte {byte:#04x} at {error.start}") from None


def read_prompt(args: argparse.Namespace) -> str:
    """The text of ``-p`` or ``-f``, or of standard input for ``-p -``; a file's last line feed is dropped."""
    if args.file is not None:
        return read_text(args.file).removesuffix("\n")
    if args.prompt == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text: bad byte at {error.start}") from None
    return args.prompt or ""


def load_model(args: argparse.Namespace, *, context_limit: int | None = None) -> LoadedModel:
    """Loads the model that the flags name, with a progress bar, and prints its notes to stderr.

    ``context_limit`` lowers the default context; ``-c`` stands above it.
    """
    from hotcold.engine.loading import LoadOptions, load

    options = LoadOptions(
        sparsity=args.sparsity, threads=args.threads, context=args.ctx_size, backend=args.backend
    )
    if context_limit is not None:
        options.default_context = context_limit
    with bytes_progress("loading") as progress:
        model = load(args.model, options, progress)
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    return model
