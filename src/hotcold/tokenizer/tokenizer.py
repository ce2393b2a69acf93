"""Text to token ids and back, for any model file that carries its vocabulary.

:class:`Tokenizer` has the parts that all kinds share: special tokens, BOS and EOS, the space before a text,
whole UTF-8 characters. ``tokenizer.ggml.model`` chooses the algorithm for ordinary text."""

import codecs
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, Self, TypeAlias

from hotcold.errors import UserError
from hotcold.tokenizer.added_tokens import SPACES, AddedTokens
from hotcold.tokenizer.bpe import ADDS_BOS, ADDS_EOS, ByteLevelBPE, pre_kind, pre_notes
from hotcold.tokenizer.character_bpe import CharacterBPE
from hotcold.tokenizer.least_tokens import LeastTokens
from hotcold.tokenizer.longest_match import LongestMatch
from hotcold.tokenizer.spm import SentencePieceBPE
from hotcold.tokenizer.unicode import check_unicode
from hotcold.tokenizer.unigram import Unigram
from hotcold.tokenizer.vocabulary import (
    PREFIX,
    Defaults,
    TokenizerError,
    TokenType,
    Vocabulary,
    read_vocabulary,
    token_bytes,
)
from hotcold.values import shown

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerError"]

_NAMED = 8  # most bytes or characters without a token in a message
_Metadata: TypeAlias = Mapping[str, Any]


class Algorithm(Protocol):
    """The part that differs between kinds of tokenizers."""

    piece: Callable[[int], bytes]  # the bytes of a token

    @property
    def lacks(self) -> bool: ...  # True if it leaves out parts of some texts

    def encode_ordinary(self, text: str) -> list[int]: ...  # ids of a text without special tokens

    def absent(self, text: str) -> list[str]: ...  # names of the parts of a text that it leaves out


#: ``tokenizer.ggml.model`` -> the algorithm, and its defaults for keys that the file lacks.
_ALGORITHMS: dict[
    str, tuple[Callable[[Vocabulary, _Metadata], Algorithm], Callable[[_Metadata], Defaults]]
] = {
    "llama": (SentencePieceBPE, lambda _: Defaults((1, 2, 0), add_bos=True, space_prefix=True, scores=True)),
    "gpt2": (
        ByteLevelBPE,
        lambda file: Defaults(
            (11, 11, None), pre_kind(file) in ADDS_BOS, pre_kind(file) in ADDS_EOS, notes=pre_notes(file)
        ),
    ),
    "gemma4": (CharacterBPE, lambda _: Defaults((2, 1, 3), add_bos=True)),
    # The line break that ends a turn is an ordinary token, as in llama.cpp's files.
    "rwkv": (LongestMatch, lambda _: Defaults((None, None, None), ends_in_text=True)),
    "t5": (Unigram, lambda _: Defaults((None, 1, 2), add_eos=True, space_prefix=True, scores=True)),
}  # fmt: skip


