"""OpenAI's ``/v1/responses``: translates the request to one of the chat route."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotcold.chat.stream import AnswerStream
from hotcold.server.protocol import chat, sampling, thinking
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.dialects import translated
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import (
    Anything,
    Choice,
    Either,
    Field,
    Fields,
    Flag,
    Items,
    Kind,
    Neutral,
    Schema,
    Shape,
    Tagged,
    Text,
    Whole,
    check_depth,
)
from hotcold.server.protocol.kept import RequestTexts, text_of
from hotcold.server.protocol.limits import LARGEST, MAX_MESSAGES, MAX_PARTS
from hotcold.server.protocol.messages import ONLY_TEXT, REFUSAL_PART, TEXT_PART, ResultPart
from hotcold.server.protocol.responses_reply import ResponsesReply
from hotcold.server.protocol.responses_tools import HOSTED, TOOL_CHOICE, TOOLS, Names, arguments_of
from hotcold.values import shown

_PART = Tagged(
    "type",
    {"input_text": TEXT_PART, "output_text": TEXT_PART, "text": TEXT_PART, "refusal": REFUSAL_PART},
    ONLY_TEXT,
)


def _content(part: Kind) -> Either:
    return Either({str: Text(), list: Items(part, 0, MAX_PARTS)}, "a string, or a list of text parts,")


_CALL_ID = Field(Text(0, 256), required=True)
_CALLED = {
    "call_id": _CALL_ID,
    "name": Field(Text(1, 256), required=True),
    "namespace": Field(Text(0, 256)),
}
_OUTPUT = Shape({"call_id": _CALL_ID, "output": Field(_content(ResultPart(_PART)), required=True)})
#: Items of tools that ran elsewhere, and of OpenAI's own bookkeeping, which are left out.
_ELSEWHERE = (
    *(f"{each}_call" for each in HOSTED), "additional_tools", "apply_patch_call_output", "compaction",
    "compaction_trigger", "computer_call_output", "configuration_update", "local_shell_call_output",
    "mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "program", "program_output",
    "shell_call_output", "tool_search_output",
)  # fmt: skip
_THOUGHT = Tagged("type", {"reasoning_text": TEXT_PART, "summary_text": TEXT_PART})
_ITEM = Tagged(
    "type",
    {
        "message": Shape(
            {
                "role": Field(Choice(("user", "assistant", "system", "developer")), required=True),
                "content": Field(_content(_PART), required=True),
            }
        ),
        "function_call": Shape({**_CALLED, "arguments": Field(Text(), required=True)}),
        "function_call_output": _OUTPUT,
        "custom_tool_call": Shape({**_CALLED, "input": Field(Text(), required=True)}),
        "custom_tool_call_output": _OUTPUT,
        "reasoning": Shape(
            {
                "content": Field(Items(_THOUGHT, 0, MAX_PARTS)),
                "summary": Field(Items(_THOUGHT, 0, MAX_PARTS)),
            }
        ),
        "item_reference": Shape({"id": Field(Text(1, 256), required=True)}),
        **dict.fromkeys(_ELSEWHERE, Shape({})),
    },
)


class Item:
    """An item of the input; a message needs no type."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if isinstance(value, dict) and value.get("type") is None and "role" in value:
            value = {**value, "type": "message"}
        return _ITEM.read(value, param)

    def schema(self) -> Schema:
        message = _ITEM.shapes["message"].schema()
        untyped = {**message, "properties": {**message["properties"], "type": {"type": "null"}}}
        return {"anyOf": [_ITEM.schema(), untyped]}


