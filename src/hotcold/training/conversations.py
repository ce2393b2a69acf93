"""Turns conversations into tokens with a tokenizer's chat template; only answers are learned."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.training.libraries import library_errors


def encode_conversation(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None
) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Token ids of a conversation with its tools, and a mask of the ids in answers.

    Ids are those of ``tokenizer.apply_chat_template`` of transformers. A template with ``{% generation %}``
    names the answers itself. Otherwise an answer is the text that a message adds to the template's output for
    the messages before it, without white space at its end. UserError: there is no answer, the template
    refuses the messages, or it changes earlier messages when an answer is added."""
    with library_errors("the chat template cannot render a conversation"):
        answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise UserError("a conversation has no message of the role 'assistant'")
        if not isinstance(tokenizer.chat_template, str):
            fix = "give texts, or a tokenizer_config.json with one"
            raise UserError(f"the tokenizer has no chat template: {fix}")
        if re.search(r"\{%-?\s*generation", tokenizer.chat_template):
            encoded = tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(encoded["input_ids"]), np.array(encoded["assistant_masks"], bool)
        render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        spans = [_span(render, messages, number) for number in answers]
        text = render(messages)
    for begin, answer in spans:
        if text[begin : begin + len(answer)] != answer:
            raise UserError("the chat template changes earlier messages: mark answers by {% generation %}")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = np.zeros(len(coded["input_ids"]), bool)
    for number, (first, last) in enumerate(coded["offset_mapping"]):
        learned[number] = any(begin <= first and last <= begin + len(answer) for begin, answer in spans)
    return list(coded["input_ids"]), learned


def _span(render: Callable[..., str], messages: Sequence[dict[str, Any]], number: int) -> tuple[int, str]:
    """The position and the text of an answer."""
    before = render(messages[:number], add_generation_prompt=True)
    after = render(messages[: number + 1])
    if not after.startswith(before):
        raise UserError("the chat template writes answers in another way than it asks for them")
    return len(before), after[len(before) :].rstrip()
