"""Finds out from a chat template how a model marks its thinking."""

from dataclasses import dataclass


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
