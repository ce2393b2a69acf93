"""Formats of calls of tools: a table, and the choice of a chat template's format."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from hotcold.chat.literals import GEMMA, PYTHON, Notation


@dataclass(frozen=True)
class JSONCall:
    """A call is an object, ``{"name": NAME, key: ARGUMENTS}``, with keys in this order."""

    key: str  #: the template's key; a model's call may have any of :data:`ARGUMENT_KEYS`
    id: str | None = None  #: pattern of the id that a call may have after these keys

    def begins(self, text: str) -> bool:
        return text.startswith("{")

    def may_begin(self, text: str) -> bool:
        return self.begins(text)


@dataclass(frozen=True)
class NamedCall:
    """A call is ``prefix``, its name, an optional mark, ``separator``, and its arguments as an object."""

    separator: str
    prefix: str = ""
    mark: tuple[str, str] | None = None  #: a text and the pattern of an id or a number of the call

    def begins(self, text: str) -> bool:
        return bool(text)

    def may_begin(self, text: str) -> bool:
        return True


@dataclass(frozen=True)
class TaggedCall:
    """A call is ``prefix``, its name, ``separator``, each argument with three texts around it, ``suffix``.
    Strings are written unchanged, other values as JSON."""

    separator: str
    argument: tuple[str, str, str]  #: before the name of an argument, before its value, after its value
    suffix: str
    prefix: str = ""

    def begins(self, text: str) -> bool:
        return bool(text) and text.startswith(self.prefix)

    def may_begin(self, text: str) -> bool:
        return self.prefix.startswith(text)


@dataclass(frozen=True)
class LiteralCall:
    """A call is ``prefix``, its name, and its arguments in a notation other than JSON."""

    notation: Notation
    prefix: str = ""

    def begins(self, text: str) -> bool:
        return text.startswith(self.prefix) if self.prefix else text[:1].isidentifier()

    def may_begin(self, text: str) -> bool:
        return self.prefix.startswith(text)


@dataclass(frozen=True)
class HarmonyCall:
    """A call is a message in its own channel: see ``harmony.py``."""

    def begins(self, text: str) -> bool:
        return False

    def may_begin(self, text: str) -> bool:
        return False


CallKind: TypeAlias = JSONCall | NamedCall | TaggedCall | LiteralCall | HarmonyCall
ARGUMENT_KEYS = ("arguments", "parameters", "args")


@dataclass(frozen=True)
class ToolFormat:
    """An answer with calls is ``before``, a call, any number of ``between`` and a call, ``after``."""

    name: str
    call: CallKind
    before: str = ""
    between: str | None = None  #: None: an answer has at most one call
    after: str = ""
    marker: str = ""  #: the text in an answer that begins calls
    #: Texts around calls in addition to the marker and spaces. A call may begin after ``opens``; after
    #: ``closes`` it must wait for the next of ``opens``.
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    #: Names in these texts that a vocabulary may have as single tokens or control tokens.
    tokens: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that begin calls in an answer."""
        return (self.marker, self.tag) if self.tag else (self.marker,)

    @property
    def tag(self) -> str:
        """The tag that begins a call if the model omits the marker."""
        return self.call.prefix if isinstance(self.call, TaggedCall) else ""

    @property
    def shows_itself(self) -> bool:
        """True if a call is recognisable without an opening text after the marker."""
        return not self.opens or isinstance(self.call, JSONCall | LiteralCall)


