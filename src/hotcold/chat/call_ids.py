"""Ids of calls, in the form that a template requires. Messages of role ``tool`` repeat them."""

import hashlib
import re
import secrets
import string
from typing import Any, Literal, TypeAlias

from hotcold.chat.tool_formats import KIMI, MISTRAL, MISTRAL_ARGS, MISTRAL_IDS, ToolFormat

#: ``openai``: call_ and 24 digits, for templates that accept any id; ``nine``: nine letters and digits;
#: ``kimi``: functions.NAME:NUMBER.
CallIds: TypeAlias = Literal["openai", "nine", "kimi"]

_LETTERS = string.ascii_letters + string.digits
_NINE = re.compile("[a-zA-Z0-9]{9}")
_KIMI = re.compile(r"functions\.[^:]+:[0-9]+")
_ASKS_FOR_NINE = re.compile(r"\|\s*length\s*[!=]=\s*9\b")


def call_ids_of(template: str, format: ToolFormat) -> CallIds:
    """Returns the form that a template requires."""
    if format in (MISTRAL, MISTRAL_ARGS, MISTRAL_IDS) or _ASKS_FOR_NINE.search(template):
        return "nine"
    return "kimi" if format == KIMI else "openai"


def new_call_id(form: CallIds, name: str, index: int) -> str:
    """Returns a new id for call ``index`` of an answer."""
    if form == "nine":
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"functions.{name}:{index}" if form == "kimi" else f"call_{secrets.token_hex(12)}"


def with_fitting_ids(messages: list[dict[str, Any]], form: CallIds) -> list[dict[str, Any]]:
    """Replaces ids that do not have the template's form, equal ids by equal ones. Calls and results without
    an id get one if the template needs it; such a result gets the id of the call at its position."""
    if form == "openai":
        return messages
    new_ids: dict[str, str] = {}
    waiting: list[str] = []  # ids of calls without a result so far
    changed: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = calls = [dict(call) for call in calls]
            for index, call in enumerate(calls):
                old = call.get("id")
                id = _fitting(old or f"{len(changed)}.{index}", form, call["function"]["name"], index)
                if old is not None:
                    new_ids[old] = id
                call["id"] = id
            waiting = [call["id"] for call in calls]
        elif message["role"] == "tool":
            old = message.get("tool_call_id")
            if old is None:
                id = waiting[0] if waiting else _fitting(f"{len(changed)}", form, "", 0)
            else:
                id = new_ids.get(old) or _fitting(old, form, message.get("name") or "", 0)
            message["tool_call_id"] = id
            if id in waiting:
                waiting.remove(id)
        changed.append(message)
    return changed


def _fitting(id: str, form: CallIds, name: str, index: int) -> str:
    if form == "kimi":
        return id if _KIMI.fullmatch(id) else f"functions.{name}:{index}"
    if _NINE.fullmatch(id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode(errors="replace")).digest(), "big")
    return "".join(_LETTERS[number // len(_LETTERS) ** i % len(_LETTERS)] for i in range(9))
