"""Finds out from a chat template how a model marks its thinking, and how a call ends it."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hotcold.chat.tool_formats import HarmonyCall, JSONCall, NamedCall, TaggedCall, ToolFormat

#: Budgets of thinking tokens by effort, for templates that do not know efforts: those of Gemini's API. Higher
#: efforts have no limit.
EFFORT_BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576}


@dataclass(frozen=True)
class Thinking:
    """The texts around thinking; each may be a control token of the vocabulary."""

    start: str
    end: str
    #: The control tokens in these texts; empty where each text is one.
    tokens: tuple[str, ...] = ()
    #: whether it may begin anywhere in an answer, and may be left without having begun
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
    """The marks that a template writes around thinking, or searches for; None if it knows none. A template
    that only removes earlier thinking from a history searches for its end."""
    for each in KNOWN:
        if each.start in template or each.end in template:
            return each
    return None


def opens_thinking(prompt: str, thinking: Thinking | None) -> bool:
    """True if the end of a prompt's text opens the answer's thinking, so that the answer begins inside."""
    if thinking is None:
        return False
    return prompt.rstrip().endswith(thinking.start)


def leaves_open(beginning: str, thinking: Thinking) -> bool:
    """True if the text with which an answer begins is the beginning of a thought."""
    before, start, thought = beginning.rpartition(thinking.start)
    return bool(start) and (thinking.anywhere or not before.strip()) and thinking.end not in thought


def is_off(values: Mapping[str, Any]) -> bool:
    """True if values for a template forbid thinking."""
    allowed = values.get("enable_thinking", values.get("thinking"))
    return values.get("reasoning_effort") == "none" if allowed is None else allowed is False


@dataclass(frozen=True)
class CallOpening:
    """How a call begins within a thought: at the beginning of a line, or with a control token, which no
    thought only mentions; then comes the name of a known tool. Both patterns look at the character before."""

    pattern: str  #: of the text up to the name of the tool, which is its group
    mark: str  #: of the text with which such a call begins
    head: str  #: text before the name, as the grammar of calls has it

    @cached_property
    def calls(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    @cached_property
    def marks(self) -> re.Pattern[str]:
        return re.compile(self.mark)


def call_opening(format: ToolFormat, names: Iterable[str], controls: Collection[str]) -> CallOpening | None:
    """How calls of these tools begin in a thought, where ``controls`` are names of control tokens. None:
    they have channels of their own, or there are no tools."""
    kind = format.call
    if isinstance(kind, HarmonyCall) or not (known := sorted(names, key=len, reverse=True)):
        return None
    prefix = "" if isinstance(kind, JSONCall) else kind.prefix
    marker, tag = re.escape(format.marker), re.escape(prefix)
    line = r"(?<=\n)[ \t]*"
    opens = "|".join(map(re.escape, format.opens))
    between = rf"\s*(?:(?:{opens})\s*)*" if opens else r"\s*"
    if isinstance(kind, JSONCall):
        known = [json.dumps(name, ensure_ascii=False)[1:-1] for name in known]
        prefix, tag = '{"name": "', r'\{\s*"name"\s*:\s*"'
    elif isinstance(kind, NamedCall) and prefix:
        tag = f"(?:{tag})?"
    mark = marker if format.marker in controls else line + marker
    begins = f"{mark}{between}"
    if isinstance(kind, TaggedCall) and prefix:  # models leave the marker out
        begins, mark = f"(?:{begins}|{line})", f"(?:{mark}|{line}{tag})"
    called = "|".join(map(re.escape, known))
    return CallOpening(rf"{begins}{tag}({called})(?=[^\w.\-])", mark, format.before + prefix)
