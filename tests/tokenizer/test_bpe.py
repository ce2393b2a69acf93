"""Byte-level BPE: llama.cpp's vectors, splits by hand, the plain rule, and merges that are broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.llama_cpp_vectors import vectors, vocabulary
from support.vocabularies import ALPHABET, CONTROL, NORMAL, USER_DEFINED, bpe

from hotcold.tokenizer.bpe import ADDS_BOS, IGNORES_MERGES, PRE_TOKENIZERS, pre_tokenizer
from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError

HEIDI = Path(__file__).parent.parent / "data" / "heidi.txt"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
WORDS = "ab Ġab 12 123 ĊĊ <|end|> <|im_end|> ðŁ¦Ļ"


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.piece(id).decode(errors="replace") for id in tokenizer.encode(text, add_bos=False)]


@pytest.mark.parametrize("kind", ["gpt-2", "falcon"])
def test_llama_cpps_vectors(kind: str) -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary(kind))
    for text, ids in vectors(kind):
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text


def test_another_reader_of_gpt_2s_vocabulary(tmp_path: Path) -> None:
    """GPT-2's tokens and merges, with which the library itself encodes a book."""
    from tokenizers import ByteLevelBPETokenizer

    metadata = vocabulary("gpt-2")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    theirs = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ours = Tokenizer.from_metadata(metadata)
    text = HEIDI.read_text(encoding="utf-8")
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_another_reader_of_opts_vocabulary(test_data: Path) -> None:
    """OPT's files, read by the library itself; its ids are those of the JSON file."""
    from tokenizers import ByteLevelBPETokenizer

    folder = test_data / "tokenizers"
    theirs = ByteLevelBPETokenizer(str(folder / "opt_vocab.json"), str(folder / "opt_merges.txt"))
    vocabulary = theirs.get_vocab()
    merges = (folder / "opt_merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    ours = Tokenizer.from_metadata({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
    })  # fmt: skip
    text = HEIDI.read_text(encoding="utf-8")
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


#: What each kind makes of a text with a little of everything; ``·`` marks the cuts. llama.cpp cuts alike,
#: except for e\u0301 with gpt-4o, tekken and kimi-k2 and fB with youtu: there the expressions of the models
#: count.
SPLITS = {
    "gpt-2": "I·'d· DO·'·T· x·1234·,· ½٣·字가か· é·\u0301· a·_·b·+;·  \n\n \t· 🦙· fB·/·\n",
    "starcoder": "I·'d· DO·'·T· x·1·2·3·4·,· ·½·٣·字가か· é·\u0301· a·_·b·+;·  \n\n \t· 🦙· fB·/·\n",
    "llama-bpe": "I·'d· DO·'T· x·123·4·,· ·½٣·字가か· é·\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "qwen2": "I·'d· DO·'T· x·1·2·3·4·,· ·½·٣·字가か· é·\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "qwen35": "I·'d· DO·'T· x·1·2·3·4·,· ·½·٣·字가か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "gpt-4o": "I'd· DO'T· x·123·4·,· ·½٣·字가か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· f·B·/\n",
    "tekken": "I·'d· DO·'T· x·1·2·3·4·,· ·½·٣·字가か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· f·B·/\n",
    "kimi-k2": "I'd· DO'T· x·123·4·,· ·½٣·字·가か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· f·B·/\n",
    "bloom": "I'd· DO'T· x1234·,· ½٣字가か· é\u0301· a_b+;·  \n\n \t· 🦙· fB/·\n",
    "viking": "I'd· DO'T· x·1·2·3·4·,· ·½·٣·字가か· é\u0301· a_b+;·  \n\n \t· 🦙· fB/·\n",
    "falcon": "I·'·d· DO·'·T· x·123·4·,· ½٣·字가か· é·\u0301· a·_·b·+;·  \n\n \t· 🦙· fB·/·\n",
    "default": "I·'·d· DO·'·T· x·123·4·,· ·½٣·字가か· é·\u0301· a·_·b·+;·  \n\n \t· 🦙· fB·/·\n",
    "deepseek-llm": "I·'·d· DO·'·T· x·1234·,· ·½٣·字가か· é·\u0301· a·_·b·++;·  ·\n·\n· \t 🦙· fB·/·\n",
    "deepseek-coder": "I·'·d· DO·'·T· x·1·2·3·4·,· ·½·٣·字가か· é·\u0301· a·_·b·+·;·  ·\n·\n· \t 🦙· fB·/·\n",
    "deepseek-v3": "I·'d· DO·'T· x·123·4·,· ·½٣·字·가·か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "youtu": "I'd· DO'T· x·1·2·3·4·,· ·½·٣·字·가·か· é\u0301· a·_b·+;·  \n\n· \t· 🦙· f·B·/\n",
    "seed-coder": "I·'d· DO·'T· x·1·2·3·4·,· ·½·٣·字가か· é·\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/·\n",
    "exaone-moe": "I·'d· DO·'T· x·1·2·3·4·,· ·½·٣·字가か é\u0301 a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "superbpe": "I'd DO'T x·1·234·, ·½٣·字가か é\u0301 a_b+;  \n\n \t 🦙 fB/\n",
    "jais-2": "I·'d· DO·'T· x·123·4·,· ·½٣·字가か· é·\u0301· a·_b·+;·  \n\n· \t· 🦙· fB·/\n",
    "chameleon": "I·'·d· DO·'·T· x·1·2·3·4·,· ·½·٣·字가か· é·\u0301· a·_·b·+·;·  ·\n·\n· ·\t· 🦙· fB·/·\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", SPLITS)
