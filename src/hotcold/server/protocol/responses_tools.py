"""The tools of OpenAI's ``/v1/responses``: functions, alone or in namespaces, and custom tools, whose input
is a text. Tools that OpenAI or its client runs are left out."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.fields import (
    Anything,
    Choice,
    Either,
    Field,
    Flag,
    Items,
    Schema,
    Shape,
    Tagged,
    Text,
)
from hotcold.server.protocol.limits import MAX_NAME
from hotcold.server.protocol.messages import FUNCTION_NAME
from hotcold.values import shown

_FUNCTION = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text()),
        "parameters": Field(Anything(), note="JSON Schema of the arguments."),
        "strict": Field(Flag(), note="Has no effect: arguments always match the schema."),
    }
)
_GRAMMAR = Shape(
    {"syntax": Field(Choice(("lark", "regex")), required=True), "definition": Field(Text(), required=True)}
)
_CUSTOM = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text()),
        "format": Field(
            Tagged("type", {"text": Shape({}), "grammar": _GRAMMAR}),
            note="The model reads the grammar, but the input may not match it.",
        ),
    }
)
_IN_NAMESPACE = Tagged("type", {"function": _FUNCTION, "custom": _CUSTOM})
_NAMESPACE = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text(), "", "The model reads it before the first function's."),
        "tools": Field(Items(_IN_NAMESPACE, 1), required=True),
    }
)
#: Types of tools that run at OpenAI, or in a client by another protocol.
HOSTED = (
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search",
    "web_search", "web_search_preview",
)  # fmt: skip
#: The beginning of a custom tool's arguments, and complete characters of its text. An escaped surrogate is
#: complete only with the other half, or if none can follow.
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))*""",
    re.VERBOSE,
)
_DATED = re.compile(r"_\d{4}_\d{2}_\d{2}$")
_TOOL = Tagged(
    "type",
    {
        "function": _FUNCTION,
        "namespace": _NAMESPACE,
        "custom": _CUSTOM,
        **dict.fromkeys(HOSTED, Shape({})),
    },
)


class Tool:
    """A tool. The type of a hosted one may end with a date."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if isinstance(value, dict) and isinstance(value.get("type"), str):
            value = {**value, "type": _DATED.sub("", value["type"])}
        return _TOOL.read(value, param)

    def schema(self) -> Schema:
        return _TOOL.schema()


TOOLS = Items(Tool(), 0)
_NAMED = Shape({"name": Field(Text(1, 256), required=True)})
_BY_NAME = {"function": _NAMED, "custom": _NAMED}
_ALLOWED = Shape(
    {
        "mode": Field(Choice(("auto", "required")), "auto"),
        "tools": Field(Items(Tagged("type", _BY_NAME), 1), required=True),
    }
)
TOOL_CHOICE = Either(
    {
        str: Choice(("none", "auto", "required")),
        dict: Tagged("type", {**_BY_NAME, "allowed_tools": _ALLOWED}),
    },
    "none, auto, required, or an object that names functions,",
)


class Names:
    """The functions of a request, and their names. A function in a namespace is NAMESPACE__NAME for the
    model, and two names for clients. A custom tool is a function with one text for the model."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.functions: list[dict[str, Any]] = []  #: the chat route's form
        self.left_out = ", ".join(dict.fromkeys(each["type"] for each in tools if each["type"] in HOSTED))
        self._custom: set[str] = set()
        self._divided: dict[str, tuple[str, str]] = {}  # joined name -> namespace and name
        for place, tool in enumerate(tools):
            if tool["type"] == "namespace":
                self._add_namespace(tool, f"tools[{place}]")
            elif tool["type"] not in HOSTED:
                self._add(tool, tool["name"], tool["description"])
        self._plain = {tool["name"] for tool in tools if tool["type"] in ("function", "custom")}
        self._uses = Counter(name for _, name in self._divided.values())
        self._joined = {name: joined for joined, (_, name) in self._divided.items()}

    def is_custom(self, joined: str) -> bool:
        """Returns whether the function of this name is a custom tool for clients."""
        return joined in self._custom

    def joined(self, name: str, namespace: str | None = None) -> str:
        """Returns the model's name of a function. ``namespace`` is optional if the name is unique."""
        if namespace:
            return f"{namespace}__{name}"
        if name not in self._plain and self._uses[name] == 1:
            return self._joined[name]
        return name

    def divided(self, joined: str) -> dict[str, str]:
        """Returns the fields of a call that name its function."""
        if joined not in self._divided:
            return {"name": joined}
        namespace, name = self._divided[joined]
        return {"name": name, "namespace": namespace}

    def choice(self, choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
        """Returns ``tool_choice`` in the chat route's form."""
        if isinstance(choice, str):
            return choice
        if choice["type"] != "allowed_tools":
            return self._named(choice)
        tools = [self._named(each) for each in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}

    def _named(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        return _function({"name": self.joined(tool["name"])})

    def _add_namespace(self, namespace: Mapping[str, Any], param: str) -> None:
        about = namespace["description"]
        for place, tool in enumerate(namespace["tools"]):
            name = self.joined(tool["name"], namespace["name"])
            if len(name) > MAX_NAME:
                got = f"{shown(name)} has {len(name)} characters"
                raise invalid(
                    f"{got}: with both names it may have {MAX_NAME}", f"{param}.tools[{place}].name"
                )
            described = "\n".join(filter(None, (about, tool["description"]))) or None
            self._divided[name] = namespace["name"], tool["name"]
            self._add(tool, name, described)
            about = ""

    def _add(self, tool: Mapping[str, Any], name: str, description: str | None) -> None:
        if tool["type"] == "custom":
            self._custom.add(name)
            tool = _as_function(tool["format"], description)
        else:
            tool = {**tool, "description": description}
        self.functions.append(_function({**tool, "name": name}))


def _as_function(format: Mapping[str, Any] | None, description: str | None) -> dict[str, Any]:
    """Returns the function with one text that represents a custom tool. Its description has the grammar,
    which shows the model the form of the text."""
    lines = [description] if description else []
    if format is not None and format["type"] == "grammar":
        kind = "lark grammar" if format["syntax"] == "lark" else "regular expression"
        lines.append(f"The input matches this {kind}:\n{format['definition']}")
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"description": "\n".join(lines) or None, "parameters": parameters}


def arguments_of(input: str) -> str:
    """Returns the arguments of a custom tool's function for an input of the tool."""
    return json.dumps({"input": input}, ensure_ascii=False)


class InputText:
    """Reads the input of a custom tool from the streamed arguments of its function."""

    def __init__(self) -> None:
        self.text = ""  #: the input so far
        self._unread = ""
        self._begun = False

    def push(self, arguments: str) -> str:
        """Adds a piece of the arguments; returns the text that is now complete."""
        self._unread += arguments
        if not self._begun:
            begin = _BEGIN.match(self._unread)
            if begin is None:
                return ""
            self._begun, self._unread = True, self._unread[begin.end() :]
        match = _CHARACTERS.match(self._unread)
        assert match is not None  # it also matches an empty text
        self._unread = self._unread[match.end() :]
        text: str = json.loads(f'"{match[0]}"', strict=False)
        self.text += text
        return text


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function, or its name, in the chat route's form."""
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type" and value is not None},
    }
