"""Anthropic's Python client against SmolLM2: answers, streams, tools and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as found:
        yield found


def options(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ABOUT}]
    return {"model": MODEL, "messages": messages, "max_tokens": 40, "extra_body": {"temperature": 0}, **more}


def test_an_answer_and_its_stream(client: Any) -> None:
    whole = client.messages.create(**options(system="You answer in a sentence."))
    assert whole.model == MODEL and whole.stop_reason in ("end_turn", "max_tokens")
    (block,) = whole.content
    with client.messages.stream(**options(system="You answer in a sentence.")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(
        model=MODEL, system="You answer in a sentence.", messages=options()["messages"]
    )
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_stop_sequence(client: Any) -> None:
    whole = client.messages.create(**options())
    word = whole.content[0].text.split()[2]
    again = client.messages.create(**options(stop_sequences=[word]))
    assert again.stop_reason == "stop_sequence" and again.stop_sequence == word


def test_tools_in_two_requests(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = options(messages=messages, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=120)
    first = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and calls[0].name == "get_weather"
    assert isinstance(calls[0].input["city"], str)
    assert [block.input for block in final.content if block.type == "tool_use"] == [c.input for c in calls]
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": "20 degrees"} for each in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(**options(messages=messages, tools=[WEATHER]))
    assert second.content


def test_a_parsed_answer(client: Any) -> None:
    reply = client.messages.parse(**options(output_format=Person, max_tokens=120))
    assert isinstance(reply.parsed_output, Person)


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**options(extra_body={"temperature": -1}))
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        client.messages.create(**options(messages=[{"role": "user", "content": [image]}]))
