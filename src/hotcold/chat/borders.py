"""Finds the positions of a prompt up to which later prompts are likely to be equal.

Another conversation with the same system message differs from the user's first message on. A template that
removes earlier thinking changes the next turn's prompt from the first answer after the last user message
on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hotcold.chat.messages import Message
from hotcold.chat.traits import Traits
from hotcold.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Openings:
    """The tokens between a template's messages, from the first control token on; empty if it has none."""

    user: list[int]  #: between a system message and the user's message
    answer: list[int]  #: between a user's message and the answer: the part that all prompts have


def openings_of(tokenizer: Tokenizer, traits: Traits) -> Openings:
    """Finds the openings in the probes of a template."""
    prompt, past = (_from_control_token(tokenizer, text) for text in traits.before_answer)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, past, strict=False))
    return Openings(_from_control_token(tokenizer, traits.before_user), [id for id, _ in same])


def borders_of(ids: Sequence[int], messages: Sequence[Message], openings: Openings) -> tuple[int, ...]:
    """Returns the ends of two prefixes: before the first user message, and before the current turn's
    answer."""
    roles = [message["role"] for message in messages]
    last_turn = roles[::-1].index("user") if "user" in roles else len(roles)
    users, answers = _ends_of(openings.user, ids), _ends_of(openings.answer, ids)
    opens_answer = len(answers) - roles.count("assistant")  # 1 if the prompt opens an answer
    since = roles[len(roles) - last_turn :].count("assistant") + opens_answer
    if opens_answer not in (0, 1):
        since = 1  # the template opens one answer for all messages of a turn
    return (*users[:1], *answers[len(answers) - since :][:1])


def _from_control_token(tokenizer: Tokenizer, text: str) -> list[int]:
    parts = tokenizer.cut_special(text)
    while parts and isinstance(parts[0], str):
        del parts[0]
    return tokenizer.encode_parts(parts)


def _ends_of(part: list[int], ids: Sequence[int]) -> list[int]:
    """Returns the position after each occurrence of some tokens."""
    n = len(part)
    return [i + n for i, id in enumerate(ids) if part and id == part[0] and [*ids[i : i + n]] == part]
