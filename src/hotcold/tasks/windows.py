"""Cuts a text into windows, and chooses a part of them."""

from collections.abc import Sequence
from typing import TypeVar

from hotcold.tasks.scoring import cut_windows
from hotcold.tokenizer.tokenizer import Tokenizer

_T = TypeVar("_T")


def text_windows(tokenizer: Tokenizer, text: str, size: int, *, special: bool = False) -> list[list[int]]:
    """Consecutive windows of ``size`` tokens, each with BOS first if the model's file asks for it. With
    ``special`` names of control tokens become these tokens. ValueError as in
    :func:`~hotcold.tasks.scoring.cut_windows`."""
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return cut_windows(tokenizer.encode(text, add_bos=False, parse_special=special), size, bos)


def evenly(items: Sequence[_T], n: int) -> list[_T]:
    """``n`` items at equal distances from the first to near the last; all, if there are at most ``n``."""
    if n >= len(items):
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]
