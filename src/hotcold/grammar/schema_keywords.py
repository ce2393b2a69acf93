"""Keywords of JSON schemas: the values that each may have, and how a pattern or a format is enforced."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.values import shown

MOST_ENUM = 4096
MOST_COUNT = 100_000  #: that minItems, maxLength and the like may demand
#: Whole numbers beyond these are read wrongly nearly everywhere; the first is the compiler's least.
LEAST_WHOLE = 1024 - (1 << 63)
MOST_WHOLE = (1 << 63) - 1
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,31}"
#: Where the compiler's own rule allows what is not of the format: February 29 in any year, a leap second at
#: any minute, names that are too long. All of it is of the format; not all of the format is in it.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
    "email": rf"^{_ATOM}(\.{_ATOM})?@{_LABEL}(\.{_LABEL}){{0,2}}$",
}
#: Those that are enforced; others are facts for readers.
FORMATS = (*FORMAT_PATTERNS, "duration", "ipv4", "ipv6", "uri", "uuid")

#: What a grammar cannot hold an answer to. Where it has the value given here it asks for nothing.
NOT_ENFORCED: Mapping[str, Any] = {
    "not": False,
    "contains": None,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "if": None,
    "propertyNames": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}


def check_value(key: str, value: Any, at: str) -> None:
    """GrammarError: the value is not of the kind that the keyword has. ``at`` names both."""
    if key in _VALUES:
        _VALUES[key](value, at)


def _type(value: Any, at: str) -> None:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or any(each not in TYPES for each in found):
        raise GrammarError(f"{at} is {shown(value)}: allowed are {', '.join(TYPES)}, or a list of them")


def _enum(value: Any, at: str) -> None:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{at} is {shown(value)}: a list of values is needed")
    if len(value) > MOST_ENUM:
        raise GrammarError(f"{at} has {len(value)} values: allowed are {MOST_ENUM}")


def _count(value: Any, at: str) -> None:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 0:
        raise GrammarError(f"{at} is {shown(value)}: a whole number from 0 is needed")
    if at.startswith("min") and value > MOST_COUNT:
        raise GrammarError(f"{at} is {shown(value)}: allowed are the whole numbers 0 to {MOST_COUNT}")


def _limit(value: Any, at: str) -> None:
    if isinstance(value, bool) and at.startswith("exclusive"):
        return  # draft 4
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise GrammarError(f"{at} is {shown(value)}: a number is needed")


def _multiple(value: Any, at: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise GrammarError(f"{at} is {shown(value)}: a number above 0 is needed")


def _names(value: Any, at: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(f"{at} is {shown(value)}: a list of names is needed")


def _text(value: Any, at: str) -> None:
    if not isinstance(value, str):
        raise GrammarError(f"{at} is {shown(value)}: a text is needed")


def _schemas(value: Any, at: str) -> None:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{at} is {shown(value)}: a list of schemas is needed")


def _named_schemas(value: Any, at: str) -> None:
    if not isinstance(value, dict):
        raise GrammarError(f"{at} is {shown(value)}: an object of schemas is needed")


def _flag(value: Any, at: str) -> None:
    if not isinstance(value, bool):
        raise GrammarError(f"{at} is {shown(value)}: true or false is needed")


COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES: dict[str, Callable[[Any, str], None]] = {
    "type": _type,
    "enum": _enum,
    "required": _names,
    "uniqueItems": _flag,
    "pattern": _text,
    "format": _text,
    "$ref": _text,
    "multipleOf": _multiple,
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys(LIMITS, _limit),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _schemas),
    **dict.fromkeys(("properties", "patternProperties"), _named_schemas),
}


def can_be_written(value: Any) -> bool:
    """Whether a constant can be asked for exactly: beyond 2^53 two numbers become one, and characters that
    JSON has as numbers only are not generated."""
    values = [value]
    for each in values:  # more are added meanwhile
        if isinstance(each, dict):
            values += each.values()
        elif isinstance(each, list):
            values += each
        elif isinstance(each, str):
            if _BY_NUMBER.search(each):
                return False
        elif isinstance(each, int | float) and not abs(each) < 2**53:
            return False
    return True


_BY_NUMBER = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


def numeric(schema: Mapping[str, Any], types: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The bounds of numbers as they are enforced, and the keywords that cannot be. Whole numbers stay within
    64 bits also where nothing bounds them: else a model could write digits until its answer ends."""
    found = {key: schema[key] for key in LIMITS if key in schema}
    for key, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(other), bool) and found.pop(other) and key in found:  # draft 4
            found[other] = found.pop(key)
    lost = []
    if "number" in types:
        for key, value in [*found.items()]:
            if abs(value) >= 2**53:
                del found[key]
                if (value < 0) == key.lower().endswith("maximum") or abs(value) < 1e307:
                    lost.append(key)
        return found, lost
    if "integer" in types:
        lost += _whole_bounds(found)
    return found, lost