_FORMAT = Tagged(
    "type",
    {
        "text": Shape({}),
        "json_object": Shape({}),
        "json_schema": Shape(
            {
                "name": Field(Text(0, 256)),
                "description": Field(Text()),
                "schema": Field(Anything(), required=True),
                "strict": Field(Flag(), note="A schema that cannot be enforced is an error."),
            }
        ),
    },
)
#: Additional content that a response may have at OpenAI, and never has here. Log-probabilities are not in the
#: list: a client that asks for them gets an error.
_INCLUDED = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "message.input_image.image_url",
)  # fmt: skip
_REASONING = Shape(
    {
        "effort": Field(Choice(thinking.EFFORTS), note="none turns thinking off."),
        "max_tokens": Field(thinking.BUDGET, None, "Limit of thinking tokens, under OpenRouter's name."),
        "summary": Field(
            Choice(("auto", "concise", "detailed")), None, "Has no effect: the whole thinking is returned."
        ),
    }
)
FIELDS: Fields = {
    "model": chat.MODEL,
    "input": Field(
        Either({str: Text(), list: Items(Item(), 0, MAX_MESSAGES)}, "a string, or a list of items,"),
        None,
        "The user's message, or the conversation so far.",
        required=True,
    ),
    "instructions": Field(Text(), None, "The system message."),
    "max_output_tokens": Field(Whole(1, LARGEST), None, "Limit of tokens in the answer."),
    "stream": Field(Flag(), False, "Streams the answer as server-sent events."),
    "tools": Field(TOOLS, None, "Functions and custom tools that the model may call."),
    "tool_choice": Field(TOOL_CHOICE, None, "auto if there are tools."),
    "parallel_tool_calls": Field(Flag(), None, "Whether an answer may have several calls."),
    "text": Field(Shape({"format": Field(_FORMAT)}), None, "The form of the answer."),
    "reasoning": Field(_REASONING, None, "A value for the chat template."),
    **sampling.SHARED,
    "include": Field(Items(Choice(_INCLUDED), 0, 64), None, "Has no effect: the server has none of these."),
    "store": Field(Flag(), True, "Whether the response is stored for later requests."),
    "previous_response_id": Field(Text(1, 256), None, "The response that this conversation continues."),
    "conversation": Field(Neutral(), note="Use previous_response_id."),
    "background": Field(Neutral((False,))),
    "metadata": Field(Anything(), None, "The response repeats it."),
    "truncation": Field(Neutral(("disabled",))),
    "prompt": Field(Neutral()),
    "context_management": Field(Neutral(([],))),
    "moderation": Field(Neutral()),
    "top_logprobs": Field(Neutral((0,))),
}  # fmt: skip
BODY = Shape(FIELDS)
_CALLS = ("function_call", "custom_tool_call")
_NAMES = {"response_format": "text.format", "messages": "input"}


@dataclass(frozen=True)
class ResponsesCall(ChatCall):
    """The job and options of one request."""

    repeated: dict[str, Any] = field(default_factory=dict)  #: fields of the request that the response repeats
    names: Names = field(default_factory=Names)  #: names of the functions
    kept: RequestTexts | None = None  #: stored with the response; None: the response is not stored

    def reply(self, parts: Callable[[], AnswerStream]) -> ResponsesReply:
        return ResponsesReply(self.facts, parts(), self.repeated, self.names, kept=self.kept)


def parse(body: object, facts: Facts) -> ResponsesCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = BODY.read(body, "")
    values["input"] = [*_previous(values["previous_response_id"], facts), *_items(values["input"], facts)]
    _check_calls(values["input"])
    names = Names(values["tools"] or ())
    call = translated(chat.parse, _chat(values, names), facts, _NAMES)
    repeated = _repeated_fields(values, call)
    kept = RequestTexts(text_of(values["input"]), text_of(repeated)) if values["store"] else None
    fields = {**vars(call), "left_out": names.left_out}
    return ResponsesCall(**fields, repeated=repeated, names=names, kept=kept)


def _previous(id: str | None, facts: Facts) -> list[dict[str, Any]]:
    """Returns the conversation up to the end of a stored response. Raises APIError if it is not stored."""
    if id is None:
        return []
    items = facts.kept_responses.conversation(id)
    if items is None:
        got = f"previous response with id {shown(id)} not found: only the last ones are kept"
        fix = "send the whole conversation as input"
        raise invalid(f"{got}; {fix}", "previous_response_id", "previous_response_not_found")
    return [_ITEM.read(item, "previous_response_id") for item in items]


def _items(input: str | list[dict[str, Any]], facts: Facts) -> list[dict[str, Any]]:
    """Returns the items of an input, without items of tools that ran elsewhere."""
    if isinstance(input, str):
        return [{"type": "message", "role": "user", "content": input}]
    return [item for item in _resolved(input, facts) if item["type"] not in _ELSEWHERE]


