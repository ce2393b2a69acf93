"""Prompts for the text between two others, for models that were trained to fill in the middle."""

from collections.abc import Sequence

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Field, Text

#: The field of routes that otherwise continue a prompt.
SUFFIX = Field(
    Text(),
    "",
    "The text after the gap, for models trained to fill gaps; prompt is the text before it.",
)
_NEEDED = {"fim_pre": "a prefix", "fim_suf": "a suffix", "fim_mid": "a middle"}


def check_model(facts: Facts, param: str | None = None) -> None:
    """Raises APIError if the model cannot fill in. ``param`` is the field that requests it."""
    if facts.fills_in:
        return
    missing = [word for kind, word in _NEEDED.items() if kind not in facts.tokenizer.filling]
    reason = f"its vocabulary lacks {' and '.join(missing)} token"
    message = f"this model cannot fill gaps, {reason}: use a model that was trained for it"
    raise APIError(message, param=param, code="model_not_supported")


def filled_texts(facts: Facts, prefixes: Sequence[str | list[int]], suffix: str) -> list[list[int]]:
    """Returns the prompt of each prefix (text or token ids) and a suffix. Raises APIError if a text cannot
    fit."""
    facts.check_length(suffix, "suffix")
    after = plain_tokens(facts, suffix)
    prompts = []
    for prefix in prefixes:
        if isinstance(prefix, str):
            facts.check_length(prefix, "prompt")
            prefix = plain_tokens(facts, prefix)
        prompts.append(filled(facts, prefix, after))
    return prompts


def filled(facts: Facts, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Returns the prompt for the text between a prefix and a suffix, with BOS if the model needs it."""
    marks, bos = facts.tokenizer.filling, facts.tokenizer.bos_id
    ids = [bos] if facts.tokenizer.add_bos and bos is not None else []
    return [*ids, marks["fim_pre"], *prefix, marks["fim_suf"], *suffix, marks["fim_mid"]]


def plain_tokens(facts: Facts, text: str) -> list[int]:
    """Returns the tokens of a part of a file. Names of control tokens stay text."""
    return facts.tokenizer.encode(text, add_bos=False)
