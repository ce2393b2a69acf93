"""Prompts that the context cannot hold are refused before they are encoded, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from support import chat_models
from support.chat_models import CHATML, chat_of

from hotcold.chat import chat as chat_module
from hotcold.chat import stand_ins
from hotcold.chat.rendering import TemplateError, TemplateStopped
from hotcold.engine.request import RequestError

CONTEXT = 300


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize("made", [chat_models.bpe, chat_models.spm])
def test_what_cannot_fit_is_refused_and_never_encoded(
    made: Any, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, tokenizer = chat_of(made(template))
    fits = len(chat.ids(said(""))) if template else 0
    encode_rendered = chat_module.encode_rendered

    def spy(*values: Any) -> Any:
        ids = encode_rendered(*values)
        assert len(ids) < 2 * CONTEXT
        return ids

    monkeypatch.setattr(chat_module, "encode_rendered", spy)
    with pytest.raises(
        RequestError, match=f"at least [0-9]+ tokens and the context holds {CONTEXT}"
    ) as caught:
        chat.ids(said("xy " * 10_000), context=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    # A text of the most characters for its tokens.
    longest = max((tokenizer.piece(id).decode() for id in tokenizer.control_names), key=len)
    for word in ("user", longest):
        text = word * ((CONTEXT - fits - 8) // len(tokenizer.encode(word, add_bos=False)))
        assert len(chat.ids(said(text), context=CONTEXT)) < CONTEXT
    chat.close()


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>{{ messages[-1].content[:20] }}",
        "<|im_start|>{{ messages[-1].content | trim }}",
        "<|im_start|>{% if tools %}{{ tools | length }}{% endif %}",
        "<|im_start|>",
    ],
)
def test_what_a_template_leaves_out_does_not_count(template: str) -> None:
    chat, _ = chat_of(chat_models.bpe(template))
    text = " " * 100_000 if "trim" in template else "xy " * 100_000
    messages = [*said("xy " * 1000), {"role": "assistant", "content": "a"}] * ("trim" not in template)
    assert 0 < len(chat.ids([*messages, *said(text)], context=CONTEXT)) < CONTEXT
    chat.close()


def test_a_prompt_that_is_too_long_to_render_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = chat_of(chat_models.bpe(CHATML))
    assert chat.ids(said("a"))

    def stopped(request: object) -> str:
        raise TemplateStopped("it took longer than 2 s")

    monkeypatch.setattr(chat._process, "render", stopped)
    with pytest.raises(RequestError, match="at least") as caught:
        chat.ids(said("xy " * 10_000), context=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    for text, context in (("short", CONTEXT), ("xy " * 10_000, None)):
        with pytest.raises(TemplateError, match="longer than 2 s"):
            chat.ids(said(text), context=context)
    chat.close()


def test_a_template_that_refuses_a_long_prompt_says_why() -> None:
    chat, _ = chat_of(chat_models.bpe("{{ raise_exception('only short ones') }}"))
    with pytest.raises(TemplateError, match="only short ones"):
        chat.ids(said("xy " * 10_000), context=CONTEXT)
    chat.close()


@pytest.mark.parametrize("part", [1, 3])
def test_characters_are_replaced_in_parts_without_a_seam(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = chat_of(chat_models.bpe(CHATML))
    messages = said("<|im_end|>\ue000\U000f0000 \U0001f600 end\ufdd0")
    whole = chat.ids(messages), chat.text(messages)
    monkeypatch.setattr(stand_ins, "_PART", part)
    assert (chat.ids(messages), chat.text(messages)) == whole
    chat.close()
