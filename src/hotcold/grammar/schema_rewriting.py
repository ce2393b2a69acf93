"""Rewrites JSON schemas of any tool to schemas that a grammar can enforce.

Annotations are removed. References get one form. A constraint that cannot be enforced is left out, and a note
names it. An object that names its properties, and says nothing about others, is closed. Properties that
``allOf``, ``$ref`` and the like name for the same value are allowed there, too, so that closing excludes no
valid value. Rewriting a rewritten schema changes nothing."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotcold.grammar.error import GrammarError
from hotcold.grammar.schema_keywords import (
    COUNTS,
    FORMAT_PATTERNS,
    FORMATS,
    LIMITS,
    MOST_COUNT,
    NOT_ENFORCED,
    can_be_written,
    check_value,
    compiled_pattern,
    few_names,
    numeric,
    type_list,
)
from hotcold.grammar.schema_names import (
    CONDITIONAL,
    GROUPS,
    NOTHING,
    REFERENCES,
    Others,
    conditional,
    names_properties,
    said_by,
    total,
)
from hotcold.grammar.schema_overlap import exclude_each_other
from hotcold.grammar.schema_references import References, pointer
from hotcold.values import shown

MOST_LEVELS = 32  #: of nested schemas
_MOST_STEPS = 50_000  #: most visits of schemas; a schema is visited once for each path to it

_Schema = dict[str, Any]
_PLAIN = re.compile(r"[\w$-]{1,60}", re.ASCII)


@dataclass(frozen=True)
class Rewritten:
    schema: Any
    notes: tuple[str, ...]  #: omitted constraints, such as ``uniqueItems at properties.tags``


@dataclass(frozen=True)
class _Place:
    """The place of a schema in its document."""

    path: str
    level: int = 1
    closing: bool = True  #: close objects that say nothing about other properties
    others: Others = NOTHING

    def same(self, others: Others, *path: str | int) -> "_Place":
        """Returns the place of a schema of the same value."""
        return replace(self, path=_path(self.path, *path), level=self.level + 1, others=others)

    def at(self, key: str) -> str:
        return f"{key} at {self.path or 'the top'}"


def rewritten(schema: Any, *, open: bool = False) -> Rewritten:
    """Rewrites a schema that is not deeper than the limit. ``open``: as in the standard, objects may have
    unnamed properties unless they exclude them. GrammarError: it is broken."""
    rewriting = _Rewriting(schema, closing=not open)
    schema_of_values = rewriting.whole()
    return Rewritten(schema_of_values, tuple(rewriting.notes))


def _path(path: str, *parts: str | int) -> str:
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += f"[{shown(part)}]"
    return path


class _Rewriting:
    """The state of rewriting one document."""

    def __init__(self, root: Any, closing: bool) -> None:
        self._root = root
        self._closing = closing
        self.notes: dict[str, None] = {}
        self._references = References(root)
        self._definitions: _Schema = {}
        self._names: dict[tuple[str, bool, Others], str] = {}
        self._taken: set[str] = set()  # names of definitions in use
        self._left: list[tuple[str, Any, _Place]] = []  # definitions to rewrite
        self._one_of: list[tuple[_Place, Sequence[Any]]] = []  # compared when all references are read
        self._steps = 0

    def whole(self) -> Any:
        root = self._schema(self._root, _Place("", closing=self._closing))
        while self._left:
            name, target, where = self._left.pop()
            self._definitions[name] = self._schema(target, where)
        for place, options in self._one_of:
            if not exclude_each_other(options, self._references.resolved):
                self._leave_out(place, "oneOf")
        if self._definitions:
            root["$defs"] = {name: self._definitions[name] for name in self._names.values()}
        return root

    def _schema(self, schema: Any, place: _Place) -> Any:
        self._step()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            message = f"a schema is {shown(schema)}" if not place.path else f"{place.path} is {shown(schema)}"
            raise GrammarError(f"{message}: a schema is an object, true or false")
        if place.level > MOST_LEVELS:
            raise GrammarError(f"the schema is nested too deeply: {MOST_LEVELS} levels are allowed")
        for key, value in schema.items():
            check_value(key, value, place.at(key))
        stated = self._simple(schema, place) | self._items(schema, place)
        place = replace(place, closing=place.closing or schema.get("unevaluatedProperties") is False)
        groups = self._groups(schema)
        stated |= self._object(schema, place, total([place.others, *(each.others for each in groups)]))
        applied = self._applied(schema, place, groups)
        lost = (key for key in NOT_ENFORCED if key in schema and not _asks_nothing(key, schema))
        self._leave_out(place, *lost)
        both = [key for key in schema if key in stated or key in (*GROUPS, *REFERENCES)]
        return _merged(stated, applied) if both and both[0] in stated else _merged(applied, stated)

    # --- keywords of a single value -----------------------------------------------------------------------

    def _simple(self, schema: _Schema, place: _Place) -> _Schema:
        types = type_list(schema)
        nullable = schema.get("nullable") is True and "null" not in types  # OpenAPI 3.0
        kept: _Schema = {"type": [*types, "null"] if nullable else schema["type"]} if "type" in schema else {}
        asked = [key for key in _CAN_BE_ENFORCED if key in schema]
        kept |= {key: schema[key] for key in asked if _CAN_BE_ENFORCED[key](schema[key])}
        bounds, lost = numeric(schema, types)
        self._leave_out(place, *(key for key in asked if key not in kept), *lost)
        kept |= bounds
        for key in ("minLength", "maxLength", "minItems", "maxItems"):
            if key in schema:
                kept[key] = min(int(schema[key]), MOST_COUNT)
        format = schema.get("format")
        if "pattern" in kept:
            kept["pattern"] = compiled_pattern(schema["pattern"])
        if format in FORMAT_PATTERNS:
            by_format = {"pattern": compiled_pattern(FORMAT_PATTERNS[format])}
            kept |= {"allOf": [by_format]} if "pattern" in kept else by_format
        elif format in FORMATS:
            kept["format"] = format
        return kept

    def _items(self, schema: _Schema, place: _Place) -> _Schema:
        kept: _Schema = {}
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # the older drafts
            first, rest = "items", "additionalItems"
        if prefix := schema.get(first):
            inner = (self._inner(place, first, i) for i in range(len(prefix)))
            kept["prefixItems"] = [*map(self._schema, prefix, inner)]
        if schema.get(rest, True) is not True:
            kept["items"] = self._schema(schema[rest], self._inner(place, rest))
        return kept

    # --- objects ------------------------------------------------------------------------------------------

    def _object(self, schema: _Schema, place: _Place, others: Others) -> _Schema:
        named, by_pattern = schema.get("properties", {}), schema.get("patternProperties", {})
        # Schemas of both may apply to one value; then neither may exclude properties that the other names.
        others_of_named = self._said(by_pattern.values())
        others_by_pattern = self._said(named.values()) if by_pattern else NOTHING
        properties = {
            name: self._schema(subschema, self._inner(place, "properties", name, others=others_of_named))
            for name, subschema in named.items()
        }
        patterns, all_patterns = self._patterns(by_pattern, place, others_by_pattern)
        rest = schema.get("additionalProperties")
        if rest is not None:
            rest = self._schema(rest, self._inner(place, "additionalProperties"))
        required = list(dict.fromkeys(schema.get("required", ())))
        if _may_close(schema):
            other_patterns = [pattern for pattern in others.patterns if pattern not in patterns]
            spoken = others.open or said_by(schema).open or not all_patterns
            rest = spoken or not place.closing or bool(other_patterns and patterns)
            if not rest:
                properties |= {name: True for name in (*required, *others.names) if name not in properties}
                patterns |= dict.fromkeys(other_patterns, True)
        if not properties and not patterns:
            properties, patterns, rest = self._by_names(schema, rest, place)
        # The compiler would let an answer begin a name of a pattern even if all such names are used.
        for pattern in [*patterns]:
            if (names := few_names(pattern)) is not None:
                subschema = patterns.pop(pattern)
                properties |= {name: _both(properties.get(name, True), subschema) for name in names}
        parts = {"properties": properties, "patternProperties": patterns, "required": required}
        object_schema: _Schema = {key: value for key, value in parts.items() if value}
        if rest is not None:
            object_schema["additionalProperties"] = rest
        alone = others == NOTHING and not any(key in schema for key in (*GROUPS, *REFERENCES))
        return object_schema | self._counts(schema, object_schema, place, alone)

    def _patterns(self, given: _Schema, place: _Place, others: Others) -> tuple[_Schema, bool]:
        """Schemas by patterns of names, and True if no pattern was left out."""
        compiled_patterns = {}
        for pattern, subschema in given.items():
            compiled = compiled_pattern(pattern)
            inner = self._inner(place, "patternProperties", pattern, others=others)
            if compiled is None:
                self._leave_out(inner, "the pattern")
            else:
                compiled_patterns[compiled] = self._schema(subschema, inner)
        return compiled_patterns, len(compiled_patterns) == len(given)

    def _by_names(self, schema: _Schema, rest: Any, place: _Place) -> tuple[_Schema, _Schema, Any]:
        """The properties that ``propertyNames`` allows in an object without named properties."""
        allowed = schema.get("propertyNames")
        subschema = True if rest is None else rest
        if not isinstance(allowed, dict) or _demands(allowed) not in ({"enum"}, {"pattern"}):
            return {}, {}, rest
        if "enum" in allowed:
            check_value("enum", allowed["enum"], place.at("propertyNames"))
            return {name: subschema for name in allowed["enum"] if isinstance(name, str)}, {}, False
        check_value("pattern", allowed["pattern"], place.at("propertyNames"))
        pattern = compiled_pattern(allowed["pattern"])
        if pattern is None:
            self._leave_out(place, "propertyNames")
            return {}, {}, rest
        return {}, {pattern: subschema}, False

    def _counts(self, schema: _Schema, kept: _Schema, place: _Place, alone: bool) -> _Schema:
        """``minProperties`` and ``maxProperties``, as far as the compiler supports them."""
        named, required = len(kept.get("properties", ())), len(kept.get("required", ()))
        optional = named - len(set(kept.get("required", ())) & set(kept.get("properties", ())))
        closed = kept.get("additionalProperties") is False and "patternProperties" not in kept
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        counts: _Schema = {}
        if least > required:
            counts["minProperties"] = int(least)
        if most is not None and not (closed and most >= named):
            counts["maxProperties"] = int(most)
        # Names outside the schema may repeat, so two properties may have the same name.
        exact = alone and least <= required + 1
        if optional:
            exact = exact and closed and (most is None or most == required + 1)
        if counts and not exact and not (alone and not optional and least <= required):
            self._leave_out(place, *counts)
            return {}
        return counts

    # --- other schemas of the same value ------------------------------------------------------------------

    def _groups(self, schema: _Schema) -> list["_Group"]:
        """The groups of schemas for the same value; the schemas of a group are alternatives."""
        groups: list[tuple[str, int | None, list[Any]]] = []
        for key in GROUPS:
            schemas = schema.get(key, [])
            if key == "allOf":
                groups += [(key, i, [each]) for i, each in enumerate(schemas)]
            elif schemas:
                groups.append((key, None, schemas))
        for key in REFERENCES:
            if key in schema:
                groups.append((key, None, [self._references.target(schema[key])]))
        for key in CONDITIONAL:
            if schemas := conditional(schema, key):
                groups.append((key, None, schemas))
        alone = len(groups) == 1 and not names_properties(schema)  # no other schema needs its statements
        return [_Group(*each, NOTHING if alone else self._said(each[2])) for each in groups]

    def _applied(self, schema: _Schema, place: _Place, groups: Sequence["_Group"]) -> _Schema:
        merged: _Schema = {}
        both: list[Any] = []
        said = said_by(schema)
        for i, group in enumerate(groups):
            self._step(len(groups))
            others = total([place.others, said, *(each.others for each in (*groups[:i], *groups[i + 1 :]))])
            key = group.key
            part: _Schema = {}
            if key == "allOf":
                both.append(self._schema(group.schemas[0], place.same(others, key, group.index or 0)))
            elif key in REFERENCES:
                part = {"$ref": self._reference(schema[key], place, others)}
            elif key in ("anyOf", "oneOf"):
                places = (place.same(others, key, i) for i in range(len(group.schemas)))
                part = {"anyOf": [*map(self._schema, group.schemas, places)]}
            if key == "oneOf":
                self._one_of.append((place, group.schemas))
            if part.keys() & merged.keys():
                both.append(part)
            else:
                merged |= part
        return merged | ({"allOf": both} if both else {})

    # --- references ---------------------------------------------------------------------------------------

    def _reference(self, reference: str, place: _Place, others: Others) -> str:
        """The reference to a definition of the target, rewritten with the statements of these others."""
        target = self._references.target(reference)
        closing = place.closing
        if others.open:
            others = Others(open=True)
        if (closing, others) != (self._closing, NOTHING) and not any(map(_may_close, self._same([target]))):
            closing, others = self._closing, NOTHING
        key = (reference, closing, others)
        if key not in self._names:
            parts = pointer(reference)
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", parts[-1] if parts else "root")[:60] or "_"
            self._names[key] = name = next(each for each in _numbered(stem) if each not in self._taken)
            self._taken.add(name)
            path = _path("", *parts) or "#"
            self._left.append((name, target, _Place(path, closing=closing, others=others)))
        return f"#/$defs/{self._names[key]}"

    def _same(self, schemas: Iterable[Any]) -> list[_Schema]:
        """These schemas and all schemas that they apply to the same value."""
        by_id: dict[int, _Schema] = {}
        left = [*reversed([*schemas])]
        while left:
            schema = left.pop()
            if not isinstance(schema, dict) or id(schema) in by_id:
                continue
            self._step()
            by_id[id(schema)] = schema
            for key in GROUPS:
                if isinstance(schema.get(key), list):
                    left += reversed(schema[key])
            for key in CONDITIONAL:
                left += conditional(schema, key)
            left += [self._references.target(schema[key]) for key in REFERENCES if key in schema]
        return [*by_id.values()]

    def _said(self, schemas: Iterable[Any]) -> Others:
        return total(map(said_by, self._same(schemas)))

    # --- bounds and notes ---------------------------------------------------------------------------------

    def _step(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise GrammarError("the schema is too large: too many schemas refer to each other")

    def _leave_out(self, place: _Place, *keys: str) -> None:
        self.notes |= dict.fromkeys(map(place.at, keys))

    def _inner(self, place: _Place, *path: str | int, others: Others = NOTHING) -> _Place:
        """Returns the place of a schema of another value, which is inside this one."""
        return _Place(_path(place.path, *path), place.level + 1, self._closing, others)


@dataclass(frozen=True)
class _Group:
    key: str
    index: int | None
    schemas: Sequence[Any]
    others: Others


def _may_close(schema: _Schema) -> bool:
    return names_properties(schema) and "additionalProperties" not in schema


_CAN_BE_ENFORCED: dict[str, Callable[[Any], bool]] = {
    "enum": can_be_written,
    "const": can_be_written,
    "multipleOf": lambda value: 1e-6 <= value < 2**31,
    "pattern": lambda value: compiled_pattern(value) is not None,
}
_DEMANDS = {
    "type", "enum", "const", "pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not",
    "$ref", "if", *LIMITS, *COUNTS,
}  # fmt: skip


def _demands(schema: _Schema) -> set[str]:
    """The keywords in a schema of names that require more than a string."""
    demands = _DEMANDS & schema.keys()
    return demands - {"type"} if schema.get("type", "string") == "string" else demands


def _asks_nothing(key: str, schema: _Schema) -> bool:
    value, nothing = schema[key], NOT_ENFORCED[key]
    if key == "uniqueItems":
        return value is False or schema.get("maxItems", 2) < 2
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key == "propertyNames" and isinstance(value, dict):
        named = schema.get("properties") or schema.get("patternProperties")
        return not _demands(value) or (_demands(value) in ({"enum"}, {"pattern"}) and not named)
    if key == "unevaluatedProperties":
        return isinstance(value, bool) or value == {}
    return value is nothing or (isinstance(value, dict) and value == nothing)


def _both(first: Any, second: Any) -> Any:
    return second if first is True else first if second is True else {"allOf": [first, second]}


def _merged(first: _Schema, second: _Schema) -> _Schema:
    merged = {**first, **second}
    if "allOf" in first and "allOf" in second:
        merged["allOf"] = [*first["allOf"], *second["allOf"]]
    return merged


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    for n in range(2, _MOST_STEPS + 2):
        yield f"{stem}-{n}"
