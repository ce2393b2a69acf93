"""A tokenizer's vocabulary, read from GGUF metadata (``tokenizer.ggml.*``) and checked.

The keys are those of the GGUF specification. Files come from strangers, so nothing here is believed before it
has been looked at; whatever is wrong is a :class:`TokenizerError` of one line."""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats.files import shown

PREFIX = "tokenizer.ggml."


class TokenizerError(UserError):
    """A vocabulary that cannot be used: the message has what was seen and what is allowed."""


def wrong(key: str, what: str) -> TokenizerError:
    """What is wrong with a value of the file; ``key`` comes without its prefix."""
    return TokenizerError(f"{PREFIX}{key} {what}")


#: ``tokenizer.ggml.token_type``
TokenType = enum.IntEnum(
    "TokenType", ["UNDEFINED", "NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"], start=0
)


@dataclass(frozen=True)
class Defaults:
    """What a kind of tokenizer assumes where its file is silent, as llama.cpp does."""

    ids: tuple[int | None, int | None, int | None]  #: BOS, EOS, unknown
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False  #: where False, the file's add_space_prefix does not count either
    scores: bool = False  #: whether scores are required


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]  #: ``[V]`` as the file spells them
    types: list[int]  #: ``[V]`` :class:`TokenType`, as plain integers
    scores: npt.NDArray[np.float32] | None  #: ``[V]``, for kinds of tokenizer that have them
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]  #: tokens that end a text: EOS, end of turn, end of message
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool  #: whether text starts with a space that the user did not write

    def ordinary(self, *excluded: TokenType) -> dict[str, int]:
        """Ids of the tokens that text may become by their spelling; of equal tokens the last counts."""
        never = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE, *excluded}
        return {token: id for id, token in enumerate(self.tokens) if self.types[id] not in never}

    def byte_ids(self) -> dict[int, int]:
        """Byte -> id of its token, such as ``<0x0A>``."""
        ids = (id for id, type in enumerate(self.types) if type == TokenType.BYTE)
        return {int(self.tokens[id][1:-1], 16): id for id in ids}

    def pieces(self, spelled: Callable[[str], bytes]) -> list[bytes]:
        """``[V]`` the bytes that tokens stand for: the names of special ones, the others ``spelled``."""
        by_name = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)

        def piece(token: str, type: int) -> bytes:
            if type == TokenType.BYTE:
                return bytes([int(token[1:-1], 16)])
            return token.encode() if type in by_name else spelled(token)

        return [piece(token, type) for token, type in zip(self.tokens, self.types, strict=True)]


#: Tokens that end a turn in well-known chat formats; their files do not always name them as such.
_END_OF_TURN = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<|eom_id|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
))  # fmt: skip

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def read_vocabulary(metadata: Mapping[str, Any], defaults: Defaults) -> Vocabulary:
    """Reads and checks the vocabulary of a GGUF file; no key outside ``tokenizer.ggml.`` is looked at."""
    tokens = array(metadata, "tokens", "U")
    if not tokens:
        raise TokenizerError(f"the file has no {PREFIX}tokens, or 0 of them: use one with a vocabulary")
    declared = _types(metadata, tokens)
    # Types are optional; bytes show by their spelling, and the special ids are marked below.
    types = declared or [TokenType.BYTE if _BYTE_TOKEN.fullmatch(t) else TokenType.NORMAL for t in tokens]
    ids = {name: _id(metadata, name, len(tokens)) for name in ("bos", "eos", "unknown", "eot", "eom")}
    for name, default in zip(ids, defaults.ids, strict=False):
        # A default counts only if the file agrees that this token is a special one.
        if ids[name] is None and default is not None and default < len(tokens) and declared:
            ids[name] = default if types[default] in (TokenType.CONTROL, TokenType.UNKNOWN) else None
    bos, eos, unknown, *ends = ids.values()
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    ends += [eos] + [id for id, t in enumerate(tokens) if t in _END_OF_TURN and types[id] in special]
    if {"<|return|>", "<|call|>"} <= set(tokens):  # Harmony: <|end|> closes a channel, not the answer
        ends = [id for id in ends if id is None or tokens[id] != "<|end|>"]
    stop_ids = frozenset(id for id in ends if id is not None)
    # Whatever the file calls them: text that a user writes must never become one of these.
    for id in stop_ids if bos is None else (bos, *stop_ids):
        types[id] = TokenType.CONTROL
    if unknown is not None and types[unknown] == TokenType.NORMAL:
        types[unknown] = TokenType.UNKNOWN
    scores = _scores(metadata, len(tokens)) if defaults.scores else None
    return Vocabulary(
        tokens,
        types,
        scores,
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        stop_ids=stop_ids,
        add_bos=_adds(metadata, "bos", bos, default=defaults.add_bos),
        add_eos=_adds(metadata, "eos", eos, default=defaults.add_eos),
        add_space_prefix=flag(metadata, "add_space_prefix", default=True) and defaults.space_prefix,
    )


def array(metadata: Mapping[str, Any], name: str, kinds: str, size: int | None = None) -> Any:
    """An array of the file or None: a list of strings for ``kinds`` "U", else values of these NumPy kinds."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, list) and not (isinstance(value, np.ndarray) and value.ndim == 1):
        raise wrong(name, f"is {shown(value)}: a flat array is needed")
    if size not in (None, len(value)):
        raise wrong(name, f"has {len(value)} entries for {size} tokens: one per token is needed")
    if kinds == "U":
        for i, text in enumerate(value):
            if not isinstance(text, str):
                raise wrong(f"{name}[{i}]", f"is {shown(text)}: only strings are allowed")
        return list(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:  # a list holds strings
        raise wrong(name, f"is {shown(value)}: only {'numbers' if 'f' in kinds else 'integers'} are allowed")
    return value


def flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise wrong(name, f"is {shown(value)}: true and false are allowed")
    return value


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int] | None:
    values = array(metadata, "token_type", "iu", len(tokens))
    if values is None:
        return None
    for id in np.flatnonzero((values < 0) | (values > max(TokenType))).tolist():
        raise wrong(f"token_type[{id}]", f"is {values[id]}: allowed are 0 to {max(TokenType)}")
    for id in np.flatnonzero(values == TokenType.BYTE).tolist():
        if not _BYTE_TOKEN.fullmatch(tokens[id]):
            raise wrong(f"tokens[{id}]", f"is {shown(tokens[id])} of type byte: allowed are <0x00> to <0xFF>")
    types: list[int] = values.tolist()
    return types


def _scores(metadata: Mapping[str, Any], size: int) -> npt.NDArray[np.float32]:
    scores = array(metadata, "scores", "fiu", size)
    if scores is None:
        raise TokenizerError(f"the file has no {PREFIX}scores: one per token is needed")
    with np.errstate(over="ignore"):
        values: npt.NDArray[np.float32] = scores.astype(np.float32)
    for id in np.flatnonzero(np.isnan(values)).tolist():
        raise wrong(f"scores[{id}]", "is not a number")
    return values


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"{name}_token_id"
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if type(value) is not int:
        raise wrong(key, f"is {shown(value)}: a token id is needed")
    if not 0 <= value < size:
        raise wrong(key, f"is {shown(value)}: the {size} tokens have the ids 0 to {size - 1}")
    return value


def _adds(metadata: Mapping[str, Any], which: str, id: int | None, *, default: bool) -> bool:
    adds = flag(metadata, f"add_{which}_token", default=default and id is not None)
    if adds and id is None:
        raise wrong(f"add_{which}_token", f"is true: the file needs {PREFIX}{which}_token_id too")
    return adds
