"""Instructor against SmolLM2, with its defaults: a tool must be called; where that fails it asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

instructor = pytest.importorskip(
    "instructor", reason="it wants older libraries than other clients: extra test-instructor"
)

import openai  # noqa: E402
from pydantic import BaseModel, Field, field_validator  # noqa: E402

from tests.clients.people import City, Person  # noqa: E402


@pytest.fixture
def client(url: str) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0))


def options(**more: Any) -> dict[str, Any]:
    about = [{"role": "user", "content": ABOUT}]
    return {"model": MODEL, "messages": about, "max_tokens": 120, "temperature": 0, "max_retries": 1, **more}


def test_a_model(client: Any) -> None:
    assert isinstance(client.create(response_model=Person, **options()), Person)


def test_by_the_name_of_the_provider(url: str) -> None:
    client = instructor.from_provider(f"openai/{MODEL}", base_url=url, api_key="none")
    found = client.create(response_model=City, messages=options()["messages"], max_tokens=120)
    assert isinstance(found, City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_modes(url: str, mode: str) -> None:
    made = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(made, mode=instructor.Mode[mode])
    person, completion = client.create_with_completion(response_model=Person, **options())
    assert isinstance(person, Person) and completion.usage.completion_tokens > 0


def test_a_list(client: Any) -> None:
    found = client.create(response_model=Iterable[City], **options())
    assert all(isinstance(each, City) for each in found)


def test_a_partial_model(client: Any) -> None:
    *_, last = client.create_partial(response_model=Person, **options())
    assert Person.model_validate(last.model_dump())


def test_another_try(client: Any) -> None:
    """The first answer is refused and goes back with the reason."""
    tries: list[str] = []

    class Picky(BaseModel):
        name: str = Field(max_length=20)

        @field_validator("name")
        @classmethod
        def not_the_first(cls, value: str) -> str:
            tries.append(value)
            if len(tries) == 1:
                raise ValueError("name a person")
            return value

    assert isinstance(client.create(response_model=Picky, **options(max_retries=2)), Picky)
    assert len(tries) == 2


def test_without_blocking(url: str) -> None:
    async def found() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
            return await instructor.from_openai(made).create(response_model=City, **options())

    assert isinstance(asyncio.run(found()), City)
