"""Windows of a text, and a choice of some of them."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from hotcold.errors import UserError
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.scoring import cut_windows
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import printable

_T = TypeVar("_T")


def text_windows(tokenizer: Tokenizer, text: str, size: int, *, special: bool = False) -> list[list[int]]:
    """Cuts a text into consecutive windows of ``size`` tokens, each with BOS first if the model's file asks
    for it. ``special``: names of control tokens become these tokens. UserError as in
    :func:`~hotcold.tasks.scoring.cut_windows`."""
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return cut_windows(tokenizer.encode(text, add_bos=False, parse_special=special), size, bos)


def shared_windows(
    candidate: LoadedModel, base: LoadedModel, text: str, *, special: bool = False
) -> list[list[int]]:
    """Returns the windows of a text for two models, as long as the shorter context. UserError: the
    vocabularies or the tokens of the text differ."""
    names = f"{printable(candidate.path.name)} and {printable(base.path.name)}"
    fix = "compare files of one model, which have one tokenizer"
    sizes = candidate.config.vocab, base.config.vocab
    if sizes[0] != sizes[1]:
        raise UserError(f"{names} have {sizes[0]} and {sizes[1]} tokens in their vocabularies: {fix}")
    if difference := candidate.tokenizer.difference(base.tokenizer):
        raise UserError(f"{names} have different vocabularies, {difference}: {fix}")
    size = min(candidate.context, base.context)
    windows, others = (
        text_windows(each.tokenizer, text, size, special=special) for each in (candidate, base)
    )
    for at, pair in enumerate(zip(chain(*windows), chain(*others), strict=False)):
        if pair[0] != pair[1]:
            first, second = (printable(repr(candidate.tokenizer.piece(id))) for id in pair)
            got = f"token {at} of the text is {first} for one and {second} for the other"
            raise UserError(f"{names} have different tokenizers, {got}: {fix}")
    if windows != others:
        got = f"{sum(map(len, windows))} and {sum(map(len, others))}"
        raise UserError(f"{names} have different tokenizers, the text has {got} tokens: {fix}")
    return windows


def evenly(items: Sequence[_T], n: int) -> list[_T]:
    """Returns ``n`` items at equal distances from the first to near the last; all, if there are at most
    ``n``."""
    if n >= len(items):
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]
