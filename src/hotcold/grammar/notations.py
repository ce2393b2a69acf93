"""Translates every kind of grammar to the notation that is compiled: llguidance's dialect of Lark."""

from collections.abc import Mapping

from hotcold.engine.request import Grammar
from hotcold.grammar.compiler import escaped_regex
from hotcold.grammar.error import GrammarError
from hotcold.grammar.gbnf_lexemes import lark_of_gbnf
from hotcold.grammar.json_schema import lark_of_schema, schemas_in_lark

SOURCE_BYTES = 1 << 16  #: of a schema, an expression or a grammar
LARK_BYTES = 1 << 18  #: of a grammar in Lark, which may have the schemas of many tools


def check_size(grammar: Grammar) -> None:
    """Raises GrammarError if a grammar is too long or of an unknown kind."""
    size = len(grammar.source.encode(errors="replace"))
    most = LARK_BYTES if grammar.kind == "lark" else SOURCE_BYTES
    if size > most:
        raise GrammarError(f"the grammar has {size} bytes: allowed are {most}")
    if grammar.kind not in KINDS:
        raise GrammarError(f"the kind of grammar is {grammar.kind!r:.40}: allowed are {', '.join(KINDS)}")


def lark_of(grammar: Grammar, token_ids: Mapping[str, int], notes: list[str] | None = None) -> str:
    """A grammar in Lark. ``token_ids`` are the control tokens' ids by name; ``notes`` gets the parts of its
    schemas that are not enforced. GrammarError: it is broken, unsupported or beyond the limits, as far as
    this is known before it is compiled."""
    check_size(grammar)
    match grammar.kind:
        case "json_object":
            return lark_of_schema('{"type": "object"}')
        case "json_schema":
            return lark_of_schema(grammar.source, notes)
        case "regex":
            return f"start: /{escaped_regex(grammar.source)}/\n" if grammar.source else 'start: ""\n'
        case "gbnf":
            return lark_of_gbnf(grammar.source, token_ids.get)
        case "lark":
            return schemas_in_lark(grammar.source, notes)
        case "checked":
            raise AssertionError("the kind of grammar was checked above")


KINDS = ("json_schema", "json_object", "regex", "gbnf", "lark")
