"""What an answer must match, as plain data that may cross from one process to another."""

from dataclasses import dataclass
from typing import Literal

#: ``checked`` is what a check has made of one of the others; nobody else makes it.
GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark", "checked"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match from its first character to its last."""

    kind: GrammarKind
    source: str = ""  #: JSON of the schema, the expression, or the grammar's text; nothing of ``json_object``
    #: what of a schema the answer is not held to, such as ``uniqueItems at properties.tags``
    notes: tuple[str, ...] = ()
