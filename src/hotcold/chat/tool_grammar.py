"""Grammars of answers that may, or must, call tools: each call matches the schema of its tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotcold.chat.call_grammar import Terms, call_rules, content_term
from hotcold.chat.harmony_grammar import harmony_rules
from hotcold.chat.tool_formats import HARMONY, ToolFormat
from hotcold.engine.request import Grammar
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import read
from hotcold.grammar.schema_rewriting import Rewritten
from hotcold.values import shown

MOST_TOOLS = 128
#: Of one answer. Small models call the same tool again and again, where nothing ends that.
MOST_CALLS = 16
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parallel: bool,
    format: ToolFormat,
    token_ids: Mapping[str, int] | None = None,
    content: Grammar | None = None,
    *,
    open: bool = False,
) -> Grammar | None:
    """The grammar of an answer, None where it is free.

    ``tools`` are OpenAI's: ``{"type": "function", "function": {"name", "parameters"}}``. ``choice`` is
    ``none``; ``auto``: text, then perhaps calls; ``required``: calls only; or
    ``{"type": "function", "function": {"name": ...}}``: calls of that tool only. With ``parallel`` there may
    be several calls where the format has room for them. ``token_ids`` are the control tokens of the
    vocabulary by name: where one of them is in the format's texts it is that token; others may stand in free
    text. Text that is no call must match ``content``, where that is given: then there are no calls behind it.
    What of a tool's schema cannot be enforced is in the grammar's notes, or an error where the tool is
    ``strict``; ``open`` is as of :func:`~hotcold.grammar.schema_rewriting.rewritten`. GrammarError: a tool,
    its schema or the choice is not right."""
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
    terms = Terms(token_ids or {})
    free = choice == "auto"
    strict = {function.get("name") for function in map(_function, tools) if function.get("strict") is True}
    found = {name: _read(name, schema, name in strict, open) for name, schema in named.items()}
    named = {name: each.schema for name, each in found.items()}
    notes = [f"tool {shown(name)}: {note}" for name, each in found.items() for note in each.notes]
    if free and content is not None:
        notes += content.notes
    if format is HARMONY:
        lines = harmony_rules(terms, named, free=free, content=content)
    else:
        several = parallel and format.between is not None
        lines = _rules(terms, named, several, format, free=free, content=content)
    return Grammar("lark", "\n".join([*lines, *terms.lines]) + "\n", tuple(notes))


def framed(content: Grammar, format: ToolFormat, token_ids: Mapping[str, int]) -> Grammar:
    """The grammar of an answer without calls whose content must match another: the same one, but where
    content stands between marks."""
    if format is not HARMONY or content.kind in ("gbnf", "lark", "checked"):
        return content
    terms = Terms(token_ids)
    lines = harmony_rules(terms, {}, free=True, content=content)
    return Grammar("lark", "\n".join([*lines, *terms.lines]) + "\n", content.notes)


def _read(name: str, schema: object, strict: bool, open: bool) -> Rewritten:
    try:
        return read(schema, strict=strict, open=open)
    except GrammarError as error:
        raise GrammarError(f"the tool {shown(name)}: {error}") from None


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
        if isinstance(parameters, dict) and parameters and "type" not in parameters:
            parameters = {"type": "object", **parameters}
        named[name] = found = parameters or _NO_ARGUMENTS
        if not isinstance(found, dict) or found.get("type") != "object":
            raise GrammarError(f"the parameters of the tool {shown(name)} are no schema of type 'object'")
    return named


def _rules(
    terms: Terms,
    named: Mapping[str, object],
    several: bool,
    format: ToolFormat,
    *,
    free: bool,
    content: Grammar | None,
) -> list[str]:
    more = f" ({terms.literal(format.between or '')} call){{0,{MOST_CALLS - 1}}}" if several else ""
    calls = f"calls: call{more} {terms.literal(format.after)}"
    begin = f"{terms.literal(format.before)} calls"
    if not free:
        start = [f"start: {begin}"]
    elif content is not None:
        start = [f"start: content | {begin}", f"content: {content_term(content)}"]
    else:
        start = _free(terms, format)
    beside_json = content is not None and format.at_start
    return [*start, calls, *call_rules(terms, format.call, named, beside_json)]


def _free(terms: Terms, format: ToolFormat) -> list[str]:
    """Text in which nothing marks calls, or calls from the mark on. The lexemes are such that any text
    can be read in one way. Between its parts there may be control tokens, which are no text: a model may
    have some for its thinking."""
    before, marker = format.before, format.marker
    rest = terms.literal(before.removeprefix(marker))
    silent = terms.other_tokens(format.tokens)
    parts = f"(FREE? <[{silent}]>)*" if silent else ""
    options = [f"{parts} FREE?"]
    excluded = "".join(f" & ~/(?s:.*){terms.escaped(mark)}(?s:.*)/" for mark in format.marks)
    if format.at_start:
        options.append(f"{terms.literal(before)} calls")
        excluded += r" & ~/\s*\{(?s:.*)/"  # it would be a call
    if terms.is_token(marker):
        options.append(f"{parts} FREE? {terms.literal(marker)} {rest} calls")
    else:
        options.append(f"{parts} MARKED {rest} calls")
        terms.lines += [f"MARKED: PART {terms.quoted(marker)}", f"PART: /(?s:.*)/{excluded}"]
    return [f"start: {' | '.join(options)}", f"FREE: /(?s:.+)/{excluded}"]
