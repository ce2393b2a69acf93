"""Rules of a grammar for calls whose arguments are literals of a language other than JSON."""

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
_SEVERAL = {"$ref", "allOf", *_EITHER}  # other schemas for the same value
_SINGLE = r"SINGLE: /'([^'\\]|\\(?s:.))*'/"
_MOST_ITEMS = 1000  # limit of items that a rule counts
_MOST_STEPS = 20_000  # limit of schemas to visit, counted again for each path to them
_STEPS_OF_SEVERAL = 20  # steps for merging several schemas
_MOST_OPTIONS = 8  # limit of nested options in a tool's arguments


def literal_rules(
    terms: Terms, kind: LiteralCall, rule: str, name: str, schema: Mapping[str, Any]
) -> list[str]:
    """Returns rules in which ``rule`` is a call of the tool. The notes of the terms list the parts that
    cannot be enforced. Raises GrammarError if the schema is too large."""
    rules = _Rules(terms, kind, rule, name, schema)
    notation = kind.notation
    head = f"{terms.literal(kind.prefix)} {terms.quoted(name)}"
    members = rules.arguments(schema)
    rules.finish()
    call = f"{rule}: {head} {terms.quoted(notation.opens)} {members} {terms.quoted(notation.closes)}"
    return [call, *rules.lines]


