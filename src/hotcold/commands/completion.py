"""Scripts that let a shell complete commands, options and their choices: ``hotcold --completion bash``."""

import argparse
from collections.abc import Sequence
from shlex import quote

from hotcold.commands.command_line import nearest, parser_of
from hotcold.errors import UserError

SHELLS = ("bash", "zsh", "fish")
_ALWAYS = ("--help", "--version")

#: Completes a word from the options and choices of the command, else as the name of a file.
_BASH = """\
_hotcold() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words= found
    if [[ $COMP_CWORD == 1 ]]; then
        words={verbs}
    else
        case "${{COMP_WORDS[1]}} $before" in
{choices}
        *)  [[ $word != -* ]] || case "${{COMP_WORDS[1]}}" in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <(compgen -W "$words" -- "$word")
}}
complete -o default -F _hotcold hotcold
"""


def script(shell: str, verbs: Sequence[tuple[str, str]]) -> str:
    """Returns the script for a shell; ``verbs`` are names with a line about each. UserError: another
    shell."""
    if shell not in SHELLS:
        raise UserError(f"--completion {shell}{nearest(shell, SHELLS)}: choose from {', '.join(SHELLS)}")
    if shell == "fish":
        return _fish(verbs)
    first = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return first + _bash(verbs)


def _bash(verbs: Sequence[tuple[str, str]]) -> str:
    choices, options = [], []
    for verb, _ in verbs:
        actions = shown_actions(parser_of(verb))
        names = [name for action in actions for name in action.option_strings if name.startswith("--")]
        options.append(f"            {verb}) words={quote(' '.join(names))} ;;")
        for action in actions:
            if action.choices and action.option_strings:
                known = quote(" ".join(map(str, action.choices)))
                cases = "|".join(f'"{verb} {name}"' for name in action.option_strings)
                choices.append(f"        {cases}) words={known} ;;")
    names = [*(name for name, _ in verbs), *_ALWAYS]
    return _BASH.format(verbs=quote(" ".join(names)), choices="\n".join(choices), options="\n".join(options))


def _fish(verbs: Sequence[tuple[str, str]]) -> str:
    lines = []
    for verb, summary in verbs:
        lines.append(f"complete -c hotcold -n __fish_use_subcommand -f -a {verb} -d {_fish_text(summary)}")
    for verb, _ in verbs:
        parser = parser_of(verb)
        for action in shown_actions(parser):
            words = [f"complete -c hotcold -n '__fish_seen_subcommand_from {verb}'"]
            for name in action.option_strings:
                kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
                words.append(f"{kind} {name.lstrip('-')}")
            if len(words) == 1:
                continue
            if action.choices:
                words.append(f"-x -a {_fish_text(' '.join(map(str, action.choices)))}")
            elif action.nargs != 0:
                words.append("-r")
            words.append(f"-d {_fish_text(help_of(parser, action))}")
            lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def shown_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the options and arguments that ``--help`` shows."""
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns the help of an option in one line, with its default filled in."""
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
