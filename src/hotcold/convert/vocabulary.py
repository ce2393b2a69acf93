"""The tokenizer of a checkpoint folder as GGUF's ``tokenizer.*`` metadata."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.chat_templates import chat_template_metadata
from hotcold.convert.checkpoint import Checkpoint, ConvertError, Settings
from hotcold.convert.sentencepiece_model import Piece, read_sentencepiece_model
from hotcold.formats.files import shown
from hotcold.model.bpe import IGNORES_MERGES, PRE_TOKENIZERS
from hotcold.model.vocabulary import TokenType

_ADDED_SCORE = -1000.0  # llama.cpp's score of tokens that were added after training
_PAD_SCORE = -10000.0
#: How a Split keeps the matches of its expression apart from what lies between them.
_CUTS = ({"behavior": "Isolated", "invert": False}, {"behavior": "Removed", "invert": True})
_ORDER = ("model", "pre", "tokens", "scores", "token_type", "merges") + tuple(
    f"{name}_token_id" for name in ("unknown", "bos", "eos", "padding")
)


def vocabulary_metadata(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """``tokenizer.*`` keys for ``vocab_size`` tokens, from ``tokenizer.model`` or ``tokenizer.json``.

    Added tokens come from the JSON files beside it; ids that nobody names become unused ``[PADn]`` tokens, as
    in llama.cpp's files. ConvertError: a file is missing, not valid, or does not fit ``vocab_size``."""
    settings = checkpoint.settings("tokenizer_config.json")
    tokens = [Piece(f"[PAD{id}]", _PAD_SCORE, TokenType.UNUSED) for id in range(vocab_size)]
    if (checkpoint.folder / "tokenizer.model").is_file():
        keys = _from_sentencepiece(checkpoint, settings, tokens)
    elif (checkpoint.folder / "tokenizer.json").is_file():
        keys = _from_json(checkpoint, settings, tokens)
    else:
        raise ConvertError(f"{checkpoint.folder} has neither tokenizer.model nor tokenizer.json")
    for name in ("bos", "eos", "padding"):
        # config.json overrules the tokenizer, since fine-tuning may have moved BOS and EOS.
        key = {"padding": "pad_token_id"}.get(name, f"{name}_token_id")
        configured = checkpoint.config.token(key)
        if configured is not None and configured >= vocab_size:
            raise checkpoint.config.error(key, f"a token id below {vocab_size}")
        if configured is not None:
            keys[f"{name}_token_id"] = configured
    for name in ("add_bos_token", "add_eos_token"):
        keys[name] = settings.flag(name, keys[name])
    keys["tokens"] = [token.text for token in tokens]
    keys["token_type"] = np.array([token.type for token in tokens], np.int32)
    # One order whatever the source: the same checkpoint gives the same bytes.
    names = [*_ORDER, *sorted(keys.keys() - set(_ORDER))]
    metadata = {f"tokenizer.ggml.{name}": keys[name] for name in names if keys.get(name) is not None}
    return metadata | chat_template_metadata(checkpoint)


def _from_sentencepiece(checkpoint: Checkpoint, settings: Settings, tokens: list[Piece]) -> dict[str, Any]:
    path = checkpoint.folder / "tokenizer.model"
    model = read_sentencepiece_model(path)
    if model.algorithm != "BPE":
        raise ConvertError(f"{path} is a SentencePiece {model.algorithm} model: only BPE is supported")
    trained = len(model.pieces)
    _check_size(path, trained, len(tokens))
    tokens[:trained] = model.pieces
    extra = checkpoint.settings("added_tokens.json")
    _add(tokens, extra, [(id, {"content": text}) for text, id in extra.values.items()], trained)
    decoder = settings.section("added_tokens_decoder").values.items()
    entries = [(int(id) if re.fullmatch("[0-9]{1,9}", id) else id, entry) for id, entry in decoder]
    _add(tokens, settings, entries, trained)
    return {f"{name}_token_id": id for name, id in model.ids.items()} | {
        "model": "llama",
        "pre": "default",
        "scores": np.array([token.score for token in tokens], np.float32),
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": model.add_space_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces or None,
    }


def _from_json(checkpoint: Checkpoint, settings: Settings, tokens: list[Piece]) -> dict[str, Any]:
    tokenizer = checkpoint.settings("tokenizer.json")
    keys, trained = _bpe(tokenizer)
    _check_size(tokenizer.path, max(trained, default=0) + 1, len(tokens))
    for id, token in trained.items():
        tokens[id] = Piece(token, 0.0, TokenType.NORMAL)
    entries = tokenizer.values.get("added_tokens") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise tokenizer.error("added_tokens", "a list of objects")
    _add(tokens, tokenizer, [(entry.get("id"), entry) for entry in entries], 0)
    ids = {piece.text: id for id, piece in enumerate(tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        special = settings.values.get(f"{key}_token")
        text = special.get("content") if isinstance(special, dict) else special
        keys[f"{name}_token_id"] = ids.get(text) if isinstance(text, str) else None
        if name != "padding":
            place = 0 if name == "bos" else -1
            keys[f"add_{name}_token"] = isinstance(text, str) and _adds(tokenizer, text, place)
    return keys


def _check_size(path: Path, trained: int, size: int) -> None:
    if trained > size:
        raise ConvertError(f"{path} has {trained} pieces, but config.json says vocab_size {size}")


def _add(tokens: list[Piece], source: Settings, entries: list[tuple[Any, Any]], trained: int) -> None:
    """Names tokens that were added after training; what a model says of its own stands."""
    for id, entry in entries:
        known = entry if isinstance(entry, dict) else {}
        text = known.get("content")
        if not isinstance(text, str) or type(id) is not int or not 0 <= id < len(tokens):
            needed = f"a text and an id below {len(tokens)} are needed"
            raise ConvertError(f"{source.path}: added token {shown(text)} with id {shown(id)}: {needed}")
        if id >= trained:
            special = known.get("special") is True
            tokens[id] = Piece(text, _ADDED_SCORE, TokenType.CONTROL if special else TokenType.USER_DEFINED)


# --- tokenizer.json, where it describes a byte-level BPE ---


def _bpe(tokenizer: Settings) -> tuple[dict[str, Any], dict[int, str]]:
    """A byte-level BPE as ``tokenizer.ggml.`` keys, and id -> token of the trained vocabulary."""
    model = tokenizer.section("model")
    kind = "SentencePiece" if model.flag("byte_fallback", False) else model.text("type", "BPE")
    if kind != "BPE":
        raise ConvertError(f"{tokenizer.path} is {shown(kind)}: byte-level BPE or tokenizer.model is needed")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.values.get(key):
            raise model.error(key, "null")
    # llama.cpp leaves NFC out as well: hardly any text is not in it.
    if tokenizer.values.get("normalizer") not in (None, {"type": "NFC"}):
        raise tokenizer.error("normalizer", "null or NFC")
    tokens: dict[int, str] = {}
    for text, id in model.section("vocab").values.items():
        if type(id) is not int or id < 0 or id in tokens:
            seen = f"token {shown(text)} has id {shown(id)}"
            raise ConvertError(f"{tokenizer.path}: {seen}: one of its own is needed")
        tokens[id] = text
    merges = model.values.get("merges")
    if not isinstance(merges, list):
        raise model.error("merges", "a list of pairs")
    pairs = [_merge(tokenizer, merge) for merge in merges]
    pre = _pre_kind(tokenizer, model.flag("ignore_merges", False))
    return {"model": "gpt2", "pre": pre, "merges": pairs}, tokens


def _adds(tokenizer: Settings, text: str | None, place: int) -> bool:
    """Whether the template around a text has the special token ``text`` first (0) or last (-1)."""
    steps = tokenizer.section("post_processor").values
    for step in [steps, *(steps.get("processors") or [])]:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list) and single and isinstance(single[place], dict):
            token = single[place].get("SpecialToken")
            return isinstance(token, dict) and token.get("id") == text
    return False


def _merge(tokenizer: Settings, merge: Any) -> str:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    match parts:
        case [str(left), str(right)] if left and right and " " not in left + right:
            return f"{left} {right}"
    raise ConvertError(f"{tokenizer.path}: the merge {shown(merge)} is not a pair of tokens")


def _pre_kind(tokenizer: Settings, ignore_merges: bool) -> str:
    steps = _steps(tokenizer.values.get("pre_tokenizer"))
    kinds = [kind for kind, cuts in PRE_TOKENIZERS.items() if [*map(_plain, cuts), "ByteLevel"] == steps]
    fitting = [kind for kind in kinds if (kind in IGNORES_MERGES) == ignore_merges]
    if fitting:
        return fitting[0]
    if kinds:
        seen = f"{', '.join(kinds)}, but with ignore_merges {ignore_merges}"
    else:
        seen = f"{' then '.join(steps)[:600]!r}; known are {', '.join(PRE_TOKENIZERS)}"
    raise ConvertError(f"{tokenizer.path}: GGUF has no name for its pre_tokenizer: it is {seen}")


def _steps(step: Any) -> list[str]:
    """Regular expressions in their order, then ``ByteLevel``; what has no expression by its type."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            found = [expression for each in steps for expression in _steps(each)]
            # The spelling changes nothing for those after it, as long as they look at ASCII alone.
            spelled = [expression for expression in found if expression != "ByteLevel"]
            return spelled + ["ByteLevel"] * (len(spelled) < len(found))
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
