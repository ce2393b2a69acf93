"""tokenizer.json of SentencePiece's kinds, and GPT-2's two files: the ids of the library that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import change_config, copy_checkpoint
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.tokenizer import tokenizer as model
from hotcold.tokenizer.bpe import PRE_TOKENIZERS
from tests.convert.test_byte_level_bpe import TEXTS

SPACE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
WORDS = st.lists(
    st.sampled_from(["I'll", " ", "  ", "12345", "\n", "été", "字", "<think>", "🦙", "go there"])
)

#: How the files of Llama 2, Gemma and Mistral make tokens of spaces.
STYLES: dict[str, dict[str, Any]] = {
    "llama": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE]},
        "pre_tokenizer": None,
    },
    "gemma": {
        "normalizer": REPLACE,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
    },
    "mistral": {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False,
        },
    },
}  # fmt: skip


def trained() -> list[str]:
    """Tokens of several characters, in the order in which they were made."""
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    theirs.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = theirs.get_vocab()
    return sorted(vocab, key=lambda text: vocab[text])


def with_fallback(style: str) -> dict[str, Any]:
    """As transformers makes it of a SentencePiece model: all merges of a token, token by token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained()]
    vocab = {text: id for id, text in enumerate(dict.fromkeys(pieces))}
    merges = [
        [text[:at], text[at:]]
        for text in vocab
        if not text.startswith("<")
        for at in range(1, len(text))
        if text[:at] in vocab and text[at:] in vocab
    ]
    added = [{"id": id, "content": text, "special": True} for text, id in vocab.items() if id < 3]
    added.append({"id": len(vocab), "content": "<think>", "special": False})
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [entry | rest for entry in added],
        "model": {
            "type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "fuse_unk": True,
            "unk_token": "<unk>",
        },
        **STYLES[style],
    }  # fmt: skip


def folder_of(folder: Path, size: int, files: dict[str, str]) -> Path:
    copy = copy_checkpoint(folder)
    (copy / "tokenizer.model").unlink()
    change_config(copy, vocab_size=size, bos_token_id=None, eos_token_id=None)
    for name, text in files.items():
        (copy / name).write_text(text, encoding="utf-8")
    return copy


def converted(folder: Path) -> dict[str, Any]:
    opened = open_checkpoint(folder)
    return vocabulary_metadata(opened, opened.config.integer("vocab_size"))


@pytest.mark.parametrize("style", STYLES)
def test_bpe_that_falls_back_on_bytes(style: str, tmp_path: Path) -> None:
    values = with_fallback(style)
    theirs = Tokenizer.from_str(json.dumps(values))
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    files = {"tokenizer.json": json.dumps(values), "tokenizer_config.json": config}
    metadata = converted(folder_of(tmp_path, theirs.get_vocab_size(), files))
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is (style != "gemma")
    assert metadata["tokenizer.ggml.token_type"][[0, 1, 3, 258, -1]].tolist() == [2, 3, 6, 6, 4]
    ours = model.Tokenizer.from_metadata(metadata)

    @given(WORDS.map("".join) | st.text(max_size=20))
    @settings(max_examples=75)
    def check(text: str) -> None:
        # The library makes other spaces than SentencePiece before a text, or after an added token.
        if text and "<think>" not in text and not (text.startswith(" ") and style == "mistral"):
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    check()


def added(style: str, special: bool, normalized: bool) -> dict[str, Any]:
    """With further tokens, of each flag one."""
    values = with_fallback(style)
    size = len(values["model"]["vocab"])
    for i, flag in enumerate(("lstrip", "rstrip", "single_word", "none")):
        flags = {name: name == flag for name in ("lstrip", "rstrip", "single_word")}
        entry = {"id": size + 1 + i, "content": f"x{flag}x", "special": special, "normalized": normalized}
        values["added_tokens"].append(entry | flags)
    return values


@pytest.mark.parametrize(("special", "normalized"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_flags_of_added_tokens(style: str, special: bool, normalized: bool, tmp_path: Path) -> None:
    values = added(style, special, normalized)
    theirs = Tokenizer.from_str(json.dumps(values))
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    files = {"tokenizer.json": json.dumps(values), "tokenizer_config.json": config}
    metadata = converted(folder_of(tmp_path, theirs.get_vocab_size(), files))
    own = {key.removeprefix("hotcold.tokenizer.") for key in metadata if key.startswith("hotcold.")}
    assert own == {"lstrip", "rstrip", "single_word"} | ({"normalized"} if normalized else set())
    ours = model.Tokenizer.from_metadata(metadata)
    pieces = ["go", " ", "  ", "\n", "\t ", "x", "1", "-", "xlstripx", "xrstripx", "xsingle_wordx", "xnonex"]

    @given(st.lists(st.sampled_from(pieces), max_size=12).map("".join))
    @settings(max_examples=75)
    def check(text: str) -> None:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == ids, repr(text)

    check()


def test_a_unigram_model(tmp_path: Path) -> None:
    theirs = Tokenizer(models.Unigram())
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    theirs.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    theirs.train_from_iterator(TEXTS, trainer)
    files = {"tokenizer.json": theirs.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "</s>"})}
    metadata = converted(folder_of(tmp_path, theirs.get_vocab_size(), files))
    assert metadata["tokenizer.ggml.model"] == "t5" and metadata["tokenizer.ggml.unknown_token_id"] == 0
    ours = model.Tokenizer.from_metadata(metadata)
    for text in [TEXTS[0], TEXTS[2], "won't you go", "12 12 12", "def f"]:
        assert ours.encode(text, add_bos=False) == theirs.encode(text, add_special_tokens=False).ids


