"""OpenAI's Python client against SmolLM2: parsed answers, tools and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import pytest

from tests.clients.conftest import ABOUT, MODEL

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

QUESTION: Any = [{"role": "user", "content": ABOUT}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    country: str | None = pydantic.Field(max_length=20)


class Person(pydantic.BaseModel):
    """Someone whom a text speaks of."""

    name: str = pydantic.Field(description="The first name", max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    kind: Literal["person", "robot"]
    mood: Mood
    home: City
    friends: list[City] = pydantic.Field(max_length=1)


class GetWeather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    unit: Literal["C", "F"] = "C"


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


def options(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 120, "temperature": 0, **more}


def test_a_parsed_answer(client: Any) -> None:
    (choice,) = client.chat.completions.parse(**options(response_format=Person)).choices
    assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"
    assert choice.message.parsed == Person.model_validate_json(choice.message.content)


def test_a_parsed_stream(client: Any) -> None:
    with client.chat.completions.stream(**options(response_format=City)) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, City)


def test_a_form_of_json_alone(client: Any) -> None:
    reply = client.chat.completions.create(
        **options(
            messages=[{"role": "user", "content": 'Alice is 30. Answer in JSON: {"age": ...}'}],
            response_format={"type": "json_object"},
        )
    )
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


def test_tools_in_two_requests(client: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(
        **options(messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    )
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.id
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees, sunny"}]
    second = client.chat.completions.create(**options(messages=messages, tools=[WEATHER], tool_choice="none"))
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls


def test_tools_that_may_be_called(client: Any) -> None:
    """Text or calls: SmolLM2 decides, and either is a whole answer."""
    reply = client.chat.completions.create(**options(tools=[WEATHER]))
    message = reply.choices[0].message
    assert message.content or message.tool_calls
    for call in message.tool_calls or ():
        assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments), dict)


def test_parsed_arguments(client: Any) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    reply = client.chat.completions.parse(**options(tools=[tool], tool_choice="required"))
    calls = reply.choices[0].message.tool_calls
    assert calls and all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)


def test_a_chosen_tool(client: Any) -> None:
    choice = {"type": "function", "function": {"name": "GetWeather"}}
    tools = [WEATHER, openai.pydantic_function_tool(GetWeather)]
    reply = client.chat.completions.parse(
        **options(tools=[tools[1]], tool_choice=choice, parallel_tool_calls=False)
    )
    (call,) = reply.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_streamed_calls(client: Any) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with client.chat.completions.stream(**options(tools=[tool], tool_choice="required")) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in message.tool_calls)


def test_streamed_calls_by_hand(client: Any) -> None:
    """The deltas as they come: a call's beginning has its id and name, later ones only text."""
    calls: dict[int, Any] = {}
    reason = None
    stream = client.chat.completions.create(
        **options(
            tools=[WEATHER], tool_choice="required", stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in stream:
        if not chunk.choices:
            assert chunk.usage.completion_tokens > 0
            continue
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name == "get_weather"
            calls[delta.index] = calls.get(delta.index, "") + (delta.function.arguments or "")
    assert reason == "tool_calls" and calls
    assert all(set(json.loads(text)) == {"city"} for text in calls.values())


def test_a_client_that_does_not_block(url: str) -> None:
    async def both() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = client.chat.completions.parse(**options(response_format=City))
            stream = await client.chat.completions.create(**options(max_tokens=8, stream=True))
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [(await whole).choices[0].message.parsed, "".join(text)]

    parsed, text = asyncio.run(both())
    assert isinstance(parsed, City) and text


def test_the_reply_itself(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(**options(max_tokens=4))
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    with client.chat.completions.with_streaming_response.create(**options(max_tokens=4)) as reply:
        assert json.loads("".join(reply.iter_text()))["choices"]


def test_models_and_completions(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    reply = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4)
    assert reply.choices[0].text
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def test_an_address_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with openai.OpenAI() as client:
        assert client.chat.completions.create(**options(max_tokens=4)).choices[0].message.content


def test_a_parsed_response(client: Any) -> None:
    reply = client.responses.parse(
        model=MODEL, input=ABOUT, text_format=Person, temperature=0, max_output_tokens=120
    )
    assert isinstance(reply.output_parsed, Person) and reply.status == "completed"


def test_tools_in_two_responses(client: Any) -> None:
    """The second has what the first gave, as the client keeps it, and the result of its call."""
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    items: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 120}
    options["parallel_tool_calls"] = False
    with client.responses.stream(input=items, tool_choice="required", **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["city"], str)
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees, sunny"})
    second = client.responses.create(input=items, tool_choice="none", **options)
    assert second.output_text and [item.type for item in second.output] == ["message"]


def test_a_response_that_continues_another(client: Any) -> None:
    """The server keeps the first one, streamed or not, until it is deleted."""
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input=ABOUT, instructions="Be brief.", **options)
    second = client.responses.create(input="How old?", previous_response_id=first.id, **options)
    items: Any = [{"role": "user", "content": ABOUT}, *first.output, {"role": "user", "content": "How old?"}]
    same = client.responses.create(input=items, store=False, **options)
    assert second.output_text == same.output_text and second.usage.input_tokens == same.usage.input_tokens
    with client.responses.stream(input="Sure?", previous_response_id=second.id, **options) as stream:
        *_, last = stream  # the answer may be cut off
    third = last.response
    assert third.previous_response_id == second.id and third.usage.input_tokens > second.usage.input_tokens
    assert client.responses.retrieve(third.id).output_text == third.output_text
    client.responses.delete(third.id)
    for gone in (third.id, same.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input="And?", previous_response_id=gone, **options)
        assert caught.value.code == "previous_response_not_found"


def test_a_custom_tool(client: Any) -> None:
    """The model is made to call it; its input is a text, and the model continues after its output."""
    tool: Any = {"type": "custom", "name": "note", "description": "Writes a note."}
    options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "tools": [tool]}
    options["parallel_tool_calls"] = False
    choice: Any = {"type": "custom", "name": "note"}
    with client.responses.stream(input=ABOUT, tool_choice=choice, **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    assert "response.custom_tool_call_input.delta" in kinds
    (call,) = [item for item in first.output if item.type == "custom_tool_call"]
    assert call.name == "note" and isinstance(call.input, str)
    output: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "written"}]
    second = client.responses.create(
        input=output, previous_response_id=first.id, tool_choice="none", **{**options, "max_output_tokens": 8}
    )
    assert [item.type for item in second.output] == ["message"]