def test_how_words_are_cut(kind: str) -> None:
    text = SPLITS[kind].replace("·", "")
    words = [text[start:end] for _, (start, end) in pre_tokenizer(kind).pre_tokenize_str(text)]
    assert words == SPLITS[kind].split("·")


def test_every_expression_is_covered_by_a_split() -> None:
    covered = {PRE_TOKENIZERS[kind] for kind in SPLITS}
    assert covered == set(PRE_TOKENIZERS.values())
    assert PRE_TOKENIZERS.keys() >= IGNORES_MERGES | ADDS_BOS


@pytest.mark.parametrize("kind", [None, *SPLITS])
def test_any_text_comes_back_and_never_becomes_a_control_token(kind: str | None) -> None:
    tokenizer = Tokenizer.from_metadata(bpe(kind, WORDS, [("<|im_end|>", CONTROL), ("  ", USER_DEFINED)]))

    @given(
        TEXT
        | st.lists(st.sampled_from(["<|end|>", "<|im_end|>", "  ", "ab", "123", "\n", "🦙"])).map("".join)
    )
    @settings(max_examples=60)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_bos=False)
        assert not tokenizer.stop_ids & set(ids)
        assert tokenizer.decode(ids) == text
        stream, shown = tokenizer.stream_decoder(), ""
        for id in ids:
            shown += stream.push(id)
            assert text.startswith(shown)
        assert stream.flush() == ""

    check()


def merged_slowly(word: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """The textbook rule: again and again the pair of the lowest rank, the leftmost of equals."""
    symbols = list(word)
    while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return symbols


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=25), st.text("abc", max_size=40))
@settings(max_examples=300)
def test_merges_in_the_order_of_the_file(choices: list[tuple[int, int]], text: str) -> None:
    symbols, merges = ["a", "b", "c"], []
    for left, right in choices:
        pair = (symbols[left % len(symbols)], symbols[right % len(symbols)])
        if pair not in merges and len("".join(pair)) < 9:
            merges.append(pair)
            symbols.append("".join(pair))
    tokens = [*ALPHABET, *dict.fromkeys(s for s in symbols if len(s) > 1)]
    listed = [" ".join(pair) for pair in merges]
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "", tokens=tokens, token_type=None, merges=listed,
                                            bos_token_id=None, eos_token_id=None))  # fmt: skip
    assert pieces(tokenizer, text) == merged_slowly(text, {pair: i for i, pair in enumerate(merges)})


