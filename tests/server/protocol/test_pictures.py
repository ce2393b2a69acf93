"""Pictures and files in results of tools: a text stands in for them, in each dialect."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_pieces import facts

from hotcold.server.protocol import anthropic, chat, ollama, responses
from hotcold.server.protocol.errors import APIError

PNG = "iVBORw0KGgo="
TEXT = {"type": "text", "text": "logo.png:"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
ADDRESS = f"data:image/png;base64,{PNG}"
PICTURE = "[picture left out: this model reads text]"


def anthropic_result(content: Any) -> list[dict[str, Any]]:
    block = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    return anthropic.parse(body, facts()).messages


def chat_result(content: Any) -> list[dict[str, Any]]:
    message = {"role": "tool", "tool_call_id": "t1", "content": content}
    return chat.parse({"messages": [message]}, facts()).messages


def responses_result(content: Any) -> list[dict[str, Any]]:
    item = {"type": "function_call_output", "call_id": "t1", "output": content}
    return responses.parse({"input": [item]}, facts()).messages


CASES = [
    (anthropic_result, {"type": "image", "source": SOURCE}, "picture"),
    (
        anthropic_result,
        {"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}},
        "document",
    ),
    (chat_result, {"type": "image_url", "image_url": {"url": ADDRESS}}, "picture"),
    (chat_result, {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}, "sound"),
    (chat_result, {"type": "file", "file": {"file_data": PNG}}, "file"),
    (responses_result, {"type": "input_image", "image_url": ADDRESS}, "picture"),
    (chat_result, {"type": "video_url", "video_url": {"url": ADDRESS}}, "video"),
    (chat_result, {"type": "resource", "resource": {"uri": "file:///a", "blob": PNG}}, "resource"),
    (anthropic_result, {"type": "resource_link", "uri": ADDRESS, "name": "a"}, "link"),
    (responses_result, {"type": "input_file", "file_data": PNG}, "file"),
    (responses_result, {"type": "computer_screenshot", "image_url": ADDRESS}, "picture"),
]


@pytest.mark.parametrize(("read", "part", "kind"), CASES, ids=[str(each[1]["type"]) for each in CASES])
def test_a_part_that_no_model_here_reads(read: Any, part: dict[str, Any], kind: str) -> None:
    (message,) = read([part])
    stand_in = f"[{kind} left out: this model reads text]"
    assert message["role"] == "tool" and stand_in in str(message["content"])
    assert PNG not in str(message)
    text = TEXT if read is not responses_result else {"type": "input_text", "text": "logo.png:"}
    (message,) = read([text, part, text])
    assert [each["text"] for each in message["content"]] == ["logo.png:", stand_in, "logo.png:"]
    for broken in ({"type": "hologram"}, {"type": ["image"]}, {"type": None}, "image"):
        with pytest.raises(APIError):
            read([broken])


def test_a_search_result_is_its_texts() -> None:
    """Anthropic's clients send it in a tool's result, or in a message of the user."""
    block = {"type": "search_result", "source": "https://a.b", "title": "A", "citations": {"enabled": True}}
    block["content"] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (result,) = anthropic_result([block])
    assert (result["role"], result["content"]) == ("tool", "A\nhttps://a.b\none\ntwo")
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [block, {**TEXT, "text": "Why?"}]}]}
    (message,) = anthropic.parse(body, facts()).messages
    assert [each["text"] for each in message["content"]] == [result["content"], "Why?"]
    picture = {"type": "image", "source": SOURCE}
    with pytest.raises(APIError, match="this model reads text only"):
        anthropic_result([{**block, "content": [picture]}])


def test_pictures_of_ollama() -> None:
    def content(**fields: Any) -> Any:
        return ollama.parse_chat({"messages": [{"role": "tool", **fields}]}, facts()).messages[0]["content"]  # type: ignore[union-attr]

    assert content(content="logo.png:", images=[PNG]) == f"logo.png:\n{PICTURE}"
    assert content(images=[PNG, PNG]) == f"{PICTURE}\n{PICTURE}"
    assert content(content="a", images=[]) == content(content="a") == "a"
    for parse, body in (
        (ollama.parse_chat, {"messages": [{"role": "user", "content": "a", "images": [PNG]}]}),
        (ollama.parse_generate, {"prompt": "a", "images": [PNG]}),
    ):
        with pytest.raises(APIError, match="images is a list of 1: this model reads text only: leave it out"):
            parse(body, facts())


@pytest.mark.parametrize(
    ("parse", "content", "param"),
    [
        (anthropic.parse, [{"type": "image", "source": SOURCE}], "messages[0].content[0].type"),
        (chat.parse, [{"type": "image_url", "image_url": {"url": ADDRESS}}], "messages[0].content[0].type"),
        (responses.parse, [{"type": "input_image", "image_url": ADDRESS}], "input[0].content[0].type"),
    ],
)
def test_pictures_of_users_are_refused(parse: Any, content: Any, param: str) -> None:
    message = {"role": "user", "content": content}
    with pytest.raises(APIError, match="reads text only") as caught:
        parse({"max_tokens": 4, "messages": [message], "input": [message]}, facts())
    assert caught.value.param == param
