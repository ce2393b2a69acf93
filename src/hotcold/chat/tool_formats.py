"""How models write calls of tools: a table of formats, and which one a chat template uses."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from hotcold.chat.literals import GEMMA, PYTHON, Notation


@dataclass(frozen=True)
class JSONCall:
    """A call is an object, ``{"name": NAME, key: ARGUMENTS}``, keys in this order."""

    key: str  #: as the template has it; what models write is read by any of :data:`ARGUMENT_KEYS`
    id: str | None = None  #: a pattern of the id that a call may have under another key behind these

    def begins(self, text: str) -> bool:
        return text.startswith("{")

    def may_begin(self, text: str) -> bool:
        return self.begins(text)


@dataclass(frozen=True)
class NamedCall:
    """A call is ``prefix``, its name, perhaps a mark, ``separator``, and its arguments as an object."""

    separator: str
    prefix: str = ""
    mark: tuple[str, str] | None = None  #: a text and a pattern, which are an id or a number of the call

    def begins(self, text: str) -> bool:
        return bool(text)

    def may_begin(self, text: str) -> bool:
        return True


@dataclass(frozen=True)
class TaggedCall:
    """A call is ``prefix``, its name, ``separator``, each argument with three texts around it, ``suffix``.
    Values that are strings stand there as they are, all others as JSON."""

    separator: str
    argument: tuple[str, str, str]  #: before the name of an argument, before its value, behind its value
    suffix: str
    prefix: str = ""

    def begins(self, text: str) -> bool:
        return bool(text) and text.startswith(self.prefix)

    def may_begin(self, text: str) -> bool:
        return self.prefix.startswith(text)


@dataclass(frozen=True)
class LiteralCall:
    """A call is ``prefix``, its name, and its arguments in a notation that is not JSON."""

    notation: Notation
    prefix: str = ""

    def begins(self, text: str) -> bool:
        return text.startswith(self.prefix) if self.prefix else text[:1].isidentifier()

    def may_begin(self, text: str) -> bool:
        return self.prefix.startswith(text)


@dataclass(frozen=True)
class HarmonyCall:
    """A call is a message in a channel of its own: see ``harmony.py``."""

    def begins(self, text: str) -> bool:
        return False

    def may_begin(self, text: str) -> bool:
        return False


CallKind: TypeAlias = JSONCall | NamedCall | TaggedCall | LiteralCall | HarmonyCall
ARGUMENT_KEYS = ("arguments", "parameters", "args")


@dataclass(frozen=True)
class ToolFormat:
    """An answer that calls tools is ``before``, a call, any number of ``between`` and a call, ``after``."""

    name: str
    call: CallKind
    before: str = ""
    between: str | None = None  #: None where an answer has one call at most
    after: str = ""
    marker: str = ""  #: where it comes up in an answer, calls begin
    #: Texts beside the marker that may stand around calls, beside spaces: those behind which a call may
    #: begin, and those behind which none may before another of the former.
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    #: Names in these texts that a vocabulary may have as single tokens, control tokens perhaps.
    tokens: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts with which calls begin in an answer."""
        return (self.marker, self.tag) if self.tag else (self.marker,)

    @property
    def tag(self) -> str:
        """The tag with which a call begins where the model leaves the marker out."""
        return self.call.prefix if isinstance(self.call, TaggedCall) else ""

    @property
    def shows_itself(self) -> bool:
        """True if a call is known by itself, so that nothing must open it behind the marker."""
        return not self.opens or isinstance(self.call, JSONCall | LiteralCall)


HERMES = ToolFormat(
    name="hermes",
    call=JSONCall("arguments"),
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    marker="<tool_call>",
    closes=("}", "</tool_call>"),  # of braces that are doubled
    tokens=("<tool_call>", "</tool_call>"),
)
#: The format of every model whose template has no tools, or one that is not in this table:
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

_ARGUMENTS = re.compile(r'\\?"arguments\\?"')  # in a template, perhaps within a string
_TOOLS = re.compile(r"\btools\b")
#: The first of these whose texts are all in a template that knows tools is its format.
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
#: Signs that a template writes something other than JSON between Hermes' tags.
_NO_JSON = ("<function=", "<arg_key>", "<invoke", "<parameter", "<tool_calls>")


def knows_tools(template: str) -> bool:
    return _TOOLS.search(template) is not None


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template uses; :data:`GENERAL` if it has no tools, or an unknown format."""
    if not knows_tools(template):
        # That of DeepSeek V3.1 writes calls, and leaves it to its users to describe tools.
        writes = "tool_calls" in template and "<｜tool▁sep｜>" in template and "```json" not in template
        return DEEPSEEK if writes else GENERAL
    for format, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return format
    if "<tool_call>" in template and _ARGUMENTS.search(template):
        return GENERAL if any(each in template for each in _NO_JSON) else HERMES
    return GENERAL


def is_harmony(template: str, control_tokens: Collection[str]) -> bool:
    """True if answers are in channels, with tools or without: a short template may not show them."""
    if "<|message|>" not in template:
        return False
    return "<|channel|>" in template or ("<|start|>" in template and "<|channel|>" in control_tokens)
