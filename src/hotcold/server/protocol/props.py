"""llama.cpp's ``/props``, ``/slots`` and ``/apply-template``: the server's and the template's properties."""

from dataclasses import dataclass
from typing import Any

from hotcold.chat.chat import Chat
from hotcold.chat.tool_formats import GENERAL
from hotcold.server.protocol import chat, thinking
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Fields, Shape, check_depth
from hotcold.server.protocol.native import settings

TEMPLATE: Fields = {
    name: chat.FIELDS[name]
    for name in (
        "model", "messages", "tools", "tool_choice", "chat_template_kwargs", *thinking.FIELDS,
        "add_generation_prompt", "response_format", "chat_template",
    )
}  # fmt: skip
_TEMPLATE = Shape(TEMPLATE)
_THOUGHT = "Quaestio"
#: Variables of templates that decide whether the thinking of all messages stays in the prompt.
_KEEP = {
    "preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False,
    "drop_thinking": False,
}  # fmt: skip


@dataclass(frozen=True)
class TemplateFacts:
    """The template, the separate one for tools if there is one, and their abilities."""

    text: str = ""
    with_tools: str = ""
    caps: dict[str, bool] | None = None


def parse_template(body: object, facts: Facts) -> ChatCall:
    """Reads a conversation that is only rendered."""
    check_depth(body)
    values = _TEMPLATE.read(body, "")
    return chat.parse({name: value for name, value in values.items() if value is not None}, facts)


def caps(known: Chat) -> dict[str, bool]:
    """Returns llama.cpp's ``chat_template_caps``; empty without a template. Blocks during its probes."""
    if not known.has_template:
        return {}
    traits, with_tools = known.traits(), known.traits(tools=True)
    calls = with_tools.calls
    return {
        "supports_string_content": traits.text,
        "supports_typed_content": traits.parts,
        "supports_tools": known.lists_tools and known.tool_format is not GENERAL,
        "supports_tool_calls": calls,
        "supports_parallel_tool_calls": calls and with_tools.several_calls,
        "supports_system_role": traits.system,
        "supports_preserve_reasoning": _keeps_thoughts(known),
        "supports_reasoning_effort": "reasoning_effort" in (known.template or ""),
        "supports_object_arguments": calls and with_tools.object_arguments,
    }


def _keeps_thoughts(known: Chat) -> bool:
    """Returns whether an earlier answer's thinking can stay in a prompt."""
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    messages = [{"role": role, "content": content} for role, content in said]
    messages[1]["reasoning_content"] = _THOUGHT
    try:
        return _THOUGHT in known.text(messages, kwargs={"enable_thinking": True, **_KEEP})
    except ValueError:  # the template refuses the value
        return False


def props(facts: Facts, template: TemplateFacts | None = None) -> dict[str, Any]:
    """Returns ``/props``. The path of the model's file is private, so it is left out."""
    template = template or TemplateFacts()
    properties = {
        "default_generation_settings": {
            "n_ctx": facts.context,
            "params": {**settings(facts.sampling), "n_predict": facts.default_max_tokens},
        },
        "total_slots": facts.slots,
        "model_alias": facts.name,
        "model_path": facts.name,
        "chat_template": template.text,
        "chat_template_caps": template.caps or {},
        "bos_token": _name(facts, facts.tokenizer.bos_id),
        "eos_token": _name(facts, facts.tokenizer.eos_id),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "is_sleeping": False,
        "build_info": facts.fingerprint,
    }
    return (
        {**properties, "chat_template_tool_use": template.with_tools} if template.with_tools else properties
    )


def slots(facts: Facts, busy: int, *, fail_if_none: bool = False) -> list[dict[str, Any]]:
    """Returns ``/slots``: which ones are in use, with nothing about their requests. Raises APIError if none
    is free and the client wants an error then."""
    if fail_if_none and busy >= facts.slots:
        raise APIError(
            "no slot is free: try again later",
            status=503,
            type="unavailable_error",
            code="no_slot",
            retry_after=1,
        )
    return [
        {"id": id, "n_ctx": facts.context, "speculative": False, "is_processing": id < busy}
        for id in range(facts.slots)
    ]


def _name(facts: Facts, id: int | None) -> str:
    return "" if id is None else facts.tokenizer.piece(id).decode(errors="replace")
