"""Options that several verbs share, named as in llama.cpp, and the end of a command."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotcold.commands.command_line import MODEL_ARGUMENT
from hotcold.commands.flags import in_flags
from hotcold.commands.progress import DOWNLOADING, LOADING, progress
from hotcold.errors import UserError
from hotcold.hub import names as hub_names
from hotcold.hub.download import located
from hotcold.kernels import BACKENDS
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.kernels.numpy_tiles import PROMPT_MATHS
from hotcold.model.mixers.attention import CACHE_TYPES
from hotcold.runtime.named_templates import TEMPLATES, template_text
from hotcold.runtime.options import DRAFT_MAX, SPARSITY_MODES
from hotcold.runtime.pooling import POOLINGS
from hotcold.tasks import texts as files
from hotcold.tasks.reports import Setup
from hotcold.tasks.texts import read_text as read_text
from hotcold.values import printable, read_size
from hotcold.values import scaled as scaled
from hotcold.values import size as size

if TYPE_CHECKING:
    from hotcold.hosting.state import ModelInfo
    from hotcold.runtime.session import Session
    from hotcold.tokenizer.tokenizer import Tokenizer

_LARGEST = 2**31 - 1
_CACHE_TYPE = "f16"
TEXT_WINDOW = 512  #: the most positions of a window, where a command cuts a text into some and no -c is given
MODEL_HELP = "GGUF file, or hf.co/OWNER/NAME:QUANT of the Hugging Face hub (default: the built-in model)"


def whole_number(low: int, high: int = _LARGEST) -> Callable[[str], int]:
    """A parser of integers in ``low..high``, whose error names the values allowed."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def threads(text: str) -> int | None:
    """A parser of thread counts; -1 means the same as no option."""
    return None if text == "-1" else whole_number(1, 1024)(text)


def context_size(text: str) -> int:
    """A parser of context sizes; 0 means all positions of the model."""
    return 0 if text == "0" else whole_number(2)(text)


def token_count(text: str) -> int:
    """A parser of limits of generated tokens; -1 means as many as there is room for."""
    return _LARGEST if text in ("-1", "-2") else whole_number(1)(text)


def number(text: str) -> float:
    """A parser of finite numbers; the code that uses a number checks its range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def logit_bias(text: str) -> tuple[int, float]:
    """A parser of ``15043+1``, ``15043-0.5`` and ``15043-inf``: a token id and what is added to its logit."""
    found = re.fullmatch(r"([0-9]{1,10})([+-](?:[0-9]{1,9}(?:\.[0-9]{1,9})?)|-inf)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a token id and a bias such as 15043+1 or 15043-inf"
        )
    return int(found[1]), float(found[2])


def byte_size(text: str) -> int:
    """A parser of sizes, as :func:`read_size` reads them."""
    try:
        return read_size(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def byte_sizes(text: str) -> int | tuple[int, ...]:
    """A parser of one size, or of several with commas between them."""
    sizes = tuple(byte_size(each.strip()) for each in text.split(","))
    return sizes if len(sizes) > 1 else sizes[0]


def file_path(text: str) -> Path:
    """A parser of paths, which refuses the empty one: it would silently mean this folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path: name a file")
    return Path(text)


