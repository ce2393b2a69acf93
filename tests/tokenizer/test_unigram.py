"""The unigram model against SentencePiece itself, with its normalisation; tables that are broken."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, unigram

from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError


def trained(**options: Any) -> tuple[Any, bytes]:
    """A model of its own, and the table that normalises text for it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model, draw = io.BytesIO(), random.Random(1)
    sentences = ["".join(draw.choices("ab  cdé字ﬁＡ１", k=30)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type="unigram", num_threads=1,
        minloglevel=2, hard_vocab_limit=False, **options,
    )  # fmt: skip
    data = model.getvalue()
    schema = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    table = schema.ModelProto.FromString(data).normalizer_spec.precompiled_charsmap
    return sentencepiece.SentencePieceProcessor(model_proto=data), table


CASES: list[dict[str, Any]] = [
    {"vocab_size": 120, "normalization_rule_name": "nmt_nfkc"},
    {"vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    {"vocab_size": 120, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    {"vocab_size": 120, "normalization_rule_name": "nfkc", "add_dummy_prefix": False},
]


@pytest.mark.parametrize("options", CASES)
def test_agrees_with_sentencepiece(options: dict[str, Any]) -> None:
    processor, table = trained(**options)
    size = processor.get_piece_size()
    types = [
        UNKNOWN if processor.is_unknown(id) else CONTROL if processor.is_control(id)
        else BYTE if processor.is_byte(id) else UNUSED if processor.is_unused(id) else NORMAL
        for id in range(size)
    ]  # fmt: skip
    found = {
        "model": "t5", "tokens": [processor.id_to_piece(id) for id in range(size)],
        "scores": np.array([processor.get_score(id) for id in range(size)], np.float32),
        "token_type": np.array(types, np.int32),
        "eos_token_id": processor.eos_id(), "unknown_token_id": processor.unk_id(),
        "add_space_prefix": options.get("add_dummy_prefix", True),
        "remove_extra_whitespaces": options.get("remove_extra_whitespaces", True),
    } | ({"precompiled_charsmap": np.frombuffer(table, np.uint8)} if table else {})  # fmt: skip
    tokenizer = Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in found.items()})

    @given(
        st.text("ab  cdé字ﬁＡ１\u3000\t\n\u00a0\u0301ÀßX", max_size=40)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    )
    @settings(max_examples=300)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == [*processor.encode(text), processor.eos_id()]
        stream = tokenizer.stream_decoder()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)

    check()
    assert tokenizer.decode(tokenizer.encode("ab cd")) == "ab cd"


def test_the_best_cut_by_hand() -> None:
    tokenizer = Tokenizer.from_metadata(unigram())
    pieces = [tokenizer.piece(id).decode() for id in tokenizer.encode("  abab  a?? ")]
    # " a" (-3.5) + "ba" (-6) + "b" (-4.5) is worse than " " (-3) + "abab" (-9).
    assert pieces == [" ", "abab", " a", "<unk>", "</s>"]
    with_bytes = Tokenizer.from_metadata(unigram(with_bytes=True))
    assert with_bytes.decode(with_bytes.encode("a é<0x41>")) == "a é<0x41>"


def table(units: list[int], strings: bytes) -> list[int]:
    trie = struct.pack(f"<{len(units)}I", *units)
    return list(struct.pack("<I", len(trie)) + trie + strings)


def test_a_table_that_points_nowhere_replaces_nothing() -> None:
    plain = Tokenizer.from_metadata(unigram()).encode("abab")
    for units in ([0x7FFFFFFF], [0] * 200, [1 << 10] + [0x61 | 1 << 8 | 0x1FF << 10] * 300):
        tokenizer = Tokenizer.from_metadata(unigram(precompiled_charsmap=table(units, b"")))
        assert tokenizer.encode("abab") == plain


@pytest.mark.parametrize("broken", [[1], [5, 0, 0, 0, 1], [8, 0, 0, 0, 1, 2, 3, 4], [3, 0, 0, 0, 1, 2, 3]])
def test_a_table_that_is_cut_off(broken: list[int]) -> None:
    with pytest.raises(TokenizerError, match=r"precompiled_charsmap has \d+ bytes, its trie \d+"):
        Tokenizer.from_metadata(unigram(precompiled_charsmap=broken))


def test_an_unknown_token_is_needed() -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.ggml\.unknown_token_id"):
        Tokenizer.from_metadata(unigram(unknown_token_id=None, token_type=[1] * 10))
