"""RWKV's tokenizer: the longest token at each place, by brute force; llama.cpp's ids; what is special."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import golden_checkpoint
from support.golden import DATA

from hotcold.convert.checkpoint import open_checkpoint
from hotcold.convert.vocabulary import vocabulary_metadata
from hotcold.errors import UserError
from hotcold.tokenizer.longest_match import unescaped
from hotcold.tokenizer.tokenizer import Tokenizer

#: llama.cpp's ids (llama-cpp-python 0.3.36) of a file that the golden checkpoint gave.
TEXT = "hello world \u4f60\u597d\n\nUser: it's"
IDS = [275, 33, 120, 112, 115, 109, 101, 33, 272, 257, 258, 59, 33, 106, 117, 40, 116]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return vocabulary_metadata(open_checkpoint(golden_checkpoint("tiny-rwkv7")), 288)


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata)


@cache
def published() -> dict[bytes, int]:
    """The tokens of the vocabulary's file, read in another way."""
    path: Path = DATA / "tiny-rwkv7" / "rwkv_vocab_v20230424.txt"
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        id, literal = line.split(" ", 1)
        token = eval(literal.rsplit(" ", 1)[0], {"__builtins__": {}})
        found[token if isinstance(token, bytes) else token.encode()] = int(id)
    return found


def longest(text: bytes, tokens: dict[bytes, int]) -> list[int]:
    found = []
    while text:
        token = max((each for each in tokens if text.startswith(each)), key=len)
        found.append(tokens[token])
        text = text[len(token) :]
    return found


def test_the_ids_of_llama_cpp(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(TEXT) == IDS
    assert tokenizer.decode(IDS) == TEXT


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["hello", "hell", "o wo", "\t", " '", "\u4f60", "\u597d", "\\", "\n", "th", "e"])
    )
    | st.text()
)
def test_the_longest_token_at_each_place(tokenizer: Tokenizer, parts: Any) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert ids == longest(text.encode(), published())
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    """The line break that ends a turn is in texts, too; the token that ends texts and those without a text
    never are."""
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 0, {0, 257})
    assert tokenizer.encode("a\n\nb") == [98, 257, 99]
    assert 0 not in tokenizer.encode("<s>")
    assert tokenizer.encode("<s>\n\n", parse_special=True) == [0, 257]
    assert 285 not in tokenizer.encode("[PAD285]")
    assert tokenizer.encode("[PAD7]") == [282]
    assert tokenizer.decode([98, 257, 0, 99]) == "a\n\nb"
    assert not tokenizer.left_out([TEXT])


def test_bytes_without_a_token(metadata: dict[str, Any]) -> None:
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[98] = 5  # unused
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.token_type": np.array(types)})
    assert tokenizer.encode("an a!") == [283, 262, 34]
    assert tokenizer.encode("ba") == [99] and tokenizer.left_out(["ba"]) == "0x61"
    with pytest.raises(UserError, match="the text has a lone surrogate, U\\+DCFF, at character 2"):
        tokenizer.left_out(["ba", "ba\udcff"])  # before the ids are asked for: commands note it first


@pytest.mark.parametrize(
    ("spelled", "wanted"),
    [
        (r"a\n\t\r\\", b"a\n\t\r\\"), (r"\xe4\xBD", b"\xe4\xbd"), (r"\'\"", b"'\""), ("\u00e4", b"\xc3\xa4"),
        ("a\\", b"a"), (r"a\x4", b"a"), (r"\xzz!", b"!"), ("", b""),
    ],
)  # fmt: skip
def test_escapes(spelled: str, wanted: bytes) -> None:
    assert unescaped(spelled) == wanted
