"""Pydantic AI against SmolLM2, with its defaults: an agent's output is the call of a tool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

pydantic_ai = pytest.importorskip("pydantic_ai")

from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from tests.clients.people import City, Person  # noqa: E402


@pytest.fixture
def model(url: str, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    provider = OpenAIProvider(base_url=url, api_key="none")
    yield OpenAIChatModel(MODEL, provider=provider)
    loop.run_until_complete(provider.client.close())


def agent(model: Any, **more: Any) -> Any:
    return pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 120}, **more)


def test_a_text(model: Any) -> None:
    run = agent(model, system_prompt="You are a fox.", instructions="Be brief.").run_sync("Hello")
    assert run.output and run.usage.output_tokens > 0


def test_an_output_of_a_class(model: Any) -> None:
    assert isinstance(agent(model, output_type=Person).run_sync(ABOUT).output, Person)


def test_one_of_several_classes(model: Any) -> None:
    """Each is a tool of its own."""
    run = agent(model, output_type=[City, Person]).run_sync(ABOUT)
    assert isinstance(run.output, City | Person)


def test_an_output_by_response_format(model: Any) -> None:
    run = agent(model, output_type=pydantic_ai.NativeOutput(Person)).run_sync(ABOUT)
    assert isinstance(run.output, Person)


def test_tools(model: Any) -> None:
    """SmolLM2 may call the tool, and gets the result, or not; it may go on calling, which the agent ends."""
    called = []
    found = agent(model)

    @found.tool_plain
    def get_weather(city: str, days: int = 1) -> str:
        """The weather of a city.

        Args:
            city: its name
            days: how many
        """
        called.append((city, days))
        return "20 degrees, sunny"

    try:
        run = found.run_sync(
            "What is the weather in Paris?", usage_limits=pydantic_ai.UsageLimits(request_limit=3)
        )
    except pydantic_ai.UsageLimitExceeded:
        assert called
    else:
        assert run.output
    assert all(isinstance(city, str) and isinstance(days, int) for city, days in called)


@pytest.mark.parametrize(("output", "then"), [(str, "none"), (Person, ["final_result"])])
def test_a_tool_and_then_the_output(model: Any, output: Any, then: Any) -> None:
    """The loop of two requests: the second has the call and what it gave. SmolLM2 would rather not call, and
    then would rather not stop."""

    def settings(run: Any) -> Any:
        choice = ["get_weather"] if run.run_step == 1 else then
        return {"temperature": 0, "max_tokens": 120, "tool_choice": choice}

    found = pydantic_ai.Agent(model, model_settings=settings, output_type=output)
    called = []

    @found.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "20 degrees, sunny"

    run = found.run_sync(ABOUT)
    assert called and isinstance(run.output, output) and run.usage.requests == 2


def test_some_of_the_tools(model: Any) -> None:
    """A choice of several tools; the agent's output is one of them."""
    settings: Any = {"temperature": 0, "max_tokens": 120, "tool_choice": ["final_result"]}
    found = pydantic_ai.Agent(model, model_settings=settings, output_type=City)

    @found.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        raise AssertionError("it was not to be called")

    assert isinstance(found.run_sync(ABOUT).output, City)


def test_a_streamed_text(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def pieces() -> list[str]:
        async with agent(model).run_stream("Hello") as run:
            found = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
            assert run.usage.output_tokens > 0
            return found

    found = loop.run_until_complete(pieces())
    assert len(found) > 1 and "".join(found)


def test_a_streamed_output(model: Any, loop: asyncio.AbstractEventLoop) -> None:
    async def last() -> Any:
        async with agent(model, output_type=Person).run_stream(ABOUT) as run:
            return await run.get_output()

    assert isinstance(loop.run_until_complete(last()), Person)


def test_another_try(model: Any) -> None:
    """An output that the agent refuses goes back to the model as the result of the tool."""
    found = agent(model, output_type=City, retries=2)
    tries = []

    @found.output_validator
    def not_the_first(output: City) -> City:
        tries.append(output)
        if len(tries) == 1:
            raise pydantic_ai.ModelRetry("Name the city only.")
        return output

    assert isinstance(found.run_sync(ABOUT).output, City) and len(tries) == 2


def test_an_address_from_the_environment(
    url: str, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    found = agent(f"openai-chat:{MODEL}")
    assert found.run_sync("Hello").output
    loop.run_until_complete(found.model.client.close())


def test_responses(url: str, loop: asyncio.AbstractEventLoop) -> None:
    """By OpenAI's newer route: a tool and then an output of a class, in two requests."""

    def settings(run: Any) -> Any:
        choice = ["get_weather"] if run.run_step == 1 else ["final_result"]
        return {"temperature": 0, "max_tokens": 120, "tool_choice": choice}

    provider = OpenAIProvider(base_url=url, api_key="none")
    model = OpenAIResponsesModel(MODEL, provider=provider)
    found = pydantic_ai.Agent(model, model_settings=settings, output_type=Person)
    called = []

    @found.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "20 degrees, sunny"

    assert isinstance(found.run_sync(ABOUT).output, Person) and called
    loop.run_until_complete(provider.client.close())
