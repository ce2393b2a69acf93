"""A tokenizer's vocabulary, read from GGUF metadata (``tokenizer.ggml.*``) and checked.

The keys are those of the GGUF specification. Files are untrusted, so everything is checked before use; an
error is a :class:`TokenizerError` of one line."""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.tokenizer.added_tokens import TokenFlags, read_flags
from hotcold.tokenizer.end_tokens import END_KEYS, end_tokens
from hotcold.values import printable, shown

PREFIX = "tokenizer.ggml."


class TokenizerError(UserError):
    """Raised for a vocabulary that cannot be used; the message has the value seen and the values allowed."""


def wrong(key: str, problem: str) -> TokenizerError:
    """The error for a wrong value in the file; ``key`` comes without its prefix."""
    return TokenizerError(f"{PREFIX}{key} {problem}")


#: ``tokenizer.ggml.token_type``
TokenType = enum.IntEnum(
    "TokenType", ["UNDEFINED", "NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"], start=0
)


@dataclass(frozen=True)
class Defaults:
    """A kind of tokenizer's defaults for keys that a file lacks, as in llama.cpp."""

    ids: tuple[int | None, int | None, int | None]  #: BOS, EOS, unknown
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False  #: if False, the file's add_space_prefix is ignored, too
    scores: bool = False  #: scores are required
    ends_in_text: bool = False  #: ordinary tokens that end a text also occur within texts
    notes: tuple[str, ...] = ()  #: assumptions that the user should know


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]  #: ``[V]`` in the file's spelling
    types: npt.NDArray[np.int8]  #: ``[V]`` :class:`TokenType`
    scores: npt.NDArray[np.float32] | None  #: ``[V]``, for kinds of tokenizer with scores
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]  #: tokens that end a text: EOS, end of turn, end of message
    flags: TokenFlags  #: flags of the tokens that are found by name
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool  #: text gets a space before it
    notes: tuple[str, ...] = ()  #: assumptions and left out parts, a line each
    filling: Mapping[str, int] = field(default_factory=dict)  #: as :attr:`EndTokens.filling`

    def ordinary(self, *excluded: TokenType) -> dict[str, int]:
        """Spelling -> id of the tokens that ordinary text may become; the last of equal tokens counts."""
        allowed = np.ones(len(TokenType), np.bool_)
        allowed[[TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE, *excluded]] = False
        chosen = allowed[self.types]
        tokens = dict(
            zip(compress(self.tokens, chosen.tolist()), np.flatnonzero(chosen).tolist(), strict=True)
        )
        # Tokens that are not UTF-8 occur in no text, and not every library accepts them as strings.
        if _SURROGATE.search("".join(tokens)) is None:
            return tokens
        return {token: id for token, id in tokens.items() if not _SURROGATE.search(token)}

    def of_types(self, *types: TokenType) -> list[int]:
        """The ids of the tokens of these types."""
        return _of_types(self.types, *types)

    def byte_ids(self) -> dict[int, int]:
        """The id of the token of each byte, such as ``<0x0A>``."""
        return {int(self.tokens[id][1:-1], 16): id for id in self.of_types(TokenType.BYTE)}

    def speller(self, spelled: Callable[[str], bytes]) -> Callable[[int], bytes]:
        """Makes a function from an id to a token's bytes: special tokens' names, or ``spelled`` of others."""
        tokens, types = self.tokens, self.types.tolist()

        def piece(id: int) -> bytes:
            token, type = tokens[id], types[id]
            if type == TokenType.BYTE:
                return bytes([int(token[1:-1], 16)])
            return token_bytes(token) if type in _BY_NAME else spelled(token)

        return piece


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ID_KEY = re.compile(r"tokenizer\.ggml\.[a-z_]+_token_id")
#: Types of tokens that are found by name before the rest of a text is tokenised.
_BY_NAME = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
#: Hotcold's key for tokens that end a text and have no key in GGUF.
MORE_ENDS = "hotcold.tokenizer.end_token_ids"