def new_file(text: str) -> Path:
    """A parser of paths to write to, which refuses an existing file before any work."""
    try:
        return files.new_file(file_path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def model_file(text: str) -> Path:
    """A parser of models: paths, and ``hf:OWNER/NAME/FILE.gguf``, whose form is checked at once."""
    path = file_path(text)
    if hub_names.is_hub_name(path):
        hub_name(text)
    return path


def _draft_file(text: str) -> Path:
    """A parser of model files. A number is how many tokens llama.cpp guesses."""
    if text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no model file: --draft-max {text} bounds the guesses")
    return model_file(text)


def hub_name(text: str) -> hub_names.HubName:
    """A parser of names on the hub, with or without ``hf:``."""
    try:
        return hub_names.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local_model(model: Path | None) -> Path | None:
    """Path of the given model. A model of the hub is downloaded first, with a progress bar, unless it is in
    the cache. None, the built-in model, stays None."""
    if model is None or not hub_names.is_hub_name(model):
        return model
    with progress(DOWNLOADING, in_bytes=True) as advance:
        return located(model, advance, lambda line: print_notes([line]))


def add_model(parser: argparse._ActionsContainer) -> None:
    """Adds the model, which is given as an argument or with ``-m``."""
    parser.add_argument(MODEL_ARGUMENT, nargs="?", type=model_file, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-m", "--model", type=model_file, metavar="FILE", help="the model, as MODEL gives it")


def add_model_options(
    parser: argparse.ArgumentParser, *, sparsity: bool = True, context: int = 32768
) -> None:
    """Adds the model and the options of loading. ``context``: the most tokens of a sequence where no size is
    given."""
    add_model(parser)
    add = parser.add_argument_group("model").add_argument
    add("-v", "--verbose", action="store_true", help="print all notes, and all figures after an answer")
    add(
        "-t",
        "--threads",
        type=threads,
        metavar="N",
        help="number of threads (default, and -1: one per physical core that this process may use)",
    )
    add(
        "-c",
        "--ctx-size",
        type=context_size,
        metavar="N",
        help=f"context size in tokens; 0: all that the model has (default: the model's, at most {context}, "
        "as far as memory allows)",
    )
    add_cache_options(add)
    add(
        "--backend",
        choices=BACKENDS,
        default="cpu",
        help="code that computes (default: cpu; reference is plain NumPy, slow, for checks)",
    )
    add(
        "--prompt-math",
        choices=PROMPT_MATHS,
        help="how a processor with AMX computes prompts: with the bits of decoding (same), float weights as "
        "two BF16 halves (split), or all weights rounded to BF16 (fast) (default: same)",
    )
    if not sparsity:
        return
    add(
        "--sparsity",
        choices=SPARSITY_MODES,
        default="auto",
        help="which neurons are computed (default: auto, which prints its choice)",
    )
    add(
        "--predictor",
        type=file_path,
        metavar="FILE",
        help="file of fit-predictor (default: MODEL.predictor.gguf beside the model)",
    )
    add(
        "--ram-budget",
        type=byte_size,
        metavar="SIZE",
        help="for models of experts: RAM that weights, KV cache and steps may take, such as 8GiB; experts "
        "that do not fit stay in the model's file and are read when they are named (default: all in "
        "memory where they fit, else as many as do)",
    )
    _add_hybrid_options(parser)


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "guesses of the next tokens, which make no other text, only a faster one"
    )
    add = group.add_argument
    add(
        "--draft-max",
        type=whole_number(0, DECODE_ROWS - 1),
        default=DRAFT_MAX,
        metavar="N",
        help="the most tokens of a sequence that a step verifies, as long as they pay; 0: none "
        f"(default: {DRAFT_MAX})",
    )
    add(
        "--draft",
        "-md",
        "--model-draft",
        type=_draft_file,
        metavar="FILE",
        help="a smaller model with the same vocabulary, which guesses what is not looked up in the text",
    )
    add("--no-draft", dest="draft_max", action="store_const", const=0, help="the same as --draft-max 0")


def add_pooling_option(add: Callable[..., Any]) -> None:
    """``add`` is the parser's or group's ``add_argument``."""
    add(
        "--pooling",
        choices=POOLINGS,
        help="how a text's vectors become one: their mean, or the vector of the last or the first token "
        "(default: as the model's file names it)",
    )


def add_cache_options(add: Callable[..., Any]) -> None:
    """``add`` is the parser's or group's ``add_argument``; :func:`cache_type` reads what was given."""
    types = tuple(CACHE_TYPES)
    add(
        "--cache-type",
        choices=types,
        help=f"type of stored keys and values (default: {_CACHE_TYPE}; q8_0 takes half the memory of f16)",
    )
    # As llama.cpp has them; keys and values have one type here.
    for short, long in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")):
        add(short, long, choices=types, help=argparse.SUPPRESS)


def cache_type(args: argparse.Namespace) -> str:
    """The type of keys and values. UserError: two different types were given."""
    both: str | None = args.cache_type
    default = both or _CACHE_TYPE
    keys, values = args.cache_type_k or default, args.cache_type_v or default
    if keys != values or keys != (both or keys):
        seen = f"-ctk {keys} and -ctv {values}" if keys != values else f"--cache-type {both} and -ctk {keys}"
        raise UserError(f"{seen}: keys and values have one type today: give --cache-type alone")
    return keys


def _add_hybrid_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU, which computes hot neurons while the CPU computes cold ones")
    add = group.add_argument
    add_gpu_option(group)
    add(
        "--vram-budget",
        type=byte_sizes,
        metavar="SIZE",
        help="limit of GPU memory, such as 512MiB or 8GiB; a bare number is GiB (default: the free memory "
        "minus 1 GiB, or minus 1/8 if that is less); of several GPUs for each, or one size each: 8GiB,4GiB",
    )
    add(
        "--placement",
        type=file_path,
        metavar="FILE",
        help="what the GPU computes: a .gpuidx file of hotcold plan (default: as hotcold plan chooses for "
        "the budget)",
    )
    # For checks: a backend that computes hot neurons in place of a GPU, and its threads.
    add("--hot-backend", choices=BACKENDS, help=argparse.SUPPRESS)
    add("--hot-threads", type=whole_number(1, 1024), help=argparse.SUPPRESS)


def add_gpu_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME|INDEX|off",
        help="part of a GPU's name, or its number in hotcold doctor; several with commas: 0,1; off: only the "
        "CPU (default: a discrete card, or an integrated GPU that was measured to be faster; never software)",
    )


