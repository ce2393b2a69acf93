"""The messages and tools of a chat request."""

from typing import Any

from hotcold.chat.messages import RESERVED
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.fields import (
    Anything,
    Choice,
    Either,
    Field,
    Flag,
    Items,
    Kind,
    Neutral,
    Real,
    Schema,
    Shape,
    Tagged,
    Text,
    Whole,
    refuse,
)
from hotcold.server.protocol.limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_TEMPLATE_KWARGS,
)

ONLY_TEXT = "; this model reads text only"
TEXT_PART = Shape({"text": Field(Text(), required=True)})
REFUSAL_PART = Shape({"refusal": Field(Text(), required=True)})
_PART = Tagged("type", {"text": TEXT_PART}, ONLY_TEXT)
_OWN_PART = Tagged(
    "type",
    {
        "text": TEXT_PART,
        "refusal": REFUSAL_PART,
    },
    ONLY_TEXT,
)


#: Parts of a tool's result that the model cannot read: type -> kind in words.
_UNREADABLE = {
    "image": "picture", "image_url": "picture", "input_image": "picture", "image_file": "picture",
    "computer_screenshot": "picture", "document": "document", "file": "file", "input_file": "file",
    "audio": "sound", "audio_url": "sound", "input_audio": "sound", "video": "video", "video_url": "video",
    "input_video": "video", "resource": "resource", "resource_link": "link",
    "tool_reference": "tool reference",
}  # fmt: skip


class ResultPart:
    """A part of a tool's result. A text replaces an unreadable part: a refusal would end the conversation,
    since all later requests have the same result."""

    def __init__(self, texts: Tagged) -> None:
        self._texts = texts

    def read(self, value: Any, param: str) -> dict[str, Any]:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in _UNREADABLE:
            return {"type": "text", "text": left_out(_UNREADABLE[kind])}
        return self._texts.read(value, param)

    def schema(self) -> Schema:
        types = {"type": {"type": "string", "enum": [*_UNREADABLE]}}
        unreadable = {"type": "object", "properties": types, "required": ["type"]}
        return {"oneOf": [*self._texts.schema()["oneOf"], unreadable]}


def left_out(kind: str) -> str:
    """Returns the text that replaces a part of this kind."""
    return f"[{kind} left out: this model reads text]"


class Content:
    """A text, or a list of text parts. Templates that support parts get them unchanged. An empty list is an
    empty text, since templates read the first part of a list."""

    def __init__(self, part: Kind) -> None:
        self._kind = Either(
            {str: Text(), list: Items(part, 0, MAX_PARTS)}, "a string, or a list of text parts,"
        )

    def read(self, value: Any, param: str) -> str | list[dict[str, str]]:
        content: str | list[dict[str, str]] = self._kind.read(value, param)
        if isinstance(content, str) or not content:
            return content or ""
        return [{"type": "text", "text": part.get("text") or part.get("refusal", "")} for part in content]

    def schema(self) -> Schema:
        return self._kind.schema()


FUNCTION_NAME = Text(1, MAX_NAME, r"[a-zA-Z0-9_.-]+", "allowed are letters, digits, _, - and .")
_CALL = Shape(
    {
        "id": Field(Text(0, 256)),
        "type": Field(Choice(("function",)), "function"),
        "function": Field(
            Shape(
                {
                    "name": Field(Text(1, 256), required=True),
                    "arguments": Field(
                        Either({str: Text(), dict: Anything()}, "a string of JSON"),
                        "{}",
                        "JSON, as a string; a call that was cut off is shown as it is.",
                    ),
                }
            ),
            required=True,
        ),
    }
)
_TEXT = Field(Content(_PART), required=True)
_NAME = Field(Text(0, 256))


MESSAGE = Tagged(
    "role",
    {
        "system": Shape({"content": _TEXT, "name": _NAME}),
        "developer": Shape({"content": _TEXT, "name": _NAME}),
        "user": Shape({"content": _TEXT, "name": _NAME}),
        "assistant": Shape(
            {
                "content": Field(Content(_OWN_PART)),
                "name": _NAME,
                "reasoning_content": Field(Text(), note="The thinking before the text."),
                "tool_calls": Field(Items(_CALL, 0, MAX_CALLS)),
                "function_call": Field(Neutral(), note="Use tool_calls."),
                "audio": Field(Neutral()),
            }
        ),
        "tool": Shape(
            {
                "content": Field(Content(ResultPart(_PART))),
                "tool_call_id": Field(Text(0, 256)),
                "name": _NAME,
            }
        ),
    },
)  # fmt: skip
MESSAGES = Items(MESSAGE, 1, MAX_MESSAGES)

