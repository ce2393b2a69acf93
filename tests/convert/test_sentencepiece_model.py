"""The SentencePiece model reader, against the sentencepiece package and against broken files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import TINY_TOKENIZER

from hotcold.convert import ConvertError
from hotcold.convert.sentencepiece_model import read_sentencepiece_model
from hotcold.tokenizer.vocabulary import TokenType

DATA = Path(__file__).parent.parent / "data"


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value & (1 << 64) - 1)


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def piece(text: bytes, score: float = 0.0, kind: int = 1) -> bytes:
    return message(1, message(1, text) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))


ABC = piece(b"<unk>", 0, 2) + piece(b"a", -1.5) + piece(b"b", -2)


def model_file(folder: Path, data: bytes) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(data)
    return path


def assert_equals_the_package(path: Path) -> None:
    ours, theirs = read_sentencepiece_model(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert len(ours.pieces) == theirs.get_piece_size()
    for id, ours_piece in enumerate(ours.pieces):
        assert ours_piece.text == theirs.id_to_piece(id)
        assert ours_piece.score == theirs.get_score(id)
        kinds = {
            TokenType.UNKNOWN: theirs.is_unknown(id),
            TokenType.CONTROL: theirs.is_control(id),
            TokenType.BYTE: theirs.is_byte(id),
            TokenType.UNUSED: theirs.is_unused(id),
        }
        assert [kind for kind, holds in kinds.items() if holds] == [
            kind for kind in kinds if ours_piece.type is kind
        ]
    ids = [-1 if id is None else id for id in ours.ids.values()]
    assert ids == [theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id()]


def test_tiny_model() -> None:
    assert_equals_the_package(TINY_TOKENIZER)


def test_the_built_in_models_vocabulary() -> None:
    assert_equals_a_bpe_model(DATA / "fable-7m/tokenizer.model")


def test_llamas_vocabulary(test_data: Path) -> None:
    assert_equals_a_bpe_model(test_data / "tokenizers" / "llama2_tokenizer.model")


def assert_equals_a_bpe_model(path: Path) -> None:
    assert_equals_the_package(path)
    model = read_sentencepiece_model(path)
    assert model.algorithm == "BPE"
    assert model.add_space_prefix and not model.remove_extra_whitespaces


def test_settings_and_defaults(tmp_path: Path) -> None:
    model = read_sentencepiece_model(model_file(tmp_path, ABC))
    assert model.algorithm == "UNIGRAM"
    assert model.ids == {"unknown": 0, "bos": 1, "eos": 2, "padding": None}
    assert model.add_space_prefix and model.remove_extra_whitespaces
    trainer = number(3, 2) + number(40, 0) + number(41, -1) + number(42, 2) + number(43, 1)
    normaliser = number(3, 0) + number(4, 0)
    model = read_sentencepiece_model(model_file(tmp_path, ABC + message(2, trainer) + message(3, normaliser)))
    assert model.algorithm == "BPE"
    assert model.ids == {"unknown": 0, "bos": None, "eos": 2, "padding": 1}
    assert not model.add_space_prefix and not model.remove_extra_whitespaces


def test_unknown_fields_are_skipped(tmp_path: Path) -> None:
    extra = (
        number(200, 5)
        + message(201, b"abc")
        + varint(202 << 3 | 1)
        + bytes(8)
        + varint(203 << 3 | 5)
        + bytes(4)
    )
    assert len(read_sentencepiece_model(model_file(tmp_path, extra + ABC)).pieces) == 3


def test_what_the_schema_does_not_know_is_passed_over(tmp_path: Path) -> None:
    odd = piece(b"c", 0, 0) + piece(b"d", 0, 1 << 40) + message(1, message(1, b"e") + message(3, b"x"))
    path = model_file(tmp_path, ABC + odd + message(2, number(3, 9)) + number(1, 7))
    assert [each.type for each in read_sentencepiece_model(path).pieces[3:]] == [TokenType.NORMAL] * 3
    assert read_sentencepiece_model(path).algorithm == "UNIGRAM"
    assert sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size() == 6


CORRUPT = "not a usable SentencePiece model: Error parsing message"
BAD_MODELS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no pieces"),
    "text": (b"This is a text, not a model.", "not a usable SentencePiece model"),
    "a piece without text": (ABC + piece(b""), "piece 3 has 0 bytes"),
    "a piece of 5000 bytes": (ABC + piece(b"x" * 5000), "piece 3 has 5000 bytes"),
    "not UTF-8": (ABC + piece(b"\xff"), "piece 3 is not UTF-8"),
    "score NaN": (ABC + piece(b"c", float("nan")), "piece 3 has the score nan"),
    "score infinite": (ABC + piece(b"c", float("inf")), "piece 3 has the score inf"),
    "bos beyond the pieces": (ABC + message(2, number(41, 3)), "bos_id is 3: there are 3 pieces"),
    "length of 2^63": (ABC + varint(1 << 3 | 2) + varint(1 << 63), CORRUPT),
    "endless number": (ABC + b"\x08" + b"\xff" * 40, CORRUPT),
    "cut number": (ABC + b"\x08\xff", CORRUPT),
    "group": (ABC + b"\x0b", CORRUPT),
    "cut float": (ABC + message(1, message(1, b"c") + b"\x15\0\0"), CORRUPT),
    "text as a number": (ABC + message(1, number(1, 7)), "piece 3 has 0 bytes"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    data, text = BAD_MODELS[case]
    with pytest.raises(ConvertError) as caught:
        read_sentencepiece_model(model_file(tmp_path, data))
    assert text in str(caught.value) and "tokenizer.model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_model_never_gives_a_wrong_piece(tmp_path: Path) -> None:
    """Protobuf has no length of the whole: a cut between two pieces is a valid, shorter model."""
    data, whole = TINY_TOKENIZER.read_bytes(), read_sentencepiece_model(TINY_TOKENIZER).pieces
    refused = 0
    for length in range(600):
        try:
            pieces = read_sentencepiece_model(model_file(tmp_path, data[:length])).pieces
        except ConvertError:
            refused += 1
        else:
            assert pieces == whole[: len(pieces)]
    assert refused > 500


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=5))
def test_mutated_models_are_read_or_refused(tmp_path_factory: Any, changes: list[tuple[int, int]]) -> None:
    data = bytearray(TINY_TOKENIZER.read_bytes())
    for position, value in changes:
        data[position] = value
    try:
        model = read_sentencepiece_model(model_file(tmp_path_factory.getbasetemp(), bytes(data)))
    except ConvertError:
        return
    assert len(model.pieces) <= 300


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = model_file(tmp_path, b"")
    with open(path, "wb") as file:
        file.truncate((64 << 20) + 1)  # sparse: takes no disk
    with pytest.raises(ConvertError, match="larger than 64 MiB"):
        read_sentencepiece_model(path)
