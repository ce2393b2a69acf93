"""Renders chat templates with Jinja, inside a :class:`~hotcold.processes.guarded.GuardedProcess` only.

Templates come with model files, so they are untrusted. The process bounds time and memory; this file bounds
what a template can access."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotcold.chat.stand_ins import MarkedText, StandIns
from hotcold.errors import UserError

MOST_STEPS = 20_000  #: limit of one ``range``
MOST_CHARACTERS = 8 << 20  #: limit of a text made by repetition, and of the whole prompt
_COMPILED = 8  #: limit of cached compiled templates
_MOST_PROBED = 1 << 18  # limit of characters returned for a probe


class _Generation(Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks training text and has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as in ``transformers``, with bounds. Texts that templates join stay :class:`MarkedText`."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.stand_ins = StandIns("", "")
        self.filters["tojson"] = self._to_json
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may use an attribute. It may change its own lists: some keep a queue."""
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def concat(self, parts: Iterable[str]) -> str:
        return MarkedText("".join(parts), self.stand_ins)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for times, of in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(of, Sequence) and times * len(of) > MOST_CHARACTERS:
                    raise SecurityError(f"the template repeats a value {times} times")
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) < 64):
            raise SecurityError("the template computes a power that is too large")
        if operator == "%" and isinstance(left, str) and re.search(r"[0-9]{7}|\*", left):
            raise SecurityError("the template pads a text to too many characters")
        return super().call_binop(context, operator, left, right)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Returns JSON without Jinja's escapes for HTML, as in transformers."""
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_listed,
        )
        if ensure_ascii:  # stand-ins were escaped
            back = {format(ord(b), "04x"): a for a, b in self.stand_ins.forward.items() if ord(b) < 1 << 16}
            text = re.sub(
                r"\\(?:u([0-9a-f]{4})|.)",
                lambda json_text: _escaped(back.get(json_text[1] or ""), self.stand_ins) or json_text[0],
                text,
            )
        return MarkedText(text, self.stand_ins)


class _Given(list[Any]):
    """Messages, which a template cannot change."""


def _listed(value: object) -> list[Any]:
    """Returns a list of the results of Jinja's filters, such as ``map``."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _escaped(character: int | None, stand_ins: StandIns) -> str:
    """Returns the ASCII JSON escape of a character that had a stand-in; empty for None."""
    if character is None:
        return ""
    return stand_ins.forward[character] if character < 128 else json.dumps(chr(character))[1:-1]


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MOST_STEPS:
        raise SecurityError(
            f"a loop of the template has {len(numbers)} steps: at most {MOST_STEPS} are allowed"
        )
    return numbers


def _raise(message: object = "") -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_environment = TemplateEnvironment()
_compiled = lru_cache(_COMPILED)(_environment.from_string)


def render(request: dict[str, Any]) -> str:
    """Renders ``template`` with ``values`` (the program's), ``messages`` and ``users`` (values of users, and
    tools). Their texts get stand-ins, except roles, because templates make token names of them. Raises
    Jinja's errors, or any error that a template causes."""
    stand_ins = StandIns(*request["stand_ins"])
    _environment.stand_ins = stand_ins
    messages = _Given(
        {key: value if key == "role" else stand_ins.mark(value) for key, value in message.items()}
        for message in request["messages"]
    )
    users = {name: stand_ins.mark(value) for name, value in request["users"].items()}
    parts: list[str] = []
    size = 0
    for part in _compiled(request["template"]).generate(**request["values"], **users, messages=messages):
        parts.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise SecurityError(f"the prompt has more than {MOST_CHARACTERS} characters")
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns ``{"text": ...}``, or raises UserError. A request with ``probes``, each with messages and
    tools, gets ``{"texts": [...]}``, with null for a probe that could not be rendered."""
    if "probes" in request:
        return {"texts": [_probed(request, probe) for probe in request["probes"]]}
    try:
        return {"text": render(request)}
    except (MemoryError, RecursionError) as error:
        raise UserError(f"it takes too much memory ({type(error).__name__})") from None
    except Exception as error:  # a template may cause any error; none is a defect of Hotcold
        text = " ".join(str(error).split())[:400]
        kind = type(error).__name__
        raise UserError(text if text and isinstance(error, TemplateError) else f"{kind}: {text}") from None


def _probed(request: dict[str, Any], probe: dict[str, Any]) -> str | None:
    """Returns the text of a probe, like :func:`render`, but without stand-ins, because no user wrote it."""
    values = {**request["values"], "tools": probe["tools"]}
    try:
        return render({**request, "messages": probe["messages"], "values": values})[:_MOST_PROBED]
    except Exception:
        return None
