"""LangChain's client of OpenAI against SmolLM2, with its defaults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

langchain_openai = pytest.importorskip("langchain_openai")

from langchain_core.messages import HumanMessage, SystemMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402
from typing_extensions import TypedDict  # noqa: E402

# The client itself keeps what it parsed in a field that its library describes as empty.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")


class Person(BaseModel):
    """Someone whom a text speaks of."""

    name: str = Field(description="The first name", max_length=20)
    age: int
    city: str | None = Field(default=None, max_length=20)


class City(TypedDict):
    """A city."""

    name: str
    capital: bool


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"20 degrees in {city} for {days} days"


@pytest.fixture
def llm(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=120, max_retries=0
    )


def test_an_answer(llm: Any) -> None:
    reply = llm.invoke([SystemMessage("Be brief."), HumanMessage("Hello")])
    assert reply.content and reply.usage_metadata["output_tokens"] > 0
    assert reply.response_metadata["model_name"] == MODEL


def test_a_stream(llm: Any) -> None:
    assert "".join(chunk.content for chunk in llm.stream("Hello")) == llm.invoke("Hello").content


def test_counts_of_a_stream(llm: Any) -> None:
    *_, last = llm.stream("Hello", stream_usage=True)
    whole = sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in (*_, last))
    assert whole > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(llm: Any, method: str) -> None:
    """The first is its default."""
    assert isinstance(llm.with_structured_output(Person, method=method).invoke(ABOUT), Person)


def test_structured_output_by_default(llm: Any) -> None:
    found = llm.with_structured_output(Person, include_raw=True).invoke(ABOUT)
    assert isinstance(found["parsed"], Person) and found["parsing_error"] is None


def test_structured_output_without_a_class(llm: Any) -> None:
    """Schemas that do not say that they are closed; ``strict`` is false."""
    found = llm.with_structured_output(City).invoke("Paris is a capital.")
    assert set(found) == {"name", "capital"} and isinstance(found["capital"], bool)
    schema = {**Person.model_json_schema(), "title": "Person"}
    assert set(llm.with_structured_output(schema).invoke(ABOUT)) <= {"name", "age", "city"}


def test_structured_output_as_it_comes(llm: Any) -> None:
    *_, last = llm.with_structured_output(Person).stream(ABOUT)
    assert isinstance(last, Person)


def test_bound_tools(llm: Any) -> None:
    """SmolLM2 may call them or not."""
    reply = llm.bind_tools([get_weather]).invoke("What is the weather in Paris?")
    assert (reply.content or reply.tool_calls) and not reply.invalid_tool_calls


@pytest.mark.parametrize("choice", ["any", "get_weather", True])
def test_bound_tools_in_two_requests(llm: Any, choice: Any) -> None:
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    bound = llm.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    messages.append(bound.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    messages.append(get_weather.invoke(call))
    assert messages[-1].tool_call_id == call["id"]
    assert llm.invoke(messages).content


def test_tools_that_are_classes(llm: Any) -> None:
    """``strict`` is sent with these."""
    reply = llm.bind_tools([Person], tool_choice="required", strict=True).invoke(ABOUT)
    for call in reply.tool_calls:
        Person.model_validate(call["args"])
    assert reply.tool_calls and not reply.invalid_tool_calls


def test_streamed_calls(llm: Any) -> None:
    first, *more = llm.bind_tools([get_weather], tool_choice="any").stream("What is the weather in Paris?")
    for chunk in more:
        first += chunk
    assert first.tool_calls and not first.invalid_tool_calls
    assert all(call["name"] == "get_weather" and "city" in call["args"] for call in first.tool_calls)


def test_without_blocking(llm: Any) -> None:
    async def both() -> list[Any]:
        structured = llm.with_structured_output(Person)
        try:
            return await asyncio.gather(llm.ainvoke("Hello"), structured.ainvoke(ABOUT))
        finally:
            await llm.root_async_client.close()

    text, person = asyncio.run(both())
    assert text.content and isinstance(person, Person)


def test_responses(url: str) -> None:
    """By OpenAI's newer route, whole and as it comes."""
    llm = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=40, use_responses_api=True
    )
    whole = llm.invoke("Hello")
    assert whole.text and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in llm.stream("Hello")) == whole.text