def test_two_files_of_gpt2(tmp_path: Path) -> None:
    """As OPT has them: BOS is the token that also ends a text, and the merges are a file of their own."""
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "<pad>", "</s>"],
        show_progress=False,
    )
    theirs.train_from_iterator(TEXTS, trainer)
    (tmp_path / "saved").mkdir()
    theirs.model.save(str(tmp_path / "saved"))
    files = {name: (tmp_path / "saved" / name).read_text("utf-8") for name in ("vocab.json", "merges.txt")}
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": {"content": "</s>"}, "eos_token": "</s>",
              "pad_token": "<pad>", "add_bos_token": True}  # fmt: skip
    files["tokenizer_config.json"] = json.dumps(config)
    folder = folder_of(tmp_path, theirs.get_vocab_size(), files)
    metadata = converted(folder)
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    ours = model.Tokenizer.from_metadata(metadata)
    for text in TEXTS[:3]:
        assert ours.encode(text) == [2, *theirs.encode(text).ids]
    assert ours.encode("</s>", parse_special=True) == [2, 2] and ours.stop_ids == {2}
    (folder / "merges.txt").unlink()
    with pytest.raises(ConvertError, match=r"vocab\.json and merges\.txt of GPT2Tokenizer or"):
        converted(folder)


@pytest.mark.parametrize("stated", [None, "GPT2Tokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_two_files_of_qwen(stated: str | None, model_type: str, tmp_path: Path) -> None:
    """Digits are cut one by one, as Qwen's class does, whatever tokenizer_config.json says of the class."""
    theirs = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["qwen2"][0]), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([cut, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([*TEXTS, "2024 12345 2024"], trainer)
    (tmp_path / "saved").mkdir()
    theirs.model.save(str(tmp_path / "saved"))
    files = {name: (tmp_path / "saved" / name).read_text("utf-8") for name in ("vocab.json", "merges.txt")}
    size = theirs.get_vocab_size()
    entry = {"content": "<|im_end|>", "special": True}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {str(size): entry}}
    files["tokenizer_config.json"] = json.dumps(config | ({"tokenizer_class": stated} if stated else {}))
    folder = folder_of(tmp_path, size + 1, files)
    change_config(folder, model_type=model_type)
    metadata = converted(folder)
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    ours = model.Tokenizer.from_metadata(metadata)
    for text in (*TEXTS[:3], "in 2024: 12345"):
        assert ours.encode(text, add_bos=False) == theirs.encode(text).ids
    assert ours.stop_ids == {size}
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConvertError, match="Qwen2Tokenizer has control tokens outside vocab"):
        converted(folder)


def test_two_files_of_an_unknown_tokenizer(tmp_path: Path) -> None:
    files = {"vocab.json": '{"a": 0}', "merges.txt": "", "tokenizer_config.json": "{}"}
    folder = folder_of(tmp_path, 1, files)
    with pytest.raises(ConvertError, match=r"are needed, .*; this is .of no tokenizer_class"):
        converted(folder)


def test_special_tokens_of_a_sentencepiece_model_are_never_text(tmp_path: Path) -> None:
    """Gemma's turns are user-defined pieces of its model, and special in tokenizer_config.json."""
    folder = copy_checkpoint(tmp_path)
    decoder = {"260": {"content": "e", "special": True}, "261": {"content": "other", "special": True}}
    decoder["288"] = {"content": SPACE * 2, "special": False}  # matches a text as it is
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    change_config(folder, vocab_size=289)
    metadata = converted(folder)
    assert metadata["tokenizer.ggml.tokens"][260] == "e" and metadata["tokenizer.ggml.tokens"][288] == "  "
    assert metadata["tokenizer.ggml.token_type"][259:263].tolist() == [1, 3, 1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "null, or steps that make '\\u2581' of spaces is needed"),
        ({"normalizer": None}, "one that makes '\\u2581' of spaces is needed"),
        (
            {"pre_tokenizer": {"type": "Whitespace"}},
            "pre_tokenizer is {'type': 'Whitespace'}: null or Metaspace",
        ),
        ({"model": {"type": "WordPiece"}}, "is 'WordPiece': BPE, Unigram or tokenizer.model is needed"),
        (
            {"model": {"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": 1}},
            "unk_id is 1: the id of the unknown",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["a", "b"]], "unk_id": 0}},
            "token 0 is ['a', 'b']: a text and",
        ),
    ],
)
def test_what_gguf_cannot_express(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = with_fallback("gemma") | change
    folder = folder_of(tmp_path, 700, {"tokenizer.json": json.dumps(values)})
    with pytest.raises(ConvertError) as caught:
        converted(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_added_tokens_that_the_weights_lack(tmp_path: Path) -> None:
    values = with_fallback("gemma")
    size = len(values["model"]["vocab"])  # what was added last is the first beyond
    folder = folder_of(tmp_path, size, {"tokenizer.json": json.dumps(values)})
    notes: list[str] = []
    found = vocabulary_metadata(open_checkpoint(folder), size, notes)
    assert len(found["tokenizer.ggml.tokens"]) == size and "<think>" not in found["tokenizer.ggml.tokens"]
    assert notes == [
        f"an added token is left out, since the weights have {size} tokens: '<think>' with id {size}"
    ]


def test_the_table_of_a_unigram_model(tmp_path: Path) -> None:
    values = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0], ["a", -1.5]], "unk_id": 0},
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never"},
    }
    folder = folder_of(tmp_path, 3, {"tokenizer.json": json.dumps(values)})
    metadata = converted(folder)
    np.testing.assert_array_equal(metadata["tokenizer.ggml.precompiled_charsmap"], np.zeros(4, np.uint8))
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "*"}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ConvertError, match="a table in base64"):
        converted(folder)
