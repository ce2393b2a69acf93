"""The ``hotcold`` command: it finds the command, imports only its module, and turns errors into one line.

Exit codes: 0 done; 2 a mistake of the user, in a file or of the machine; 70 a defect of this program (both
give one line on stderr); 130 interrupted by Ctrl-C; 141 the reader of stdout has gone. ``python -X dev -m
hotcold`` shows the traceback behind the line."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from hotcold.commands.command_line import module_of, nearest, parser_of
from hotcold.errors import UserError
from hotcold.version import __version__

#: Each verb is a module ``hotcold.commands.<verb>`` with a docstring, which ``--help`` shows, and two
#: functions: ``add_arguments(parser)`` and ``run(args)``. ``run`` returns the exit code, or raises an error
#: of :data:`FOR_THE_USER` with a message for the user.
VERBS: tuple[tuple[str, str], ...] = (
    ("generate", "generate text from a prompt"),
    ("serve", "serve a model over HTTP, with OpenAI's API and others"),
    ("chat", "chat with a model in the terminal"),
    ("embed", "compute embeddings of texts"),
    ("info", "describe a model file"),
    ("tokenize", "turn text into token ids"),
    ("perplexity", "measure how well a model predicts a text"),
    ("bench", "measure prompt and generation speed"),
    ("fit-predictor", "make predictors for --sparsity predicted"),
    ("profile", "count how often each neuron is active on a text"),
    ("plan", "plan what a GPU computes, and predict the speed"),
    ("doctor", "describe this machine and measure its memory"),
    ("sparsify", "train a checkpoint until most of its neurons are zero"),
    ("convert", "convert a checkpoint to a GGUF file, or change a GGUF file"),
    ("imatrix", "make an importance matrix for hotcold quantize"),
    ("quantize", "quantise a GGUF file to smaller block types"),
    ("pull", "download a model from the Hugging Face hub"),
    ("list", "list downloaded models"),
    ("remove", "delete a downloaded model"),
)

#: Other names of verbs, as other programs have them.
ALIASES = {"run": "chat"}

#: Errors that a user can fix. All others are defects of this program.
FOR_THE_USER = (UserError, OSError, MemoryError)

EXIT_ERROR = 2
EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (``sys.argv[1:]`` when None) and returns the exit code."""
    _prepare_streams()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # not at interpreter exit: a full disk or a closed pipe is reported below
        return code
    except KeyboardInterrupt:
        _say("\nhotcold: interrupted" if sys.stderr.isatty() else "hotcold: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        if _is_for_the_user(error):
            _say(f"hotcold: error: {_one_line(error)}")
            return EXIT_ERROR
        got = f"{type(error).__name__}: {_one_line(error)}"
        _say(f"hotcold: internal error: {got} (please report it; `python -X dev -m hotcold` shows where)")
        return EXIT_DEFECT
    finally:
        _abandon_broken(sys.stdout)
        _abandon_broken(sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"hotcold {__version__}")
        return 0
    if argv[0] == "--completion":
        from hotcold.commands.completion import SHELLS, script

        if len(argv) != 2:
            raise UserError(f"--completion takes the name of a shell: {', '.join(SHELLS)}")
        print(script(argv[1], VERBS), end="")
        return 0
    names = [*(name for name, _ in VERBS), *ALIASES, "help"]
    if argv[0].startswith("-"):
        raise UserError(f"a command is needed before {argv[0]!r}: choose from {', '.join(names)}")
    _check_verb(argv[0], names)
    if argv[0] != "help":
        return _run_verb(ALIASES.get(argv[0], argv[0]), argv[1:])
    if len(argv) > 2:
        raise UserError(f"help describes one command, not {len(argv) - 1}: try hotcold help {argv[1]}")
    if len(argv) == 1 or argv[1] == "help":
        print(_overview())
        return 0
    _check_verb(argv[1], names)
    return _run_verb(ALIASES.get(argv[1], argv[1]), ["--help"])


def _check_verb(word: str, names: Sequence[str]) -> None:
    if word not in names:
        hint = nearest(word, names) or f"; commands: {', '.join(names)}"
        raise UserError(f"unknown command {word!r}{hint}")


def _run_verb(name: str, argv: list[str]) -> int:
    parser = parser_of(name)
    try:
        args = parser.parse_strictly(argv)
    except SystemExit as done:  # --help has printed
        return int(done.code or 0)
    for note in parser.notes:
        _say(f"note: {note}")
    from hotcold.commands.options import check_outputs

    check_outputs(args)
    code: int = module_of(name).run(args)
    return code


def _overview() -> str:
    lines = ["usage: hotcold COMMAND [options]", ""]
    lines += ["Runs large language models by computing only the neurons that a token needs.", ""]
    lines += ["commands:", *(f"  {name:<14}{summary}" for name, summary in VERBS)]
    lines += [*(f"  {name:<14}the same as {verb}" for name, verb in ALIASES.items()), ""]
    lines += ["options:", "  -h, --help    show this text", "  --version     show the version"]
    lines += ["  --completion bash|zsh|fish", "                print a script that completes commands", ""]
    lines += ["`hotcold help COMMAND` describes one command. Try first:", ""]
    lines += ['  hotcold generate -p "Once upon a time"']
    return "\n".join(lines)


def _is_for_the_user(error: BaseException | None) -> bool:
    """Returns whether a user can fix the error, or the error that ended another thread and caused this
    one."""
    if isinstance(error, RuntimeError):
        error = error.__cause__
    return isinstance(error, FOR_THE_USER)


def _one_line(error: Exception) -> str:
    from hotcold.commands.flags import in_flags
    from hotcold.values import printable

    text = in_flags(str(error))
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"out of memory: {text}" if text else "out of memory"
    text = " ".join(text.split()) or type(error).__name__
    return printable(text if len(text) <= 500 else f"{text[:350]} ... {text[-145:]}", 1000)


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    # A story's curly quote must not end the run on a terminal with a small character set.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr is full or gone: the exit code is all that is left
        print(line, file=sys.stderr)


def _abandon_broken(stream: TextIO) -> None:
    """Discards output that cannot be written, so that the interpreter's last flush does not fail again."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
