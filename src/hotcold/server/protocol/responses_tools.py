"""The tools of OpenAI's ``/v1/responses``: functions, by themselves or in namespaces."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.fields import Anything, Choice, Either, Field, Flag, Items, Shape, Tagged, Text
from hotcold.server.protocol.limits import MAX_NAME, MAX_TOOLS
from hotcold.server.protocol.messages import FUNCTION_NAME
from hotcold.values import shown

_FUNCTION = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text()),
        "parameters": Field(Anything(), note="JSON Schema of the arguments."),
        "strict": Field(Flag(), note="Arguments always fit, whatever this says."),
    }
)
_IN_NAMESPACE = Tagged("type", {"function": _FUNCTION})
_NAMESPACE = Shape(
    {
        "name": Field(FUNCTION_NAME, required=True),
        "description": Field(Text(), "", "The model reads it before the first function's."),
        "tools": Field(Items(_IN_NAMESPACE, 1, MAX_TOOLS), required=True),
    }
)
TOOLS = Items(
    Tagged(
        "type",
        {"function": _FUNCTION, "namespace": _NAMESPACE},
        "; the tools that OpenAI itself runs are not here: switch them off in the client",
    ),
    0,
    MAX_TOOLS,
)
_NAMED = Shape({"name": Field(Text(1, 256), required=True)})
_ALLOWED = Shape(
    {
        "mode": Field(Choice(("auto", "required")), "auto"),
        "tools": Field(Items(Tagged("type", {"function": _NAMED}), 1, MAX_TOOLS), required=True),
    }
)
TOOL_CHOICE = Either(
    {
        str: Choice(("none", "auto", "required")),
        dict: Tagged("type", {"function": _NAMED, "allowed_tools": _ALLOWED}),
    },
    "none, auto, required, or an object that names functions,",
)


class Names:
    """The functions of a request, and their names. A function of a namespace is called NAMESPACE__NAME by the
    model, and both names by clients."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.functions: list[dict[str, Any]] = []  #: as the chat route has them
        self._divided: dict[str, tuple[str, str]] = {}  # namespace and name
        for place, tool in enumerate(tools):
            if tool["type"] == "namespace":
                self._take_in(tool, f"tools[{place}]")
            else:
                self.functions.append(_function(tool))

    def joined(self, name: str, namespace: str | None = None) -> str:
        """The name that the model knows; without a namespace, also of the one function in a namespace that is
        called so."""
        if namespace:
            return f"{namespace}__{name}"
        if any(each["function"]["name"] == name for each in self.functions):
            return name
        called = [joined for joined, (_, own) in self._divided.items() if own == name]
        return called[0] if len(called) == 1 else name

    def divided(self, joined: str) -> dict[str, str]:
        """The fields of a call that name its function."""
        if joined not in self._divided:
            return {"name": joined}
        namespace, name = self._divided[joined]
        return {"name": name, "namespace": namespace}

    def choice(self, choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
        """``tool_choice`` as the chat route has it."""
        if isinstance(choice, str):
            return choice
        if choice["type"] == "function":
            return self._named(choice)
        tools = [self._named(each) for each in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}

    def _named(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        return _function({"name": self.joined(tool["name"])})

    def _take_in(self, namespace: Mapping[str, Any], param: str) -> None:
        about = namespace["description"]
        for place, tool in enumerate(namespace["tools"]):
            name = self.joined(tool["name"], namespace["name"])
            if len(name) > MAX_NAME:
                seen = f"{shown(name)} has {len(name)} characters"
                raise invalid(
                    f"{seen}: with both names it may have {MAX_NAME}", f"{param}.tools[{place}].name"
                )
            described = "\n".join(filter(None, (about, tool["description"]))) or None
            self._divided[name] = namespace["name"], tool["name"]
            self.functions.append(_function({**tool, "name": name, "description": described}))
            about = ""


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function, or its name, as the chat route has it."""
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type" and value is not None},
    }
