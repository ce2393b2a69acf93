"""Calls whose arguments are literals of a language that is not JSON, as rules of a grammar."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hotcold.chat.literals import PYTHON, written
from hotcold.chat.tool_formats import LiteralCall
from hotcold.grammar.schema_keywords import LIMITS, type_list

if TYPE_CHECKING:
    from hotcold.chat.call_grammar import Terms

_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_NUMBERS = (*LIMITS, "multipleOf")
_SINGLE = r"SINGLE: /'([^'\\]|\\(?s:.))*'/"
_MOST_ITEMS = 1000  # that a rule counts


def literal_rules(
    terms: "Terms", kind: LiteralCall, rule: str, name: str, schema: Mapping[str, Any]
) -> list[str]:
    """Rules of which ``rule`` is a call of the tool. What of strings cannot be enforced is in the notes of
    the terms."""
    rules = _Rules(terms, kind, rule, name, schema)
    notation = kind.notation
    head = f"{terms.literal(kind.prefix)} {terms.quoted(name)}"
    members = rules.members(schema, notation.equals, arguments=True)
    call = f"{rule}: {head} {terms.quoted(notation.opens)} {members} {terms.quoted(notation.closes)}"
    return [call, *rules.lines]


class _Rules:
    """Rules of the values of one tool."""

    def __init__(
        self, terms: "Terms", kind: LiteralCall, rule: str, name: str, root: Mapping[str, Any]
    ) -> None:
        self.lines: list[str] = []
        self._terms = terms
        self._notation = kind.notation
        self._rule = rule
        self._tool = name
        self._root = root
        self._count = 0
        self._named: dict[str, str] = {}  # rules of what references lead to, and of any value
        self._comma = self._spaced(",")
        self._colon = self._spaced(":")

    def _spaced(self, sign: str) -> str:
        gap = self._notation.gap
        return f"{self._terms.quoted(sign)} {self._terms.quoted(gap)}?" if gap else self._terms.quoted(sign)

    def _name(self) -> str:
        self._count += 1
        return f"{self._rule}_{self._count}"

    def members(self, schema: Mapping[str, Any], equals: str = "", *, arguments: bool = False) -> str:
        """The members of an object, or the arguments of a call, without the brackets."""
        properties = schema.get("properties")
        sign = self._terms.quoted(equals) if equals else self._colon
        if not isinstance(properties, Mapping) or not properties:
            closed = schema.get("additionalProperties") is False
            return "" if closed else self._any_members(sign, arguments=arguments)
        names = [each for each in properties if properties[each] is not False]
        if self._notation.in_order:
            names.sort()
        required = set(schema.get("required", ()))
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
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference)
        if "const" in schema:
            return self._one_of([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return self._one_of(values)
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                return self._either(map(self.value, options))
        if isinstance(parts := schema.get("allOf"), list):
            return self.value(self._merged([schema, *parts]))
        types = type_list(schema)
        if "type" not in schema and not schema.keys() & {"properties", "items", *_OF_STRINGS, *_OF_NUMBERS}:
            return self._any()
        return self._either(self._typed(schema, type) for type in types)

    def _referred(self, reference: str) -> str:
        if reference not in self._named:
            self._named[reference] = name = self._name()
            target = self._target(reference)
            self.lines.append(f"{name}: {self.value(target)}")
        return self._named[reference]

    def _target(self, reference: str) -> Any:
        definitions = self._root.get("$defs")
        name = reference.removeprefix("#/$defs/")
        return definitions.get(name) if isinstance(definitions, Mapping) else None

    def _merged(self, parts: list[Any]) -> dict[str, Any]:
        """One schema with the properties of all of these; of what several say, what the first one says."""
        found: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, Mapping) and isinstance(reference := part.get("$ref"), str):
                part = self._target(reference)
            if not isinstance(part, Mapping):
                continue
            properties = {**found.get("properties", {})}
            for name, each in part.get("properties", {}).items():
                if properties.get(name, True) is True:
                    properties[name] = each
            required = [*found.get("required", ()), *part.get("required", ())]
            found = {**{key: each for key, each in part.items() if key != "allOf"}, **found}
            found |= {"properties": properties} if properties else {}
            found |= {"required": required} if required else {}
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
            return f'"{{" {self.members(schema)} "}}"'
        return '("true" | "false" | "True" | "False")' if type == "boolean" else '("null" | "None")'

    def _string(self, schema: Mapping[str, Any]) -> str:
        limits = {key: schema[key] for key in _OF_STRINGS if key in schema}
        if self._notation is PYTHON:
            double = f"%json {json.dumps({'type': 'string', **limits})}"
            return double if limits else f"({double} | {self._single()})"
        for key in limits:
            self._terms.notes[self._tool, f"{key} of strings"] = None
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
        if arguments or self._notation.bare_keys:
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
            objects = f'"{{" {self._any_members(self._colon)} "}}"'
            self.lines.append(f"{name}: {self._either([*types, items, objects])}")
        return self._named[""]

    def _any_members(self, sign: str, *, arguments: bool = False) -> str:
        bare = arguments or self._notation.bare_keys
        key = r"/[^\s<>()\[\]{}:=,'\"|]{1,100}/" if bare else self._string({})
        member = f"{key} {sign} {self._any()}"
        return f"({member} ({self._comma} {member})*)?"
