"""A tokenizer's vocabulary, read from GGUF metadata (``tokenizer.ggml.*``) and checked.

The keys are those of the GGUF specification. Files come from strangers, so nothing here is believed before it
has been looked at; whatever is wrong is a :class:`TokenizerError` of one line.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PREFIX = "tokenizer.ggml."


class TokenizerError(ValueError):
    """A vocabulary that cannot be used: the message has what was seen and what is allowed."""


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Defaults:
    """What a kind of tokenizer assumes where its file is silent, as llama.cpp does."""

    ids: tuple[int | None, int | None, int | None]  #: BOS, EOS, unknown
    add_bos: bool
    add_space_prefix: bool
    scores: bool  #: whether scores are required


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in id order and the settings around them.

    Attributes:
        tokens: ``[V]`` texts as the file spells them.
        types: ``[V]`` :class:`TokenType`, as plain integers.
        scores: ``[V]`` float32, or None for kinds of tokenizer that have none.
        stop_ids: tokens that end a text: EOS, end of turn, end of message.
        add_space_prefix: whether text starts with a space that the user did not write.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    scores: npt.NDArray[np.float32] | None
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


#: Tokens that end a turn in well-known chat formats; their files do not always name them as such.
_END_OF_TURN = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom_id|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
))  # fmt: skip

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_value(text: str) -> int | None:
    """The byte that a token such as ``<0x0A>`` stands for; None for any other text."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


def read_vocabulary(metadata: Mapping[str, Any], defaults: Defaults) -> Vocabulary:
    """Reads and checks the vocabulary of a GGUF file; no key outside ``tokenizer.ggml.`` is looked at.

    Raises:
        TokenizerError: a key is missing, has the wrong type, or does not fit the others.
    """
    tokens = _tokens(metadata)
    size = len(tokens)
    declared = _types(metadata, size)
    bos, eos, unknown = (
        _default_id(default, declared, size)
        if (id := _id(metadata, f"{name}_token_id", size)) is None
        else id
        for name, default in zip(("bos", "eos", "unknown"), defaults.ids, strict=True)
    )
    types = _inferred_types(tokens) if declared is None else declared
    ends = [eos, _id(metadata, "eot_token_id", size), _id(metadata, "eom_token_id", size)]
    stop_ids = frozenset([id for id in ends if id is not None] + _ends_of_turn(tokens, types))
    # Whatever the file calls them: text that a user writes must never become one of these.
    for id in (bos, *stop_ids):
        if id is not None:
            types[id] = TokenType.CONTROL
    if unknown is not None and types[unknown] == TokenType.NORMAL:
        types[unknown] = TokenType.UNKNOWN
    _check_bytes(tokens, types)
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=_scores(metadata, size, required=defaults.scores),
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        stop_ids=stop_ids,
        add_bos=_adds(metadata, "bos", bos, default=defaults.add_bos),
        add_eos=_adds(metadata, "eos", eos, default=False),
        add_space_prefix=_flag(metadata, "add_space_prefix", default=defaults.add_space_prefix),
    )


def quoted(text: object, limit: int = 40) -> str:
    """A value of an untrusted file, safe and short enough for a one-line message."""
    shown = ascii(text[: limit + 1] if isinstance(text, (str, list)) else text)
    return shown if len(shown) <= limit else shown[:limit] + "..."


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _array(metadata, "tokens")
    if tokens is None:
        raise TokenizerError(f"the file has no {PREFIX}tokens, so no vocabulary: use a file that has one")
    if not len(tokens):
        raise TokenizerError(f"{PREFIX}tokens has 0 tokens: at least 1 is needed")
    for id, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TokenizerError(f"{PREFIX}tokens[{id}] is {quoted(token)}: only strings are allowed")
    return list(tokens)


def _types(metadata: Mapping[str, Any], size: int) -> list[int] | None:
    types = _array(metadata, "token_type")
    if types is None:
        return None
    _check_length("token_type", len(types), size)
    values = np.asarray(types)
    if values.dtype.kind not in "iu":
        raise TokenizerError(f"{PREFIX}token_type holds {values.dtype} values: only integers are allowed")
    wrong = np.flatnonzero((values < min(TokenType)) | (values > max(TokenType)))
    if len(wrong):
        id = int(wrong[0])
        raise TokenizerError(
            f"{PREFIX}token_type[{id}] is {values[id]}: allowed are {min(TokenType)} to {max(TokenType)}"
        )
    listed: list[int] = values.tolist()
    return listed


def _inferred_types(tokens: Sequence[str]) -> list[int]:
    """The key is optional; bytes show by their spelling, and the special ids are marked by the caller."""
    return [TokenType.NORMAL if byte_value(token) is None else TokenType.BYTE for token in tokens]


def _scores(metadata: Mapping[str, Any], size: int, *, required: bool) -> npt.NDArray[np.float32] | None:
    scores = _array(metadata, "scores")
    if scores is None:
        if required:
            raise TokenizerError(f"the file has no {PREFIX}scores: one per token is needed")
        return None
    _check_length("scores", len(scores), size)
    values = np.asarray(scores)
    if values.dtype.kind not in "fiu":
        raise TokenizerError(f"{PREFIX}scores holds {values.dtype} values: only numbers are allowed")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if np.isnan(values).any():
        raise TokenizerError(f"{PREFIX}scores[{int(np.isnan(values).argmax())}] is not a number")
    return values


def _check_bytes(tokens: Sequence[str], types: Sequence[int]) -> None:
    for id, (token, type) in enumerate(zip(tokens, types, strict=True)):
        if type == TokenType.BYTE and byte_value(token) is None:
            raise TokenizerError(
                f"{PREFIX}tokens[{id}] is {quoted(token)} of type byte: allowed are <0x00> to <0xFF>"
            )


def _ends_of_turn(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [id for id, token in enumerate(tokens) if token in _END_OF_TURN and types[id] in special]


def _check_length(name: str, length: int, size: int) -> None:
    if length != size:
        raise TokenizerError(
            f"{PREFIX}{name} has {length} entries for {size} tokens: one per token is needed"
        )


def _array(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(PREFIX + name)
    if (
        value is None
        or isinstance(value, (list, tuple))
        or (isinstance(value, np.ndarray) and value.ndim == 1)
    ):
        return value
    raise TokenizerError(f"{PREFIX}{name} is {quoted(value)}: a flat array is needed")


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TokenizerError(f"{PREFIX}{name} is {quoted(value)}: a token id is needed")
    if not 0 <= value < size:
        raise TokenizerError(f"{PREFIX}{name} is {value}: the {size} tokens have the ids 0 to {size - 1}")
    return int(value)


def _default_id(default: int | None, types: Sequence[int] | None, size: int) -> int | None:
    # It counts only if the file agrees that this token is a special one.
    if default is None or types is None or default >= size:
        return None
    return default if types[default] in (TokenType.CONTROL, TokenType.UNKNOWN) else None


def _adds(metadata: Mapping[str, Any], which: str, id: int | None, *, default: bool) -> bool:
    """Whether the BOS or EOS token is put around a text."""
    name = f"add_{which}_token"
    if id is not None:
        return _flag(metadata, name, default=default)
    if _flag(metadata, name, default=False):
        raise TokenizerError(f"{PREFIX}{name} is true: the file needs {PREFIX}{which}_token_id too")
    return False


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, (bool, np.bool_)):
        raise TokenizerError(f"{PREFIX}{name} is {quoted(value)}: true and false are allowed")
    return bool(value)
