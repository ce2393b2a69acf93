"""The tokens that end a text, by llama.cpp's rule: the test has its own list of their names."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support.vocabularies import CONTROL, NORMAL, UNUSED, USER_DEFINED, bpe, spm

from hotcold.formats.gguf import open_gguf
from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError
from hotcold.tokenizer.vocabulary import TokenType

pytestmark = pytest.mark.long  # no instruction set or backend changes it

#: As llama-vocab.cpp of llama-cpp-python 0.3.36 lists them.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
#: Tokens that text never becomes, although they end nothing.
RESERVED = ("<|fim_prefix|>", "<fim_suffix>", "<MID>", "<|code_prefix|>", "<\uff5cfim\u2581hole\uff5c>")


def made(names: dict[str, TokenType], **keys: Any) -> tuple[Tokenizer, dict[str, int]]:
    """A byte-level vocabulary with these tokens, whose own end is ``<stop>``, and their ids."""
    metadata = bpe("gpt-2", "", [("<stop>", CONTROL), *names.items()])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[256] = "<unlisted>"  # else <|end|>
    ids = {name: tokens.index(name) for name in ("<stop>", *names)}
    given = {"eos_token_id": ids["<stop>"], "bos_token_id": None} | keys
    for key, value in given.items():
        name = key if key.startswith("hotcold.") else f"tokenizer.ggml.{key}"
        metadata[name] = value
        if value is None:
            del metadata[name]
    return Tokenizer.from_metadata(metadata), ids


def stops(names: dict[str, TokenType], **keys: Any) -> set[str]:
    tokenizer, ids = made(names, **keys)
    found = {id: name for name, id in ids.items()}
    return {found[id] for id in tokenizer.stop_ids} - {"<stop>"}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("type", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
def test_a_name_ends_a_text_whatever_its_type(name: str, type: TokenType) -> None:
    tokenizer, ids = made({name: type})
    assert tokenizer.stop_ids == {ids["<stop>"], ids[name]}
    assert ids[name] not in tokenizer.encode(f"a {name} b"), "text of a user ends the answer"
    assert ids[name] in tokenizer.encode(f"a {name} b", parse_special=True)
    assert tokenizer.decode([ids[name]]) == ""


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("type", [NORMAL, USER_DEFINED])
def test_tokens_around_code_are_no_text(name: str, type: TokenType) -> None:
    tokenizer, ids = made({name: type})
    assert tokenizer.stop_ids == {ids["<stop>"]}
    assert ids[name] not in tokenizer.encode(name) and ids[name] in tokenizer.encode(name, parse_special=True)


@pytest.mark.parametrize("name", ["<|END|>", "<|im_end|", "im_end", "<pad>", "<|user|>", "<fim_sep>"])
def test_other_names_end_nothing(name: str) -> None:
    assert stops({name: CONTROL}) == set()


@pytest.mark.parametrize("key", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_key_names_what_ends_a_text(key: str) -> None:
    tokenizer, ids = made({"<x>": NORMAL}, **{f"{key}_token_id": 258})
    assert ids["<x>"] == 258 and tokenizer.stop_ids == {ids["<stop>"], 258}
    assert 258 not in tokenizer.encode("<x>")


def test_keys_that_end_nothing() -> None:
    for key in ("bos", "unknown", "padding", "seperator", "mask", "fim_pre", "fim_suf", "fim_mid"):
        assert stops({"<x>": CONTROL}, **{f"{key}_token_id": 258}) == set()


def test_of_several_pads_one_counts() -> None:
    pads = {"[PAD]": CONTROL, "<|fim_pad|>": CONTROL, "<x>": CONTROL}
    assert stops(pads) == {"<|fim_pad|>"}
    assert stops(pads, fim_pad_token_id=260) == {"<x>"}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        # gpt-oss: <|end|> closes a channel.
        (["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {"<|return|>", "<|call|>", "<|endoftext|>"}),
        # Solar Open
        (["<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}),
        # Phi-3, and one of the two alone
        (["<|end|>", "<|endoftext|>"], {"<|end|>", "<|endoftext|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
        (["<|end|>", "<|call|>"], {"<|end|>", "<|call|>"}),
    ],
)
def test_the_end_of_a_part_is_not_the_end_of_the_text(names: list[str], ends: set[str]) -> None:
    for type in (CONTROL, NORMAL):
        assert stops(dict.fromkeys(names, type)) == ends
    tokenizer, ids = made(dict.fromkeys(names, NORMAL))
    assert ids["<|end|>"] not in tokenizer.encode("<|end|>"), "a user closes a channel"


def test_html_of_gemma_4_is_text() -> None:
    assert stops({"</s>": NORMAL, "<|tool_response>": CONTROL}) == {"<|tool_response>"}
    assert stops({"</s>": USER_DEFINED, "<|tool_response>": NORMAL}) == {"<|tool_response>"}
    tokenizer, ids = made({"</s>": USER_DEFINED, "<|tool_response>": CONTROL})
    assert ids["</s>"] in tokenizer.encode("<s>x</s>")
    # PLaMo's EOS, by its key alone
    plamo = {"</s>": NORMAL, "<|plamo:eos|>": CONTROL}
    assert stops(plamo) == {"</s>"}
    assert stops(plamo, eos_token_id=259) == {"<|plamo:eos|>"}
    # What the file itself calls a control token is no HTML.
    assert stops({"</s>": CONTROL, "<|tool_response>": CONTROL}) == {"</s>", "<|tool_response>"}


def test_our_own_key_has_more() -> None:
    names = {"<x>": CONTROL, "<y>": NORMAL, "<z>": CONTROL}
    key = "hotcold.tokenizer.end_token_ids"
    assert stops(names, **{key: np.array([258, 259], np.int32)}) == {"<x>", "<y>"}
    tokenizer, ids = made(names, **{key: np.array([-1, 260, 1 << 20], np.int32)})
    assert tokenizer.stop_ids == {ids["<stop>"], ids["<z>"]}
    assert [note for note in tokenizer.notes if key in note and "-1" in note]
    with pytest.raises(TokenizerError, match=r"end_token_ids is 5: an array of token ids is needed"):
        made(names, **{key: 5})


def test_sentencepiece_vocabularies_alike() -> None:
    metadata = spm([("<end_of_turn>", USER_DEFINED)])
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.stop_ids == {2, len(metadata["tokenizer.ggml.tokens"]) - 1}


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("HOTCOLD_SMOLLM2", {"<|endoftext|>", "<|im_end|>", "<reponame>"}),
        ("HOTCOLD_GEMMA3", {"<eos>", "<end_of_turn>", "</s>"}),
    ],
)
def test_of_published_files(variable: str, names: set[str]) -> None:
    """llama.cpp's log lists these as EOG tokens."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no file")
    with open_gguf(os.environ[variable]) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    assert {tokenizer.piece(id).decode() for id in tokenizer.stop_ids} == names
