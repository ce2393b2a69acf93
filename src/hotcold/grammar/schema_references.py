"""Resolves references within a JSON schema: by path, by anchor, or by the schema's own address."""

import re
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from hotcold.grammar.error import GrammarError
from hotcold.values import shown

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


class References:
    """Resolves the references of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[str, Any] = {}

    def target(self, reference: Any) -> Any:
        """The schema at a reference. GrammarError: it points at nothing, or out of the document."""
        if not isinstance(reference, str):
            raise GrammarError(f"$ref is {shown(reference)}: a text is needed")
        if reference not in self._found:
            self._found[reference] = self._look_for(reference)
        return self._found[reference]

    def resolved(self, schema: Any) -> Any:
        """A schema, or the schema that it refers to."""
        for _ in range(20):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self.target(schema["$ref"])
        return schema

    def _look_for(self, reference: str) -> Any:
        base = self._root.get("$id") if isinstance(self._root, dict) else None
        local = reference.removeprefix(base) if isinstance(base, str) and base else reference
        if local and not local.startswith("#"):
            message = "only references within the schema, '#/...', are allowed"
            raise GrammarError(f"$ref is {shown(reference)}: {message}")
        target = self._root
        if local not in ("", "#") and not local.startswith("#/"):
            target = self._anchors.get(unquote(local[1:]))
        for part in pointer(local):
            if isinstance(target, list) and _INDEX.fullmatch(part) and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                target = None
        if not isinstance(target, dict | bool):
            raise GrammarError(f"$ref {shown(reference)} does not exist in the schema")
        return target

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        anchors: dict[str, Any] = {}
        left = [self._root]
        for value in left:  # the loop appends to it
            if isinstance(value, dict):
                for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
                    if isinstance(value.get(key), str):
                        anchors.setdefault(value[key].removeprefix("#"), value)
            left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return anchors


def pointer(reference: str) -> list[str]:
    """The names on the path of a reference."""
    parts = unquote(reference.partition("#")[2]).split("/")
    return [part.replace("~1", "/").replace("~0", "~") for part in parts[1:]] if parts[0] == "" else []
