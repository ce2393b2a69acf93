"""Grammars of answers that may, or must, call tools: each call matches the schema of its tool."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hotcold.engine.grammar_error import GrammarError
from hotcold.engine.job import Grammar
from hotcold.engine.json_schema import check_schema_size, checked
from hotcold.formats.files import shown

MOST_TOOLS = 128
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallFormat(Protocol):
    """How a model writes calls; ``tool_calls.ToolFormat`` is one."""

    @property
    def before(self) -> str: ...
    @property
    def between(self) -> str | None: ...
    @property
    def after(self) -> str: ...
    @property
    def arguments_key(self) -> str: ...
    @property
    def marker(self) -> str: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def at_start(self) -> bool: ...


def tools_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parallel: bool,
    format: CallFormat,
    token_ids: Mapping[str, int] | None = None,
) -> Grammar | None:
    """The grammar of an answer, None where it is free.

    ``tools`` are OpenAI's: ``{"type": "function", "function": {"name", "parameters"}}``. ``choice`` is
    ``none``; ``auto``: text, then perhaps calls; ``required``: calls only; or
    ``{"type": "function", "function": {"name": ...}}``: calls of that tool only. With ``parallel`` there may
    be several calls where the format has room for them. ``token_ids`` are the control tokens of the
    vocabulary by name: where one of them is in the format's texts it is that token; others may stand in free
    text. GrammarError: a tool, its schema or the choice is not right."""
    named = _named(tools)
    if isinstance(choice, Mapping):
        name = _function(choice).get("name")
        if name not in named:
            raise GrammarError(f"tool_choice names {shown(name)}: the tools are {shown(list(named))}")
        named = {str(name): named[str(name)]}
    elif choice not in ("none", "auto", "required"):
        raise GrammarError(
            f"tool_choice is {shown(choice)}: allowed are none, auto, required, or a tool's name"
        )
    if choice == "none" or (choice == "auto" and not named):
        return None
    if not named:
        raise GrammarError(f"tool_choice is {shown(choice)}, but there are no tools")
    return Grammar("lark", _Lark(named, parallel, format, token_ids or {}).text(free=choice == "auto"))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise GrammarError(f"a tool is {shown(dict(tool))}: allowed is type 'function', with a function")
    return function


def _named(tools: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The schemas of the arguments, by the names of the tools."""
    if len(tools) > MOST_TOOLS:
        raise GrammarError(f"there are {len(tools)} tools: allowed are {MOST_TOOLS}")
    named: dict[str, object] = {}
    for function in map(_function, tools):
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise GrammarError(f"the name of a tool is {shown(name)}: a text is needed")
        if name in named:
            raise GrammarError(f"the tool {shown(name)} is there twice")
        parameters = function.get("parameters")
        named[name] = found = _NO_ARGUMENTS if parameters is None else parameters
        if not isinstance(found, dict) or found.get("type") != "object":
            raise GrammarError(f"the parameters of the tool {shown(name)} are no schema of type 'object'")
    return named


class _Lark:
    def __init__(
        self, named: Mapping[str, object], parallel: bool, format: CallFormat, token_ids: Mapping[str, int]
    ) -> None:
        self._named = named
        self._several = parallel and format.between is not None
        self._format = format
        #: the longest first, so that one which begins another does not hide it
        self._token_ids = dict(sorted(token_ids.items(), key=lambda each: -len(each[0])))

    def text(self, free: bool) -> str:
        format = self._format
        more = f" ({self._literal(format.between or '')} call)*" if self._several else ""
        lines = [f"calls: call{more} {self._literal(format.after)}"]
        if free:
            lines += self._free()
        else:
            lines.append(f"start: {self._literal(format.before)} calls")
        lines.append("call: " + " | ".join(f"call{i}" for i in range(len(self._named))))
        for i, (name, schema) in enumerate(self._named.items()):
            try:
                check_schema_size(schema)
                checked(schema)
            except GrammarError as error:
                raise GrammarError(f"the tool {shown(name)}: {error}") from None
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, {json.dumps(format.arguments_key)}: '
            lines.append(f'call{i}: {_quoted(head)} %json {json.dumps(schema)} "}}"')
        return "\n".join(lines) + "\n"

    def _free(self) -> list[str]:
        """Text in which nothing marks calls, or calls from the mark on. The lexemes are such that any text
        can be read in one way. Between its parts there may be control tokens, which are no text: a model may
        have some for its thinking."""
        before, marker = self._format.before, self._format.marker
        rest = self._literal(before.removeprefix(marker))
        silent = _ranges(id for name, id in self._token_ids.items() if name not in self._format.tokens)
        parts = f"(FREE? <[{silent}]>)*" if silent else ""
        options = [f"{parts} FREE?"]
        excluded = f" & ~/(?s:.*){_escaped(marker)}(?s:.*)/"
        if self._format.at_start:
            options.append(f"{self._literal(before)} calls")
            excluded += r" & ~/\s*\{(?s:.*)/"  # it would be a call
        if marker in self._token_ids:
            options.append(f"{parts} FREE? {self._literal(marker)} {rest} calls")
        else:
            options.append(f"{parts} MARKED {rest} calls")
        lines = [f"start: {' | '.join(options)}", f"FREE: /(?s:.+)/{excluded}"]
        if marker not in self._token_ids:
            lines += [f"MARKED: PART {_quoted(marker)}", f"PART: /(?s:.*)/{excluded}"]
        return lines

    def _literal(self, text: str) -> str:
        """A text, in which the names of control tokens are those tokens."""
        if not text:
            return ""
        for name, id in self._token_ids.items():
            if name and name in text:
                before, after = text.split(name, 1)
                return " ".join(filter(None, (self._literal(before), f"<[{id}]>", self._literal(after))))
        return _quoted(text)


def _ranges(ids: Iterable[int]) -> str:
    """``1-3,7``"""
    found: list[list[int]] = []
    for id in sorted(ids):
        if found and found[-1][1] == id - 1:
            found[-1][1] = id
        else:
            found.append([id, id])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in found)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)
