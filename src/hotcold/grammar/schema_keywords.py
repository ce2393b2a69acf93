"""Keywords of JSON schemas: their allowed values, and the enforcement of patterns and formats."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.values import shown

MOST_ENUM = 4096
MOST_COUNT = 100_000  #: largest value of minItems, maxLength and the like
MOST_NAMES = 64  #: most names of a pattern that is replaced by the list of its names
_MOST_GROUPS = 16  # nested, in such a pattern
#: Most programs read whole numbers outside these bounds wrongly; the first is the compiler's lower limit.
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
#: Replacements for formats whose rule in the compiler is too wide: it allows February 29 in any year, a leap
#: second at any minute, names that are too long. These patterns match only valid values, but not all of them.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
    "email": rf"^{_ATOM}(\.{_ATOM})?@{_LABEL}(\.{_LABEL}){{0,2}}$",
}
#: Formats that are enforced; other formats are annotations.
FORMATS = (*FORMAT_PATTERNS, "duration", "ipv4", "ipv6", "uri", "uuid")

#: Keywords that a grammar cannot enforce, each with the value that has no effect.
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


def type_list(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", list(TYPES))
    return [types] if isinstance(types, str) else types


def check_value(key: str, value: Any, at: str) -> None:
    """Raises GrammarError if the value has the wrong type for its keyword. ``at`` is its place."""
    needed, right = _VALUES.get(key, ("", None))
    if right is not None and not right(value):
        raise GrammarError(f"{at} is {shown(value)}: {needed}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and value % 1 == 0


def _list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_Needed = tuple[str, Callable[[Any], bool]]
_TEXT: _Needed = ("a text is needed", lambda value: isinstance(value, str))
_SCHEMAS: _Needed = ("a list of schemas is needed", _list)
_NAMED_SCHEMAS: _Needed = ("an object of schemas is needed", lambda value: isinstance(value, dict))
_LEAST: _Needed = (
    f"a whole number from 0 to {MOST_COUNT} is needed",
    lambda value: _count(value) and value <= MOST_COUNT,
)
_MOST: _Needed = ("a whole number from 0 is needed", _count)
_LIMIT: _Needed = ("a number is needed", _number)
_DRAFT_4: _Needed = ("a number is needed", lambda value: _number(value) or isinstance(value, bool))
#: The allowed values of keywords. The compiler checks other keywords, and the details of these.
_VALUES: dict[str, _Needed] = {
    "type": (
        f"allowed are {', '.join(TYPES)}, or a list of them",
        lambda value: value in TYPES or (_list(value) and all(each in TYPES for each in value)),
    ),
    "enum": (
        f"a list of values is needed, at most {MOST_ENUM}",
        lambda value: _list(value) and len(value) <= MOST_ENUM,
    ),
    "required": (
        "a list of names is needed",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
    "uniqueItems": ("true or false is needed", lambda value: isinstance(value, bool)),
    "multipleOf": ("a number above 0 is needed", lambda value: _number(value) and value > 0),
    "pattern": _TEXT, "format": _TEXT, "$ref": _TEXT,
    "minItems": _LEAST, "minLength": _LEAST, "minProperties": _LEAST,
    "maxItems": _MOST, "maxLength": _MOST, "maxProperties": _MOST,
    "minimum": _LIMIT, "maximum": _LIMIT, "exclusiveMinimum": _DRAFT_4, "exclusiveMaximum": _DRAFT_4,
    "allOf": _SCHEMAS, "anyOf": _SCHEMAS, "oneOf": _SCHEMAS, "prefixItems": _SCHEMAS,
    "properties": _NAMED_SCHEMAS, "patternProperties": _NAMED_SCHEMAS,
}  # fmt: skip


def can_be_written(value: Any) -> bool:
    """True if a grammar can require exactly this constant. Beyond 2^53, different numbers become equal;
    characters that JSON can only escape by code point are not generated."""
    values = [value]
    for item in values:  # the loop appends to it
        if isinstance(item, dict):
            values += item.values()
        elif isinstance(item, list):
            values += item
        elif isinstance(item, str):
            if _BY_NUMBER.search(item):
                return False
        elif isinstance(item, int | float) and not abs(item) < 2**53:
            return False
    return True


_BY_NUMBER = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


def numeric(schema: Mapping[str, Any], types: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The enforced bounds of numbers, and the keywords that cannot be enforced. Whole numbers without bounds
    are limited to 64 bits: otherwise a model could write digits until its answer ends."""
    bounds = {key: schema[key] for key in LIMITS if key in schema}
    for key, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(bounds.get(other), bool) and bounds.pop(other) and key in bounds:  # draft 4
            bounds[other] = bounds.pop(key)
    whole = "number" not in types
    if whole and "integer" not in types:
        return bounds, []
    low, high = (LEAST_WHOLE, MOST_WHOLE) if whole else (1 - 2**53, 2**53 - 1)
    lost = []
    for key, value in [*bounds.items()]:
        if not low <= value <= high:
            del bounds[key]
            if (value < 0) == key.lower().endswith("maximum") or (not whole and abs(value) < 1e307):
                lost.append(key)
    if whole and not {"minimum", "exclusiveMinimum"} & bounds.keys():
        bounds["minimum"] = low
    if whole and not {"maximum", "exclusiveMaximum"} & bounds.keys():
        bounds["maximum"] = high
    return bounds, lost