HERMES = ToolFormat(
    name="hermes",
    call=JSONCall("arguments"),
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    marker="<tool_call>",
    closes=("}", "</tool_call>"),  # for doubled braces
    tokens=("<tool_call>", "</tool_call>"),
)
#: The format for templates that have no tools, or an unknown format: :mod:`hotcold.chat.general_tools`
#: describes it in the prompt.
GENERAL = replace(HERMES, name="general")
LLAMA = ToolFormat(
    name="llama",
    call=JSONCall("parameters"),
    marker="<|python_tag|>",
    opens=(";", ","),
    tokens=("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    name="mistral",
    call=JSONCall("arguments", id="[a-zA-Z0-9]{9}"),
    before="[TOOL_CALLS][",
    between=", ",
    after="]",
    marker="[TOOL_CALLS]",
    opens=("[", ","),
    closes=("]",),
    tokens=("[TOOL_CALLS]",),
)
#: Nemotron Nano v2
NEMOTRON = ToolFormat(
    name="nemotron",
    call=JSONCall("arguments"),
    before="<TOOLCALL>[",
    between=", ",
    after="]</TOOLCALL>",
    marker="<TOOLCALL>",
    opens=("[", ","),
    closes=("]", "</TOOLCALL>"),
    tokens=("<TOOLCALL>", "</TOOLCALL>"),
)
#: Devstral, Magistral, Ministral 3
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    call=NamedCall("[ARGS]"),
    before="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    marker="[TOOL_CALLS]",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
)
#: Mistral Small 3.2
MISTRAL_IDS = replace(
    MISTRAL_ARGS,
    name="mistral-ids",
    call=NamedCall("[ARGS]", mark=("[CALL_ID]", "[a-zA-Z0-9]{9}")),
    tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
#: Qwen3-Coder, Qwen3.5, Nemotron Nano 3, Step 3.5
QWEN_XML = replace(
    HERMES,
    name="qwen-xml",
    call=TaggedCall(
        prefix="<function=",
        separator=">\n",
        argument=("<parameter=", ">\n", "\n</parameter>\n"),
        suffix="</function>",
    ),
)
#: GLM 4.5 and later
GLM = ToolFormat(
    name="glm",
    call=TaggedCall(
        separator="\n",
        argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        suffix="</tool_call>",
    ),
    before="<tool_call>",
    between="\n<tool_call>",
    marker="<tool_call>",
    tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
#: GLM 4.7
GLM_TIGHT = replace(
    GLM,
    name="glm-tight",
    call=TaggedCall(
        separator="",
        argument=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        suffix="</tool_call>",
    ),
    between="<tool_call>",
)
#: MiniMax M2
MINIMAX = ToolFormat(
    name="minimax",
    call=TaggedCall(
        prefix='<invoke name="',
        separator='">\n',
        argument=('<parameter name="', '">', "</parameter>\n"),
        suffix="</invoke>\n",
    ),
    before="<minimax:tool_call>\n",
    between="",
    after="</minimax:tool_call>",
    marker="<minimax:tool_call>",
    closes=("</minimax:tool_call>",),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
)
LFM2 = ToolFormat(
    name="lfm2",
    call=LiteralCall(PYTHON),
    before="<|tool_call_start|>[",
    between=", ",
    after="]<|tool_call_end|>",
    marker="<|tool_call_start|>",
    opens=("[", ","),
    closes=("]", "<|tool_call_end|>"),
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    call=LiteralCall(GEMMA, prefix="call:"),
    before="<|tool_call>",
    between="<tool_call|><|tool_call>",
    after="<tool_call|>",
    marker="<|tool_call>",
    closes=("<tool_call|>",),
    tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
KIMI = ToolFormat(
    name="kimi",
    call=NamedCall("<|tool_call_argument_begin|>", prefix="functions.", mark=(":", "[0-9]{1,4}")),
    before="<|tool_calls_section_begin|><|tool_call_begin|>",
    between="<|tool_call_end|><|tool_call_begin|>",
    after="<|tool_call_end|><|tool_calls_section_end|>",
    marker="<|tool_calls_section_begin|>",
    opens=("<|tool_call_begin|>",),
    closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    tokens=(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "<|tool_calls_section_end|>",
    ),
)  # fmt: skip
#: DeepSeek V3.1
DEEPSEEK = ToolFormat(
    name="deepseek",
    call=NamedCall("<｜tool▁sep｜>"),
    before="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    between="<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
    after="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    marker="<｜tool▁calls▁begin｜>",
    opens=("<｜tool▁call▁begin｜>",),
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    tokens=(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)  # fmt: skip
#: DeepSeek V3 and R1
DEEPSEEK_R1 = replace(
    DEEPSEEK,
    name="deepseek-r1",
    call=NamedCall("\n```json\n", prefix="function<｜tool▁sep｜>"),
    between="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
    after="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
#: gpt-oss
HARMONY = ToolFormat(
    name="harmony",
    call=HarmonyCall(),
    tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
)

_ARGUMENTS = re.compile(r'\\?"arguments\\?"')  # in a template, possibly inside a string
_TOOLS = re.compile(r"\btools\b")
#: A template with tools has the first format whose texts it all has.
_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (KIMI, ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    (DEEPSEEK_R1, ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    (DEEPSEEK, ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    (QWEN_XML, ("<tool_call>", "<function=", "<parameter=")),
    (GLM_TIGHT, ("<tool_call>", "</arg_key><arg_value>")),
    (GLM, ("<tool_call>", "<arg_key>", "<arg_value>")),
    (MINIMAX, ("<minimax:tool_call>", "<invoke name=", "<parameter name=")),
    (LFM2, ("<|tool_call_start|>",)),
    (LFM2, ("<|tool_list_start|>",)),
    (LFM2, ("List of tools: [",)),
    (GEMMA4, ("<|tool_call>call:",)),
    (NEMOTRON, ("<TOOLCALL>[", "</TOOLCALL>")),
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (LLAMA, ('"parameters": ', '{"name": ', "<|start_header_id|>")),
)  # fmt: skip
#: Texts that show that a template writes something other than JSON between Hermes' tags.
_NO_JSON = ("<function=", "<arg_key>", "<invoke", "<parameter", "<tool_calls>")


def knows_tools(template: str) -> bool:
    return _TOOLS.search(template) is not None


def tool_format(template: str) -> ToolFormat:
    """Returns the format of a chat template; :data:`GENERAL` if it has no tools, or an unknown format."""
    if not knows_tools(template):
        # DeepSeek V3.1's template writes calls, and expects the user to describe tools.
        writes = "tool_calls" in template and "<｜tool▁sep｜>" in template and "```json" not in template
        return DEEPSEEK if writes else GENERAL
    for format, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return format
    if "<tool_call>" in template and _ARGUMENTS.search(template):
        return GENERAL if any(each in template for each in _NO_JSON) else HERMES
    return GENERAL


def is_harmony(template: str, control_tokens: Collection[str]) -> bool:
    """Returns whether answers have channels, with or without tools: a short template may not show them."""
    if "<|message|>" not in template:
        return False
    return "<|channel|>" in template or ("<|start|>" in template and "<|channel|>" in control_tokens)