class Tokenizer:
    """Maps text to the ``vocab_size`` tokens of a vocabulary and back. ``bos_id``, ``eos_id``, ``stop_ids``,
    ``add_bos`` and ``add_eos`` are as in :class:`Vocabulary`."""

    def __init__(self, vocabulary: Vocabulary, algorithm: Algorithm) -> None:
        tokens = vocabulary.tokens
        self.vocab_size = len(tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.filling = vocabulary.filling  #: tokens around code to fill in, by llama.cpp's short names
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self._space_prefix = vocabulary.add_space_prefix
        self._algorithm = algorithm
        self.notes = vocabulary.notes  #: assumptions and left out parts, a line each, for the user
        flags = vocabulary.flags
        #: tokens that add nothing to a text; and tokens that are found before the algorithm runs
        self._silent = {*vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN)}
        user_defined = {*vocabulary.of_types(TokenType.USER_DEFINED)}
        normalized = flags.normalized & user_defined if vocabulary.add_space_prefix else frozenset()
        self._fences = self._silent | (user_defined - normalized)

        def named(ids: Iterable[int]) -> AddedTokens:
            # The longest first, as in llama.cpp.
            order = sorted(ids, key=lambda id: len(token_bytes(tokens[id])), reverse=True)
            return AddedTokens([(tokens[id], id) for id in order if tokens[id]], flags)

        self._special, self._user_defined = named(self._fences), named(user_defined - normalized)
        self._normalized = named(normalized)
        #: id -> name of the tokens that add nothing to a text
        self.control_names = {
            id: token_bytes(text).decode(errors="replace")
            for text, id in self._special.names
            if id in self._silent
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The tokenizer that a GGUF file describes; its tensors and architecture do not matter.
        ``TokenizerError``: the vocabulary is missing, broken, or of a kind that is not supported."""
        model = metadata.get(PREFIX + "model")
        if not isinstance(model, str) or model not in _ALGORITHMS:
            got = f"no {PREFIX}model" if model is None else f"{PREFIX}model {shown(model)}"
            raise TokenizerError(f"the file has {got}: supported are {', '.join(_ALGORITHMS)}")
        algorithm, defaults = _ALGORITHMS[model]
        vocabulary = read_vocabulary(metadata, defaults(metadata))
        return cls(vocabulary, algorithm(vocabulary, metadata))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens that :meth:`encode` returns for a text, with any options. A
        million characters take some milliseconds, and other threads run meanwhile."""
        return self._least_tokens.of(text)

    @cached_property
    def _least_tokens(self) -> LeastTokens:
        """The bound of this vocabulary. A text may lose white space next to tokens with flags, and the parts
        that the algorithm leaves out. Unigram models join unknown characters and spaces: their bound is 0."""
        lost: set[int] = set()
        if self._special.flags.lstrip or self._special.flags.rstrip:
            lost.update(SPACES.encode())
        if self._algorithm.lacks:
            lost.update(byte for byte in range(128) if self._algorithm.absent(chr(byte)))
            lost.update(range(128, 256))  # bytes of characters whose other bytes may be absent
        if isinstance(self._algorithm, Unigram):
            lost.update(range(256))
        pieces = map(self.piece, range(self.vocab_size))
        return LeastTokens(pieces, lost, spaces=not self._algorithm.lacks)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of a text; ``ValueError`` for a lone surrogate, or if the file lacks a requested BOS.

        ``add_bos`` True or False decide about BOS and leave EOS out; None follows the file for both. With
        ``parse_special`` the name of a control token, such as ``</s>``, becomes that token. Use it only for
        the program's own text, since in a user's text it is an injection. User-defined tokens always match.
        Characters that no token can spell are left out: :meth:`left_out` names them."""
        check_unicode(text)
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise UserError("add_bos is True but this vocabulary has no BOS token: leave it out")
            ids.append(self.bos_id)
        ids += self.encode_parts(self.cut_special(text) if parse_special else [text])
        if add_bos is None and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def cut_special(self, text: str) -> list[str | int]:
        """Cuts a text into ids of the special tokens that it names, including control tokens, and strings."""
        return self._special.cut(text)

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Token ids of text in parts, without BOS and EOS. In strings only user-defined ones are special."""
        ids: list[int] = []
        prefix = space = " " if self._space_prefix else ""
        whole = [*parts]
        for part, before, after in zip(whole, ["", *whole], [*whole[1:], ""], strict=False):
            beside = self._beside(before)[-1:], self._beside(after)[:1]
            for fragment in [part] if isinstance(part, int) else self._user_defined.cut(part, *beside):
                if isinstance(fragment, int):
                    ids.append(fragment)
                    prefix = space
                    continue
                for piece in self._normalized.cut(prefix + fragment):
                    ids += [piece] if isinstance(piece, int) else self._algorithm.encode_ordinary(piece)
                prefix = ""
        return ids

    def left_out(self, texts: Iterable[str]) -> str:
        """The bytes (as 0x04) or characters (as U+0004) of these texts that :meth:`encode` leaves out because
        no token can spell them. Nearly always empty."""
        if not self._algorithm.lacks:
            return ""
        parts: list[str] = []
        for text in texts:
            check_unicode(text)
            parts += [part for part in self._user_defined.cut(text) if isinstance(part, str)]
        pieces = [piece for part in parts for piece in self._normalized.cut(part) if isinstance(piece, str)]
        names = [*dict.fromkeys(name for piece in pieces for name in self._algorithm.absent(piece))]
        return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")

    def _beside(self, part: str | int) -> str:
        """The text of a part, as the context of its neighbours."""
        return self.piece(part).decode(errors="replace") if isinstance(part, int) else part

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, so that ``decode(encode(text)) == text``.

        Control tokens add nothing, and the space that :meth:`encode` put before a text is removed.
        Bytes that are not UTF-8 become U+FFFD. SentencePiece's own space, U+2581, becomes a space.
        An id outside the vocabulary is a ValueError."""
        stream = StreamDecoder(self)
        return b"".join(map(stream.next_bytes, ids)).decode(errors="replace")

    def stream_decoder(self, shown: Iterable[int] = ()) -> "StreamDecoder":
        """A decoder for single tokens. For a continuation push the prompt's tokens first. Control tokens in
        ``shown`` add their names."""
        return StreamDecoder(self, shown)

    def piece(self, id: int) -> bytes:
        """The bytes of one token, as in the middle of a text, or the name of a control token."""
        if not 0 <= id < self.vocab_size:
            last = self.vocab_size - 1
            raise UserError(f"token id {id} is not in the vocabulary: allowed are 0 to {last}")
        return self._algorithm.piece(id)

    def difference(self, other: "Tokenizer") -> str:
        """Names the first difference between two vocabularies; empty if they are equal."""
        for id in range(min(self.vocab_size, other.vocab_size)):
            if self.piece(id) != other.piece(id):
                return f"token {id} is {self.piece(id)!r:.60} and {other.piece(id)!r:.60}"
        return ""


class StreamDecoder:
    """Decodes tokens one by one; the joined texts equal :meth:`Tokenizer.decode` of all tokens.

    Texts have whole characters: the first bytes of a character are held back until it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer._silent.difference(shown)
        self._at_start = tokenizer._space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def whole(self) -> bool:
        """True if no character is incomplete."""
        return not self._utf8.getstate()[0]

    def push(self, id: int) -> str:
        """The text that a token completes, which may be empty. ValueError: the id is out of range."""
        return self._utf8.decode(self.next_bytes(id))

    def flush(self) -> str:
        """The bytes of an incomplete character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def next_bytes(self, id: int) -> bytes:
        tokenizer = self._tokenizer
        piece = tokenizer.piece(id)
        if id in tokenizer._fences:  # a new text starts
            self._at_start = tokenizer._space_prefix
            return b"" if id in self._silent else piece
        if self._at_start:
            self._at_start = False
            return piece.removeprefix(b" ")
        return piece