#: The beginning of a sampling option's default in its help.
_ELSE = "default: the model file's, else"


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of sampling; :func:`sampling_given` returns the given ones."""
    add = parser.add_argument_group("sampling").add_argument
    add(
        "--temp",
        "--temperature",
        type=number,
        metavar="X",
        help=f"temperature; 0 always takes the likeliest token ({_ELSE} 0.8)",
    )
    add(
        "--top-k",
        type=whole_number(0),
        metavar="N",
        help=f"keep the N likeliest tokens; 0 keeps all ({_ELSE} 40)",
    )
    add(
        "--top-p",
        type=number,
        metavar="P",
        help=f"keep the likeliest tokens whose probabilities add up to P; 1 keeps all ({_ELSE} 0.95)",
    )
    add(
        "--min-p",
        type=number,
        metavar="P",
        help=f"keep tokens at least P times as likely as the likeliest; 0 keeps all ({_ELSE} 0.05)",
    )
    add(
        "--repeat-penalty",
        type=number,
        metavar="X",
        help=f"make recent tokens less likely; 1 changes nothing ({_ELSE} 1)",
    )
    add(
        "--repeat-last-n",
        type=whole_number(-1),
        metavar="N",
        help=f"how many tokens count as recent; 0: none, -1: all ({_ELSE} 64)",
    )
    add(
        "--frequency-penalty",
        type=number,
        metavar="X",
        help="make a token less likely for each time that it was generated (default: 0)",
    )
    add(
        "--presence-penalty",
        type=number,
        metavar="X",
        help="make tokens that were generated less likely (default: 0)",
    )
    add(
        "-l",
        "--logit-bias",
        type=logit_bias,
        action="append",
        default=[],
        metavar="ID(+/-)BIAS",
        help="make a token likelier (15043+1) or less likely (15043-1), or forbid it (15043-inf); may be "
        "repeated",
    )
    add(
        "-s",
        "--seed",
        type=whole_number(-1, 2**63 - 1),
        default=-1,
        metavar="N",
        help="seed of the random numbers; -1 draws one (default: -1)",
    )


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the chat template; :func:`chat_template` returns the given one."""
    group = parser.add_argument_group("chat template").add_mutually_exclusive_group()
    group.add_argument(
        "--chat-template",
        metavar="NAME|TEXT",
        help=f"template to use instead of the model file's: Jinja source, or {', '.join(TEMPLATES)}",
    )
    group.add_argument(
        "--chat-template-file", type=file_path, metavar="FILE", help="file with such a template in Jinja"
    )


