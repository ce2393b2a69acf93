"""Options that several commands share, named as in llama.cpp, and the end of a command."""

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
from hotcold.formats.files import output_file
from hotcold.hub import names as hub_names
from hotcold.hub.download import located
from hotcold.kernels import BACKENDS
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.kernels.numpy_tiles import PROMPT_MATHS
from hotcold.model.mixers.attention import CACHE_TYPES
from hotcold.runtime.named_templates import TEMPLATES, template_text
from hotcold.runtime.options import COLD_PROMPTS, DRAFT_MAX, SPARSITY_MODES
from hotcold.runtime.pooling import POOLINGS
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
TEXT_WINDOW = 512  #: default limit of positions of the windows into which commands cut a text
MODEL_HELP = "GGUF file, or hf.co/OWNER/NAME:QUANT of the Hugging Face hub (default: the built-in model)"


def whole_number(low: int, high: int = _LARGEST, special: str = "") -> Callable[[str], int]:
    """Returns a parser of integers in ``low..high``, whose error names the allowed values. ``special`` is a
    further value that the caller reads itself."""
    also = f", or {special}" if special else ""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}{also}")
        return value

    return parse


def threads(text: str) -> int | None:
    """Parses a number of threads; -1 means the same as no option."""
    return None if text == "-1" else whole_number(1, 1024, "-1")(text)


def context_size(text: str) -> int:
    """Parses a context size; 0 means all positions of the model."""
    return 0 if text == "0" else whole_number(2, special="0")(text)


def token_count(text: str) -> int:
    """Parses a limit of generated tokens; -1 means until the context is full."""
    return _LARGEST if text in ("-1", "-2") else whole_number(1, special="-1")(text)


def number(text: str) -> float:
    """Parses a finite number; the code that uses it checks its range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def logit_bias(text: str) -> tuple[int, float]:
    """Parses ``15043+1``, ``15043-0.5`` and ``15043-inf``: a token id and the bias of its logit."""
    match = re.fullmatch(r"([0-9]{1,10})([+-](?:[0-9]{1,9}(?:\.[0-9]{1,9})?)|-inf)", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a token id and a bias such as 15043+1 or 15043-inf"
        )
    return int(match[1]), float(match[2])


def byte_size(text: str) -> int:
    """Parses a size, as :func:`read_size` does."""
    try:
        return read_size(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def byte_sizes(text: str) -> int | tuple[int, ...]:
    """Parses one size, or several with commas between them."""
    sizes = tuple(byte_size(each.strip()) for each in text.split(","))
    return sizes if len(sizes) > 1 else sizes[0]


def file_path(text: str) -> Path:
    """Parses a path. Refuses the empty path, which would silently mean this folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path: name a file")
    return Path(text)


def add_output(parser: argparse._ActionsContainer, *flags: str, **settings: Any) -> None:
    """Adds an option or argument that names a file to write. :func:`check_outputs` reads its value."""
    name = parser.add_argument(*flags, type=file_path, **settings).dest
    parser.set_defaults(outputs=(*(parser.get_default("outputs") or ()), name))


def add_force(parser: argparse._ActionsContainer) -> None:
    """Adds ``--force``, which allows to replace the files of :func:`add_output`."""
    parser.add_argument("--force", action="store_true", help="replace output files that exist")


def check_outputs(args: argparse.Namespace) -> None:
    """Checks all files that a command will write, before its work and before downloads. UserError: a file
    exists and ``--force`` is missing, the command reads the file, or it cannot be written."""
    values = vars(args)
    names = values.get("outputs", ())
    inputs = [value for name, value in values.items() if name not in names and isinstance(value, Path)]
    outputs = [values[name] for name in names if values[name] is not None]
    for path in outputs:
        output_file(path, force=args.force, inputs=inputs)
    files = [path.resolve() for path in outputs]
    for i, path in enumerate(outputs):
        if files[i] in files[:i]:
            raise UserError(f"{printable(str(path), 4096)}: two outputs have this name: give two names")


def model_file(text: str) -> Path:
    """Parses a model: a path, or ``hf:OWNER/NAME/FILE.gguf``, whose form is checked at once."""
    path = file_path(text)
    if hub_names.is_hub_name(path):
        hub_name(text)
    return path


def _draft_file(text: str) -> Path:
    """Parses a draft model. Refuses a number, which llama.cpp takes as the number of draft tokens."""
    if text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a model file: --draft-max {text} limits the draft tokens"
        )
    return model_file(text)


def hub_name(text: str) -> hub_names.HubName:
    """Parses a name on the hub, with or without ``hf:``."""
    try:
        return hub_names.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local_model(model: Path | None) -> Path | None:
    """Returns the path of the given model. A model of the hub is first downloaded, with a progress bar,
    unless it is in the cache. None, the built-in model, stays None."""
    if model is None or not hub_names.is_hub_name(model):
        return model
    with progress(DOWNLOADING, in_bytes=True) as advance:
        return located(model, advance, lambda line: print_notes([line]))