def _resolved(items: list[dict[str, Any]], facts: Facts) -> Iterator[dict[str, Any]]:
    """Returns the items, and stored items in place of references. A second reference to an item is an error,
    so that a short request cannot become huge."""
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        param = f"input[{place}]"
        if item["type"] == "item_reference":
            first = places.setdefault(item["id"], place)
            if first != place:
                got = f"{param}.id is {shown(item['id'])}, as in input[{first}]"
                raise invalid(f"{got}: refer to an item once", f"{param}.id")
            kept = facts.kept_items.find(item["id"])
            if kept is None:
                got = f"{param}.id is {shown(item['id'])}, which is not among the items that are kept"
                raise invalid(f"{got}: send the item itself, or set store to false", f"{param}.id")
            yield _ITEM.read(json.loads(kept[0]), param)
        else:
            yield item


def _check_calls(items: list[dict[str, Any]]) -> None:
    if items and items[-1]["type"] in _CALLS:
        got = f"input ends with the call {shown(items[-1]['call_id'])}"
        raise invalid(f"{got}: add a {items[-1]['type']}_output of each call", "input")


def _repeated_fields(values: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    reasoning, format = values["reasoning"] or {}, (values["text"] or {}).get("format")
    return {
        "instructions": values["instructions"],
        "max_output_tokens": values["max_output_tokens"],
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": values["previous_response_id"],
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": values["store"],
        "temperature": call.job.params.temperature,
        "top_p": call.job.params.top_p,
        "text": {"format": _without_absent(format or {"type": "text"})},
        "tool_choice": values["tool_choice"] or "auto",
        "tools": [each for each in values["tools"] or () if each["type"] not in HOSTED],
        "truncation": "disabled",
        "metadata": values["metadata"] or {},
    }


def _without_absent(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shape.items() if value is not None}


def _chat(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Translates the request to one of the chat route."""
    reasoning = values["reasoning"]
    body: dict[str, Any] = {
        "messages": [*_messages(values, names)],
        "max_tokens": values["max_output_tokens"],
        "stream": values["stream"],
        "parallel_tool_calls": values["parallel_tool_calls"],
        "reasoning": reasoning and {name: reasoning[name] for name in ("effort", "max_tokens")},
        **{name: values[name] for name in sampling.SHARED},
    }
    format = (values["text"] or {}).get("format") or {"type": "text"}
    if format["type"] == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif format["type"] == "json_schema":
        named = {name: format[name] for name in ("name", "schema", "strict") if format[name] is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if names.functions:
        body["tools"] = names.functions
    if values["tool_choice"] is not None:
        body["tool_choice"] = names.choice(values["tool_choice"])
    return body


def _messages(values: Mapping[str, Any], names: Names) -> Iterator[dict[str, Any]]:
    """Returns the messages of the items. Consecutive items of the assistant are one message."""
    if values["instructions"]:
        yield {"role": "system", "content": values["instructions"]}
    assistant: dict[str, Any] = {}
    for item in values["input"]:
        if _is_assistants(item):
            begins = item["type"] in ("message", "reasoning")
            if begins and (assistant.get("content") is not None or "tool_calls" in assistant):
                yield assistant
                assistant = {}
            _add_item(assistant, item, names)
            continue
        if assistant:
            yield assistant
            assistant = {}
        if item["type"] == "message":
            yield {"role": item["role"], "content": _text(item["content"])}
        else:
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
    if assistant:
        yield assistant


def _is_assistants(item: Mapping[str, Any]) -> bool:
    """Returns whether an item is the assistant's."""
    return item["type"] in ("reasoning", *_CALLS) or item.get("role") == "assistant"


def _add_item(assistant: dict[str, Any], item: Mapping[str, Any], names: Names) -> None:
    """Adds an item to the assistant's message. Thinking without a text adds nothing."""
    thoughts: list[str] = []
    if item["type"] == "reasoning":
        thoughts = [part["text"] for part in item["content"] or item["summary"] or ()]
        if not thoughts:
            return
    assistant.setdefault("role", "assistant")
    assistant.setdefault("content", None)
    if thoughts:
        before = [assistant["reasoning_content"]] if "reasoning_content" in assistant else []
        assistant["reasoning_content"] = "\n".join([*before, *thoughts])
    elif item["type"] == "message":
        assistant["content"] = _text(item["content"])
    else:
        name = names.joined(item["name"], item["namespace"])
        custom = item["type"] == "custom_tool_call"
        arguments = arguments_of(item["input"]) if custom else item["arguments"]
        function = {"name": name, "arguments": arguments}
        assistant.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})


def _text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Reduces a single part to its text, which every template supports."""
    if isinstance(content, str):
        return content
    texts = [each["refusal"] if each["type"] == "refusal" else each["text"] for each in content]
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