def read_vocabulary(metadata: Mapping[str, Any], defaults: Defaults) -> Vocabulary:
    """Reads and checks a GGUF file's vocabulary, with Hotcold's own keys and the facts that names imply."""
    tokens = array(metadata, "tokens", "U")
    if not tokens:
        raise TokenizerError(f"the file has no {PREFIX}tokens, or 0 of them: use one with a vocabulary")
    notes = [*defaults.notes]
    declared = _types(metadata, tokens)
    if declared is None:
        notes.append(f"the file has no {PREFIX}token_type: special tokens are recognised by their names")
    # Types are optional: the spelling shows byte tokens, and the special ids are marked below.
    types = _by_spelling(tokens) if declared is None else declared
    ids = _ids(metadata, tokens, notes)
    for name, default in zip(("bos", "eos", "unknown"), defaults.ids, strict=True):
        # A default counts only if the file types this token as special.
        if ids[name] is None and default is not None and default < len(tokens) and declared is not None:
            ids[name] = default if types[default] in (TokenType.CONTROL, TokenType.UNKNOWN) else None
            if name == "eos" and ids[name] is not None:
                guess = f"token {default}, {printable(tokens[default], 40)}, does, as in llama.cpp"
                notes.append(f"the file does not say which token ends a text: {guess}")
    bos, eos, unknown = ids["bos"], ids["eos"], ids["unknown"]
    ends = end_tokens(
        tokens, _of_types(types, TokenType.CONTROL), ids, _more_ends(metadata, len(tokens), notes)
    )
    if not ends.stops:
        notes.append("no token of the vocabulary ends a text: answers end at their length limit")
    # A user's text must never become one of these tokens, also if the file gives them another type.
    for id in ends.reserved if bos is None else (bos, *ends.reserved):
        if not (defaults.ends_in_text and types[id] == TokenType.NORMAL):
            types[id] = TokenType.CONTROL
    if unknown is not None and types[unknown] == TokenType.NORMAL:
        types[unknown] = TokenType.UNKNOWN
    scores = _scores(metadata, len(tokens)) if defaults.scores else None
    flags = read_flags(metadata, tokens, _of_types(types, *_BY_NAME), TokenizerError)
    space_prefix = flag(metadata, "add_space_prefix", default=True) and defaults.space_prefix
    for id in flags.normalized if space_prefix else ():
        if types[id] == TokenType.USER_DEFINED:
            tokens[id] = " " + tokens[id]
    return Vocabulary(
        tokens,
        types,
        scores,
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        stop_ids=ends.stops,
        flags=flags,
        add_bos=_adds(metadata, "bos", bos, notes, default=defaults.add_bos),
        add_eos=_adds(metadata, "eos", eos, notes, default=defaults.add_eos),
        add_space_prefix=space_prefix,
        notes=tuple(notes),
        filling=ends.filling,
    )


def token_bytes(token: str) -> bytes:
    """The bytes of a token in the file; bytes that are not UTF-8 are lone surrogates in the string."""
    return token.encode(errors="surrogateescape")


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
        for i, text in enumerate(value if {*map(type, value)} != {str} else ()):
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


def _of_types(types: npt.NDArray[np.int8], *wanted: TokenType) -> list[int]:
    ids: list[int] = np.flatnonzero(np.isin(types, wanted)).tolist()
    return ids


def _by_spelling(tokens: Sequence[str]) -> npt.NDArray[np.int8]:
    kinds = [TokenType.BYTE if _BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL for token in tokens]
    return np.array(kinds, np.int8)


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> npt.NDArray[np.int8] | None:
    values = array(metadata, "token_type", "iu", len(tokens))
    if values is None:
        return None
    for id in np.flatnonzero((values < 0) | (values > max(TokenType))).tolist():
        raise wrong(f"token_type[{id}]", f"is {values[id]}: allowed are 0 to {max(TokenType)}")
    for id in np.flatnonzero(values == TokenType.BYTE).tolist():
        if not _BYTE_TOKEN.fullmatch(tokens[id]):
            raise wrong(f"tokens[{id}]", f"is {shown(tokens[id])} of type byte: allowed are <0x00> to <0xFF>")
    types: npt.NDArray[np.int8] = values.astype(np.int8)
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


def _ids(metadata: Mapping[str, Any], tokens: Sequence[str], notes: list[str]) -> dict[str, int | None]:
    """The ids in the file's keys, by the name before ``_token_id``. An id without a token counts as none, as
    in llama.cpp, and adds a note."""
    size = len(tokens)
    ids: dict[str, int | None] = dict.fromkeys(("bos", "unknown", *END_KEYS))
    for key in filter(_ID_KEY.fullmatch, metadata):
        value, name = metadata[key], key.removeprefix(PREFIX).removesuffix("_token_id")
        if type(value) is not int:
            if name in ids:
                raise wrong(f"{name}_token_id", f"is {shown(value)}: a token id is needed")
        elif 0 <= value < size:
            ids[name] = value
        else:
            got = f"{key} is {shown(value)}: the {size} tokens have the ids 0 to {size - 1}"
            notes.append(f"{got}; the key is ignored")
    return ids


def _more_ends(metadata: Mapping[str, Any], size: int, notes: list[str]) -> list[int]:
    value = metadata.get(MORE_ENDS)
    if value is None:
        return []
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        raise TokenizerError(f"{MORE_ENDS} is {shown(value)}: an array of token ids is needed")
    ids: list[int] = value.tolist()
    if beyond := [id for id in ids if not 0 <= id < size]:
        notes.append(f"{MORE_ENDS} has {beyond[0]}: the {size} tokens have the ids 0 to {size - 1}; ignored")
    return [id for id in ids if 0 <= id < size]


def _adds(
    metadata: Mapping[str, Any], which: str, id: int | None, notes: list[str], *, default: bool
) -> bool:
    key = f"add_{which}_token"
    adds = flag(metadata, key, default=default and id is not None)
    if adds and id is None:
        if f"{PREFIX}{which}_token_id" in metadata:
            notes.append(f"no {which.upper()} is added to texts, since the id in the file is not a token")
            return False
        raise wrong(key, f"is true: the file needs {PREFIX}{which}_token_id too")
    if adds and PREFIX + key not in metadata:
        where = "begin with BOS" if which == "bos" else "end with EOS"
        notes.append(f"the file does not say whether texts {where} ({PREFIX}{key}): they do, as in llama.cpp")
    return adds
