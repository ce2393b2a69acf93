"""``hotcold tokenize``: what it prints, and what it says about input that it cannot use."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.vocabularies import bpe

from hotcold.commands import cli
from hotcold.commands.tokenize import escaped
from hotcold.formats.gguf import write_gguf

Say = Callable[[bytes], None]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A file with a vocabulary, no tensors, and an unknown architecture."""
    path = tmp_path / "vocabulary.gguf"
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581ab",
        "a",
        "ab",
    ]
    metadata = {
        "general.architecture": "abacus",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(id) for id in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_gguf(path, metadata, {})
    return path


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Puts bytes on standard input."""
    return lambda data: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def ids_and_pieces(capsys: pytest.CaptureFixture[str]) -> tuple[list[int], list[str | list[int]]]:
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report["ids"], report["pieces"]


def test_a_line_for_each_token(vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokenize", "-m", str(vocabulary), "-p", 'ab\n"é\x1b']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        '  1  "<s>"',
        '260  " ab"',
        ' 13  "\\n"',
        ' 37  "\\""',
        '198  "\\xc3"',
        '172  "\\xa9"',
        ' 30  "\\u001b"',
    ]


def test_json(vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokenize", "-m", str(vocabulary), "-p", "abé", "--json"]) == 0
    assert ids_and_pieces(capsys) == ([1, 260, 198, 172], ["<s>", " ab", [0xC3], [0xA9]])
    assert cli.main(["tokenize", "-m", str(vocabulary), "-p", "", "--json", "--no-bos"]) == 0
    assert ids_and_pieces(capsys) == ([], [])


def test_standard_input_to_its_last_byte(
    vocabulary: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["-p", "-"]):
        say(b"ab\0\n")
        assert cli.main(["tokenize", "-m", str(vocabulary), "--no-bos", "--json", *arguments]) == 0
        assert ids_and_pieces(capsys) == ([260, 3, 13], [" ab", "\0", "\n"])


def test_control_tokens_only_on_request(vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tokenize", "-m", str(vocabulary), "--no-bos", "--json", "-p", "ab</s>"]
    assert cli.main(arguments) == 0
    assert 2 not in ids_and_pieces(capsys)[0]
    assert cli.main([*arguments, "--special"]) == 0
    assert ids_and_pieces(capsys) == ([260, 2], [" ab", "</s>"])


def test_the_built_in_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokenize", "-p", "Once upon a time", "--json"]) == 0
    ids, pieces = ids_and_pieces(capsys)
    assert ids[0] == 1 and "".join(map(str, pieces[1:])) == " Once upon a time"


def test_pieces_of_a_byte_level_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, {"general.architecture": "abacus"} | bpe("llama-bpe", "ab Ġab"), {})
    assert cli.main(["tokenize", "-m", str(path), "-p", "ab ab é"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ['256  "<|end|>"', '257  "ab"', '259  " ab"', ' 32  " "', '195  "\\xc3"', '169  "\\xa9"']


def test_what_has_no_token_is_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, {"general.architecture": "abacus"} | bpe("gpt-2", "ab", absent=b"\x04\x06"), {})
    assert cli.main(["tokenize", "-m", str(path), "-p", "ab\x06a\x04b"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ['255  "ab"', ' 95  "a"', ' 96  "b"']
    assert (
        captured.err
        == "note: the model's vocabulary cannot spell 0x04, 0x06 of the text, which are left out\n"
    )


def test_mistakes_are_one_line_and_exit_code_2(
    vocabulary: Path, tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, bare = tmp_path / "empty.gguf", tmp_path / "bare.gguf"
    empty.write_bytes(b"")
    write_gguf(bare, {"general.architecture": "llama"}, {})
    mistakes = [
        (["-m", str(tmp_path / "none.gguf")], "none.gguf"),
        (["-m", str(tmp_path)], "regular file"),
        (["-m", str(empty)], "empty.gguf"),
        (["-m", str(bare)], "bare.gguf: the file has no tokenizer.ggml.model"),
        (["-m", str(vocabulary), "-p", "a\udcff"], "lone surrogate, U+DCFF, at character 1"),
        (["-m", str(vocabulary)], "standard input is not UTF-8 text: byte 0xff at 1"),
        (["-m", str(vocabulary), "--bos"], "unknown option '--bos'"),
    ]
    for arguments, message in mistakes:
        say(b"a\xff")
        if "-p" not in arguments and arguments[-1] != str(vocabulary):
            arguments = [*arguments, "-p", "a"]
        assert cli.main(["tokenize", *arguments]) == 2, arguments
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and message in captured.err


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" caf\xc3\xa9", '" café"'), (b"\\n\n\r\t", r'"\\n\n\r\t"'), (b"\xe5\xad", r'"\xe5\xad"'),
        ("\u202e\ue000\U000e0001".encode(), r'"\u202e\ue000\U000e0001"'), (b"", '""'),
        (b"\x00\x7f", r'"\u0000\u007f"'),
    ],
)  # fmt: skip
def test_escapes(piece: bytes, shown: str) -> None:
    assert escaped(piece) == shown
