"""Finds the positions of a prompt up to which later prompts are likely to be equal.

Another conversation with the same system message differs from the user's first message on. A template that
drops earlier thoughts changes the next turn's prompts from the first answer to the last user message on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hotcold.chat.messages import Message
from hotcold.chat.traits import Traits
from hotcold.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Openings:
    """The tokens between messages of a template, from the first control token on; none if it has none."""

    user: list[int]  #: between a system message and the user's
    answer: list[int]  #: between a user's message and the answer, as far as all prompts have the same


def openings_of(tokenizer: Tokenizer, traits: Traits) -> Openings:
    """Finds the openings that the probes of a template showed."""
    prompt, past = (_from_control_token(tokenizer, text) for text in traits.before_answer)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, past, strict=False))
    return Openings(_from_control_token(tokenizer, traits.before_user), [id for id, _ in same])


def borders_of(ids: Sequence[int], messages: Sequence[Message], openings: Openings) -> tuple[int, ...]:
    """Returns where the user's first message begins, and where the first answer to the last one does."""
    roles = [message["role"] for message in messages]
    last_turn = roles[::-1].index("user") if "user" in roles else len(roles)
    users, answers = _ends_of(openings.user, ids), _ends_of(openings.answer, ids)
    opened = len(answers) - roles.count("assistant")  # 1 where the prompt opens an answer
    since = roles[len(roles) - last_turn :].count("assistant") + opened
    if opened not in (0, 1):
        since = 1  # such a template opens one answer for all messages of a turn
    return (*users[:1], *answers[len(answers) - since :][:1])


def _from_control_token(tokenizer: Tokenizer, text: str) -> list[int]:
    parts = tokenizer.cut_special(text)
    while parts and isinstance(parts[0], str):
        del parts[0]
    return tokenizer.encode_parts(parts)


def _ends_of(part: list[int], ids: Sequence[int]) -> list[int]:
    """Returns the positions behind each occurrence of some tokens."""
    n = len(part)
    return [i + n for i, id in enumerate(ids) if part and id == part[0] and [*ids[i : i + n]] == part]
