"""Byte-pair encoding of characters (``tokenizer.ggml.model`` = ``gemma4``), Gemma 4's algorithm.

A text is cut at its newlines, spaces are spelled U+2581, and neighbours merge in the order of
``tokenizer.ggml.merges``. A character without a token becomes its bytes in UTF-8, as in SentencePiece."""

from collections.abc import Mapping
from typing import Any

from hotcold.tokenizer.bpe import read_merges
from hotcold.tokenizer.library import encoding
from hotcold.tokenizer.spm import SPACE, spelled
from hotcold.tokenizer.vocabulary import Vocabulary

_CUT = r"[^\n]+|[\n]+"


class CharacterBPE:
    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        self.piece = vocabulary.speller(spelled)
        ids = vocabulary.ordinary()
        merges = read_merges(vocabulary.tokens, ids, metadata)
        self._characters = {token for token in ids if len(token) == 1}
        self._bytes = set(vocabulary.byte_ids())
        self.lacks = len(self._bytes) < 256
        # A character without a token becomes an extra token, so that its neighbours do not merge.
        self._absent_id, name = len(vocabulary.tokens), "\0" * (max(map(len, ids), default=0) + 1)
        ids |= {f"<0x{byte:02X}>": id for byte, id in vocabulary.byte_ids().items()} | {name: self._absent_id}
        bpe = models.BPE(ids, merges, unk_token=name, fuse_unk=False, byte_fallback=True)
        self._tokenizer = Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_CUT), "isolated")

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text without special tokens; its :meth:`absent` characters are left out."""
        ids: list[int] = encoding(self._tokenizer, text.replace(" ", SPACE)).ids
        return [id for id in ids if id != self._absent_id] if self.lacks else ids

    def absent(self, text: str) -> list[str]:
        """The characters of a text without a token, and with a byte without a token."""
        others = set(text.replace(" ", SPACE)) - self._characters
        return [f"U+{ord(each):04X}" for each in sorted(others) if not self._bytes.issuperset(each.encode())]