class _Rules:
    """The rules of one tool's values."""

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
        # rules of merged schemas, and the rule of any value under the key ""
        self._named: dict[str, str] = {}
        self._left: list[tuple[str, Mapping[str, Any]]] = []  # merged schemas whose rules are not written yet
        self._comma = self._spaced(",")
        self._colon = self._spaced(":")

    def _spaced(self, sign: str) -> str:
        gap = self._notation.gap
        return f"{self._terms.quoted(sign)} {self._terms.quoted(gap)}?" if gap else self._terms.quoted(sign)

    def _name(self) -> str:
        self._count += 1
        return f"{self._rule}_{self._count}"

    def finish(self) -> None:
        """Writes the rules of the schemas that other rules refer to."""
        while self._left:
            name, schema = self._left.pop()
            self.lines.append(f"{name}: {self._combined(schema)}")

    def arguments(self, schema: Mapping[str, Any], level: int = 0) -> str:
        """Returns the term of a call's arguments, without the brackets."""
        merged = self._merged([schema])
        key = next((key for key in _EITHER if key in merged), None)
        if key is None or level > _MOST_OPTIONS:
            return self._members(merged, arguments=True)
        options = self._options(merged, key)
        return self._either(self.arguments(each, level + 1) or '""' for each in options)

    def _members(self, schema: Mapping[str, Any], *, arguments: bool = False) -> str:
        """Returns the term of the members of an object, or of a call's arguments."""
        self._note(f"{key} of objects" for key in _OF_OBJECTS if key in schema)
        additional = schema.get("additionalProperties")
        required = schema.get("required", ())
        properties = {**schema.get("properties", {})}
        if not properties:
            return "" if additional is False else self._any_members(additional, arguments=arguments)
        properties |= {property: additional for property in required if property not in properties}
        sign = self._terms.quoted(self._notation.equals) if arguments else self._colon
        names = [property for property in properties if properties[property] is not False]
        if self._notation.in_order:
            names.sort()
        base = self._name()
        for i, property in enumerate(names):
            member = f"{self._key(property, arguments)} {sign} {self.value(properties[property])}"
            last, optional = i + 1 == len(names), property not in required
            following = "" if last else f" {base}_rest{i + 1}"
            skipped = "" if not optional else " | " + ('""' if last else f"{base}_from{i + 1}")
            self.lines += [
                f"{base}_{i}: {member}",
                f"{base}_rest{i}: ({self._comma} {base}_{i}){'?' * optional}{following}",
                f"{base}_from{i}: {base}_{i}{following}{skipped}",
            ]
        return f"{base}_from0" if names else ""

    def value(self, schema: Any) -> str:
        """Returns the term of a value."""
        self._step()
        if not isinstance(schema, Mapping):
            return self._any_value()
        if "const" in schema:
            return self._one_of([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return self._one_of(values)
        if _SEVERAL & schema.keys():
            return self._rule_of(schema)
        types = type_list(schema)
        keys = {"properties", "additionalProperties", "items", "prefixItems", *_OF_STRINGS, *_OF_NUMBERS}
        if "type" not in schema and not schema.keys() & keys:
            return self._any_value()
        return self._either(self._typed(schema, type) for type in types)

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise GrammarError("the schema is too large: too many schemas refer to each other")

    def _note(self, notes: Iterable[str]) -> None:
        self._terms.notes |= dict.fromkeys((self._tool, each) for each in notes)

    def _rule_of(self, schema: Mapping[str, Any]) -> str:
        """Returns the rule of a schema, which may refer to itself."""
        self._step(_STEPS_OF_SEVERAL)
        key = json.dumps(schema, sort_keys=True)
        if key not in self._named:
            self._named[key] = self._name()
            self._left.append((self._named[key], schema))
        return self._named[key]

    def _combined(self, schema: Mapping[str, Any]) -> str:
        """Returns the term of a value that matches all parts of a schema."""
        if schema.keys() == {"$ref"}:
            return self.value(self._target(schema["$ref"]))
        merged = self._merged([schema])
        key = next((key for key in _EITHER if key in merged), None)
        return (
            self.value(merged) if key is None else self._either(map(self.value, self._options(merged, key)))
        )

    def _options(self, schema: Mapping[str, Any], key: str) -> Iterable[Any]:
        """Returns each option of a schema, merged with the other parts of the schema."""
        shared = {name: each for name, each in schema.items() if name != key}
        options = [each for each in schema[key] if each is not False]
        return [self._merged([shared, each]) for each in options] if shared else options

    def _target(self, reference: str) -> Any:
        definitions = self._root.get("$defs")
        name = reference.removeprefix("#/$defs/")
        return definitions.get(name) if isinstance(definitions, Mapping) else None

    def _flat(self, parts: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
        """Yields the schemas of one value; ``$ref`` and ``allOf`` are replaced by their schemas."""
        left, references = [*parts], set()
        while left:
            self._step()
            part = left.pop(0)
            if not isinstance(part, Mapping):
                continue
            left[:0] = part.get("allOf", ())
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                left.insert(0, self._target(reference))
            yield {key: each for key, each in part.items() if key not in ("$ref", "allOf", "$defs")}

    def _merged(self, parts: Iterable[Any]) -> dict[str, Any]:
        """Merges several schemas into one with all their properties. If they disagree, the first one wins."""
        merged: dict[str, Any] = {}
        for part in self._flat(parts):
            if _SEVERAL & part.keys() & merged.keys():
                self._note(["a second anyOf of one value"])
            properties = {**merged.get("properties", {})}
            for name, value in part.get("properties", {}).items():
                if properties.get(name, True) is True:
                    properties[name] = value
            required = dict.fromkeys([*merged.get("required", ()), *part.get("required", ())])
            merged = {**part, **merged}
            merged |= {"properties": properties} if properties else {}
            merged |= {"required": [*required]} if required else {}
        return merged

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
        upper = "" if most is None or most > _MOST_ITEMS else str(int(most) - len(first))
        if first:
            return f"{f' {self._comma} '.join(first)} ({self._comma} {item}){{{least},{upper}}}"
        following = f"({self._comma} {item}){{{max(0, least - 1)},{upper and int(upper) - 1}}}"
        return f"{item} {following}" if least else f"({item} {following})?"

    def _key(self, name: str, arguments: bool) -> str:
        if (arguments or self._notation.bare_keys) and is_word(name):
            return self._terms.quoted(name)
        return self._one_of([name])

    def _one_of(self, values: list[Any]) -> str:
        """Returns the term of one of several constants, in this notation."""
        terms = []
        for value in values:
            text = written(value, self._notation)
            terms.append(self._terms.literal(text))
            if isinstance(value, str) and text == f'"{value}"' and "'" not in value:
                terms.append(self._terms.quoted(f"'{value}'"))
        return self._either(terms)

    def _either(self, options: Iterable[str]) -> str:
        terms = [*dict.fromkeys(options)]
        return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"

    def _any_value(self) -> str:
        """Returns the rule of any value."""
        if "" not in self._named:
            self._named[""] = name = self._name()
            types = [self._typed({}, type) for type in ("string", "number", "boolean", "null")]
            items = f'"[" ({name} ({self._comma} {name})*)? "]"'
            objects = f'"{{" {self._any_members(True)} "}}"'
            self.lines.append(f"{name}: {self._either([*types, items, objects])}")
        return self._named[""]

    def _any_members(self, schema: Any, *, arguments: bool = False) -> str:
        """Returns the term of members with any names, whose values match a schema."""
        bare = arguments or self._notation.bare_keys
        key = r"/[^\s<>()\[\]{}:=,'\"|]{1,100}/" if bare else self._string({})
        sign = self._terms.quoted(self._notation.equals) if arguments else self._colon
        member = f"{key} {sign} {self.value(schema)}"
        return f"({member} ({self._comma} {member})*)?"
