"""Grammars of answers in Harmony: thinking of any allowed length, then content or a call."""

from collections.abc import Mapping

from hotcold.chat.call_grammar import content_term, json_term
from hotcold.chat.grammar_terms import Terms
from hotcold.chat.tool_formats import HARMONY
from hotcold.engine.request import Grammar


def harmony_rules(
    terms: Terms, named: Mapping[str, object], *, free: bool, content: Grammar | None
) -> list[str]:
    """Returns the rules of an answer that calls one of these tools; if ``free``, it may have content
    instead."""
    literal = terms.literal
    further = f"{terms.text_until('<|end|>')} {literal('<|start|>assistant')}"
    options = [f"call{i}" for i in range(len(named))] + ["final"] * free
    lines = [
        f"start: (aside {further})* ({' | '.join(options)})",
        f"aside: {literal('<|channel|>')} ({literal('analysis')} | {literal('commentary')}) "
        f"{literal('<|message|>')}",
        f'format: " " ({literal("<|constrain|>")})? "json"',
    ]
    if free:
        said = "SAID?" if content is None else content_term(content)
        lines.append(f"final: {literal('<|channel|>final')} format? {literal('<|message|>')} {said}")
        if content is None:
            marks = "|".join(terms.escaped(name) for name in HARMONY.tokens)
            lines.append(f"SAID: /(?s:.+)/ & ~/(?s:.*)({marks})(?s:.*)/")
    channel = f'{literal("<|channel|>")} ("commentary" | "analysis")'
    for i, (name, schema) in enumerate(named.items()):
        to = terms.quoted(f" to=functions.{name}")
        head = f"({channel} {to} | {to} {channel}) format? {literal('<|message|>')}"
        lines.append(f"call{i}: {head} {json_term(schema)}")
    return lines
