"""Byte-level byte-pair encoding (``tokenizer.ggml.model`` = ``gpt2``): GPT-2, Llama 3, Qwen and others.

A text is cut into words, a word is spelled in 256 printable characters, one per byte, and neighbours merge in
the order of ``tokenizer.ggml.merges``. ``tokenizer.ggml.pre`` names the rule that cuts words; its names are
llama.cpp's. If llama.cpp's expression only approximates the expression of training, llama.cpp's is used."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hotcold.tokenizer.library import encoding
from hotcold.tokenizer.vocabulary import (
    PREFIX,
    TokenizerError,
    TokenType,
    Vocabulary,
    array,
    token_bytes,
    wrong,
)
from hotcold.values import shown

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("pre_tokenizers.json").read_bytes())
#: name -> expressions. Each cuts the remaining parts of a text into its matches and the text between them.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    name: tuple(cuts) for names, cuts in _TABLE["expressions"].items() for name in names.split()
}
#: kinds that put BOS before a text, or EOS (a separator) after it, if the file has no key for it; and kinds
#: that keep a word that is a token without merging
ADDS_BOS, ADDS_EOS, IGNORES_MERGES = (
    set(_TABLE[key].split()) for key in ("adds_bos", "adds_eos", "ignores_merges")
)

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
#: GPT-2's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_SPELLED = {byte: character for character, byte in _BYTES.items()}
_IN_NO_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that never occur in UTF-8


class ByteLevelBPE:
    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        kind = pre_kind(metadata)
        self.piece = vocabulary.speller(_spelled)
        ids = vocabulary.ordinary(TokenType.USER_DEFINED)
        self._absent = {byte for character, byte in _BYTES.items() if character not in ids} - _IN_NO_TEXT
        self.lacks = bool(self._absent)
        self._absent_id = len(vocabulary.tokens)
        bpe: dict[str, Any] = {"ignore_merges": kind in IGNORES_MERGES}
        if self.lacks:  # a byte without a token becomes an extra token, so that its neighbours do not merge
            name = "\0" * (2 * max(map(len, ids), default=0) + 1)  # longer than two tokens that merge
            ids[name] = self._absent_id
            bpe |= {"unk_token": name, "fuse_unk": False}
        self._tokenizer = Tokenizer(_model(vocabulary.tokens, ids, metadata, bpe))
        self._tokenizer.pre_tokenizer = pre_tokenizer(kind)

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text without special tokens; its :meth:`absent` bytes are left out."""
        ids: list[int] = encoding(self._tokenizer, text).ids
        return [id for id in ids if id != self._absent_id] if self.lacks else ids

    def absent(self, text: str) -> list[str]:
        """The bytes of a text that have no token; llama.cpp leaves them out, too."""
        return [f"{byte:#04x}" for byte in sorted(self._absent.intersection(text.encode()))]


def pre_kind(metadata: Mapping[str, Any]) -> str:
    """The kind in ``tokenizer.ggml.pre``, else ``default`` as in llama.cpp. TokenizerError: it is unknown."""
    kind = metadata[PREFIX + "pre"] if _names_kind(metadata) else "default"
    if not isinstance(kind, str) or kind not in PRE_TOKENIZERS:
        raise wrong("pre", f"is {shown(kind)}: supported are {', '.join(PRE_TOKENIZERS)}")
    return kind


def _names_kind(metadata: Mapping[str, Any]) -> bool:
    """True if the file names a kind, valid or not."""
    kind = metadata.get(PREFIX + "pre")
    return kind is not None and not (isinstance(kind, str) and not kind)


def pre_notes(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for the user if the file does not name its kind."""
    if _names_kind(metadata):
        return ()
    got = f"the file does not name its pre-tokenizer ({PREFIX}pre), so it is 'default', as in llama.cpp"
    return (f"{got}: words may be split differently from the model's training, which makes answers worse",)


def pre_tokenizer(kind: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[kind]]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, spelling])


def spell_bytes(token: bytes) -> str:
    """A token's bytes in GPT-2's alphabet."""
    return "".join(map(_SPELLED.__getitem__, token))


def _spelled(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:  # not in the alphabet: the token is the text itself
        return token_bytes(token)


def _model(tokens: list[str], ids: dict[str, int], file: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """The library's model of :func:`read_merges`.

    The library itself refuses a merge of other tokens than ``ids``. To check all merges here, too, would take
    longer than the rest of reading a vocabulary."""
    from tokenizers import models

    merges, special = _stored_merges(file), set(tokens).difference(ids)
    of_special = [pair for pair in enumerate(merges) if pair[1].replace(" ", "", 1) in special]
    _ordinary_pairs(tokens, ids, of_special)
    distinct = dict.fromkeys(merges)  # of equal merges the first counts; in the library, the last
    for _, merge in of_special:
        distinct.pop(merge, None)
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in distinct]  # without a space: refused
    try:
        return models.BPE(ids, pairs, **options)
    except Exception:  # the library raises no narrower type
        return models.BPE(ids, read_merges(tokens, ids, file), **options)


def _stored_merges(file: Mapping[str, Any]) -> list[str]:
    merges: list[str] | None = array(file, "merges", "U")
    if merges is None:
        kind = file.get(PREFIX + "model")
        raise TokenizerError(f"the file has no {PREFIX}merges: {PREFIX}model {kind} needs them")
    return merges


def read_merges(tokens: list[str], ids: Mapping[str, int], file: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs in merge order, without pairs of tokens that ordinary text never becomes."""
    return _ordinary_pairs(tokens, ids, enumerate(_stored_merges(file)))


def _ordinary_pairs(
    tokens: list[str], ids: Mapping[str, int], merges: Iterable[tuple[int, str]]
) -> list[tuple[str, str]]:
    """The pairs of numbered merges; TokenizerError: one is not two tokens that together are a token."""
    pairs: dict[tuple[str, str], None] = {}
    known: set[str] = set()
    for i, merge in merges:
        left, _, right = merge.partition(" ")
        if left in ids and right in ids and left + right in ids:
            pairs.setdefault((left, right))  # the first of equal pairs counts
            continue
        known = known or set(tokens)
        if not left or not right or not {left, right, left + right} <= known:
            raise wrong(f"merges[{i}]", f"is {shown(merge)}: two tokens that together are a token are needed")
    return list(pairs)
