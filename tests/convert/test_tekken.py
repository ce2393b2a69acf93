"""tekken.json to GGUF: the ids that merging by ranks gives, special tokens, and files that are damaged."""

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

#: As published files have it.
PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
CUT = pre_tokenizers.Split(Regex(PATTERN), "isolated")
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "<pad>"]
FIRST = 8  # id of the first trained token
UNMADE = b"qzxj"  # a token that no merge of two others makes


def file_of(tokens: list[bytes]) -> dict[str, Any]:
    """The file has more tokens than the model."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*tokens, b"more", b"than that"])
    ]
    special = [
        {"rank": i, "token_str": text, "is_control": text != "[INST]"} for i, text in enumerate(SPECIAL)
    ]
    size = FIRST + len(tokens)
    config = {"pattern": PATTERN, "default_vocab_size": size, "default_num_special_tokens": FIRST}
    return {"config": config, "vocab": vocab, "special_tokens": special}


def checkpoint(folder: Path, file: dict[str, Any]) -> Path:
    """Without tokenizer_config.json, as Mistral Small 3.2 was published."""
    copy = copy_checkpoint(folder, "tiny-mistral")
    (copy / "tokenizer.model").unlink()
    (copy / "tekken.json").write_text(json.dumps(file))
    change_config(copy, bos_token_id=..., eos_token_id=..., vocab_size=300)
    return copy


def converted(folder: Path) -> dict[str, Any]:
    opened = open_checkpoint(folder)
    return vocabulary_metadata(opened, opened.config.integer("vocab_size"))


def test_ids_are_those_of_merging_by_ranks(tmp_path: Path) -> None:
    tokens = [*trained(CUT), UNMADE]
    metadata = converted(checkpoint(tmp_path, file_of(tokens)))
    assert metadata["tokenizer.ggml.pre"] == "tekken"
    ours, chance = Ours.from_metadata(metadata), random.Random(1)
    ranks = {each: i for i, each in enumerate(tokens)}
    assert ours.encode(UNMADE.decode(), add_bos=False) == [FIRST + len(tokens) - 1]
    for _ in range(100):
        text = "".join(chance.choices([*WORDS, "a", "go", "'", "0", "字"], k=chance.randrange(12)))
        assert ours.encode(text) == [1, *(FIRST + rank for rank in ranks_of(text, ranks, CUT))]
        assert ours.decode(ours.encode(text)[1:]) == text


def test_special_tokens_come_first(tmp_path: Path) -> None:
    tokens = [*trained(CUT), UNMADE]
    metadata = converted(checkpoint(tmp_path, file_of(tokens)))
    assert metadata["tokenizer.ggml.tokens"][:FIRST] == [
        *SPECIAL,
        "<SPECIAL_5>",
        "<SPECIAL_6>",
        "<SPECIAL_7>",
    ]
    assert metadata["tokenizer.ggml.tokens"][FIRST + len(tokens)].startswith("[PAD")
    assert metadata["tokenizer.ggml.token_type"][:FIRST].tolist() == [3, 3, 3, 4, 3, 3, 3, 3]
    ours = Ours.from_metadata(metadata)
    assert (ours.bos_id, ours.stop_ids) == (1, {2})
    assert metadata["tokenizer.ggml.padding_token_id"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"special_tokens": None}, r"special_tokens is missing: a list .*tokenizer\.json"),
        ({"special_tokens": [{"rank": 8, "token_str": "x"}]}, "a rank below 8 and a text are needed"),
        ({"special_tokens": ["x"]}, "special token 'x': a rank below 8"),
        ({"vocab": [{"rank": 0, "token_bytes": "AA=="}]}, "vocab needs a list of"),
        (
            {"vocab": [{"rank": 0, "token_bytes": "AA=="}] * 300},
            "token 1 of vocab is .* the rank 1 are needed",
        ),
        ({"vocab": [{"rank": 0, "token_bytes": 5}] * 300}, "token 0 of vocab is"),
        ({"vocab": ["x"] * 300}, "token 0 of vocab is"),
        ({"config": {"default_vocab_size": 301}}, "default_vocab_size is 301: more than 8 and at most voc"),
        ({"config": {"default_num_special_tokens": 2**31 - 1}}, "default_vocab_size is .*: more than 2147"),
        ({"config": {"pattern": "x"}}, "GGUF has no name for its pre_tokenizer"),
        ({"config": 3}, "config is 3: an object"),
    ],
)
def test_damaged_files(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = file_of([*trained(CUT), UNMADE])
    if isinstance(config := changes.get("config"), dict):
        changes = {"config": file["config"] | config}
    with pytest.raises(ConvertError, match=message) as caught:
        converted(checkpoint(tmp_path, file | changes))
    assert "\n" not in str(caught.value)
