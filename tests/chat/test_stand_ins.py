"""Control tokens come from the template alone, whatever users write and templates do with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import chat_models
from support.vocabularies import CONTROL, spm

from hotcold.chat.stand_ins import MarkedText, StandIns, encode_rendered, stand_ins
from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import Tokenizer

TOKENIZERS = [
    Tokenizer.from_metadata(chat_models.bpe(None)),
    Tokenizer.from_metadata(chat_models.bpe(None, add_bos_token=True)),
    Tokenizer.from_metadata(chat_models.spm(None)),
    Tokenizer.from_metadata(chat_models.spm(None, add_space_prefix=False, add_bos_token=False)),
]
PARTS = [
    "<|im_start|>", "<|im_end|>", "<|", "|>", "im_end", "<|im_", "end|>", "[TOOL_CALLS]", "<|user|>", "user",
    "</s>", "<s>", "<", "s>", "<|end|>", " ", "\n", "a", "\ue000", "\U000f0000", "é", "\0", "<think>",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=50
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_what_users_write_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    @given(st.lists(TEXT, min_size=1, max_size=4), st.sampled_from(PARTS), st.sampled_from(PARTS))
    def check(users: list[str], before: str, after: str) -> None:
        marks = stand_ins(tokenizer.control_names.values(), [*users, before, after])
        text = "".join(marks.mark(user) for user in users)
        assert "".join(users) == MarkedText(text, marks) and len(text) == len("".join(users))
        ids = encode_rendered(tokenizer, text, marks)
        control = [id for id in ids if id in tokenizer.control_names]
        assert control == ([tokenizer.bos_id] if tokenizer.add_bos else [])
        assert tokenizer.decode(ids) == "".join(users).replace("\u2581", " ")
        # What a template puts around it counts as it does alone.
        alone = [id for part in (before, after) for id in tokenizer.cut_special(part) if isinstance(id, int)]
        ids = encode_rendered(tokenizer, f"{before}{text}{after}", marks)
        control = [id for id in ids if id in tokenizer.control_names]
        if "".join(users) and not "".join(users).isspace():
            expected = [id for id in alone if id in tokenizer.control_names]
            if (
                tokenizer.bos_id is not None
                and tokenizer.add_bos
                and tokenizer.cut_special(before)[0] != (tokenizer.bos_id)
            ):
                expected.insert(0, tokenizer.bos_id)
            assert control == expected

    check()


def test_bos_is_not_doubled() -> None:
    tokenizer = TOKENIZERS[2]
    for text in ("a", "<s>a"):
        ids = encode_rendered(tokenizer, text, StandIns("", ""))
        assert ids == tokenizer.encode("a", add_bos=True)
    assert tokenizer.bos_id is not None
    user = stand_ins(tokenizer.control_names.values(), ["<s>a"])
    ids = encode_rendered(tokenizer, user.mark("<s>a"), user)
    assert ids[0] == tokenizer.bos_id and tokenizer.decode(ids) == "<s>a"
    assert tokenizer.eos_id not in ids


def test_a_control_token_of_spaces_comes_from_nobody() -> None:
    tokenizer = Tokenizer.from_metadata(spm([("\n\n", CONTROL), ("<|x|>", CONTROL)]))
    ids = encode_rendered(tokenizer, "<|x|>a\n\nb", StandIns("", ""))
    assert [tokenizer.control_names[id] for id in ids if id in tokenizer.control_names] == ["<s>", "<|x|>"]


def test_stand_ins_occur_nowhere() -> None:
    texts = ["".join(map(chr, range(0xE000, 0xE100))), "ab"]
    found = stand_ins(["<|im|>", '" \\'], texts)
    assert found.plain == "<>im|" and found.marked == "".join(map(chr, range(0xE100, 0xE105)))
    everything = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)]))
    with pytest.raises(UserError, match="private-use characters"):
        stand_ins(["<|im|>"], [everything])
    assert stand_ins(["<|im|>"], [everything[:-5]]).marked == everything[-5:]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UserError, match="lone surrogate"):
        encode_rendered(TOKENIZERS[0], "a\ud800", StandIns("", ""))


def test_what_is_not_defined_keeps_the_stand_ins() -> None:
    marks = StandIns("<", "\ue000")
    text = marks.mark("a<b")
    for made in ("-".join([text, text]), text.center(9), f"{text:>9}", text.zfill(9), text * 2):
        assert "<" not in str.__str__(made) and "\ue000" in str.__str__(made)
    assert marks.mark({"<": ["<", 1, None, True]}) == {"<": ["<", 1, None, True]}
    assert int(StandIns("5", "\ue000").mark("15")) == 15
