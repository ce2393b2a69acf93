"""Calls whose arguments are literals of a language that is not JSON, as rules of a grammar."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hotcold.chat.grammar_terms import Terms
from hotcold.chat.literals import PYTHON, is_word, written
from hotcold.chat.tool_formats import LiteralCall
from hotcold.grammar.error import GrammarError
from hotcold.grammar.schema_keywords import LIMITS, type_list

_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_NUMBERS = (*LIMITS, "multipleOf")
_OF_OBJECTS = ("patternProperties", "minProperties", "maxProperties")  # not enforced
_EITHER = ("anyOf", "oneOf")
_SEVERAL = {"$ref", "allOf", *_EITHER}  # what else is said of the same value
_SINGLE = r"SINGLE: /'([^'\\]|\\(?s:.))*'/"
_MOST_ITEMS = 1000  # that a rule counts
_MOST_STEPS = 20_000  # schemas that are looked at, again for each way that leads there
_STEPS_OF_SEVERAL = 20  # one that is put together takes longer
_MOST_OPTIONS = 8  # levels of options of a tool's arguments


def literal_rules(
    terms: Terms, kind: LiteralCall, rule: str, name: str, schema: Mapping[str, Any]
) -> list[str]:
    """Rules of which ``rule`` is a call of the tool. What cannot be enforced is in the notes of the terms.
    GrammarError: the schema is too large."""
    rules = _Rules(terms, kind, rule, name, schema)
    notation = kind.notation
    head = f"{terms.literal(kind.prefix)} {terms.quoted(name)}"
    members = rules.arguments(schema)
    rules.finish()
    call = f"{rule}: {head} {terms.quoted(notation.opens)} {members} {terms.quoted(notation.closes)}"
    return [call, *rules.lines]


class _Rules:
    """Rules of the values of one tool."""

    def __init__(
        self, terms: Terms, kind: LiteralCall, rule: str, name: str, root: Mapping[str, Any]
    ) -> None:
        self.lines: list[str] = []
        self._terms = terms
        self._notation = kind.notation
        self._rule = rule
        self._tool = name
        self._root = root
        self._count = 0
        self._steps = 0
        self._named: dict[str, str] = {}  # rules of schemas that are put together, and of any value
        self._left: list[tuple[str, Mapping[str, Any]]] = []  # such rules that are yet to be written
        self._comma = self._spaced(",")
        self._colon = self._spaced(":")

    def _spaced(self, sign: str) -> str:
        gap = self._notation.gap
        return f"{self._terms.quoted(sign)} {self._terms.quoted(gap)}?" if gap else self._terms.quoted(sign)

    def _name(self) -> str:
        self._count += 1
        return f"{self._rule}_{self._count}"

    def finish(self) -> None:
        """Writes the rules of schemas that others refer to."""
        while self._left:
            name, schema = self._left.pop()
            self.lines.append(f"{name}: {self._together(schema)}")

    def arguments(self, schema: Mapping[str, Any], level: int = 0) -> str:
        """The arguments of a call, without the brackets."""
        merged = self._merged([schema])
        key = next((key for key in _EITHER if key in merged), None)
        if key is None or level > _MOST_OPTIONS:
            return self._members(merged, arguments=True)
        options = self._options(merged, key)
        return self._either(self.arguments(each, level + 1) or '""' for each in options)

    def _members(self, schema: Mapping[str, Any], *, arguments: bool = False) -> str:
        """The members of an object, or the arguments of a call."""
        self._note(f"{key} of objects" for key in _OF_OBJECTS if key in schema)
        others = schema.get("additionalProperties")
        required = schema.get("required", ())
        properties = {**schema.get("properties", {})}
        if not properties:
            return "" if others is False else self._any_members(others, arguments=arguments)
        properties |= {each: others for each in required if each not in properties}
        sign = self._terms.quoted(self._notation.equals) if arguments else self._colon
        names = [each for each in properties if properties[each] is not False]
        if self._notation.in_order:
            names.sort()
        base = self._name()
        for i, each in enumerate(names):
            member = f"{self._key(each, arguments)} {sign} {self.value(properties[each])}"
            last, optional = i + 1 == len(names), each not in required
            rest = "" if last else f" {base}_rest{i + 1}"
            skipped = "" if not optional else " | " + ('""' if last else f"{base}_from{i + 1}")
            self.lines += [
                f"{base}_{i}: {member}",
                f"{base}_rest{i}: ({self._comma} {base}_{i}){'?' * optional}{rest}",
                f"{base}_from{i}: {base}_{i}{rest}{skipped}",
            ]
        return f"{base}_from0" if names else ""

    def value(self, schema: Any) -> str:
        """A value, as a term."""
        self._step()
        if not isinstance(schema, Mapping):
            return self._any()
        if "const" in schema:
            return self._one_of([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return self._one_of(values)
        if _SEVERAL & schema.keys():
            return self._rule_of(schema)
        types = type_list(schema)
        asked = {"properties", "additionalProperties", "items", "prefixItems", *_OF_STRINGS, *_OF_NUMBERS}
        if "type" not in schema and not schema.keys() & asked:
            return self._any()
        return self._either(self._typed(schema, type) for type in types)

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise GrammarError("the schema is too large: too many schemas refer to each other")

    def _note(self, notes: Iterable[str]) -> None:
        self._terms.notes |= dict.fromkeys((self._tool, each) for each in notes)

    def _rule_of(self, schema: Mapping[str, Any]) -> str:
        """The rule of a schema, which may contain itself."""
        self._step(_STEPS_OF_SEVERAL)
        key = json.dumps(schema, sort_keys=True)
        if key not in self._named:
            self._named[key] = self._name()
            self._left.append((self._named[key], schema))
        return self._named[key]

    def _together(self, schema: Mapping[str, Any]) -> str:
        """The value that all of a schema says."""
        if schema.keys() == {"$ref"}:
            return self.value(self._target(schema["$ref"]))
        merged = self._merged([schema])
        key = next((key for key in _EITHER if key in merged), None)
        return (
            self.value(merged) if key is None else self._either(map(self.value, self._options(merged, key)))
        )

    def _options(self, schema: Mapping[str, Any], key: str) -> Iterable[Any]:
        """For each option of a schema, all that the two say together."""
        rest = {name: each for name, each in schema.items() if name != key}
        options = [each for each in schema[key] if each is not False]
        return [self._merged([rest, each]) for each in options] if rest else options

    def _target(self, reference: str) -> Any:
        definitions = self._root.get("$defs")
        name = reference.removeprefix("#/$defs/")
        return definitions.get(name) if isinstance(definitions, Mapping) else None

    def _flat(self, parts: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
        """The schemas of one value, with those that they refer to, in place of ``$ref`` and ``allOf``."""
        left, seen = [*parts], set()
        while left:
            self._step()
            part = left.pop(0)
            if not isinstance(part, Mapping):
                continue
            left[:0] = part.get("allOf", ())
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                left.insert(0, self._target(reference))
            yield {key: each for key, each in part.items() if key not in ("$ref", "allOf", "$defs")}

    def _merged(self, parts: Iterable[Any]) -> dict[str, Any]:
        """One schema with the properties of all of these; of what several say, what the first one says."""
        found: dict[str, Any] = {}
        for part in self._flat(parts):
            if _SEVERAL & part.keys() & found.keys():
                self._note(["a second anyOf of one value"])
            properties = {**found.get("properties", {})}
            for name, each in part.get("properties", {}).items():
                if properties.get(name, True) is True:
                    properties[name] = each
            required = dict.fromkeys([*found.get("required", ()), *part.get("required", ())])
            found = {**part, **found}
            found |= {"properties": properties} if properties else {}
            found |= {"required": [*required]} if required else {}
        return found

    def _typed(self, schema: Mapping[str, Any], type: str) -> str:
        if type == "string":
            return self._string(schema)
        if type in ("integer", "number"):
            limits = {key: schema[key] for key in _OF_NUMBERS if key in schema}
            return f"%json {json.dumps({'type': type, **limits})}"
        if type == "array":
            return f'"[" {self._array(schema)} "]"'
        if type == "object":
            return f'"{{" {self._members(schema)} "}}"'
        return '("true" | "false" | "True" | "False")' if type == "boolean" else '("null" | "None")'

    def _string(self, schema: Mapping[str, Any]) -> str:
        limits = {key: schema[key] for key in _OF_STRINGS if key in schema}
        if self._notation is PYTHON:
            double = f"%json {json.dumps({'type': 'string', **limits})}"
            return double if limits else f"({double} | {self._single()})"
        self._note(f"{key} of strings" for key in limits)
        quote = self._notation.quotes[0]
        return f"{self._terms.literal(quote)} {self._terms.text_until(quote)}"

    def _single(self) -> str:
        if _SINGLE not in self._terms.lines:
            self._terms.lines.append(_SINGLE)
        return "SINGLE"

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = [self.value(each) for each in schema.get("prefixItems", ())]
        items = schema.get("items", True)
        least = max(0, int(schema.get("minItems", 0)) - len(first))
        most = schema.get("maxItems")
        if items is False or (most is not None and most <= len(first)):
            return f" {self._comma} ".join(first[:most])
        item = self.value(items)
        more = "" if most is None or most > _MOST_ITEMS else str(int(most) - len(first))
        if first:
            return f"{f' {self._comma} '.join(first)} ({self._comma} {item}){{{least},{more}}}"
        rest = f"({self._comma} {item}){{{max(0, least - 1)},{more and int(more) - 1}}}"
        return f"{item} {rest}" if least else f"({item} {rest})?"

    def _key(self, name: str, arguments: bool) -> str:
        if (arguments or self._notation.bare_keys) and is_word(name):
            return self._terms.quoted(name)
        return self._one_of([name])

    def _one_of(self, values: list[Any]) -> str:
        """Constants, each as it is written here."""
        found = []
        for value in values:
            text = written(value, self._notation)
            found.append(self._terms.literal(text))
            if isinstance(value, str) and text == f'"{value}"' and "'" not in value:
                found.append(self._terms.quoted(f"'{value}'"))
        return self._either(found)

    def _either(self, options: Iterable[str]) -> str:
        found = [*dict.fromkeys(options)]
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _any(self) -> str:
        """Any value at all."""
        if "" not in self._named:
            self._named[""] = name = self._name()
            types = [self._typed({}, type) for type in ("string", "number", "boolean", "null")]
            items = f'"[" ({name} ({self._comma} {name})*)? "]"'
            objects = f'"{{" {self._any_members(True)} "}}"'
            self.lines.append(f"{name}: {self._either([*types, items, objects])}")
        return self._named[""]

    def _any_members(self, schema: Any, *, arguments: bool = False) -> str:
        """Members with any names, whose values match a schema."""
        bare = arguments or self._notation.bare_keys
        key = r"/[^\s<>()\[\]{}:=,'\"|]{1,100}/" if bare else self._string({})
        sign = self._terms.quoted(self._notation.equals) if arguments else self._colon
        member = f"{key} {sign} {self.value(schema)}"
        return f"({member} ({self._comma} {member})*)?"
