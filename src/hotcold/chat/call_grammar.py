"""Rules of a grammar for one call of a tool: one set of rules for each kind of call."""

import json
from collections.abc import Mapping
from typing import Any

from hotcold.chat.call_forms import CallForms, name_text, regex
from hotcold.chat.call_readers import PYTHON_WORDS, types_of
from hotcold.chat.grammar_terms import Terms
from hotcold.chat.literal_grammar import literal_rules
from hotcold.chat.tool_formats import (
    ARGUMENT_KEYS,
    CallKind,
    JSONCall,
    LiteralCall,
    NamedCall,
    TaggedCall,
)
from hotcold.engine.request import Grammar
from hotcold.grammar.compiler import escaped_regex
from hotcold.grammar.json_schema import WHITESPACE

MOST_TAIL = 128  #: limit of characters after calls in another form than the format's


def content_term(content: Grammar) -> str:
    """Returns a grammar of content as a term, for kinds of grammars that allow calls as alternatives."""
    if content.kind == "json_object":
        return '%json {"type": "object"}'
    if content.kind == "json_schema":
        return f"%json {content.source}"
    assert content.kind == "regex"
    return f"/{escaped_regex(content.source)}/" if content.source else '""'


def form_rules(terms: Terms, forms: CallForms, named: Mapping[str, object], most: int) -> list[str]:
    """Returns the rules of ``forms``: calls of these tools at the start of an answer, in any form. ``most``
    is the limit of calls after the first.

    ``FORMED`` is any text that begins like a call; ``NAMED`` begins with the name of one of these tools.
    After the calls a model may write a short text of any kind. Without that, the grammar would force its
    beginning into another call. The rules of :func:`argument_rules` are also needed."""
    space = f"({WHITESPACE})?"  # models write spaces without end if a grammar allows it
    keys = "|".join(f'"{key}"' for key in ARGUMENT_KEYS)
    names = "|".join(map(terms.escaped, forms.names))
    any_text = f"/(?s:.{{1,{MOST_TAIL}}})/"
    further = f"(BETWEEN form){{0,{most}}} (TAIL | BETWEEN UNNAMED?)?" if most else "TAIL?"

    def calls(name: str, arguments: str) -> list[str]:
        plain = [f"/{terms.escaped(name + after)}{space}/ {arguments}" for after in forms.plain]
        return [f"{terms.quoted(name_text(name))} KEY {arguments} END", *plain]

    return [
        f"forms: BEFORE form {further}",
        f"BEFORE: /{regex(forms.before, terms.escaped)}/",
        f"BETWEEN: /{regex(forms.between, terms.escaped)}/",
        "FORMED: BEFORE /(?s:.*)/",
        f"NAMED: /({names})(?s:.*)/",
        f"TAIL: {any_text} & ~(BETWEEN /(?s:.*)/)",
        f"UNNAMED: {any_text} & ~NAMED",
        f"KEY: /{space},{space}({keys}){space}:{space}/",
        f"END: /{space}\\}}/",
        "form: " + " | ".join(f"form{i}" for i in range(len(named))),
        *(f"form{i}: {' | '.join(calls(name, f'arguments{i}'))}" for i, name in enumerate(named)),
    ]


def content_or_form_rules(terms: Terms, forms: CallForms, named: Mapping[str, object]) -> list[str]:
    """Returns the rules of ``forms`` for an answer that is a call, or content of a grammar such as JSON. They
    use the lexemes of JSON: a longer lexeme would exclude the other reading."""
    quoted, space = terms.quoted, "SPACE?"
    keys = " | ".join(quoted(f'"{key}"') for key in ARGUMENT_KEYS)
    head = f" {space} ".join(("WRAPPED?", *map(quoted, ("{", '"name"', ":"))))
    return [
        f"forms: {head} {space} form BEHIND?",
        f"SPACE: /{WHITESPACE}/",
        f"WRAPPED: /{regex(forms.wrapped, terms.escaped)}/",
        f"BEHIND: /{regex(forms.behind, terms.escaped)}/",
        "form: " + " | ".join(f"form{i}" for i in range(len(named))),
        *(
            f"form{i}: "
            + f" {space} ".join(
                (quoted(f'"{name_text(name)}'), '","', f"({keys})", '":"', f"arguments{i}", '"}"')
            )
            for i, name in enumerate(named)
        ),
    ]