_ESCAPE = (
    r"\\(?:[dDwWsSnrtfvaAz]|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]{1,6}\}|[pP]\{[\w=]+\}|[pP][A-Z]|0(?![0-9])|[^a-zA-Z0-9])"
)
_IN_CLASS = rf"(?:\\b|{_ESCAPE}|[^\\\]])"
_RANGE = re.compile(f"({_IN_CLASS})(?:-({_IN_CLASS}))?", re.DOTALL)
#: The parts of a pattern, without look-around and back references, which the compiler lacks.
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<cls>\[(?!\^?\])\^?{_IN_CLASS}*\])|(?P<count>(?<=.)\{{[0-9]+(?:,[0-9]*)?\}})"
    r"|(?!\(\?(?:[=!>#(]|<[=!]|P=))[^\\\[]",
    re.DOTALL,
)


def compiled_pattern(pattern: str) -> str | None:
    """A pattern of ECMAScript in the compiler's syntax; None if it has a part that the compiler lacks:
    look-around, back references, word boundaries."""
    out = []
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:
            return None
        text, at = part[0], part.end()
        if part["cls"]:
            head = text[: 2 if text[1] == "^" else 1]
            ranges = (
                map(_in_class, filter(None, each.groups())) for each in _RANGE.finditer(text[len(head) : -1])
            )
            text = f"{head}{''.join(map('-'.join, ranges))}]"
        elif part["escape"]:
            text = _plain_escape(text)
        elif text in ("{", "}", "]"):
            text = f"\\{text}"
        out.append(text)
    return "".join(out)


class _ManyTexts(Exception):
    """Raised if a pattern matches more than :data:`MOST_NAMES` texts, or has an unsupported part."""


def few_names(pattern: str) -> list[str] | None:
    """Returns all names that a compiled pattern matches; None if there are more than :data:`MOST_NAMES`."""
    if not pattern.startswith("^") or not pattern.endswith("$"):
        return None
    try:
        return _texts(pattern[:-1], 1, 0)[0]
    except _ManyTexts:
        return None


def _texts(pattern: str, at: int, depth: int) -> tuple[list[str], int]:
    """Returns the texts that a group matches, and the position after the group. _ManyTexts."""
    options: list[str] = []
    before, last = [""], [""]  # texts of the current option without its last part, and of its last part
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None or depth > _MOST_GROUPS:
            raise _ManyTexts
        text, at = part[0], part.end()
        if text == "?":
            last = [*last, ""]
        elif text in ("|", ")") and depth:
            options, before, last = [*options, *_joined(before, last)], [""], [""]
            if text == ")":
                return _joined(options, [""]), at
        elif text == "(":
            at += 2 * pattern.startswith("?:", at)
            if pattern.startswith("?", at):
                raise _ManyTexts
            before = _joined(before, last)
            last, at = _texts(pattern, at, depth + 1)
        else:
            before, last = _joined(before, last), _characters(part)
    if depth:
        raise _ManyTexts
    return _joined(before, last), at


def _joined(first: list[str], second: list[str]) -> list[str]:
    if len(first) * len(second) > MOST_NAMES:
        raise _ManyTexts
    return list(dict.fromkeys(one + other for one in first for other in second))


def _characters(part: re.Match[str]) -> list[str]:
    """Returns the characters that one part of a pattern matches. _ManyTexts."""
    if part["cls"] is None:
        return [_one_character(part[0], ".*+?^$|()")]
    if part[0].startswith("[^"):
        raise _ManyTexts
    characters: list[str] = []
    for first, last in _RANGE.findall(part[0][1:-1]):
        low = ord(_one_character(first))
        characters += map(
            chr, range(low, 1 + (min(ord(_one_character(last)), low + MOST_NAMES) if last else low))
        )
    return characters


def _one_character(text: str, others: str = "") -> str:
    """Returns a literal character, alone or after a backslash. _ManyTexts: it is in ``others``, or another
    kind of escape."""
    if len(text) > 2 or (text[-1].isalnum() if len(text) == 2 else text in others):
        raise _ManyTexts
    return text[-1]


def _in_class(text: str) -> str:
    """Escapes ``[``, ``&``, ``~``, ``-`` and ``^`` in a character class."""
    if text[0] == "\\":
        return "\\x08" if text == "\\b" else _plain_escape(text)
    return f"\\{text}" if text in "[&~-^" else text


def _plain_escape(text: str) -> str:
    if text == "\\0":
        return "\\x00"
    return text[1] if text[1] in "<>" else text
