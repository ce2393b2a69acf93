"""Reads ``tokenizer.json`` of the tokenizers library, as far as GGUF can express it.

There are three kinds: a byte-level BPE; a BPE of characters with byte fallback, which is SentencePiece's
without its scores; and a unigram model."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.convert.sentencepiece_model import Piece
from hotcold.convert.settings import ConvertError, Settings
from hotcold.tokenizer.bpe import IGNORES_MERGES, PRE_TOKENIZERS
from hotcold.tokenizer.spm import SPACE
from hotcold.tokenizer.vocabulary import TokenType
from hotcold.values import shown

#: Behaviours of a Split that separate the matches of its expression from the text between them.
_CUTS = ({"behavior": "Isolated", "invert": False}, {"behavior": "Removed", "invert": True})
_BYTE = re.compile("<0x[0-9A-F]{2}>")
SPACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_SINGLE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
_MAX_SCORE = 1e30  # well inside float32; integers of JSON may have any length
_UNMADE = -1e9  # score of tokens that no merge makes: they come last


@dataclass(frozen=True)
class Trained:
    """A trained vocabulary: tokens by id, and its ``tokenizer.ggml.`` keys."""

    keys: dict[str, Any]
    tokens: dict[int, Piece]
    scored: bool = False  #: true if the kind needs scores


def trained_vocabulary(tokenizer: Settings, *, merged: bool = False) -> Trained:
    """The vocabulary in ``tokenizer.json``. ``merged``: a BPE of characters keeps its merges, as in Gemma 4's
    files. ConvertError: GGUF cannot express it, or the file is damaged."""
    model = tokenizer.section("model")
    # The first files of this library had no type.
    kind = model.text("type", "Unigram" if isinstance(model.get("vocab"), list) else "BPE")
    if kind not in ("BPE", "Unigram"):
        raise ConvertError(f"{tokenizer.path} is {shown(kind)}: BPE, Unigram or tokenizer.model is needed")
    if kind == "Unigram":
        return _unigram(tokenizer, model)
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise model.error(key, "null")
    ids = _vocab(tokenizer, model)
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise model.error("merges", "a list of pairs")
    pairs = [_merge(tokenizer, merge) for merge in merges]
    if model.flag("byte_fallback", False):
        vocabulary = _with_fallback(tokenizer, model, ids, pairs)
        return _with_merges(tokenizer, vocabulary, pairs) if merged else vocabulary
    # llama.cpp leaves out NFC as well: nearly all text is in it already.
    if tokenizer.get("normalizer") not in (None, {"type": "NFC"}):
        raise tokenizer.error("normalizer", "null or NFC")
    pre = _pre_kind(tokenizer, model.flag("ignore_merges", False))
    tokens = {id: Piece(text, 0.0, TokenType.NORMAL) for id, text in ids.items()}
    return Trained({"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in pairs]}, tokens)


def _vocab(tokenizer: Settings, model: Settings) -> dict[int, str]:
    tokens: dict[int, str] = {}
    for text, id in model.section("vocab").values.items():
        if type(id) is not int or id < 0 or id in tokens:
            got = f"token {shown(text)} has id {shown(id)}"
            raise ConvertError(f"{tokenizer.path}: {got}: a unique id is needed")
        tokens[id] = text
    return tokens


def _with_fallback(
    tokenizer: Settings, model: Settings, ids: dict[int, str], merges: list[tuple[str, str]]
) -> Trained:
    """A BPE with byte fallback, as a vocabulary of SentencePiece. SentencePiece merges the pair whose token
    has the highest score, the tokenizers library the first pair in its list: scores follow this order."""
    rank: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        rank.setdefault(left + right, place)
    unknown = model.get("unk_token")
    tokens = {}
    for id, text in ids.items():
        type = TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL
        score = -float(rank[text]) if text in rank else 0.0 if len(text) == 1 else _UNMADE
        tokens[id] = Piece(text, score, TokenType.UNKNOWN if text == unknown else type)
    keys = {
        "model": "llama",
        "pre": "default",
        "add_space_prefix": _space_prefix(tokenizer),
        "unknown_token_id": next((id for id, text in ids.items() if text == unknown), None),
    }
    return Trained(keys, tokens, scored=True)


def _with_merges(tokenizer: Settings, trained: Trained, merges: list[tuple[str, str]]) -> Trained:
    """The vocabulary with its merges. ConvertError: a merge crosses a line break, at which readers cut, or a
    text gets a space before it."""
    if trained.keys["add_space_prefix"]:
        raise tokenizer.error("normalizer", "one that puts no space before a text")
    crossing = [left + right for left, right in merges if "\n" in left + right and (left + right).strip("\n")]
    if crossing:
        raise ConvertError(f"{tokenizer.path}: the token {shown(crossing[0])} crosses the end of a line")
    keys = {"model": "gemma4", "pre": "gemma4", "merges": [" ".join(pair) for pair in merges]}
    return Trained(trained.keys | keys, trained.tokens, scored=True)


def _space_prefix(tokenizer: Settings) -> bool:
    """True if a text gets a space before it. ConvertError: the normaliser changes more than spaces."""
    prefix, spaced = False, False
    for step in _flat(tokenizer.get("normalizer"), "normalizers"):
        if step == {"type": "Prepend", "prepend": SPACE}:
            prefix = True
        elif step == SPACED:
            spaced = True
        else:
            raise tokenizer.error("normalizer", f"null, or steps that make {SPACE!a} of spaces")
    for step in _flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": "\u2581", **more}:
                old = "always" if more.get("add_prefix_space", True) else "never"
                prefix, spaced = prefix or more.get("prepend_scheme", old) != "never", True
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # the normaliser has replaced these spaces
            case _:
                raise tokenizer.error("pre_tokenizer", "null or Metaspace")
    if not spaced:
        raise tokenizer.error("normalizer", f"one that makes {SPACE!a} of spaces")
    return prefix


def _unigram(tokenizer: Settings, model: Settings) -> Trained:
    vocab, unknown = model.get("vocab"), model.get("unk_id")
    if not isinstance(vocab, list) or type(unknown) is not int or not 0 <= unknown < len(vocab):
        raise model.error("unk_id", "the id of the unknown token, and a list of tokens")
    tokens = {}
    for id, entry in enumerate(vocab):
        match entry:
            case [str(text), float() | int() as score] if abs(score) < _MAX_SCORE:
                byte = TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL
                tokens[id] = Piece(text, float(score), TokenType.UNKNOWN if id == unknown else byte)
            case _:
                raise ConvertError(
                    f"{tokenizer.path}: token {id} is {shown(entry)}: a text and a score are needed"
                )
    steps = _flat(tokenizer.get("normalizer"), "normalizers")
    tables = [step.get("precompiled_charsmap") for step in steps if step.get("type") == "Precompiled"]
    others = [step for step in steps if step.get("type") not in ("Precompiled", "Strip") and step != _SINGLE]
    if others:
        raise tokenizer.error("normalizer", "a precompiled table, or that and single spaces")
    spaces = {**tokenizer.values, "normalizer": None}
    keys: dict[str, Any] = {
        "model": "t5",
        "pre": "default",
        "add_space_prefix": _space_prefix(Settings(tokenizer.path, spaces)),
        "remove_extra_whitespaces": _SINGLE in steps or any(step.get("type") == "Strip" for step in steps),
        "unknown_token_id": unknown,
    }
    if tables and tables[0]:
        try:
            keys["precompiled_charsmap"] = np.frombuffer(base64.b64decode(tables[0], validate=True), np.uint8)
        except (TypeError, ValueError, binascii.Error):
            raise tokenizer.error("normalizer", "a table in base64") from None
    return Trained(keys, tokens, scored=True)


def _flat(step: Any, key: str) -> list[dict[str, Any]]:
    """The steps in order, with sequences unrolled."""
    if not isinstance(step, dict):
        return []
    inner = step.get(key) if step.get("type") == "Sequence" else None
    return [part for each in inner for part in _flat(each, key)] if isinstance(inner, list) else [step]


def adds(tokenizer: Settings, text: str | None, place: int) -> bool:
    """True if the template around a text has the special token ``text`` first (0) or last (-1)."""
    steps = tokenizer.section("post_processor").values
    inner = steps.get("processors") or []
    if not isinstance(inner, list):
        raise tokenizer.section("post_processor").error("processors", "a list")
    for step in [steps, *inner]:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single and isinstance(single[place], dict):
            token = single[place].get("SpecialToken")
            return isinstance(token, dict) and token.get("id") == text
    return False


def _merge(tokenizer: Settings, merge: Any) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)] if left and right and " " not in left + right:
            return left, right
    raise ConvertError(f"{tokenizer.path}: the merge {shown(merge)} is not a pair of tokens")


def _pre_kind(tokenizer: Settings, ignore_merges: bool) -> str:
    steps = _steps(tokenizer.get("pre_tokenizer"))
    kinds = [kind for kind, cuts in PRE_TOKENIZERS.items() if [*map(_plain, cuts), "ByteLevel"] == steps]
    fitting = [kind for kind in kinds if (kind in IGNORES_MERGES) == ignore_merges]
    if fitting:
        return fitting[0]
    if kinds:
        got = f"{', '.join(kinds)}, but with ignore_merges {ignore_merges}"
    else:
        got = f"{' then '.join(steps)[:600]!r}; supported are {', '.join(PRE_TOKENIZERS)}"
    raise ConvertError(f"{tokenizer.path}: GGUF has no name for its pre_tokenizer: it is {got}")


def _steps(step: Any) -> list[str]:
    """Regular expressions in order, then ``ByteLevel``; a step without an expression gives its type."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            expressions = [expression for each in steps for expression in _steps(each)]
            # Moving ByteLevel to the end changes nothing if later steps match only ASCII.
            spelled = [expression for expression in expressions if expression != "ByteLevel"]
            return spelled + ["ByteLevel"] * (len(spelled) < len(expressions))
        case {"type": "ByteLevel", "add_prefix_space": False}:
            cuts = PRE_TOKENIZERS["gpt-2"] if step.get("use_regex", True) else ()
            return [*map(_plain, cuts), "ByteLevel"]
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, **how} if how in _CUTS:
            return [_plain(pattern)]
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return [r"\p{N}" if individual else r"\p{N}+"]
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return [_plain(PRE_TOKENIZERS["falcon"][0])]
        case {"type": str(kind)}:
            return [kind if kind not in ("ByteLevel", "Split") else f"{kind} with more"]
    return [shown(step)]


def _plain(expression: str) -> str:
    return expression.replace("\r", r"\r").replace("\n", r"\n")