def add_model(parser: argparse._ActionsContainer) -> None:
    """Adds the model as an argument and as ``-m``."""
    parser.add_argument(MODEL_ARGUMENT, nargs="?", type=model_file, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-m", "--model", type=model_file, metavar="FILE", help="the model, in place of MODEL")


def add_model_options(
    parser: argparse.ArgumentParser, *, sparsity: bool = True, context: int = 32768
) -> None:
    """Adds the model and the options of loading. ``context`` is the default limit of the context."""
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
        help="context size in tokens; 0: the largest of the model (default: the model's, at most "
        f"{context}, or less if memory is short)",
    )
    add_cache_options(add)
    add(
        "--backend",
        choices=BACKENDS,
        default="cpu",
        help="code that computes (default: cpu; reference: slow NumPy code for checks)",
    )
    if not sparsity:
        return
    add(
        "--prompt-math",
        choices=PROMPT_MATHS,
        help="how a processor with AMX computes prompts: with the bits of decoding (same), float weights as "
        "two BF16 halves (split), or all weights rounded to BF16 (fast) (default: same)",
    )
    add(
        "--sparsity",
        choices=SPARSITY_MODES,
        default="auto",
        help="which neurons are computed (default: auto; --verbose prints its choice)",
    )
    add(
        "--predictor",
        type=file_path,
        metavar="FILE",
        help="predictor file of hotcold fit-predictor (default: MODEL.predictor.gguf next to the model)",
    )
    add(
        "--ram-budget",
        type=byte_size,
        metavar="SIZE",
        help="for MoE models: RAM for weights, KV cache and buffers, such as 8GiB; experts that do not fit "
        "stay in the model's file and are read when a token needs them (default: all experts in "
        "memory, or as many as fit)",
    )
    _add_hybrid_options(parser)


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "draft tokens (speculative decoding), which change the speed, not the text"
    )
    add = group.add_argument
    add(
        "--draft-max",
        type=whole_number(0, DECODE_ROWS - 1),
        default=DRAFT_MAX,
        metavar="N",
        help="at most N draft tokens per sequence and step, fewer if that is faster; 0: none "
        f"(default: {DRAFT_MAX})",
    )
    add(
        "--draft",
        "-md",
        "--model-draft",
        type=_draft_file,
        metavar="FILE",
        help="smaller model with the same vocabulary, which drafts where prompt lookup finds nothing",
    )
    add("--no-draft", dest="draft_max", action="store_const", const=0, help="the same as --draft-max 0")


def add_pooling_option(add: Callable[..., Any]) -> None:
    """Adds ``--pooling`` with ``add``, the ``add_argument`` of a parser or group."""
    add(
        "--pooling",
        choices=POOLINGS,
        help="how the token vectors of a text become one: their mean, the last token's, or the first "
        "token's (cls) (default: as the model's file says)",
    )


def add_cache_options(add: Callable[..., Any]) -> None:
    """Adds the options of the KV cache with ``add``, the ``add_argument`` of a parser or group;
    :func:`cache_type` reads them."""
    types = tuple(CACHE_TYPES)
    add(
        "--cache-type",
        choices=types,
        help=f"type of the KV cache (default: {_CACHE_TYPE}; q8_0 takes half the memory of f16)",
    )
    # The options of llama.cpp; here keys and values have the same type.
    for short, long in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")):
        add(short, long, choices=types, help=argparse.SUPPRESS)


def cache_type(args: argparse.Namespace) -> str:
    """Returns the type of the KV cache. UserError: keys and values have different types."""
    both: str | None = args.cache_type
    default = both or _CACHE_TYPE
    keys, values = args.cache_type_k or default, args.cache_type_v or default
    if keys != values or keys != (both or keys):
        got = f"-ctk {keys} and -ctv {values}" if keys != values else f"--cache-type {both} and -ctk {keys}"
        raise UserError(f"{got}: keys and values must have the same type: give only --cache-type")
    return keys


def _add_hybrid_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU (it computes hot neurons while the CPU computes cold ones)")
    add = group.add_argument
    add_gpu_option(group)
    add(
        "--vram-budget",
        type=byte_sizes,
        metavar="SIZE",
        help="limit of GPU memory, such as 512MiB or 8GiB; a bare number is GiB (default: the free memory "
        "minus 1 GiB, or minus 1/8 if that is less); for several GPUs one size for all, or one for each: "
        "8GiB,4GiB",
    )
    add(
        "--cold-prompts",
        choices=COLD_PROMPTS,
        help="where the cold neurons of prompts are computed: on the CPU, or on the GPU, which reads their "
        "weights over the link in each step and needs them twice in main memory (default: auto, the faster "
        "of both by the figures of hotcold doctor, or cpu without figures)",
    )
    add(
        "--placement",
        type=file_path,
        metavar="FILE",
        help="placement file (.gpuidx) of hotcold plan, which says what the GPU computes (default: planned "
        "for the budget)",
    )
    # For checks: a backend that computes hot neurons in place of a GPU, and its threads.
    add("--hot-backend", choices=BACKENDS, help=argparse.SUPPRESS)
    add("--hot-threads", type=whole_number(1, 1024), help=argparse.SUPPRESS)


