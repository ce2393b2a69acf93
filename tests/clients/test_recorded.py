"""Requests that clients sent once (make_corpus.py) are taken: none of them need be installed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotcold.grammar.constraint import Grammars
from tests.server.conftest import Application, application

HERE = Path(__file__).resolve().parent
HEADERS = json.loads((HERE / "headers.json").read_text(encoding="utf-8"))
#: The routes of clients that do not ask OpenAI's chat route, and the last event of their streams.
ROUTES = {
    "claude-code": ("/v1/messages", "event: message_stop\n"),
    "codex": ("/v1/responses", "event: response.completed\n"),
}
CHAT = ("/v1/chat/completions", "data: [DONE]")
SEEDS = sorted(
    path
    for path in (HERE.parent / "corpus" / "client_requests").iterdir()
    if path.name.partition("_")[0] in HEADERS
)


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.made_up_llm.CONTEXT", 8192)
        with application() as found:
            yield found


@pytest.fixture(scope="module")
def grammars(app: Application) -> Iterator[Grammars]:
    found = Grammars(app.llm.tokenizer)
    yield found
    found.close()


def body_of(seed: Path) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for line in seed.read_text(encoding="utf-8").splitlines():
        body |= json.loads(line)
    return body


@pytest.mark.parametrize("seed", SEEDS, ids=[path.stem for path in SEEDS])
def test_a_request(seed: Path, app: Application, grammars: Grammars) -> None:
    body = {**body_of(seed), "model": "made-up"}
    forced = "response_format" in body or body.get("tool_choice", "auto") not in ("auto", "none")
    before = len(app.llm.jobs)
    client = seed.name.partition("_")[0]
    route, end = ROUTES.get(client, CHAT)
    reply = app.client.post(route, json=body, headers=HEADERS[client])
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        assert reply.text.removesuffix("\n\n").rpartition("\n\n")[2].startswith(end)
    (job,) = app.llm.jobs[before:]
    assert job.grammar is not None or not forced
    if job.grammar is not None:
        grammars.check(job.grammar)


def test_each_client_was_recorded() -> None:
    clients = {path.name.partition("_")[0] for path in SEEDS}
    libraries = {"instructor", "langchain", "openai", "pydantic-ai"}
    assert clients == set(HEADERS) == libraries | {"aider", "claude-code", "codex"}
    bodies = [body_of(seed) for seed in SEEDS if seed.name.partition("_")[0] in libraries]
    for field in ("tools", "tool_choice", "response_format", "stream", "parallel_tool_calls"):
        assert any(field in body for body in bodies), field
    assert any(message["role"] == "tool" for body in bodies for message in body["messages"])
