"""BPE of characters, as Gemma 4 has it: the ids of the library that reads its tokenizer.json, the plain rule,
and what has no token."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import change_config, copy_checkpoint
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.tokenizer import tokenizer as model

TEXTS = [
    "I'll go there, won't you? 12 345 6789",
    "  def f(x):\n\t\treturn x+1\n\n",
    "字가か été ½ the  the",
] * 20
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
ROWS = 700
GEMMA4 = {"general.architecture": "gemma4"}


def trained() -> Tokenizer:
    """A small vocabulary in the form of Gemma's tokenizer.json, whose bytes have tokens."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    cut = Tokenizer(models.BPE())
    cut.normalizer = normalizers.Replace(" ", "\u2581")
    cut.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    cut.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    made = json.loads(cut.to_str())["model"]
    vocabulary = {name: id for id, name in enumerate([*names, *sorted(made["vocab"], key=made["vocab"].get)])}
    vocabulary.setdefault("\n\n", len(vocabulary))
    merges = [tuple(pair) for pair in made["merges"]] + [("\n", "\n")]
    bpe = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    whole = Tokenizer(bpe)
    whole.normalizer = normalizers.Replace(" ", "\u2581")
    whole.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    whole.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return whole


def metadata_of(tokenizer: Tokenizer, folder: Path, **changes: Any) -> dict[str, Any]:
    """Keys of the file that a checkpoint with this tokenizer gives."""
    checkpoint = copy_checkpoint(folder, "tiny-gemma4")
    (checkpoint / "tokenizer.model").unlink()
    text = json.loads(tokenizer.to_str()) | changes
    (checkpoint / "tokenizer.json").write_text(json.dumps(text))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": True}))
    change_config(checkpoint, vocab_size=ROWS, bos_token_id=2, eos_token_id=[1, 5], pad_token_id=0)
    return vocabulary_metadata(open_checkpoint(checkpoint), ROWS, [], GEMMA4)


@pytest.fixture(scope="module")
def theirs() -> Tokenizer:
    return trained()


@pytest.fixture(scope="module")
def metadata(theirs: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return metadata_of(theirs, tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def ours(metadata: dict[str, Any]) -> model.Tokenizer:
    return model.Tokenizer.from_metadata(metadata)


def test_keys(metadata: dict[str, Any], ours: model.Tokenizer) -> None:
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert "\n \n" in metadata["tokenizer.ggml.merges"]
    assert (ours.bos_id, ours.eos_id, ours.stop_ids, ours.add_bos) == (2, 1, {1, 5}, True)
    assert not ours.left_out(["anything \0 🦙"])


@given(
    st.text(st.one_of(st.sampled_from(" \nthe.x+1t"), st.characters(exclude_categories=["Cs"])), max_size=60)
)
@settings(max_examples=150, deadline=None)
def test_ids_are_those_of_the_library(theirs: Tokenizer, ours: model.Tokenizer, text: str) -> None:
    text = text.replace("\u2581", "")  # which comes back as a space
    ids = ours.encode(text, add_bos=False)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text


@pytest.mark.parametrize("text", [*TEXTS[:3], "the\n\n\n the 🦙the", "x" * 300])
def test_the_plain_rule(metadata: dict[str, Any], ours: model.Tokenizer, text: str) -> None:
    """The earliest merge first, the leftmost of equal ones; bytes where a character has no token."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {token: id for id, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    parts = list(text.replace(" ", "\u2581"))
    while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    expected: list[int] = []
    for part in parts:
        expected += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    assert ours.encode(text, add_bos=False) == expected


def test_special_tokens(ours: model.Tokenizer) -> None:
    text = "<|turn>the<turn|>"
    ids = ours.encode(text, parse_special=True)
    assert (ids[:2], ids[-1]) == ([2, 4], 5)
    assert not {4, 5} & {*ours.encode(text)}


def test_characters_without_tokens_and_bytes_are_left_out(metadata: dict[str, Any]) -> None:
    types = metadata["tokenizer.ggml.token_type"].copy()
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    llama = "🦙".encode()
    id = tokens.index(f"<0x{llama[-1]:02X}>")
    tokens[id], types[id] = "[nothing]", 5
    changed = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    lacking = model.Tokenizer.from_metadata(changed)
    assert lacking.left_out(["the 🦙 the"]) == "U+1F999"
    assert lacking.decode(lacking.encode("the🦙 the")) == "the the"


def test_what_readers_would_cut_is_refused(theirs: Tokenizer, tmp_path: Path) -> None:
    text = json.loads(theirs.to_str())
    text["model"]["vocab"]["\nt"] = len(text["model"]["vocab"])
    text["model"]["merges"].append(["\n", "t"])
    with pytest.raises(ConvertError, match="crosses the end of a line"):
        metadata_of(theirs, tmp_path / "a", model=text["model"])
    prefix = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, text["normalizer"]],
    }
    with pytest.raises(ConvertError, match="no space before a text"):
        metadata_of(theirs, tmp_path / "b", normalizer=prefix)


def test_a_file_without_merges_is_refused(metadata: dict[str, Any]) -> None:
    short = {key: value for key, value in metadata.items() if not key.endswith("merges")}
    with pytest.raises(model.TokenizerError, match=r"model gemma4 needs them"):
        model.Tokenizer.from_metadata(short)
