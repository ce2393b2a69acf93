"""Flags of added tokens: against the tokenizers library, and what llama.cpp knows by names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vocabularies import ALPHABET, CONTROL, NORMAL, SPACE, USER_DEFINED, bpe, spm
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from hotcold.tokenizer.added_tokens import SPACES, TokenFlags
from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.long  # no instruction set or backend changes it

#: Name -> flags. No one is part of another.
TOKENS = {
    "<l>": {"lstrip": True},
    "<r>": {"rstrip": True},
    "<b>": {"lstrip": True, "rstrip": True},
    "word": {"single_word": True},
    "\u00e9t\u00e9": {"single_word": True, "lstrip": True, "rstrip": True},
    "<n>": {},
}
PIECES = [
    *TOKENS,
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\x1c",
    "\u200d",
    "a",
    "_",
    "1",
    "\u00b2",
    "\u0301",
    "-",
    "x y",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def keys(ids: dict[str, list[int]]) -> dict[str, Any]:
    return {f"hotcold.tokenizer.{name}": np.array(of, np.int32) for name, of in ids.items()}


def both(special: bool) -> tuple[Tokenizer, Library]:
    """The same vocabulary of bytes, here and there."""
    metadata = bpe("gpt-2", "", [(name, CONTROL if special else USER_DEFINED) for name in TOKENS])
    ids = {name: metadata["tokenizer.ggml.tokens"].index(name) for name in TOKENS}
    flags = {
        flag: [ids[name] for name, given in TOKENS.items() if flag in given]
        for flag in ("lstrip", "rstrip", "single_word")
    }
    library = Library(models.BPE({letter: id for id, letter in enumerate([*ALPHABET, "<|end|>"])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = [AddedToken(name, normalized=False, special=special, **given) for name, given in TOKENS.items()]
    assert library.add_tokens(added) == len(TOKENS)
    assert {name: library.token_to_id(name) for name in TOKENS} == ids
    return Tokenizer.from_metadata(metadata | keys(flags)), library


@pytest.mark.parametrize("special", [False, True])
def test_text_around_added_tokens_is_the_librarys(special: bool) -> None:
    tokenizer, library = both(special)

    @given(TEXTS)
    @settings(max_examples=400)
    @example(" \u3000<b>\x1c<r>\n word wordword a_word word1 word\u0301 \u00e9t\u00e9\t<l>")
    @example("<r> <l>")
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids, repr(text)
        if not special:
            assert tokenizer.encode(text, add_bos=False) == ids

    check()


def test_without_flags_text_stays() -> None:
    """So that the test above fails for who ignores them."""
    tokenizer, _ = both(special=False)
    plain = Tokenizer.from_metadata(bpe("gpt-2", "", [(name, USER_DEFINED) for name in TOKENS]))
    text = "a <l> b<r> c"
    assert tokenizer.encode(text) != plain.encode(text)
    assert (
        tokenizer.decode(tokenizer.encode(text)) == "a<l> b<r>c" and plain.decode(plain.encode(text)) == text
    )


def test_white_space_is_unicodes() -> None:
    spaces = {chr(code) for code in range(0x3100) if chr(code).isspace()} - set("\x1c\x1d\x1e\x1f")
    assert set(SPACES) == spaces


def test_a_long_text_of_many_tokens_takes_no_square_of_time() -> None:
    tokenizer, _ = both(special=False)
    ids = tokenizer.encode("<b> " * 50_000)
    assert len(ids) == 50_000


def phi3(**general: str) -> list[str]:
    special = [
        ("<|user|>", CONTROL),
        ("<|end|>", CONTROL),
        ("<|endoftext|>", CONTROL),
        ("<word>", USER_DEFINED),
    ]
    metadata = spm(special) | {f"general.{key}": value for key, value in general.items()}
    tokenizer = Tokenizer.from_metadata(metadata)
    text = "<|user|>\n a<|end|>\n<s> a</s> \n<|endoftext|>\n<word> a"
    return [
        tokenizer.control_names.get(id, tokenizer.piece(id).decode())
        for id in tokenizer.encode(text, add_bos=False, parse_special=True)
    ]


KEPT = [
    "<|user|>", " ", "\n", " a", "<|end|>", " ", "\n", "<s>", " ", " a", "</s>", " ", " ", "\n",
    "<|endoftext|>", " ", "\n", "<word>", " ", " a",
]  # fmt: skip
STRIPPED = ["<|user|>", " a", "<|end|>", "<s>", " ", " a", "</s>", "<|endoftext|>", " ", "\n", "<word>", " a"]


@pytest.mark.parametrize(
    ("general", "expected"),
    [
        ({"name": "Phi3"}, STRIPPED),
        ({"name": "microsoft_Phi-3-mini"}, STRIPPED),
        ({"name": "Phi 3.5 Mini Instruct", "architecture": "phi3"}, STRIPPED),
        ({"name": "Phi 3.5 Mini Instruct", "architecture": "llama"}, KEPT),
        ({"name": "Llama"}, KEPT),
        ({}, KEPT),
    ],
)
def test_phi3s_tokens_take_the_white_space_after_them(general: dict[str, str], expected: list[str]) -> None:
    assert phi3(**general) == expected


def test_phi4_has_another_vocabulary() -> None:
    metadata = bpe("gpt-4o", "", [("<|user|>", CONTROL)]) | {
        "general.architecture": "phi3",
        "general.name": "Phi 4",
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert len(tokenizer.encode("<|user|> a", add_bos=False, parse_special=True)) == 3


@pytest.mark.parametrize(
    ("pre", "general", "name"),
    [
        ("jina-v2-de", {}, "<mask>"),
        ("jina-v2-code", {}, "<mask>"),
        ("gpt-2", {"general.architecture": "jina-bert-v3"}, "<mask>"),
        ("gpt-2", {"general.architecture": "nomic-bert-moe"}, "<mask>"),
        ("gpt-2", {"general.name": "A Modern-BERT"}, "[MASK]"),
    ],
)
def test_masks_take_the_white_space_before_them(pre: str, general: dict[str, str], name: str) -> None:
    metadata = bpe(pre, "", [("<mask>", CONTROL), ("[MASK]", CONTROL)]) | general
    tokenizer = Tokenizer.from_metadata(metadata)
    lengths = {
        mask: len(tokenizer.encode(f"a \n{mask} b", add_bos=False, parse_special=True))
        for mask in ("<mask>", "[MASK]")
    }
    assert lengths == {mask: 4 if mask == name else 6 for mask in lengths}


def test_the_files_own_flags_are_stronger_than_its_name() -> None:
    metadata = spm([("<x>", CONTROL)]) | {"general.name": "Phi-3"}
    x = metadata["tokenizer.ggml.tokens"].index("<x>")

    def count(**flags: list[int]) -> int:
        tokenizer = Tokenizer.from_metadata(metadata | keys(flags))
        return len(tokenizer.encode("a <x> a", add_bos=False, parse_special=True))

    assert count() == 4  # the space before it, and none after
    assert count(rstrip=[]) == 5
    assert count(lstrip=[x]) == 4
    assert count(lstrip=[x], rstrip=[x]) == 3


def test_flags_come_back_from_their_keys() -> None:
    flags = TokenFlags(lstrip=frozenset([5, 3]), single_word=frozenset([1]))
    found = flags.metadata()
    assert {key: value.tolist() for key, value in found.items()} == {
        "hotcold.tokenizer.lstrip": [3, 5],
        "hotcold.tokenizer.single_word": [1],
    }
    assert TokenFlags().metadata() == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([1 << 20]), r"hotcold.tokenizer.rstrip holds 1048576: the \d+ tokens have the ids 0 to"),
        (np.array([-1]), "holds -1"),
        (np.array([1.0]), "an array of token ids is needed"),
        (["a"], "an array of token ids is needed"),
        (3, "is 3: an array"),
    ],
)
def test_damaged_flags_are_refused(value: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_metadata(bpe("gpt-2", "") | {"hotcold.tokenizer.rstrip": value})
    assert "\n" not in str(caught.value)


def test_a_normalised_token_takes_the_space_that_the_vocabulary_puts_first() -> None:
    metadata = spm([("<x>", USER_DEFINED), ("<y>", NORMAL)])
    x = metadata["tokenizer.ggml.tokens"].index("<x>")
    tokenizer = Tokenizer.from_metadata(metadata | keys({"normalized": [x]}))
    pieces = [tokenizer.piece(id).decode() for id in tokenizer.encode("a <x> b<x>", add_bos=False)]
    assert pieces == [" a", " <x>", " ", "b", "<", "x", ">"]
    assert tokenizer.encode("<x>", add_bos=False) == [x]
    for text in ("a <x> b", "<x>a", " <x>", f"{SPACE}<x>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ")