def argument_rules(named: Mapping[str, object]) -> list[str]:
    """Returns the rules of each tool's arguments as JSON."""
    return [f"arguments{i}: {json_term(schema)}" for i, schema in enumerate(named.values())]


def call_rules(terms: Terms, kind: CallKind, named: Mapping[str, object]) -> list[str]:
    """Returns rules of ``call``, a call of one of these tools; ``named`` has the schemas of arguments."""
    lines = ["call: " + " | ".join(f"call{i}" for i in range(len(named)))]
    for i, (name, schema) in enumerate(named.items()):
        if isinstance(kind, JSONCall):
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, {json.dumps(kind.key)}: '
            id = "" if kind.id is None else f"""(", \\"id\\": \\"" /{kind.id}/ "\\"")? """
            lines.append(f'call{i}: {terms.quoted(head)} arguments{i} {id}"}}"')
        elif isinstance(kind, NamedCall):
            head = f"{terms.literal(kind.prefix)} {terms.quoted(name)} {_mark(terms, kind.mark)}"
            lines.append(f"call{i}: {head} {terms.literal(kind.separator)} arguments{i}")
        elif isinstance(kind, LiteralCall):
            assert isinstance(schema, Mapping)
            lines += literal_rules(terms, kind, f"call{i}", name, schema)
        else:
            assert isinstance(kind, TaggedCall)
            lines += _tagged(terms, kind, f"call{i}", name, schema)
    return lines


def json_term(schema: object) -> str:
    return f"%json {json.dumps(schema)}"


def _mark(terms: Terms, mark: tuple[str, str] | None) -> str:
    return "" if mark is None else f"{terms.literal(mark[0])} /{mark[1]}/"


def _tagged(terms: Terms, kind: TaggedCall, rule: str, name: str, schema: object) -> list[str]:
    """Returns the rules of a call with arguments in the order of the schema; arguments that are not required
    are optional. ``uncall`` is a call without its prefix."""
    assert isinstance(schema, Mapping)
    before, between, behind = kind.argument
    properties, required = schema.get("properties"), schema.get("required", ())
    lines, parts = [], []
    if isinstance(properties, Mapping):
        for i, argument in enumerate(properties):
            value = _tagged_value(terms, behind, schema, argument)
            head = f"{terms.literal(before)} {terms.quoted(argument)} {terms.literal(between)}"
            lines.append(f"{rule}_{i}: {head} {value}")
            parts.append(f"{rule}_{i}" if argument in required else f"{rule}_{i}?")
    else:
        head = f"{terms.literal(before)} /[^<>\\n]{{1,100}}/ {terms.literal(between)}"
        lines.append(f"{rule}_any: {head} {terms.text_until(behind)}")
        parts.append(f"{rule}_any*")
    head = f"{terms.quoted(name)} {terms.literal(kind.separator)}"
    return [
        f"{rule}: {terms.literal(kind.prefix)} un{rule}",
        f"un{rule}: {head} {' '.join(parts)} {terms.literal(kind.suffix)}",
        *lines,
    ]


def _tagged_value(terms: Terms, behind: str, schema: Mapping[str, Any], name: str) -> str:
    """Returns the rule of an argument between tags: any text for a string, unless the schema lists values."""
    types = types_of(schema, name)
    property = schema["properties"][name]
    values = property.get("enum") if isinstance(property, Mapping) else None
    if types == {"string"} and isinstance(values, list) and all(isinstance(each, str) for each in values):
        return f"({' | '.join(map(terms.quoted, values))}) {terms.literal(behind)}"
    if "string" in types or not types:
        return terms.text_until(behind)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    # Templates write these in Python's form.
    words = "".join(f' | "{word}"' for word, type in PYTHON_WORDS.items() if type in types)
    return f"({json_term({**property, **shared})}{words}) {terms.literal(behind)}"