def test_a_whole_word_that_is_a_token_in_spite_of_the_merges() -> None:
    special = [("zzz", NORMAL)]
    for kind in ("llama-bpe", "tekken", "gpt-2", "dbrx"):
        whole = pieces(Tokenizer.from_metadata(bpe(kind, "ab", special)), "zzz")
        assert whole == (["zzz"] if kind in ("llama-bpe", "tekken") else ["z"] * 3)


def test_bos_follows_the_kind_where_the_file_is_silent() -> None:
    assert Tokenizer.from_metadata(bpe("llama-bpe", "ab")).encode("ab") == [256, 257]
    assert Tokenizer.from_metadata(bpe("llama-bpe", "ab", add_bos_token=False)).encode("ab") == [257]
    assert Tokenizer.from_metadata(bpe("qwen2", "ab")).encode("ab") == [257]
    assert Tokenizer.from_metadata(bpe("qwen2", "ab", add_bos_token=True)).encode("ab") == [256, 257]
    assert Tokenizer.from_metadata(bpe("roberta-bpe", "ab")).encode("ab") == [257, 256]


def test_special_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab", [("<x>", USER_DEFINED), ("Ġé", USER_DEFINED)]))
    assert tokenizer.encode("ab<|end|>ab<x>", parse_special=True) == [257, 256, 257, 258]
    assert tokenizer.decode([257, 256, 257, 258, 259]) == "abab<x>Ġé"
    # Its spelling is a text, not bytes: the bytes that look like it are others.
    assert 259 not in tokenizer.encode("ab é")


def test_no_space_is_put_before_a_text() -> None:
    """llama.cpp looks at this flag for SentencePiece alone."""
    assert Tokenizer.from_metadata(bpe("gpt-2", "ab", add_space_prefix=True)).encode("ab") == [257]


def test_a_large_text_without_a_word_boundary() -> None:
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab"))
    assert tokenizer.encode("ab" * 200_000) == [257] * 200_000


def test_a_byte_without_a_token_is_left_out() -> None:
    tokens = list(ALPHABET[:255])
    keys: dict[str, Any] = {"token_type": None, "bos_token_id": None, "eos_token_id": None, "merges": []}
    # UTF-8 never has the byte 0xFF, so nothing is missing.
    all_of_them = Tokenizer.from_metadata(bpe("gpt-2", "", tokens=tokens, **keys))
    assert all_of_them.encode("é") == [0xC3, 0xA9] and not all_of_them.left_out(["é"])
    less = Tokenizer.from_metadata(bpe("gpt-2", "", tokens=tokens[:0xC3], **keys))
    assert less.encode("a") == [97]
    assert less.encode("aéb") == [97, 0xA9, 98]
    assert less.left_out(["aéb", "aé"]) == "0xc3"


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "tekken"])
def test_neighbours_do_not_merge_across_what_is_left_out(kind: str) -> None:
    """llama.cpp cuts the word into characters first and merges no further than to the one without a token."""
    tokenizer = Tokenizer.from_metadata(bpe(kind, "ab", absent=b"cd", add_bos_token=False))
    assert pieces(tokenizer, "abcab") == ["ab", "ab"]
    assert pieces(tokenizer, "acb") == ["a", "b"]
    assert pieces(tokenizer, "cc") == []
    assert tokenizer.left_out(["abcab", "d"]) == "0x63, 0x64"


def test_a_vocabulary_whose_tokens_are_zeros_has_what_stands_for_the_absent_elsewhere() -> None:
    """Its name must be no token's: else this merge would make one of an absent byte and a letter."""
    keys: dict[str, Any] = {"token_type": None, "bos_token_id": None, "eos_token_id": None}
    tokens = [*ALPHABET[:99], *ALPHABET[100:], "\0", "\0a", "\0\0"]
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "", tokens=tokens, merges=["\0 a"], **keys))
    assert pieces(tokenizer, "cab") == ["a", "b"]
    with pytest.raises(TokenizerError, match=r"merges\[1\] is .*: two tokens that together are a token"):
        Tokenizer.from_metadata(bpe("gpt-2", "", tokens=tokens, merges=["\0 a", "\0 \0\0"], **keys))


