"""Grammars of answers that may, or must, call tools: each call matches the schema of its tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotcold.chat.call_forms import CallForms
from hotcold.chat.call_grammar import (
    argument_rules,
    call_rules,
    content_or_form_rules,
    content_term,
    form_rules,
)
from hotcold.chat.grammar_terms import Terms
from hotcold.chat.harmony_grammar import harmony_rules
from hotcold.chat.tool_formats import HARMONY, ToolFormat
from hotcold.engine.request import Grammar
from hotcold.grammar.error import GrammarError
from hotcold.grammar.json_schema import read, told_of_strict
from hotcold.grammar.schema_rewriting import Rewritten
from hotcold.values import shown

#: Limit of calls in one answer. Otherwise small models repeat a call without end.
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
    """Returns the grammar of an answer; None if no tool may be called: see :func:`without_calls`.

    ``tools`` are OpenAI's: ``{"type": "function", "function": {"name", "parameters"}}``, with unique names.
    ``choice`` is ``none``; ``auto``: text, then optional calls; ``required``: calls only; or ``{"type":
    "function", "function": {"name": ...}}``: calls of that tool only. ``parallel`` allows several calls if
    the format does.

    ``token_ids`` are the vocabulary's control tokens by name. Their names in the format's texts are these
    tokens; other control tokens may occur in free text. Text outside of calls must match ``content``, if it
    is given; then no calls follow it.

    Parts of a tool's schema that cannot be enforced are in the grammar's notes, or raise an error for a
    ``strict`` tool; ``open``: see :func:`~hotcold.grammar.schema_rewriting.rewritten`. Raises GrammarError
    for an invalid schema of a tool. Other arguments must be valid."""
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        functions = [each for each in functions if each["name"] == choice["function"]["name"]]
    if choice == "none" or not functions:
        return None
    terms = Terms(token_ids or {})
    free = choice == "auto"
    schemas = {each["name"]: _read(each, open) for each in functions}
    named = {name: each.schema for name, each in schemas.items()}
    notes = [f"tool {shown(name)}: {note}" for name, each in schemas.items() for note in each.notes]
    if free and content is not None:
        notes += content.notes
    if format is HARMONY:
        lines = harmony_rules(terms, named, free=free, content=content)
    else:
        several = parallel and format.between is not None
        lines = _rules(terms, named, several, format, free=free, content=content)
    strict = {each["name"] for each in functions if each.get("strict") is True}
    for name, note in terms.notes:
        if name in strict:
            raise GrammarError(f"the tool {shown(name)}: {told_of_strict(note)}")
        notes.append(f"tool {shown(name)}: {note}")
    return Grammar("lark", "\n".join([*lines, *terms.lines]) + "\n", tuple(notes))


def without_calls(content: Grammar | None, format: ToolFormat, token_ids: Mapping[str, int]) -> Grammar:
    """Returns the grammar of an answer without calls: text without the format's marks, or ``content``, in its
    channel if the format has channels."""
    if content is not None and (format is not HARMONY or content.kind in ("gbnf", "lark", "checked")):
        return content
    terms = Terms(token_ids)
    if format is HARMONY:
        lines = harmony_rules(terms, {}, free=True, content=content)
    else:
        silent = terms.other_tokens(format.tokens)
        lines = [
            f"start: (FREE? <[{silent}]>)* FREE?" if silent else "start: FREE?",
            f"FREE: /(?s:.+)/{_unmarked(terms, format)}",
        ]
    return Grammar("lark", "\n".join([*lines, *terms.lines]) + "\n", content.notes if content else ())


def _unmarked(terms: Terms, format: ToolFormat) -> str:
    """Returns the restriction of a text to one without the format's marks."""
    return "".join(f" & ~/(?s:.*){terms.escaped(mark)}(?s:.*)/" for mark in format.marks)


def _read(function: Mapping[str, Any], open: bool) -> Rewritten:
    """Returns the schema of a tool's arguments, and notes on it."""
    schema = function.get("parameters")
    if isinstance(schema, dict) and schema and "type" not in schema:
        schema = {"type": "object", **schema}
    schema = schema or _NO_ARGUMENTS
    name = shown(function["name"])
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise GrammarError(f"the parameters of the tool {name} are not a schema of type 'object'")
    try:
        return read(schema, strict=function.get("strict") is True, open=open)
    except GrammarError as error:
        raise GrammarError(f"the tool {name}: {error}") from None


def _rules(
    terms: Terms,
    named: Mapping[str, object],
    several: bool,
    format: ToolFormat,
    *,
    free: bool,
    content: Grammar | None,
) -> list[str]:
    further_calls = MOST_CALLS - 1 if several else 0
    repeated = f" ({terms.literal(format.between or '')} call){{0,{further_calls}}}" if several else ""
    calls = f"calls: call{repeated} {terms.literal(format.after)}"
    begin = f"{terms.literal(format.before)} calls"
    rules = [calls, *call_rules(terms, format.call, named), *argument_rules(named)]
    if not free:
        return [f"start: {begin}", *rules]
    forms = CallForms(format, named)
    if content is not None:
        # Without ``before``, the format's call is one of the forms.
        options = f"content | {begin} | forms" if format.before else "content | forms"
        lines = [f"start: {options}", f"content: {content_term(content)}"]
        return [*lines, *content_or_form_rules(terms, forms, named), *rules]
    if format.tag:
        names = " | ".join(f"uncall{i}" for i in range(len(named)))
        rules.append(f"tagged: ({names}){repeated} ({terms.literal(format.after)})?")
    return [*_free(terms, format), *form_rules(terms, forms, named, further_calls), *rules]


def _free(terms: Terms, format: ToolFormat) -> list[str]:
    """Returns the rules of text without a call, or of text and calls. Calls begin in a form at the start, or
    at one of the format's marks. The lexemes allow one reading of any text. Control tokens may occur between
    the parts: a model may have some for its thinking."""
    marker = format.marker
    before_calls = terms.literal(format.before.removeprefix(marker))
    silent = terms.other_tokens(format.tokens)
    unmarked = _unmarked(terms, format)
    is_token = terms.is_token(marker)
    parts = f"(text? <[{silent}]>)*" if silent else ""
    marked = f"text? {terms.literal(marker)}" if is_token else "(FREE_MARKED | BEFORE OTHER_MARKED)"
    tagged = f" | {parts} (FREE_TAGGED | BEFORE OTHER_TAGGED) tagged" if format.tag else ""
    lines = [
        f"start: {parts} text? | {parts} forms | {parts} {marked} {before_calls} calls{tagged}",
        "text: FREE | BEFORE OTHER?",
    ]
    ends = {"MARKED": "" if is_token else marker, "TAGGED": format.tag}
    # Free text does not begin like a call. After a call's beginning, other text has no known name.
    for lexeme, excluded in (("FREE", "FORMED"), ("OTHER", "NAMED")):
        lines.append(f"{lexeme}: /(?s:.+)/ & ~{excluded}{unmarked}")
        lines.append(f"{lexeme}_PART: /(?s:.*)/ & ~{excluded}{unmarked}")
        lines += [f"{lexeme}_{end}: {lexeme}_PART {terms.quoted(ends[end])}" for end in ends if ends[end]]
    return lines
