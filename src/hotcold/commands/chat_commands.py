"""Runs the commands of a conversation: lines that begin with a slash."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hotcold.chat.messages import TemplateValue, check_values
from hotcold.commands.chat_terminal import Terminal, say
from hotcold.errors import UserError
from hotcold.values import LARGEST, printable, whole


@dataclass(frozen=True)
class _Command:
    usage: str
    description: str
    run: Callable[[Terminal, str], None]  #: is called with the text after the name

    @property
    def takes_text(self) -> bool:
        """True if text may come after the name."""
        return " " in self.usage


def run_command(terminal: Terminal, line: str) -> bool:
    """Runs ``/name argument``; returns False for ``/quit``. UserError: the command is unknown, or cannot run
    now."""
    name, _, argument = line.strip().partition(" ")
    name, argument = name.removeprefix("/").lower(), argument.strip()
    if argument and (name in ("quit", "exit", "bye") or (name in COMMANDS and not COMMANDS[name].takes_text)):
        raise UserError(f"/{name} takes no argument: leave out {printable(argument, 40)!r}")
    if name in ("quit", "exit", "bye"):
        return False
    if name not in COMMANDS:
        close = get_close_matches(name, [*COMMANDS, "quit"], n=1)
        hint = f"; did you mean /{close[0]}?" if close else ": /help lists the commands"
        raise UserError(f"there is no command /{printable(name, 40)}{hint}")
    COMMANDS[name].run(terminal, argument)
    return True


def completions(line: str) -> list[str]:
    """Returns the commands that begin like a line; for commands that take a file, the matching files."""
    name, space, argument = line.partition(" ")
    if not space:
        return [each for each in (*(f"/{each}" for each in COMMANDS), "/quit") if each.startswith(name)]
    if name not in ("/save", "/load"):
        return []
    folder, _, start = argument.rpartition("/")
    try:
        paths = [*_path(f"{folder}/" if "/" in argument else ".").iterdir()]
    except (UserError, OSError):
        return []
    before = argument.removesuffix(start)
    candidates = (
        f"{before}{each.name}{'/' if each.is_dir() else ''}" for each in paths if each.name.startswith(start)
    )
    return sorted(candidates)


def _help(_terminal: Terminal, _argument: str) -> None:
    for command in COMMANDS.values():
        say(f"{command.usage:<18}{command.description}")
    say(f"{'/quit':<18}end the chat, as Ctrl-D does")
    say('A \\ at the end of a line, or """ before and after, make several lines one')
    say("message. Ctrl-C stops an answer, which stays as far as it came.")


def _clear(terminal: Terminal, _argument: str) -> None:
    terminal.conversation.clear()
    say("a new conversation begins")


def _undo(terminal: Terminal, _argument: str) -> None:
    text = terminal.conversation.undo()
    if text is None:
        raise UserError("there is no message to take back")
    say(f"taken back: {printable(text, 60)}")


def _retry(terminal: Terminal, _argument: str) -> None:
    terminal.again()


def _more(terminal: Terminal, _argument: str) -> None:
    terminal.more()


def _system(terminal: Terminal, argument: str) -> None:
    if argument:
        terminal.conversation.set_system("" if argument == "-" else argument)
    system = terminal.conversation.system
    say(f"system: {printable(system)}" if system else "there is no system message")


def _save(terminal: Terminal, argument: str) -> None:
    terminal.conversation.save(_path(argument))
    say(f"written: {printable(argument, 4096)}")


def _load(terminal: Terminal, argument: str) -> None:
    terminal.conversation.load(_path(argument))
    say(f"{len(terminal.conversation.messages)} messages")


def _stats(terminal: Terminal, _argument: str) -> None:
    terminal.stats()


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise UserError("name a file: /save FILE, /load FILE")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = printable(text.partition("/")[0], 40)
        raise UserError(
            f"{user} is not a user of this machine: give the whole path, or put ./ before it"
        ) from None


_NUMBERS = {
    "temp": "temperature",
    "top-p": "top_p",
    "min-p": "min_p",
    "repeat-penalty": "repeat_penalty",
    "top-k": "top_k",
    "repeat-last-n": "repeat_last_n",
    "seed": "seed",
}
_WHOLE = ("top-k", "repeat-last-n", "seed")


def _set(terminal: Terminal, argument: str) -> None:
    """Sets a value; ``/set`` alone shows all. The names are those of options and of values of the
    template."""
    name, _, text = argument.partition(" ")
    name, text = name.lstrip("-").replace("_", "-"), text.strip()
    if not name:
        for setting, field in _NUMBERS.items():
            value = getattr(terminal.params, field)
            say(f"{setting:<18}{'random' if value is None else value}")
        say(f"{'n':<18}{-1 if terminal.max_tokens == LARGEST else terminal.max_tokens}")
        for setting, value in terminal.values.items():
            say(f"{setting:<18}{value}")
    elif name in ("n", "n-predict"):
        terminal.max_tokens = LARGEST if text == "-1" else whole("n", _number(name, text, is_whole=True), 1)
    elif name == "seed" and text == "-1":
        terminal.set_params(seed=None)
    elif name in _NUMBERS:
        terminal.set_params(**{_NUMBERS[name]: _number(name, text, is_whole=name in _WHOLE)})
    else:
        _set_value(terminal, argument.partition(" ")[0], text)


def _set_value(terminal: Terminal, name: str, text: str) -> None:
    if name not in (terminal.chat.template or ""):
        allowed = ", ".join([*_NUMBERS, "n", "values that the model's chat template asks for"])
        raise UserError(f"there is no setting {printable(name, 40)!r}: allowed are {allowed}")
    words: dict[str, TemplateValue] = {"true": True, "false": False}
    terminal.values |= check_values({name: words.get(text.lower(), text)})


def _number(name: str, text: str, *, is_whole: bool) -> float | int:
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        value = math.nan
    if not -math.inf < value < math.inf:  # an integer may be too large for a float
        kind = "a whole number" if is_whole else "a number"
        raise UserError(f"{name} is {printable(text, 40)!r}: {kind} is needed, as in /set {name} 1")
    return value


COMMANDS = {
    "help": _Command("/help", "list the commands", _help),
    "clear": _Command("/clear", "begin a new conversation; the system message stays", _clear),
    "undo": _Command("/undo", "take back your last message and its answer", _undo),
    "retry": _Command("/retry", "generate another answer to your last message", _retry),
    "more": _Command("/more", "continue the last answer", _more),
    "system": _Command("/system [TEXT]", "show or set the system message; - removes it", _system),
    "save": _Command("/save FILE", "save the conversation as JSON", _save),
    "load": _Command("/load FILE", "load a saved conversation", _load),
    "set": _Command("/set [NAME VALUE]", "show or change settings: temp, top-k, n, seed and more", _set),
    "stats": _Command("/stats", "show the speed of the last answer and the context in use", _stats),
}
