"""How models mark what they think before they answer, as their chat templates show it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thinking:
    """The texts around it; each may be a control token of the vocabulary."""

    start: str
    end: str


#: Of models that are known to think: QwQ, Qwen3 and DeepSeek-R1; Magistral; Command A; Seed-OSS; others.
KNOWN = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<thinking>", "</thinking>"),
    Thinking("<reasoning>", "</reasoning>"),
)


def thinking_of(template: str) -> Thinking | None:
    """What a template writes around thinking, or looks for; None where it knows none. A template that only
    takes former thinking out of a history looks for its end."""
    for each in KNOWN:
        if each.start in template or each.end in template:
            return each
    return None


def opens_thinking(prompt: str, thinking: Thinking | None) -> bool:
    """Whether the end of a prompt's text has begun the answer's thinking, so that the answer will not."""
    if thinking is None:
        return False
    return prompt.rstrip().endswith(thinking.start)
