"""Ollama's ``/api/chat`` and ``/api/generate``: translates the requests to those of the other routes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotcold.chat.stream import AnswerStream, ChatStream
from hotcold.engine.request import Job
from hotcold.server.protocol import chat, native, ollama_models, sampling
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
    Neutral,
    Shape,
    Tagged,
    Text,
    Whole,
    check_depth,
)
from hotcold.server.protocol.filling import SUFFIX, check_model, filled_texts
from hotcold.server.protocol.limits import LARGEST, MAX_CALLS, MAX_MESSAGES, MAX_PARTS
from hotcold.server.protocol.messages import TOOLS, left_out
from hotcold.server.protocol.native import NativeCall
from hotcold.server.protocol.ollama_reply import OllamaReply, loaded

_IMAGES = Field(Neutral(([],), "this model reads text only"), note="This model reads text only.")
_TEXT = Field(Text(), "")
_CALL = Shape(
    {
        "id": Field(Text(0, 256)),
        "function": Field(
            Shape({"name": Field(Text(1, 256), required=True), "arguments": Field(Anything(), {})}),
            required=True,
        ),
    }
)
_MESSAGE = Tagged(
    "role",
    {
        "system": Shape({"content": _TEXT, "images": _IMAGES}),
        "user": Shape({"content": _TEXT, "images": _IMAGES}),
        "assistant": Shape(
            {
                "content": _TEXT,
                "thinking": Field(Text()),
                "tool_calls": Field(Items(_CALL, 0, MAX_CALLS)),
                "images": _IMAGES,
            }
        ),
        "tool": Shape(
            {
                "content": _TEXT,
                "tool_name": Field(Text(0, 256)),
                "tool_call_id": Field(Text(0, 256)),
                "images": Field(Items(Text(), 0, MAX_PARTS), note="Each is replaced by a short text."),
            }
        ),
    },
)
_FORMAT = Either({str: Choice(("json", "")), dict: Anything()}, "json, or a JSON Schema,")
_THINK = Either({bool: Flag(), str: Choice(("low", "medium", "high"))}, "true, false, low, medium or high")
#: Fields of ``options``.
OPTIONS: Fields = {
    "num_predict": Field(
        Whole(-LARGEST, LARGEST), None, "Limit of tokens; 0 and less: until the context is full."
    ),
    **sampling.SHARED,
    "stop": sampling.STOP,
    "typical_p": sampling.UNSUPPORTED["typical_p"],
    "tfs_z": sampling.UNSUPPORTED["tfs_z"],
    "mirostat": sampling.UNSUPPORTED["mirostat"],
}  # fmt: skip
_COMMON: Fields = {
    "format": Field(_FORMAT, None, "json, or a JSON Schema that the answer matches."),
    "options": Field(Shape(OPTIONS), None, "Sampling and length of the answer."),
    "think": Field(_THINK, None, "A value for the chat template; false turns thinking off."),
    "stream": Field(Flag(), True, "Streams the answer as lines of JSON."),
    "logprobs": Field(Neutral((False,))),
    "top_logprobs": Field(Neutral((0,))),
}
CHAT: Fields = {
    "model": chat.MODEL,
    "messages": Field(
        Items(_MESSAGE, 0, MAX_MESSAGES), None, "A last message of the assistant is continued."
    ),
    "tools": Field(TOOLS, None, "Functions that the model may call."),
    **_COMMON,
}  # fmt: skip
GENERATE: Fields = {
    "model": chat.MODEL,
    "prompt": Field(Text(), "", "The user's message; with raw the text to continue."),
    "system": Field(Text(), "", "The system message; not with raw."),
    "suffix": SUFFIX,
    "raw": Field(Flag(), False, "Does not use the chat template."),
    **_COMMON,
    "template": Field(Neutral(("",)), note="The template of the model is used."),
    "context": Field(Neutral(([],)), note="Use /api/chat."),
    "images": _IMAGES,
}  # fmt: skip
SHOW: Fields = {
    "model": chat.MODEL,
    "name": Field(Text(0, 512), note="Another name for model."),
}
PULL: Fields = {
    **SHOW,
    "stream": Field(Flag(), True, "Streams the progress as lines of JSON."),
}
CHAT_BODY, GENERATE_BODY = Shape(CHAT), Shape(GENERATE)
_NAMES = {"response_format": "format"}


@dataclass(frozen=True)
class OllamaChat(ChatCall):
    """The job and options of one request for a conversation."""

    key: str = "message"  #: the reply's field for its text: ``message`` or ``response``

    def reply(self, parts: Callable[[], AnswerStream]) -> OllamaReply:
        return OllamaReply(self.facts, parts(), key=self.key)


@dataclass(frozen=True)
class RawCall(NativeCall):
    """The job and options of one request that continues a text, or fills in before a suffix."""

    suffix: str = ""

    @property
    def texts(self) -> Sequence[str | int]:
        return [*super().texts, self.suffix]

    def encode(self) -> list[list[int]]:
        if self.suffix:
            return filled_texts(self.facts, [self.prompt], self.suffix)
        return super().encode()

    def reply(self, prompts: Sequence[Sequence[int]]) -> OllamaReply:
        return OllamaReply(self.facts, ChatStream(), key="response")


@dataclass(frozen=True)
class LoadCall:
    """A request without a text, which only asks the server to load the model."""

    facts: Facts
    key: str
    job: Job = field(default_factory=Job)

    def answer(self) -> dict[str, Any]:
        return loaded(self.facts, self.key)


def parse_chat(body: object, facts: Facts) -> OllamaChat | LoadCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = CHAT_BODY.read(body, "")
    if not values["messages"]:
        return LoadCall(facts, "message")
    messages = [_message(each) for each in values["messages"]]
    return _chat(values, messages, facts, "message")


def parse_generate(body: object, facts: Facts) -> OllamaChat | RawCall | LoadCall:
    """Reads the body of a request. Raises APIError for wrong values; ignores unknown fields."""
    check_depth(body)
    values = GENERATE_BODY.read(body, "")
    suffix = values["suffix"]
    if not values["prompt"] and not suffix:
        return LoadCall(facts, "response")
    if suffix:
        check_model(facts, "suffix")
    if not values["raw"] and not suffix:
        messages = [{"role": "system", "content": values["system"]}] if values["system"] else []
        messages.append({"role": "user", "content": values["prompt"]})
        return _chat(values, messages, facts, "response")
    if values["system"]:
        other = "suffix" if suffix else "raw"
        raise invalid(f"system and {other} are both given: write it into the prompt", "system")
    given = _common(values, "n_predict")
    call = translated(native.parse, {"prompt": values["prompt"], **given}, facts, _NAMES)
    return RawCall(**vars(call), suffix=suffix)


def parse_show(body: object, facts: Facts) -> Facts:
    """Reads a request for the facts of the one model, which any name refers to."""
    Shape(SHOW).read(body, "")
    return facts


def parse_pull(body: object, facts: Facts) -> tuple[list[dict[str, Any]], bool]:
    """Returns the lines of pulling a model, and whether to stream them. Raises APIError for other models."""
    values = Shape(PULL).read(body, "")
    name = values["model"] or values["name"]
    if not name:
        raise invalid("model is missing: it is required", "model", "missing_required_parameter")
    return ollama_models.pulled(facts, name), values["stream"]


def _chat(values: Mapping[str, Any], messages: list[dict[str, Any]], facts: Facts, key: str) -> OllamaChat:
    body = {"messages": messages, "tools": values.get("tools"), **_common(values, "max_tokens")}
    think = values["think"]
    if think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": think is not False}
        body["reasoning_effort"] = think if isinstance(think, str) else None
    return OllamaChat(**vars(translated(chat.parse, body, facts, _NAMES)), key=key)


def _common(values: Mapping[str, Any], length: str) -> dict[str, Any]:
    """Returns fields by the names of other routes. ``length`` is the name of the limit of tokens."""
    options = values["options"] or {}
    fields = {name: options.get(name) for name in (*sampling.SHARED, "stop")}
    limit = options.get("num_predict")
    format = values["format"]
    if limit is not None:
        fields[length] = limit if limit > 0 else -1
    if format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": format}}
    return {**fields, "stream": values["stream"]}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    pictures = [left_out("picture")] * len(message["images"] or ())
    content = "\n".join(filter(None, (message["content"], *pictures)))
    translated = {"role": message["role"], "content": content}
    optional = {
        "reasoning_content": message.get("thinking"),
        "tool_calls": message.get("tool_calls"),
        "name": message.get("tool_name"),
        "tool_call_id": message.get("tool_call_id"),
    }
    return {**translated, **{name: value for name, value in optional.items() if value is not None}}
