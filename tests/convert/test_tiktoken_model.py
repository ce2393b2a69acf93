"""tiktoken.model to GGUF: the ids that merging by ranks gives, special tokens, and files that are damaged."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import change_config, copy_checkpoint
from support.ranked_vocabulary import WORDS, ranks_of, trained
from tokenizers import Regex, pre_tokenizers

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.tokenizer.tokenizer import Tokenizer as Ours

#: As the publishers' class joins it.
PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
CUT = pre_tokenizers.Split(Regex(PATTERN), "isolated")


def checkpoint(folder: Path, tokens: list[bytes], **settings: Any) -> Path:
    copy = copy_checkpoint(folder, "tiny-kimi-linear")
    (copy / "tokenizer.model").unlink()
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (copy / "tiktoken.model").write_bytes(b"".join(lines))
    n = len(tokens)
    names = {n: "[BOS]", n + 1: "[EOS]", n + 2: "<|im_end|>"}
    own = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {str(id): {"content": text, "special": True} for id, text in names.items()},
        "chat_template": "{{ messages[0].content }}",
    }
    (copy / "tokenizer_config.json").write_text(json.dumps(own | settings))
    change_config(copy, bos_token_id=n, eos_token_id=n + 2, pad_token_id=None, vocab_size=n + 256)
    return copy


def converted(folder: Path) -> dict[str, Any]:
    opened = open_checkpoint(folder)
    return vocabulary_metadata(opened, opened.config.integer("vocab_size"))


def test_ids_are_those_of_merging_by_ranks(tmp_path: Path) -> None:
    tokens = trained(CUT)
    metadata = converted(checkpoint(tmp_path, tokens))
    assert metadata["tokenizer.ggml.pre"] == "kimi-k2"
    assert metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"
    ours, ranks, chance = (
        Ours.from_metadata(metadata),
        {each: i for i, each in enumerate(tokens)},
        random.Random(1),
    )
    assert max(map(len, tokens)) > 3
    for _ in range(100):
        text = "".join(chance.choices([*WORDS, "a", "go", "'", "0", "字"], k=chance.randrange(12)))
        assert ours.encode(text) == ranks_of(text, ranks, CUT)
        assert ours.decode(ours.encode(text)) == text


def test_special_tokens_have_names_or_are_reserved(tmp_path: Path) -> None:
    n = len(tokens := trained(CUT))
    metadata = converted(checkpoint(tmp_path, tokens))
    named = metadata["tokenizer.ggml.tokens"][n : n + 4]
    assert named == ["[BOS]", "[EOS]", "<|im_end|>", f"<|reserved_token_{n + 3}|>"]
    assert set(metadata["tokenizer.ggml.token_type"][n:].tolist()) == {3}
    ours = Ours.from_metadata(metadata)
    assert (ours.bos_id, ours.stop_ids, ours.vocab_size) == (n, {n + 1, n + 2}, n + 256)
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"YQ== 0", "line 281 is 'YQ== 0': a new token in base64 and the rank 280 are needed"),
        (b"YQ== 280", "line 281 is 'YQ== 280'"),  # an a, which is there
        (b"*** 280", "line 281 is"),
        (b"", "line 281 is ''"),
        (base64.b64encode(b"x" * 300) + b" 280", "line 281 is"),
    ],
)
def test_damaged_files(line: bytes, message: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, trained(CUT))
    with (folder / "tiktoken.model").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ConvertError, match=message) as caught:
        converted(folder)
    assert "\n" not in str(caught.value)


def test_classes_whose_words_are_not_known(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, trained(CUT), tokenizer_class="OtherTokenizer")
    with pytest.raises(ConvertError, match=r"is 'OtherTokenizer': with tiktoken\.model TikTokenTok"):
        converted(folder)