def add_gpu_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME|INDEX|off",
        help="part of a GPU's name, or its number in hotcold doctor; several with commas: 0,1; off: only "
        "the CPU (default: a discrete GPU, or an integrated one that was measured to be faster; never "
        "a software driver)",
    )


#: Begins the default in the help of a sampling option.
_ELSE = "default: the model file's, else"


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of sampling; :func:`sampling_given` reads them."""
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
        help="seed of the random numbers; -1: a random seed (default: -1)",
    )


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the chat template; :func:`chat_template` reads them."""
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
    """Returns the given template. UserError: it is not a template, or its file cannot be read."""
    if args.chat_template_file is not None:
        text = read_text(args.chat_template_file)
        return text if text.strip() else template_text(text)
    return None if args.chat_template is None else template_text(args.chat_template)


def add_plain_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plain",
        action="store_true",
        help="print plain text on a terminal, as in a pipe: no Markdown, no wrapping, no colours",
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
    """Returns the given options of :func:`add_sampling_options` as fields of ``SamplingParams``. UserError: a
    value is not allowed."""
    from hotcold.runtime.sampling import SamplingParams

    fields_given = {field: getattr(args, name) for name, field in _SAMPLING.items()}
    fields_given = {field: value for field, value in fields_given.items() if value is not None}
    if args.logit_bias:
        fields_given["logit_bias"] = dict(args.logit_bias)
    if args.seed >= 0:
        fields_given["seed"] = args.seed
    SamplingParams(**fields_given)
    return fields_given


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of :func:`add_model_options`, as options of loading."""
    settings = {
        "threads": args.threads,
        "context": args.ctx_size,
        "backend": args.backend,
        "cache_type": cache_type(args),
    }
    if "chat_template" in args:
        settings["chat_template"] = chat_template(args)
    if "pooling" in args:
        settings["pooling"] = args.pooling
    if "sparsity" in args:
        settings |= {
            "prompt_math": args.prompt_math,
            "cold_prompts": args.cold_prompts,
            "sparsity": args.sparsity,
            "predictor": args.predictor,
            "gpu": args.gpu,
            "placement": args.placement,
            "vram_budget": args.vram_budget,
            "ram_budget": args.ram_budget,
            "hot_backend": args.hot_backend,
            "hot_threads": args.hot_threads,
        }
    return settings


def draft_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of :func:`add_draft_options`, as options of loading."""
    return {"draft_max": args.draft_max, "draft": local_model(args.draft)}


def load_session(args: argparse.Namespace, **further: Any) -> "Session":
    """Loads the given model with a progress bar, opens a session of it, and prints its notes to stderr.
    ``further`` are further fields of :class:`~hotcold.runtime.options.AllOptions`."""
    from hotcold.runtime.loading import load

    if "draft_max" in args:
        further |= draft_options(args)
    path = local_model(args.model)
    with progress(LOADING, in_bytes=True) as advance:
        model = load(path, {**model_options(args), **further}, advance)
    session = model.session()
    print_notes_of(session, verbose=args.verbose)
    return session


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {printable(in_flags(note), 4096)}", file=sys.stderr)


def print_notes_of(model: "Session | ModelInfo | Setup", *, verbose: bool) -> None:
    """Prints the notes on how a model runs; its details only with ``--verbose``."""
    print_notes(note for note in model.notes if verbose or note not in model.details)


def is_piped() -> bool:
    """Returns whether standard input is open and not a terminal: a pipe or a file brings a text."""
    return not sys.stdin.closed and not sys.stdin.isatty()


def note_empty(text: str, path: Path | None) -> None:
    """Prints a note if a text is empty that was read from a file, or from standard input if there is none."""
    if not text:
        print_notes([f"{'standard input' if path is None else path} has no text: -p gives one"])


def note_left_out(tokenizer: "Tokenizer", *texts: str) -> None:
    """Prints a note on characters of a text that no token can spell."""
    if left_out := tokenizer.left_out(texts):
        print_notes([f"the model's vocabulary cannot spell {left_out} of the text, which are left out"])


def facts(session: "Session") -> dict[str, Any]:
    """Returns the facts on which figures depend: the model, how it ran, and the machine."""
    return asdict(Setup.from_session(session))


def end(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Prints the report if ``--json`` is given; returns the exit code 0."""
    if args.json:
        if "notes" in report:
            report = report | {"notes": [in_flags(note) for note in report["notes"]]}
        print(json.dumps(report, allow_nan=False))
    return 0
