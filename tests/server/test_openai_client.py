"""OpenAI's own Python client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.served import Served, served

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "system", "content": "Stories."}, {"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("-t", "1", "--alias", "storyteller", environment={"HOTCOLD_API_KEY": "k-1"}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k-1", max_retries=0) as found:
        yield found


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "storyteller" and client.models.retrieve("storyteller").id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_chat(client: Any) -> None:
    reply = client.chat.completions.create(
        model="storyteller", messages=MESSAGES, max_tokens=12, temperature=0
    )
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_a_streamed_chat_is_the_same(client: Any) -> None:
    options: Any = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert last.usage.completion_tokens == 12 and not last.choices
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_leaving_a_stream(client: Any, server: Served) -> None:
    stream = client.chat.completions.create(
        model="storyteller", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.models.list().data


def test_log_probabilities(client: Any) -> None:
    reply = client.chat.completions.create(
        model="storyteller", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    tokens = reply.choices[0].logprobs.content
    assert tokens
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes).decode() == token.token


def test_completions(client: Any) -> None:
    reply = client.completions.create(
        model="storyteller", prompt=["Once upon a time", "The cat"], max_tokens=5, n=2, seed=7
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) > 1
    again = client.completions.create(
        model="storyteller", prompt=["Once upon a time", "The cat"], max_tokens=5, n=2, seed=7
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in reply.choices]


def test_an_echo_with_log_probabilities(client: Any) -> None:
    """An evaluation harness asks for scores of texts."""
    reply = client.completions.create(
        model="storyteller", prompt="Once upon a time there", max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = reply.choices
    assert choice.text == "Once upon a time there"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(each <= 0 for each in choice.logprobs.token_logprobs[1:])


def test_answers_that_match_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    reply = client.chat.completions.create(
        model="storyteller", messages=MESSAGES, max_tokens=60, temperature=0, response_format=form
    )
    assert reply.choices[0].message.content.lstrip().startswith("{")


def test_a_response(client: Any) -> None:
    """The newer route gives the chat route's answer to the same conversation, whole and in pieces."""
    options: Any = {"model": "storyteller", "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **options)
    options |= {"instructions": "Stories.", "input": "Once upon a time", "max_output_tokens": 12}
    reply = client.responses.create(**options)
    assert reply.output_text == chat.choices[0].message.content
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == reply.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_a_response_as_the_client_puts_it_together(client: Any) -> None:
    options: Any = {"model": "storyteller", "input": "Once upon a time", "temperature": 0}
    with client.responses.stream(**options, max_output_tokens=200) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds.count("response.output_text.done") == 1
    assert last is None or last.output_text == client.responses.create(**options).output_text
    for wrong in ({"background": True}, {"truncation": "auto"}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**options, **wrong)
        assert caught.value.param == next(iter(wrong)) and caught.value.code == "unsupported_parameter"


def test_errors(client: Any, server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="storyteller", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code and caught.value.request_id
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="storyteller", prompt="word " * 1000)
    assert caught.value.code == "context_length_exceeded"
    reply = client.completions.create(model="another", prompt="a")  # there is one model, which says its name
    assert reply.model == client.models.list().data[0].id
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k-2", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_client_that_does_not_wait(client: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.0001).completions.create(model="storyteller", prompt="Once")
