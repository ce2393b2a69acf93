"""Text to token ids and back, for any model file that carries its vocabulary.

:class:`Tokenizer` does what every kind of tokenizer shares: special tokens, BOS and EOS, the space before a
text, whole UTF-8 characters. The algorithm in between is chosen by ``tokenizer.ggml.model``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hotcold.model.spm import SentencePieceBPE
from hotcold.model.vocabulary import (
    PREFIX,
    Defaults,
    TokenizerError,
    TokenType,
    Vocabulary,
    quoted,
    read_vocabulary,
)

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerError"]


class Algorithm(Protocol):
    """What differs between kinds of tokenizers."""

    @property
    def pieces(self) -> Sequence[bytes]: ...  # [V] the bytes that each token stands for
    def encode_ordinary(self, text: str) -> list[int]: ...  # nothing in the text is special


#: ``tokenizer.ggml.model`` -> the algorithm, and what it assumes where the file is silent.
_ALGORITHMS: dict[str, tuple[Callable[[Vocabulary], Algorithm], Defaults]] = {
    "llama": (
        SentencePieceBPE,
        Defaults(ids=(1, 2, 0), add_bos=True, add_space_prefix=True, scores=True),
    ),
}

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A vocabulary and how text maps onto it.

    Attributes:
        vocab_size: V; ids are 0 to V - 1.
        bos_id, eos_id: the tokens that open and close a text, or None.
        stop_ids: every token that ends a generated text (EOS, end of turn, end of message).
        add_bos, add_eos: whether :meth:`encode` adds them unless told otherwise.
    """

    def __init__(self, vocabulary: Vocabulary, algorithm: Algorithm) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.space_prefix = vocabulary.add_space_prefix
        self._algorithm = algorithm
        self._pieces = algorithm.pieces
        types = vocabulary.types
        silent = (TokenType.CONTROL, TokenType.UNKNOWN)
        self._silent = frozenset(id for id, type in enumerate(types) if type in silent)
        #: tokens after which the text starts anew: those that the encoder finds before the algorithm runs
        self._fences = self._silent | {id for id, type in enumerate(types) if type == TokenType.USER_DEFINED}
        # The longest first, as llama.cpp looks for them.
        fences = sorted(self._fences, key=lambda id: len(vocabulary.tokens[id].encode()), reverse=True)
        self._special = [(vocabulary.tokens[id], id) for id in fences if vocabulary.tokens[id]]
        self._user_defined = [(text, id) for text, id in self._special if types[id] == TokenType.USER_DEFINED]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes; its tensors and architecture do not matter.

        Raises:
            TokenizerError: the vocabulary is missing, broken, or of a kind that is not supported.
        """
        model = metadata.get(PREFIX + "model")
        supported = ", ".join(_ALGORITHMS)
        if model is None:
            raise TokenizerError(f"the file has no {PREFIX}model, so no tokenizer: supported are {supported}")
        if not isinstance(model, str) or model not in _ALGORITHMS:
            raise TokenizerError(f"{PREFIX}model is {quoted(model)}: supported are {supported}")
        algorithm, defaults = _ALGORITHMS[model]
        vocabulary = read_vocabulary(metadata, defaults)
        return cls(vocabulary, algorithm(vocabulary))

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; also NUL and unassigned characters.
            add_bos: True or False decide about BOS and leave EOS out; None follows the file for both.
            parse_special: whether the name of a control token, such as ``</s>``, becomes that token. Only for
                text that the program wrote: from a user it is an injection. User-defined tokens always match.

        Raises:
            ValueError: a lone surrogate, which is not a character; or BOS wanted where the file has none.
        """
        surrogate = _SURROGATE.search(text)
        if surrogate:
            raise ValueError(
                f"the text has a lone surrogate, U+{ord(surrogate[0]):04X}, at character "
                f"{surrogate.start()}: only valid Unicode is allowed (was the input UTF-8?)"
            )
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ValueError("add_bos is True but this vocabulary has no BOS token: leave it out")
            ids.append(self.bos_id)
        space = " " if self.space_prefix else ""
        prefix = space
        for fragment in self._fragments(text, self._special if parse_special else self._user_defined):
            if isinstance(fragment, int):
                ids.append(fragment)
                prefix = space
            else:
                ids += self._algorithm.encode_ordinary(prefix + fragment)
                prefix = ""
        if add_bos is None and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, so that ``decode(encode(text)) == text``.

        Control tokens add nothing, and the space that :meth:`encode` put before a text is taken away again.
        Bytes that are not UTF-8 become U+FFFD. SentencePiece's own space, U+2581, comes back as a space.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        stream = StreamDecoder(self)
        return b"".join(map(stream.next_bytes, ids)).decode(errors="replace")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for tokens that come one by one. For a continuation push the prompt's tokens first."""
        return StreamDecoder(self)

    def piece(self, id: int) -> bytes:
        """The bytes of one token, as in the middle of a text; a control token's name for a control token.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        if not 0 <= id < self.vocab_size:
            raise ValueError(
                f"token id {id} is not in the vocabulary: allowed are 0 to {self.vocab_size - 1}"
            )
        return self._pieces[id]

    def is_silent(self, id: int) -> bool:
        """Whether a token adds nothing to the text: control tokens and the unknown token."""
        return id in self._silent

    def is_fence(self, id: int) -> bool:
        """Whether the text after a token starts anew, with a space of its own."""
        return id in self._fences

    def _fragments(self, text: str, special: Iterable[tuple[str, int]]) -> list[str | int]:
        """Cuts special tokens out of a text: strings in between, ids for the tokens; nothing is empty."""
        fragments: list[str | int] = [text] if text else []
        for token, id in special:
            if token not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                first, *rest = fragment.split(token)
                cut.append(first)
                for part in rest:
                    cut += (id, part)
            fragments = [fragment for fragment in cut if fragment != ""]
        return fragments


class StreamDecoder:
    """Decodes tokens one by one; the texts together are what :meth:`Tokenizer.decode` gives for all of them.

    Text comes in whole characters: bytes that may be the start of one are held back until the rest has come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._at_start = tokenizer.space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that a token completes, perhaps none. Raises ValueError for an id out of range."""
        return self._utf8.decode(self.next_bytes(id))

    def flush(self) -> str:
        """What was held back, as U+FFFD: bytes of a character that never came to its end."""
        return self._utf8.decode(b"", final=True)

    def next_bytes(self, id: int) -> bytes:
        """The bytes that the next token adds to the text."""
        tokenizer = self._tokenizer
        piece = tokenizer.piece(id)
        if tokenizer.is_fence(id):
            self._at_start = tokenizer.space_prefix
            return b"" if tokenizer.is_silent(id) else piece
        if self._at_start:
            self._at_start = False
            return piece.removeprefix(b" ")
        return piece