#: Keywords whose value is a constant, or has constants.
_CONSTANTS = ("const", "default", "enum", "example", "examples")
#: Keywords whose value has schemas by name.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class ToolSchema:
    """A JSON Schema of arguments. Programs in Go write null for a keyword without a value, so null means the
    same as an absent keyword."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        keywords: dict[str, Any] = _without_null_keywords(Anything().read(value, param))
        return keywords

    def schema(self) -> Schema:
        return Anything().schema()


def _without_null_keywords(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_null_keywords(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    keywords: dict[str, Any] = {}
    for keyword, value in schema.items():
        if value is None and keyword not in ("const", "default"):
            continue
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: _without_null_keywords(each) for name, each in value.items()}
        elif keyword not in _CONSTANTS:
            value = _without_null_keywords(value)
        keywords[keyword] = value
    return keywords


_FUNCTION = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text()),
        "parameters": Field(ToolSchema(), note="JSON Schema of the arguments."),
        "strict": Field(Flag(), note="Has no effect: arguments always match the schema."),
    }
)
_TOOL = Tagged("type", {"function": Shape({"function": Field(_FUNCTION, required=True)})})


class Tool:
    """A tool. The type is optional, as in Ollama: functions are the only tools."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if isinstance(value, dict) and value.get("type") is None and "function" in value:
            value = {**value, "type": "function"}
        return _TOOL.read(value, param)

    def schema(self) -> Schema:
        function = _TOOL.shapes["function"].schema()
        untyped = {**function, "properties": {**function["properties"], "type": {"type": "null"}}}
        return {"anyOf": [_TOOL.schema(), untyped]}


TOOLS = Items(Tool(), 0)

_NAMED_FUNCTION = Field(Shape({"name": Field(Text(1, 256), required=True)}), required=True)
_ONE_TOOL = Tagged("type", {"function": Shape({"function": _NAMED_FUNCTION})})
_ALLOWED_TOOLS = Shape(
    {
        "mode": Field(Choice(("auto", "required")), "auto"),
        "tools": Field(Items(_ONE_TOOL, 1), required=True),
    }
)
_CHOSEN = Tagged(
    "type",
    {
        "function": Shape({"function": _NAMED_FUNCTION}),
        "allowed_tools": Shape({"allowed_tools": Field(_ALLOWED_TOOLS, required=True)}),
    },
)
TOOL_CHOICE = Either(
    {str: Choice(("none", "auto", "required")), dict: _CHOSEN},
    "none, auto, required, or an object that names functions,",
)


class TemplateKwargs:
    """Plain values for names that the template reads, such as ``enable_thinking``."""

    _NAME = r"[A-Za-z][A-Za-z0-9_]{0,63}"
    _KEY = Text(1, 64, _NAME, "names of letters, digits and _ are needed")
    _VALUE = Either(
        {bool: Flag(), int: Whole(-(1 << 53), 1 << 53), float: Real(-1e308, 1e308), str: Text(0, 1024)},
        "a boolean, a number or a string",
    )

    def read(self, value: Any, param: str) -> dict[str, bool | int | float | str]:
        if not isinstance(value, dict):
            refuse(param, value, "an object is needed")
        if len(value) > MAX_TEMPLATE_KWARGS:
            refuse(param, value, f"at most {MAX_TEMPLATE_KWARGS} entries are allowed")
        arguments = {}
        for name, argument in value.items():
            self._KEY.read(name, f"a name of {param}")
            if name in RESERVED:
                raise APIError(
                    f"{param}.{name}: this name is reserved: use another one",
                    param=param,
                    code="invalid_value",
                )
            arguments[name] = self._VALUE.read(argument, f"{param}.{name}")
        return arguments

    def schema(self) -> Schema:
        return {
            "type": "object",
            "maxProperties": MAX_TEMPLATE_KWARGS,
            "propertyNames": {"pattern": f"^{self._NAME}$", "not": {"enum": sorted(RESERVED)}},
            "additionalProperties": {"type": ["boolean", "number", "string"]},
        }
