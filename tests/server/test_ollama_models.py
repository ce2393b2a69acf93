"""Ollama's routes about the one model, its vectors, and the list of models for each kind of client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.api_pieces import facts
from support.changed_models import changed
from support.served import Served, served

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.server.protocol import ollama_models
from hotcold.server.protocol.errors import APIError
from tests.server.conftest import Application

TEXTS = ["Once upon a time", "there was a fox", "a"]
CONTEXT = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"bamboo.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    return changed(model_path(), tmp_path_factory.mktemp("models") / "vectors.gguf", keys)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served("-m", str(model), "-t", "1", "-c", str(CONTEXT)) as found:
        yield found


def post(server: Served, path: str, **body: Any) -> Any:
    with server.client() as client:
        return client.post(path, json=body)


def test_vectors(server: Served, model: Path) -> None:
    """As those of Python; the counts are those of all texts."""
    with LLM(model) as llm:
        expected = llm.embed(TEXTS)
        tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    reply = post(server, "/api/embed", model="any", input=TEXTS, keep_alive=5, options={"num_ctx": 9}).json()
    assert np.array_equal(np.array(reply["embeddings"], np.float32), expected)
    assert reply["model"] == "vectors" and reply["prompt_eval_count"] == tokens
    assert reply["total_duration"] > 0 and reply["load_duration"] == 0
    one = post(server, "/api/embed", input=TEXTS[1]).json()
    assert np.array_equal(np.array(one["embeddings"], np.float32), expected[1:2])
    older = post(server, "/api/embeddings", model="any", prompt=TEXTS[1]).json()
    assert older == {"embedding": one["embeddings"][0]}


def test_without_a_text_there_are_no_vectors(server: Served) -> None:
    for body in ({}, {"input": ""}, {"input": []}):
        assert post(server, "/api/embed", **body).json()["embeddings"] == []
    assert post(server, "/api/embeddings", model="any").json() == {"embedding": []}


def test_a_text_that_is_too_long_is_cut_or_refused(server: Served, model: Path) -> None:
    """A text that was cut has its first tokens, and EOS."""
    for text in ("fox " * 200, "fox " * 100_000):
        with LLM(model) as llm:
            ids = llm.tokenizer.encode(text[:2000])
            expected = llm.embed([*ids[: CONTEXT - 2], ids[-1]])
        found = post(server, "/api/embed", input=text).json()
        assert np.array_equal(np.float32(found["embeddings"][0]), expected)
        assert found["prompt_eval_count"] == CONTEXT - 1
        older = post(server, "/api/embeddings", prompt=text).json()
        assert np.array_equal(np.float32(older["embedding"]), expected)
        reply = post(server, "/api/embed", input=text, truncate=False)
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("the input length exceeds the context length: ")


def test_a_model_that_gives_no_vectors(app: Application) -> None:
    for path, body in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
        reply = app.client.post(path, json=body)
        assert reply.status_code == 400 and "no pooling type" in reply.json()["error"]
    assert "embedding" not in app.client.post("/api/show", json={}).json()["capabilities"]


@pytest.mark.parametrize(
    "body",
    [
        {"input": 5}, {"input": [["a"]]}, {"input": [1, 2]}, {"input": ["a", None]}, {"truncate": "maybe"},
        {"input": ["a"] * 3000}, {"input": "\ud800"}, {"input": "a", "dimensions": 0},
        {"input": "a", "dimensions": "many"}, [], "a", None,
    ],
)  # fmt: skip
def test_bodies_that_are_wrong(server: Served, body: Any) -> None:
    with server.client() as client:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        reply = client.post("/api/embed", content=data, headers=kind)
    assert reply.status_code == 400 and isinstance(reply.json()["error"], str)


def test_pulling_the_model_that_is_served(app: Application) -> None:
    for name in ("made-up", "made-up:latest", "Made-Up"):
        reply = app.client.post("/api/pull", json={"model": name, "stream": False})
        assert reply.status_code == 200 and reply.json() == {"status": "success"}
    reply = app.client.post("/api/pull", json={"name": "made-up", "insecure": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in reply.text.splitlines()][-1] == {"status": "success"}


@pytest.mark.parametrize("name", ["llama3.2", "made-up:7b", "made", "other\nmodel", "x" * 500])
@pytest.mark.parametrize("stream", [False, True])
def test_no_other_model_is_pulled(app: Application, name: str, stream: bool) -> None:
    reply = app.client.post("/api/pull", json={"model": name, "stream": stream})
    assert reply.status_code == 404 and "success" not in reply.text
    error = reply.json()["error"]
    assert "is not served here: this server has made-up" in error and "\n" not in error and len(error) < 400
    assert app.client.post("/api/pull", json={}).status_code == 400


@pytest.mark.parametrize("served_as", ["hf:Own/Name:Q4_K_M", "hf.co/own/name:q4_k_m"])
def test_names_of_the_hub(served_as: str) -> None:
    known = facts(aliases=("file", served_as))
    for name in (
        "hf.co/own/name:Q4_K_M",
        "https://huggingface.co/Own/Name:Q4_K_M",
        "own/name:q4_k_m",
        "FILE",
    ):
        assert ollama_models.pulled(known, name)[-1] == {"status": "success"}
    for name in ("hf.co/own/name:Q8_0", "hf.co/other/name:Q4_K_M", "hf.co/own/name"):
        with pytest.raises(APIError, match="is not served here"):
            ollama_models.pulled(known, name)


def test_the_name_on_the_hub_is_an_alias(app_with: Any) -> None:
    app = app_with(hub_name="hf:own/name:Q4_K_M")
    (entry,) = app.client.get("/v1/models").json()["data"]
    assert entry["id"] == "made-up" and entry["aliases"] == ["hf:own/name:Q4_K_M"]
    assert app.client.post("/api/pull", json={"model": "hf.co/own/name:Q4_K_M"}).status_code == 200


def test_one_list_of_models_for_all_clients(app: Application) -> None:
    reply = app.client.get("/v1/models").json()
    (entry,) = reply["data"]
    assert reply["object"] == "list" and entry["object"] == "model"  # OpenAI's
    assert (reply["has_more"], reply["first_id"], reply["last_id"]) == (False, "made-up", "made-up")
    assert entry["type"] == "model" and entry["display_name"] == "made-up"  # Anthropic's
    assert datetime.fromisoformat(entry["created_at"]).timestamp() == entry["created"]
    for length in ("max_model_len", "context_length", "max_input_tokens"):
        assert entry[length] == 256, length
    assert entry["meta"]["n_ctx"] == 256  # llama.cpp's
    assert reply["models"][0]["capabilities"] == ["completion", "tools"]
    assert app.client.get("/v1/models/made-up").json() == entry


def test_the_context_is_the_servers(server: Served) -> None:
    """The file's own is 256 tokens or more; a client that went by it would write too long prompts."""
    with server.client() as client:
        shown = client.post("/api/show", json={}).json()
        assert shown["model_info"]["bamboo.context_length"] == CONTEXT
        assert f"num_ctx {CONTEXT}" in shown["parameters"]
        assert client.get("/api/ps").json()["models"][0]["context_length"] == CONTEXT
        assert client.get("/props").json()["default_generation_settings"]["n_ctx"] == CONTEXT
        (entry,) = client.get("/v1/models").json()["data"]
        assert entry["max_model_len"] == entry["context_length"] == entry["meta"]["n_ctx"] == CONTEXT
        assert entry["meta"]["n_ctx_train"] > CONTEXT


def test_the_version_is_one_that_clients_take(app: Application) -> None:
    """Codex wants 0.13.4 and Copilot 0.6.4; Hotcold's own is beside it."""
    from hotcold.version import __version__

    found = app.client.get("/api/version").json()
    assert tuple(map(int, found["version"].split("."))) >= (0, 13, 4) and found["hotcold"] == __version__


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/push"), ("GET", "/v1/nothing"), ("DELETE", "/api/x"), ("POST", "/v1/messages/batches")],
)
def test_a_route_that_is_missing_is_named(app: Application, method: str, path: str) -> None:
    reply = app.client.request(method, path)
    assert reply.status_code == 404
    assert f"there is no route {method} {path}; routes are listed at GET /openapi.json" in reply.text


def test_a_missing_route_is_printed_on_one_line(app: Application) -> None:
    message = app.client.get("/a%0Ab%1B" + "c" * 5000).json()["error"]["message"]
    assert message.isprintable() and len(message) < 250