def _whole_bounds(found: dict[str, Any]) -> list[str]:
    lost = []
    for key, value in [*found.items()]:
        if LEAST_WHOLE <= value <= MOST_WHOLE:
            continue
        del found[key]
        if (value < 0) == key.lower().endswith("maximum"):
            lost.append(key)  # it asks for numbers that are all beyond
    if not {"minimum", "exclusiveMinimum"} & found.keys():
        found["minimum"] = LEAST_WHOLE
    if not {"maximum", "exclusiveMaximum"} & found.keys():
        found["maximum"] = MOST_WHOLE
    return lost


def compiled_pattern(pattern: str) -> str | None:
    """A pattern of ECMAScript in the syntax that the compiler reads; None where it has what that cannot:
    look-around, references back, boundaries of words."""
    out = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            atom = _ESCAPE.match(pattern, at)
            if atom is None:
                return None
            out.append(_plain_escape(atom[0]))
            at = atom.end()
        elif char == "[":
            found = _class(pattern, at)
            if found is None:
                return None
            text, at = found
            out.append(text)
        elif _UNSUPPORTED_GROUP.match(pattern, at):
            return None
        elif char == "{" and (not out or not _QUANTIFIER.match(pattern, at)):
            out.append("\\{")
            at += 1
        elif char == "{":
            end = pattern.index("}", at) + 1
            out.append(pattern[at:end])
            at = end
        else:
            out.append(f"\\{char}" if char in "}]" else char)
            at += 1
    return "".join(out)


_ESCAPE = re.compile(
    r"\\([dDwWsSnrtfvaAz]|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]{1,6}\}|[pP]\{[\w=]+\}|[pP][A-Z]|0(?![0-9])|[^a-zA-Z0-9])",
    re.DOTALL,
)
_UNSUPPORTED_GROUP = re.compile(r"\(\?(=|!|<=|<!|>|#|P=|\()")
_QUANTIFIER = re.compile(r"\{[0-9]+(,[0-9]*)?\}")


def _plain_escape(text: str) -> str:
    if text == "\\0":
        return "\\x00"
    return text[1] if text[1] in "<>" else text


def _class(pattern: str, at: int) -> tuple[str, int] | None:
    """A class of characters, in which ``[``, ``&``, ``~`` and ``-`` stand for themselves; and its end."""
    out = ["["]
    at += 1
    if pattern.startswith("^", at):
        out.append("^")
        at += 1
    if pattern.startswith("]", at):
        return None
    may_begin = False  # whether the last one may begin a range
    while at < len(pattern):
        if pattern[at] == "]":
            return "".join([*out, "]"]), at + 1
        ends = may_begin and pattern[at] == "-" and pattern[at + 1 : at + 2] not in ("]", "")
        if ends:
            out.append("-")
            at += 1
        atom = _CLASS_ATOM.match(pattern, at)
        if atom is None:
            return None
        text = "\\x08" if atom[0] == "\\b" else atom[0]
        out.append(_plain_escape(text) if text[0] == "\\" else f"\\{text}" if text in "[&~-^" else text)
        may_begin = not ends
        at = atom.end()
    return None


_CLASS_ATOM = re.compile(rf"\\b|{_ESCAPE.pattern}|[^\\\]]", re.DOTALL)
