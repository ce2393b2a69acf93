"""Ollama's Python client against SmolLM2: answers, streams, formats, tools and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import ABOUT, MODEL

ollama = pytest.importorskip("ollama")
pydantic = pytest.importorskip("pydantic")

OPTIONS = {"temperature": 0, "num_predict": 40}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url.removesuffix("/v1")) as found:
        yield found


def test_an_answer_and_its_stream(client: Any) -> None:
    messages = [{"role": "user", "content": ABOUT}]
    whole = client.chat(MODEL, messages, options=OPTIONS)
    parts = [*client.chat(MODEL, messages, options=OPTIONS, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count and whole.total_duration > 0


def test_texts(client: Any) -> None:
    whole = client.generate(MODEL, ABOUT, options=OPTIONS)
    parts = [*client.generate(MODEL, ABOUT, options=OPTIONS, stream=True)]
    assert "".join(part.response for part in parts) == whole.response
    raw = client.generate(MODEL, "Once upon a time", raw=True, options=OPTIONS)
    assert raw.response and raw.done_reason in ("stop", "length")


def test_a_format(client: Any) -> None:
    messages = [{"role": "user", "content": ABOUT}]
    schema = Person.model_json_schema()
    reply = client.chat(MODEL, messages, format=schema, options={**OPTIONS, "num_predict": 120})
    assert Person.model_validate_json(reply.message.content)


def test_tools(client: Any) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name
        """
        return f"20 degrees in {city}"

    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    reply = client.chat(MODEL, messages, tools=[get_weather], options=OPTIONS)
    assert reply.message.content or reply.message.tool_calls
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "20 degrees"},
    ]
    assert client.chat(MODEL, messages, options=OPTIONS).message.content


def test_models(client: Any) -> None:
    (model,) = client.list().models
    assert model.model == MODEL and model.details.quantization_level == "Q4_1"
    assert client.ps().models[0].context_length > 0
    shown = client.show(MODEL)
    assert shown.modelinfo["general.architecture"] == "llama" and "completion" in shown.capabilities


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as caught:
        client.chat(MODEL, [{"role": "user", "content": "a"}], options={"temperature": -1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="this model reads text only"):
        client.generate(MODEL, "a", images=["aaaa"])