@pytest.mark.parametrize("pre", [None, ""])
def test_a_kind_that_the_file_does_not_name_is_guessed_and_said(pre: str | None) -> None:
    tokenizer = Tokenizer.from_metadata(bpe(pre, WORDS))
    default = Tokenizer.from_metadata(bpe("default", WORDS))
    assert default.notes == ()
    assert (
        len(tokenizer.notes) == 1
        and "does not name its pre-tokenizer (tokenizer.ggml.pre)" in tokenizer.notes[0]
    )
    for text in ("Call 12345 now", "ab  ab\n\n", "I'll"):
        assert tokenizer.encode(text) == default.encode(text)


def test_tokens_that_are_no_utf_8() -> None:
    """No text becomes one, and the library is not given any."""
    raw = b"a\xff".decode(errors="surrogateescape")
    special = [(raw, NORMAL), (raw + "!", USER_DEFINED), (raw + "?", CONTROL)]
    metadata = bpe("gpt-2", "ab", special)
    metadata["tokenizer.ggml.merges"] += [f"a {raw}"]
    metadata["tokenizer.ggml.tokens"] += ["a" + raw]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    tokenizer = Tokenizer.from_metadata(metadata)
    size = tokenizer.vocab_size
    assert [tokenizer.piece(id) for id in range(size - 4, size)] == [
        b"a\xff",
        b"a\xff!",
        b"a\xff?",
        b"aa\xff",
    ]
    assert pieces(tokenizer, "ab\ufffd")[0] == "ab"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"merges": None}, r"no tokenizer\.ggml\.merges"),
    ({"merges": "a b"}, r"merges is 'a b': a flat array"),
    ({"merges": [7]}, r"merges\[0\] is .*7.*: only strings"),
    ({"merges": ["a b", "ab"]}, r"merges\[1\] is 'ab': two tokens"),
    ({"merges": ["a "]}, r"merges\[0\] is 'a ': two tokens"),
    ({"merges": [" a"]}, r"merges\[0\] is ' a': two tokens"),
    ({"merges": ["a b c"]}, r"merges\[0\] is 'a b c': two tokens"),
    ({"merges": ["a c"]}, r"merges\[0\] is 'a c': two tokens that together are a token"),
    ({"merges": ["\u4e00 b"]}, r"merges\[0\] is '\\u4e00 b'"),
    ({"pre": "my-own"}, r"pre is 'my-own': supported are gpt-2, .*llama-bpe, .*qwen2"),
    ({"pre": 7}, r"pre is 7: supported"),
    ({"pre": np.array([1, 2])}, r"pre is an array of 2: supported"),
    ({"pre": ["gpt-2"]}, r"pre is \['gpt-2'\]: supported"),
]


@pytest.mark.parametrize(("keys", "message"), BROKEN)
def test_broken_vocabularies_are_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_metadata(bpe(**{"pre": "gpt-2", "words": "ab"} | keys))
    assert str(caught.value).isprintable()


def test_merges_of_control_tokens_are_left_out_and_the_first_of_equal_pairs_counts() -> None:
    merges = ["a b", "< |end|>", "b c", "a b"]
    special = [("|end|>", NORMAL), ("bc", NORMAL)]
    tokenizer = Tokenizer.from_metadata(bpe("gpt-2", "ab", special, merges=merges))
    assert pieces(tokenizer, "abc") == ["ab", "c"]


@pytest.mark.parametrize("merge", ["<|e nd|>", "<|end| >", "<|end|> "])
def test_a_merge_of_a_control_token_is_refused_unless_its_parts_are_tokens(merge: str) -> None:
    with pytest.raises(TokenizerError, match=r"merges\[1\] is .*: two tokens that together are a token"):
        Tokenizer.from_metadata(bpe("gpt-2", "ab", [("|end|>", NORMAL)], merges=["a b", merge]))
