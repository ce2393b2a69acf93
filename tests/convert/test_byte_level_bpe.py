"""tokenizer.json to GGUF: the same ids as the library that reads it, and files that GGUF cannot express."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import change_config, copy_checkpoint
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.tokenizer import tokenizer as model

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["I'll go there, won't you? 12 345 6789", "  def f(x):\n\t\treturn x+1\n\n", "字가か été ½ 🦙🦙"] * 20


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def spelling(use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


#: kind -> the pre_tokenizer that Hugging Face's files have
STYLES: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: spelling(True),
    "llama-bpe": lambda: pre_tokenizers.Sequence([split(LLAMA3), spelling()]),
    "qwen2": lambda: pre_tokenizers.Sequence([split(LLAMA3.replace("{1,3}", "")), spelling()]),
    "starcoder": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), spelling(True)]),
    "falcon": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation("contiguous"), spelling(True), split("[0-9][0-9][0-9]"),
    ]),
    "bloom": lambda: pre_tokenizers.Sequence([split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), spelling()]),
}  # fmt: skip


def checkpoint(folder: Path, style: str, **changes: Any) -> tuple[Path, Tokenizer]:
    """A checkpoint whose vocabulary was trained here in that style; ``changes`` go to config.json."""
    copy = copy_checkpoint(folder)
    (copy / "tokenizer.model").unlink()
    theirs = Tokenizer(models.BPE(ignore_merges=style == "llama-bpe"))
    theirs.pre_tokenizer, theirs.decoder = STYLES[style](), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    theirs.add_special_tokens(["<|begin|>", AddedToken("<|im_end|>", special=True)])
    theirs.add_tokens(["<think>"])
    begin = theirs.token_to_id("<|begin|>")
    theirs.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
        ]
    )
    theirs.save(str(copy / "tokenizer.json"))
    size = theirs.get_vocab_size() + 5
    change_config(copy, **{"bos_token_id": None, "eos_token_id": None, "vocab_size": size} | changes)
    (copy / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}})
    )
    return copy, theirs


def converted(folder: Path) -> dict[str, Any]:
    opened = open_checkpoint(folder)
    return vocabulary_metadata(opened, opened.config.integer("vocab_size"))


@pytest.mark.parametrize("style", STYLES)
def test_the_same_ids_as_the_library(style: str, tmp_path: Path) -> None:
    folder, theirs = checkpoint(tmp_path, style)
    metadata = converted(folder)
    assert metadata["tokenizer.ggml.pre"] == style
    ours = model.Tokenizer.from_metadata(metadata)
    assert ours.vocab_size == theirs.get_vocab_size() + 5
    assert (ours.bos_id, ours.stop_ids) == (
        theirs.token_to_id("<|begin|>"),
        {theirs.token_to_id("<|im_end|>")},
    )

    words = st.lists(
        st.sampled_from(["I'll", " ", "12345", "\n", "été", "字", "<think>", "🦙", "x+1", "\t", "é"])
    )

    @given(words.map("".join) | st.text(max_size=30))
    @settings(max_examples=75)
    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text

    check()


def test_what_is_known_of_the_tokens(tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, "gpt-2", eos_token_id=7, pad_token_id=9)
    metadata = converted(folder)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    kinds = dict(zip(tokens, types, strict=True))
    assert (kinds["<|begin|>"], kinds["<|im_end|>"], kinds["<think>"], kinds["a"]) == (3, 3, 4, 1)
    assert tokens[-5:] == [f"[PAD{len(tokens) - n}]" for n in (5, 4, 3, 2, 1)] and types[-5:] == [5] * 5
    assert metadata["tokenizer.ggml.eos_token_id"] == 7 and metadata["tokenizer.ggml.padding_token_id"] == 9
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    assert "tokenizer.ggml.scores" not in metadata


def test_the_sentencepiece_model_comes_first(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    assert converted(folder)["tokenizer.ggml.model"] == "llama"


def change(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values[name]
    values[last] = value


LLAMA_STEPS = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
SPELLING = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
#: what is changed in a good file, to what, and what the message names
BROKEN: list[tuple[str, Any, str]] = [
    ("model.type", "Unigram", "unk_id is missing: the id of the unknown token"),
    ("model.byte_fallback", True, "pre_tokenizer is {'type': 'ByteLevel'"),
    ("model.end_of_word_suffix", "</w>", "end_of_word_suffix is '</w>': null is needed"),
    ("normalizer", {"type": "Lowercase"}, "normalizer is {'type': 'Lowercase'}: null or NFC"),
    ("model.vocab", {"a": 0, "b": 0}, "token 'b' has id 0: a unique id is needed"),
    ("model.vocab", {"a": "0"}, "token 'a' has id '0'"),
    ("model.vocab", [], "vocab is []: an object"),
    ("model.vocab", {"a": 5000}, "has 5001 pieces, but config.json says"),
    ("model.merges", None, "merges is missing: a list of pairs"),
    ("model.merges", ["ab"], "the merge 'ab' is not a pair"),
    ("model.merges", [["a", "b", "c"]], "is not a pair"),
    ("model.merges", [7], "the merge 7 is not a pair"),
    ("added_tokens", {"id": 1}, "a list of objects"),
    ("added_tokens", [{"id": -1, "content": "x"}], "added token 'x' with id -1"),
    ("added_tokens", [{"id": 1, "content": None}], "added token None with id 1"),
    ("pre_tokenizer", {"type": "Metaspace"}, "it is 'Metaspace'; supported are gpt-2, "),
    ("pre_tokenizer", None, "it is 'None'; supported are gpt-2, "),
    ("pre_tokenizer", SPELLING, "it is 'ByteLevel'; supported"),
    ("pre_tokenizer", SPELLING | {"add_prefix_space": True}, "it is 'ByteLevel with more'; supported"),
    ("pre_tokenizer", LLAMA_STEPS, "no name for its pre_tokenizer"),
    ("pre_tokenizer", LLAMA_STEPS | {"behavior": "MergedWithNext"}, "it is 'Split with more'; supported"),
    ("model.ignore_merges", True, "it is gpt-2, phi-2, .*, but with ignore_merges True"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_a_file_that_gguf_cannot_express(path: str, value: Any, message: str, tmp_path: Path) -> None:
    folder, _ = checkpoint(tmp_path, "gpt-2")
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(values, path, value)
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConvertError) as caught:
        converted(folder)
    first, _, rest = message.partition(".*")
    assert first in str(caught.value) and rest in str(caught.value) and "\n" not in str(caught.value)
