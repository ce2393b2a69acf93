"""The server's own description says what the server does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api_pieces import Marked, facts, filling, likely, piece

from hotcold.server import openapi
from hotcold.server.protocol import (
    anthropic,
    chat,
    completion,
    embeddings,
    infill,
    models,
    native,
    ollama,
    ollama_embeddings,
    ollama_models,
    props,
    responses,
    sampling,
    tokens,
)
from hotcold.server.protocol.dialects import anthropic_error, ollama_error
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import NUMBER, Real, Whole
from hotcold.server.protocol.json_parts import json_parts
from hotcold.server.protocol.limits import LARGEST


def validator(name: str) -> Any:
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="compares with a validator of JSON Schema")
    document = {**openapi.document(), "$ref": f"#/components/schemas/{name}"}
    return jsonschema_rs.validator_for(json.loads(json.dumps(document)))


def pooled(known: Facts) -> Facts:
    """Facts of a model that gives vectors as long as a request may ask for."""
    return replace(known, pooling="last", meta={"n_embd": LARGEST})


def filling_in(known: Facts) -> Facts:
    """Facts of a model that fills in between texts."""
    return replace(known, tokenizer=filling())


PARSERS: dict[str, Callable[[object, Facts], Any]] = {
    "ChatRequest": chat.parse,
    "CompletionRequest": lambda body, known: completion.parse(body, filling_in(known)),
    "NativeRequest": native.parse,
    "MessagesRequest": anthropic.parse,
    "CountRequest": anthropic.parse_count,
    "InfillRequest": lambda body, known: infill.parse(body, filling_in(known)),
    "TemplateRequest": props.parse_template,
    "ResponseRequest": responses.parse,
    "EmbeddingsRequest": lambda body, known: embeddings.parse(body, pooled(known)),
    "OllamaChatRequest": ollama.parse_chat,
    "OllamaRequest": lambda body, known: ollama.parse_generate(body, filling_in(known)),
    "OllamaShowRequest": ollama.parse_show,
    "OllamaPullRequest": ollama.parse_pull,
    "OllamaEmbedRequest": lambda body, known: ollama_embeddings.parse_embed(body, pooled(known)),
    "OllamaEmbeddingsRequest": lambda body, known: ollama_embeddings.parse_embeddings(body, pooled(known)),
    "TokenizeRequest": tokens.parse_tokenize,
    "DetokenizeRequest": tokens.parse_detokenize,
}
BASES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"model": "fable", "messages": [{"role": "user", "content": "a"}]},
    "CompletionRequest": {"prompt": "a"},
    "NativeRequest": {"prompt": "a"},
    "MessagesRequest": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    "CountRequest": {"messages": [{"role": "user", "content": "a"}]},
    "InfillRequest": {"input_prefix": "a", "input_suffix": "b"},
    "TemplateRequest": {"messages": [{"role": "user", "content": "a"}]},
    "ResponseRequest": {"input": "a"},
    "EmbeddingsRequest": {"input": "a"},
    "OllamaChatRequest": {"messages": [{"role": "user", "content": "a"}]},
    "OllamaRequest": {"prompt": "a"},
    "OllamaShowRequest": {"model": "a"},
    "OllamaPullRequest": {"model": "fable"},
    "OllamaEmbedRequest": {"input": "a"},
    "OllamaEmbeddingsRequest": {"prompt": "a"},
    "TokenizeRequest": {"content": "a"},
    "DetokenizeRequest": {"tokens": [1]},
}


def test_every_request_is_compared() -> None:
    assert PARSERS.keys() == BASES.keys() == {each.body for each in openapi.OPERATIONS if each.body}


def refused(name: str, body: Any) -> bool:
    try:
        PARSERS[name](body, facts())
    except APIError:
        return True
    return False


#: Fields whose values are right alone and wrong beside others, or with this model.
DEPENDS = {
    "model", "top_logprobs", "stream_options", "tool_choice", "tools", "samplers", "best_of", "messages",
    "response_format", "json_schema", "logit_bias", "format", "system", "raw", "input", "prompt",
    "tokens", "n", "previous_response_id",
}  # fmt: skip

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 130),
    st.sampled_from([1 << 31, 1 << 64, -(1 << 63), 1e308, 5.0, 0.5, -0.5, 1e9]),
    st.text(max_size=3),
    st.sampled_from(["none", "auto", "required", "low", "function", "text"]),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=2), st.lists(st.integers(0, 9))), max_size=20),
    st.dictionaries(st.sampled_from(["1", "a", "type", "picture", "schema"]), st.integers(-200, 200)),
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_field_is_refused_where_the_description_refuses_it(name: str, data: st.DataObject) -> None:
    fields = openapi.document()["components"]["schemas"][name]["properties"]
    field = data.draw(st.sampled_from(sorted(fields)))
    body = {**BASES[name], field: data.draw(VALUES)}
    valid = validator_of(name).is_valid(body)
    if field in DEPENDS or is_number(
        body[field]
    ):  # the description cannot say everything, but what it refuses is refused
        assert valid or refused(name, body)
    else:
        assert valid is not refused(name, body)


def is_number(value: Any) -> bool:
    """True for a number as text, because no pattern can express its bounds."""
    return isinstance(value, str) and re.fullmatch(NUMBER, value) is not None


@given(st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False, allow_infinity=False))
@example(0)
@example(-1)
@example(5.0)
@example(1e-7)
def test_a_number_as_text_is_the_number(number: float) -> None:
    """It is taken where the number is, and as the same, and described where it is taken."""
    text = json.dumps(number)
    assert is_number(text)
    for kind in (Whole(-1, 100, without=0), Whole(0), Real(-2, 2), Real(0, 1e308)):
        assert reading(kind, text) == reading(kind, number)
        assert type(reading(kind, text)) is type(reading(kind, number))


def reading(kind: Whole | Real, value: Any) -> float | None:
    try:
        return kind.read(value, "x")
    except APIError:
        return None


_validators: dict[str, Any] = {}


def validator_of(name: str) -> Any:
    if name not in _validators:
        _validators[name] = validator(name)
    return _validators[name]


def test_the_document_is_plain_json_and_complete() -> None:
    document = openapi.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for each in openapi.OPERATIONS:
        operation = document["paths"][each.path][each.method.lower()]
        assert operation["operationId"] == each.name
    assert len({each.name for each in openapi.OPERATIONS}) == len(openapi.OPERATIONS)


def replies() -> dict[str, Any]:
    """One of each."""
    known = facts()
    call = chat.parse({**BASES["ChatRequest"], "logprobs": True, "top_logprobs": 2}, known)
    answer = call.reply(Marked)
    answer.add(0, piece("<a>b[f {}]", [300], "stop", logprobs=(likely(300),)))
    texts = completion.parse({"prompt": "Once", "echo": True, "logprobs": 2}, known)
    ids = texts.encode()
    found = (None, *(likely(id) for id in ids[0][1:]))
    text = texts.reply(ids)
    text.add(0, piece("b", [300], "length", logprobs=(likely(300),), prompt_logprobs=found))
    plain = native.parse({"prompt": "Once"}, known)
    own = plain.reply(plain.encode())
    own.add(0, piece("b", [300], "length"))
    blocks = anthropic.parse({**BASES["MessagesRequest"]}, known).reply(Marked)
    blocks.add(0, piece("<a>b[f {}]", [300], "stop"))
    lines = ollama.parse_chat(BASES["OllamaChatRequest"], known).reply(Marked)
    lines.add(0, piece("<a>b[f {}]", [300], "stop"))
    line = ollama.parse_generate({"prompt": "a", "raw": True}, known).reply([[1]])
    line.add(0, piece("b", [300], "length"))
    items = responses.parse(BASES["ResponseRequest"], known).reply(Marked)
    items.add(0, piece("<a>b[f {}]", [300], "stop"))
    return {
        "Prompt": {"prompt": "a"},
        "Response": items.whole(),
        "OllamaChatReply": lines.whole(),
        "OllamaReply": line.whole(),
        "OllamaModels": ollama_models.tags(known, {}),
        "OllamaModel": ollama_models.show(known, {}, "", thinks=True),
        "OllamaError": ollama_error(APIError("no")),
        "Version": ollama_models.version(),
        "MessagesReply": blocks.whole(),
        "TokenCount": {"input_tokens": 1},
        "AnthropicError": anthropic_error(APIError("no")),
        "ChatReply": answer.whole(),
        "CompletionReply": text.whole(),
        "NativeReply": own.whole(),
        "Tokens": tokens.parse_tokenize({"content": "a €", "with_pieces": True}, known).answer(),
        "Content": tokens.parse_detokenize({"tokens": [300]}, known).answer(),
        "Models": models.listing(known),
        "Model": models.one(known, "fable"),
        "Error": APIError("no").body(),
    }


@pytest.mark.parametrize("name", sorted(replies()))
def test_replies_are_as_described(name: str) -> None:
    reply = json.loads(b"".join(json_parts(replies()[name])))
    schema = validator_of(name)
    schema.validate(reply)
    for key in reply:
        if key != "timings":
            without = {other: value for other, value in reply.items() if other != key}
            assert key not in schema_keys(name) or not schema.is_valid(without), key


def schema_keys(name: str) -> list[str]:
    found: list[str] = openapi.document()["components"]["schemas"][name].get("required", [])
    return found


def test_a_table_for_the_documentation() -> None:
    table = openapi.table(chat.FIELDS)
    lines = table.splitlines()
    assert all(f"`{name}`" in table for name in chat.FIELDS)
    assert "| `temperature` | 0 to 100 |  | 0 always takes the likeliest token. |" in lines
    assert "| `top_k` | -1 to 2^31 - 1 |  | Keeps the k likeliest tokens; 0 and -1 keep all. |" in lines
    assert "| `max_tokens` | -1 to 2^31 - 1, not 0 |  | Another name for max_completion_tokens. |" in lines
    assert "| `stream` | true, false | `false` | Streams the answer" in table
    assert '`modalities` (`["text"]`)' in lines[-1] and "`chat_template`," in lines[-1]


@pytest.mark.parametrize(
    "each", [each for each in openapi.OPERATIONS if each.fields], ids=lambda each: each.name
)
def test_the_documentation_has_these_tables(each: openapi.Operation, repository: Path) -> None:
    """Where it has not, this prints what belongs there."""
    text = (repository / "docs" / "http_api.md").read_text(encoding="utf-8")
    assert each.fields is not None
    table = openapi.table(each.fields)
    assert f"`{each.method} {each.path}`" in text
    assert table in text, table


def test_the_documentation_states_the_order_of_samplers(repository: Path) -> None:
    text = " ".join((repository / "docs" / "http_api.md").read_text(encoding="utf-8").split())
    assert f"**Samplers** run in the order {', '.join(sampling.SAMPLERS)}. " in text


def test_the_routes_are_those_that_are_described() -> None:
    served = {(method, route.path) for route in routes(None) for method in route.methods}
    described = {(each.method, each.path.replace("{name}", "{name:path}")) for each in openapi.OPERATIONS}
    assert described <= served
    bare = {(method, path.removeprefix("/v1")) for method, path in described}
    heads = {("HEAD", path) for method, path in bare if method == "GET"}
    assert {(method, path.removeprefix("/v1")) for method, path in served} == bare | heads


def routes(service: Any) -> list[Any]:
    from hotcold.server.routes import api_routes

    return list(api_routes(service))
