"""Calls the tokenizers library so that other threads run meanwhile."""

from typing import Any

_LONG = 1 << 12  # characters; a shorter text takes less time than the library's own threads to wake


def encoding(tokenizer: Any, text: str) -> Any:
    """The library's encoding of a text, without special tokens. ``encode`` holds Python's lock until it
    returns, which is a second for a million characters; the call for several texts releases it."""
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=False)
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoded
