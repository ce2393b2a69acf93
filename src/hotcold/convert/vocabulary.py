"""Makes GGUF's ``tokenizer.*`` metadata from the tokenizer in a checkpoint folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.convert.added_tokens import flags_metadata
from hotcold.convert.chat_templates import chat_template_metadata
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.rwkv import TEMPLATE, VOCABULARY, world_vocabulary
from hotcold.convert.sentencepiece_model import Piece, read_sentencepiece_model
from hotcold.convert.settings import MAX_JSON, ConvertError, Settings
from hotcold.convert.tekken import TEKKEN_NAMES, read_tekken
from hotcold.convert.tiktoken_model import read_tiktoken
from hotcold.convert.tokenizer_json import Trained, adds, trained_vocabulary
from hotcold.tokenizer.bpe import PRE_TOKENIZERS
from hotcold.tokenizer.end_tokens import ends_by_name
from hotcold.tokenizer.spm import SPACE
from hotcold.tokenizer.vocabulary import MORE_ENDS, TokenType
from hotcold.values import shown

#: Tokenizers of two files: their class in transformers -> their kind of pre-tokenizer.
_TWO_FILES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "Qwen3_5Tokenizer": "qwen35"}
#: The class of the tokenizer by the beginning of the model_type.
_OF_MODELS = {
    "opt": "GPT2Tokenizer", "starcoder2": "GPT2Tokenizer", "qwen3_5": "Qwen3_5Tokenizer",
    "qwen": "Qwen2Tokenizer",
}  # fmt: skip
_ADDED_SCORE = -1000.0  # llama.cpp's score of tokens that were added after training
_PAD_SCORE = -10000.0
_ORDINARY = (TokenType.NORMAL, TokenType.USER_DEFINED)
_ORDER = ("model", "pre", "tokens", "scores", "token_type", "merges") + tuple(
    f"{name}_token_id" for name in ("unknown", "bos", "eos", "padding")
)


def vocabulary_metadata(
    checkpoint: Checkpoint,
    vocab_size: int,
    notes: list[str] | None = None,
    general: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Makes ``tokenizer.*`` keys for ``vocab_size`` tokens, from ``tokenizer.model`` or ``tokenizer.json``,
    and Hotcold's own keys where GGUF has none; ``general`` has the file's other keys.

    Added tokens come from the other JSON files. Ids without a name become unused ``[PADn]`` tokens, as in
    llama.cpp's files. Added tokens and ids beyond ``vocab_size`` are left out, and ``notes`` say so.
    ConvertError: a file is missing, not valid, or does not fit ``vocab_size``."""
    notes = [] if notes is None else notes
    settings = checkpoint.settings("tokenizer_config.json")
    tokens = [Piece(f"[PAD{id}]", _PAD_SCORE, TokenType.UNUSED) for id in range(vocab_size)]
    beyond: dict[int, str] = {}
    world: dict[str, Any] = {}
    if (checkpoint.folder / "tokenizer.model").is_file():
        keys = _from_sentencepiece(checkpoint, settings, tokens, beyond)
    elif (checkpoint.folder / "tokenizer.json").is_file():
        merged = (general or {}).get("general.architecture") == "gemma4"  # readers of gemma4 use its merges
        keys = _from_json(checkpoint.settings("tokenizer.json"), settings, tokens, beyond, merged=merged)
    elif (path := checkpoint.folder / "tiktoken.model").is_file():
        keys = _from_json(read_tiktoken(path, settings), settings, tokens, beyond)
    elif (path := checkpoint.folder / "tekken.json").is_file():
        named = Settings(settings.path, {**TEKKEN_NAMES, **settings.values})
        keys = _from_json(read_tekken(path, vocab_size), named, tokens, beyond)
    elif (path := checkpoint.folder / VOCABULARY).is_file():
        world = world_vocabulary(path, tokens)
        keys = dict(world)
    elif (checkpoint.folder / "vocab.json").is_file():
        keys = _from_json(_two_files(checkpoint, settings), settings, tokens, beyond)
    else:
        wanted = (
            f"tokenizer.model nor tokenizer.json (nor vocab.json, tiktoken.model, tekken.json, {VOCABULARY})"
        )
        raise ConvertError(f"{checkpoint.folder} has neither {wanted}: download its tokenizer as well")
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        # config.json takes precedence over the tokenizer: fine-tuning may have moved BOS and EOS.
        configured = _below(vocab_size, checkpoint.config, key, notes)
        keys[f"{name}_token_id"] = configured[0] if configured else keys[f"{name}_token_id"]
    keys |= _ends(checkpoint, keys["eos_token_id"], tokens, notes)
    keys |= world  # its config.json has other models' ids
    more_ends = keys.pop(MORE_ENDS, None)
    for name in ("add_bos_token", "add_eos_token"):
        keys[name] = settings.flag(name, keys[name])
    if beyond:
        last = f"{shown(beyond[max(beyond)])} with id {shown(max(beyond))}"
        left_out = f"{len(beyond)} added tokens are" if len(beyond) > 1 else "an added token is"
        notes.append(f"{left_out} left out, since the weights have {vocab_size} tokens: {last}")
    keys["tokens"] = [token.text for token in tokens]
    keys["token_type"] = np.array([token.type for token in tokens], np.int32)
    # A fixed order, so that the same checkpoint gives the same bytes.
    names = [*_ORDER, *sorted(keys.keys() - set(_ORDER))]
    metadata = {f"tokenizer.ggml.{name}": keys[name] for name in names if keys.get(name) is not None}
    metadata |= {MORE_ENDS: more_ends} if more_ends is not None else {}
    metadata |= flags_metadata(checkpoint, tokens, {**(general or {}), **metadata})
    templates = chat_template_metadata(checkpoint)
    return metadata | ({"tokenizer.chat_template": TEMPLATE} if world and not templates else templates)


def _below(vocab_size: int, settings: Settings, key: str, notes: list[str]) -> list[int]:
    """The token ids of a key; ids without a token are left out with a note."""
    ids = settings.tokens(key)
    if beyond := [id for id in ids if id >= vocab_size]:
        got = f"{settings.path.name}: {key} {beyond[0]}"
        notes.append(f"{got} is left out, since the weights have {vocab_size} tokens")
    return [id for id in ids if id < vocab_size]


def _ends(checkpoint: Checkpoint, eos: int | None, tokens: list[Piece], notes: list[str]) -> dict[str, Any]:
    """The keys of the tokens that end a text; config.json and generation_config.json may list several. A
    token that readers do not find by name gets one of GGUF's two other keys, or Hotcold's own key."""
    size = len(tokens)
    ends = _below(size, checkpoint.config, "eos_token_id", notes)
    ends += _below(size, _generation(checkpoint, notes), "eos_token_id", notes)
    eos = ends[0] if ends else eos
    others = [id for id in dict.fromkeys(ends) if id != eos and not ends_by_name(tokens[id].text)]
    keys: dict[str, Any] = {"eos_token_id": eos}
    keys |= {f"{name}_token_id": id for name, id in zip(("eot", "eom"), others, strict=False)}
    if rest := others[2:]:
        keys[MORE_ENDS] = np.array(rest, np.int32)
        got = f"GGUF has keys for 3 tokens that end a text: {len(rest)} more are in {MORE_ENDS}"
        notes.append(f"{got}, which llama.cpp does not read")
    return keys


def _generation(checkpoint: Checkpoint, notes: list[str]) -> Settings:
    """generation_config.json, which is optional: a damaged one is left out with a note."""
    try:
        return checkpoint.settings("generation_config.json")
    except ConvertError as error:
        notes.append(f"left out: {error}")
        return Settings(checkpoint.folder / "generation_config.json", {})


def _from_sentencepiece(
    checkpoint: Checkpoint, settings: Settings, tokens: list[Piece], beyond: dict[int, str]
) -> dict[str, Any]:
    path = checkpoint.folder / "tokenizer.model"
    model = read_sentencepiece_model(path)
    if model.algorithm not in ("BPE", "UNIGRAM"):
        raise ConvertError(f"{path} is a SentencePiece {model.algorithm} model: BPE or UNIGRAM is needed")
    trained = len(model.pieces)
    _check_size(path, trained, len(tokens))
    tokens[:trained] = model.pieces
    extra = checkpoint.settings("added_tokens.json")
    plain = [(id, {"content": text}) for text, id in extra.values.items()]
    _add(tokens, extra, plain, trained, beyond)
    decoder = settings.section("added_tokens_decoder").values.items()
    entries = [(int(id) if re.fullmatch("[0-9]{1,9}", id) else id, entry) for id, entry in decoder]
    _add(tokens, settings, entries, trained, beyond)
    _spell_user_defined(tokens)
    unigram = model.algorithm == "UNIGRAM"
    return {f"{name}_token_id": id for name, id in model.ids.items()} | {
        "model": "t5" if unigram else "llama",
        "pre": "default",
        "scores": np.array([token.score for token in tokens], np.float32),
        "add_bos_token": not unigram,
        "add_eos_token": unigram,
        "add_space_prefix": model.add_space_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces or (False if unigram else None),
        "precompiled_charsmap": np.frombuffer(model.charsmap, np.uint8)
        if unigram and model.charsmap
        else None,
    }


def _from_json(
    tokenizer: Settings,
    settings: Settings,
    tokens: list[Piece],
    beyond: dict[int, str],
    *,
    merged: bool = False,
) -> dict[str, Any]:
    vocabulary = trained_vocabulary(tokenizer, merged=merged)
    _check_size(tokenizer.path, max(vocabulary.tokens, default=0) + 1, len(tokens))
    for id, piece in vocabulary.tokens.items():
        tokens[id] = piece
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise tokenizer.error("added_tokens", "a list of objects")
    _add(tokens, tokenizer, [(entry.get("id"), entry) for entry in entries], 0, beyond)
    keys: dict[str, Any] = dict(vocabulary.keys)
    if vocabulary.scored:
        _finish_scored(vocabulary, keys, tokens)
    ids = {piece.text: id for id, piece in enumerate(tokens)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        text = _special(settings, key)
        keys[f"{name}_token_id"] = None if text is None else ids.get(text)
        if name != "padding":
            place = 0 if name == "bos" else -1
            keys[f"add_{name}_token"] = text is not None and adds(tokenizer, text, place)
    return keys


def _special(settings: Settings, name: str) -> str | None:
    """The text of the special token of this name in ``tokenizer_config.json``, or None."""
    token = settings.get(f"{name}_token")
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _finish_scored(trained: Trained, keys: dict[str, Any], tokens: list[Piece]) -> None:
    """Adds the scores. Tokens keep the trained score, unknown and byte tokens their type."""
    for id, piece in trained.tokens.items():
        if tokens[id].text == piece.text:
            kept = piece.type if piece.type in (TokenType.UNKNOWN, TokenType.BYTE) else tokens[id].type
            tokens[id] = Piece(piece.text, piece.score, kept)
    _spell_user_defined(tokens)
    keys["scores"] = np.array([token.score for token in tokens], np.float32)


def _spell_user_defined(tokens: list[Piece]) -> None:
    """Spells user-defined tokens with plain spaces, because they match unchanged text, as in llama.cpp's
    files."""
    for id, token in enumerate(tokens):
        if token.type == TokenType.USER_DEFINED:
            tokens[id] = token._replace(text=token.text.replace(SPACE, " "))


def _two_files(checkpoint: Checkpoint, settings: Settings) -> Settings:
    """``vocab.json`` and ``merges.txt`` in the form of ``tokenizer.json``."""
    vocab, path = checkpoint.settings("vocab.json"), checkpoint.folder / "merges.txt"
    model_type = checkpoint.config.text("model_type", "")
    stated = settings.text("tokenizer_class", "").removesuffix("Fast")
    implied = next((kind for begin, kind in _OF_MODELS.items() if model_type.startswith(begin)), "")
    # transformers uses Qwen's class for Qwen's models and ignores tokenizer_config.json.
    kind = implied if model_type.startswith("qwen") else stated or implied
    if kind not in _TWO_FILES or not path.is_file():
        needed = f"vocab.json and merges.txt of {' or '.join(_TWO_FILES)} are needed, or a tokenizer.json"
        raise ConvertError(f"{checkpoint.folder}: {needed}; this is {shown(kind or 'of no tokenizer_class')}")
    if path.stat().st_size > MAX_JSON:
        raise ConvertError(f"{path} is larger than {MAX_JSON >> 20} MiB: too large for merges")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    names = {_special(settings, name) for name in ("bos", "eos", "unk", "pad")}
    specials = [(text, id) for text, id in vocab.values.items() if text in names]
    extra = checkpoint.settings("added_tokens.json").values.items()
    decoder = settings.section("added_tokens_decoder").values.items()
    listed = [{**entry, "id": int(id)} for id, entry in decoder if id.isdecimal() and isinstance(entry, dict)]
    if not (extra or listed) and kind != "GPT2Tokenizer":
        needed = "added_tokens.json, or a tokenizer_config.json with added_tokens_decoder"
        raise ConvertError(
            f"{checkpoint.folder}: {kind} has control tokens outside vocab.json: {needed} is needed"
        )
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in PRE_TOKENIZERS[_TWO_FILES[kind]]
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return Settings(
        vocab.path,
        {
            "model": {
                "type": "BPE",
                "vocab": vocab.values,
                "merges": [line for line in lines if line and not line.startswith("#version")],
            },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, last]},
            "added_tokens": [
                *({"id": id, "content": text, "special": True} for text, id in specials),
                *({"id": id, "content": text} for text, id in extra),
                *listed,
            ],
        },
    )


def _check_size(path: Path, trained: int, size: int) -> None:
    if trained > size:
        raise ConvertError(f"{path} has {trained} pieces, but config.json says vocab_size {size}")


def _add(
    tokens: list[Piece],
    source: Settings,
    entries: list[tuple[Any, Any]],
    trained: int,
    beyond: dict[int, str],
) -> None:
    """Puts tokens that were added after training into ``tokens``. The model's own tokens stay, but ordinary
    ones may become control or user-defined tokens: a user's text must never become a control token. Tokens
    whose ids the weights lack (Gemma 3 1B's for images) go to ``beyond``."""
    for id, entry in entries:
        known = entry if isinstance(entry, dict) else {}
        text = known.get("content")
        if not isinstance(text, str) or type(id) is not int or id < 0:
            needed = "a text and an id from 0 are needed"
            raise ConvertError(f"{source.path}: added token {shown(text)} with id {shown(id)}: {needed}")
        kind = TokenType.CONTROL if known.get("special") is True else TokenType.USER_DEFINED
        if id >= len(tokens):
            beyond[id] = text
        elif id < trained:
            if tokens[id].text == text and tokens[id].type in _ORDINARY:
                tokens[id] = tokens[id]._replace(type=kind)
        else:
            tokens[id] = Piece(text, _ADDED_SCORE, kind)
