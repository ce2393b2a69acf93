"""Determines from a chat template how a model marks its thinking, and how a call ends it."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hotcold.chat.tool_formats import HarmonyCall, JSONCall, NamedCall, TaggedCall, ToolFormat

#: Budgets of thinking tokens by effort, for templates without efforts: the values of Gemini's API. Higher
#: efforts have no limit.
EFFORT_BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576}


@dataclass(frozen=True)
class Thinking:
    """The texts around thinking; each may be a control token of the vocabulary."""

    start: str
    end: str
    #: The control tokens in these texts; empty if each text is one token.
    tokens: tuple[str, ...] = ()
    #: whether thinking may begin anywhere in an answer, and its end may occur without a beginning
    anywhere: bool = False


#: Marks of known models: QwQ, Qwen3 and DeepSeek-R1; Magistral; Command A; Seed-OSS; others; Gemma 4.
KNOWN = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<thinking>", "</thinking>"),
    Thinking("<reasoning>", "</reasoning>"),
    Thinking("<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>"), anywhere=True),
)


def thinking_of(template: str) -> Thinking | None:
    """Returns the marks of thinking that a template writes or searches for; None if it has none. A template
    that only removes earlier thinking searches for its end."""
    for thinking in KNOWN:
        if thinking.start in template or thinking.end in template:
            return thinking
    return None


def opens_thinking(prompt: str, thinking: Thinking | None) -> bool:
    """Returns whether the end of a prompt opens the thinking, so that the answer begins inside it."""
    if thinking is None:
        return False
    return prompt.rstrip().endswith(thinking.start)


def leaves_open(beginning: str, thinking: Thinking) -> bool:
    """Returns whether the given beginning of an answer ends inside thinking."""
    before, start, thought = beginning.rpartition(thinking.start)
    return bool(start) and (thinking.anywhere or not before.strip()) and thinking.end not in thought


def is_off(values: Mapping[str, Any]) -> bool:
    """Returns whether values for a template forbid thinking."""
    allowed = values.get("enable_thinking", values.get("thinking"))
    return values.get("reasoning_effort") == "none" if allowed is None else allowed is False


@dataclass(frozen=True)
class CallOpening:
    """The beginning of a call inside thinking. It is at the beginning of a line, or has a control token,
    which thinking never only mentions. The name of a known tool follows. Both patterns check the character
    before it."""

    pattern: str  #: pattern of the text up to the tool's name, which is its group
    mark: str  #: pattern of the text that begins such a call
    head: str  #: text before the name, as in the grammar of calls

    @cached_property
    def calls(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    @cached_property
    def marks(self) -> re.Pattern[str]:
        return re.compile(self.mark)


def call_opening(format: ToolFormat, names: Iterable[str], controls: Collection[str]) -> CallOpening | None:
    """Returns the beginning of calls of these tools inside thinking. ``controls`` are the names of control
    tokens. None: the format has channels for calls, or there are no tools."""
    kind = format.call
    if isinstance(kind, HarmonyCall) or not (tool_names := sorted(names, key=len, reverse=True)):
        return None
    prefix = "" if isinstance(kind, JSONCall) else kind.prefix
    marker, tag = re.escape(format.marker), re.escape(prefix)
    line = r"(?<=\n)[ \t]*"
    opens = "|".join(map(re.escape, format.opens))
    between = rf"\s*(?:(?:{opens})\s*)*" if opens else r"\s*"
    if isinstance(kind, JSONCall):
        tool_names = [json.dumps(name, ensure_ascii=False)[1:-1] for name in tool_names]
        prefix, tag = '{"name": "', r'\{\s*"name"\s*:\s*"'
    elif isinstance(kind, NamedCall) and prefix:
        tag = f"(?:{tag})?"
    mark = marker if format.marker in controls else line + marker
    begins = f"{mark}{between}"
    if isinstance(kind, TaggedCall) and prefix:  # models omit the marker
        begins, mark = f"(?:{begins}|{line})", f"(?:{mark}|{line}{tag})"
    called = "|".join(map(re.escape, tool_names))
    return CallOpening(rf"{begins}{tag}({called})(?=[^\w.\-])", mark, format.before + prefix)