def chat_template(args: argparse.Namespace) -> str | None:
    """The given template. UserError: it is no template, or its file cannot be read."""
    if args.chat_template_file is not None:
        text = read_text(args.chat_template_file)
        return text if text.strip() else template_text(text)
    return None if args.chat_template is None else template_text(args.chat_template)


def add_plain_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain",
        action="store_true",
        help="print on a terminal as in a pipe: the text as it is, without Markdown, wrapping and colours",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end of stdout")


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The given options of :func:`add_sampling_options`, as fields of ``SamplingParams``. UserError: a value
    is not allowed."""
    from hotcold.runtime.sampling import SamplingParams

    found = {field: getattr(args, name) for name, field in _SAMPLING.items()}
    found = {field: value for field, value in found.items() if value is not None}
    if args.logit_bias:
        found["logit_bias"] = dict(args.logit_bias)
    if args.seed >= 0:
        found["seed"] = args.seed
    SamplingParams(**found)
    return found


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of :func:`add_model_options`, as options of loading."""
    found = {
        "threads": args.threads,
        "context": args.ctx_size,
        "backend": args.backend,
        "cache_type": cache_type(args),
        "prompt_math": args.prompt_math,
    }
    if "chat_template" in args:
        found["chat_template"] = chat_template(args)
    if "pooling" in args:
        found["pooling"] = args.pooling
    if "sparsity" in args:
        found |= {
            "sparsity": args.sparsity,
            "predictor": args.predictor,
            "gpu": args.gpu,
            "placement": args.placement,
            "vram_budget": args.vram_budget,
            "ram_budget": args.ram_budget,
            "hot_backend": args.hot_backend,
            "hot_threads": args.hot_threads,
        }
    return found


def draft_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`add_draft_options`, as options of loading."""
    return {"draft_max": args.draft_max, "draft": local_model(args.draft)}


def load_session(args: argparse.Namespace, **more: Any) -> "Session":
    """Loads the given model with a progress bar, opens a session of it, and prints its notes to stderr.
    ``more`` belongs to :class:`~hotcold.runtime.options.AllOptions`."""
    from hotcold.runtime.loading import load

    if "draft_max" in args:
        more |= draft_options(args)
    path = local_model(args.model)
    with progress(LOADING, in_bytes=True) as advance:
        model = load(path, {**model_options(args), **more}, advance)
    session = model.session()
    print_notes_of(session, verbose=args.verbose)
    return session


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {printable(in_flags(note), 4096)}", file=sys.stderr)


def print_notes_of(model: "Session | ModelInfo | Setup", *, verbose: bool) -> None:
    """Prints the notes on how a model runs, its details with ``--verbose`` alone."""
    print_notes(note for note in model.notes if verbose or note not in model.details)


def is_piped() -> bool:
    """True if standard input is open, and no terminal: a pipe or a file brings a text."""
    return not sys.stdin.closed and not sys.stdin.isatty()


def note_left_out(tokenizer: "Tokenizer", *texts: str) -> None:
    """Prints a note on characters of a text that no token can spell."""
    if left_out := tokenizer.left_out(texts):
        print_notes([f"no token of the model can spell {left_out} of the text: left out"])


def facts(session: "Session") -> dict[str, Any]:
    """The facts on which figures depend: the model, how it ran, and the machine."""
    return asdict(Setup.of(session))


def end(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Prints the report if ``--json`` is given; returns the exit code 0."""
    if args.json:
        if "notes" in report:
            report = report | {"notes": [in_flags(note) for note in report["notes"]]}
        print(json.dumps(report, allow_nan=False))
    return 0
