"""Answers while they are written: events, errors, and clients that go."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.asgi import PATIENCE_S, Client, until
from support.made_up_llm import MadeUpLLM

from hotcold.chat import tool_grammar
from hotcold.engine.request import RequestError
from hotcold.grammar import constraint
from hotcold.grammar.error import GrammarError
from hotcold.grammar.schema_rewriting import Rewritten
from hotcold.server.app import make_app
from hotcold.server.service import Service
from hotcold.server.settings import Settings


class Server:
    def __init__(self, **values: Any) -> None:
        self.llm = MadeUpLLM()
        self.service = Service(self.llm, Settings(log=False, **values))  # type: ignore[arg-type]
        self.app = make_app(self.service)

    def ask(self, path: str = "/v1/completions", **body: Any) -> Client:
        return Client(self.app, path, {"prompt": "Once upon", **body})


def run(test: Callable[[Server], Awaitable[None]], **values: Any) -> None:
    async def whole() -> None:
        server = Server(**values)
        await server.service.load()
        try:
            await test(server)
            await until(lambda: server.llm.running == 0)
        finally:
            server.service.close()

    asyncio.run(whole())


STREAMS = pytest.mark.parametrize("stream", [True, False])


def test_events_of_a_stream() -> None:
    async def test(server: Server) -> None:
        client = server.ask(stream=True)
        await client.end()
        headers = dict(client.sent[0]["headers"])
        assert client.status == 200
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-cache" and headers[b"x-accel-buffering"] == b"no"
        *chunks, done = client.events
        assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a b c"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    run(test)


def test_the_native_route_has_no_done() -> None:
    async def test(server: Server) -> None:
        client = server.ask("/completion", stream=True)
        await client.end()
        assert [event["stop"] for event in client.events][-1] is True
        assert "".join(event["content"] for event in client.events) == "a b c"

    run(test)


def test_several_choices_in_one_stream() -> None:
    async def test(server: Server) -> None:
        client = server.ask(stream=True, n=3, seed=5)
        await client.end()
        texts = {0: "", 1: "", 2: ""}
        for event in client.events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert set(texts.values()) == {"a b c"} and len(server.llm.jobs) == 3
        assert len({job.params.seed for job in server.llm.jobs}) == 3

    run(test)


@STREAMS
def test_a_client_that_goes_before_the_first_token(stream: bool) -> None:
    async def test(server: Server) -> None:
        server.llm.held = asyncio.Event()  # in the queue, or reading the prompt
        client = server.ask(stream=stream, n=2)
        await until(lambda: server.llm.running == 2)
        client.leaving.set()
        await client.end()
        assert server.llm.running == 0 and not client.sent

    run(test)


@STREAMS
def test_a_client_that_goes_amid_the_answer(stream: bool) -> None:
    async def test(server: Server) -> None:
        server.llm.words, server.llm.pace_s = ("word ",) * 10_000, 0.001
        client = server.ask(stream=stream)
        await until(lambda: len(client.sent) > 3 if stream else server.llm.running == 1)
        client.leaving.set()
        await client.end()
        assert server.llm.running == 0

    run(test)


@STREAMS
def test_a_client_that_goes_at_the_end(stream: bool) -> None:
    """When it goes between the last token and the end of the answer nothing is left behind, either."""

    async def test(server: Server) -> None:
        for _ in range(20):
            client = server.ask(stream=stream)
            await until(lambda client=client: bool(client.sent))  # type: ignore[misc]
            client.leaving.set()
            await client.end()

    run(test)


def test_waiting_streams_say_that_they_are_alive() -> None:
    async def test(server: Server) -> None:
        server.llm.held = asyncio.Event()
        client = server.ask(stream=True)
        await until(lambda: client.body.count(b": ping\n\n") >= 2 if client.sent else False)
        server.llm.held.set()
        await client.end()
        assert client.status == 200 and client.events[-1] == "[DONE]"

    run(test, ping_s=0.01)


@STREAMS
def test_what_cannot_start_is_told_by_a_status(stream: bool) -> None:
    async def test(server: Server) -> None:
        server.llm.fail_at = 0
        server.llm.failure = RequestError("as many wait as may", "queue_full", 7)
        client = server.ask(stream=stream)
        await client.end()
        assert client.status == 429 and (b"retry-after", b"7") in client.sent[0]["headers"]
        assert set(json.loads(client.body)["error"]) == {"message", "type", "param", "code"}

    run(test)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("queue_full", 429),
        ("not_ready", 503),
        ("closed", 503),
        ("deadline", 408),
        ("context_length_exceeded", 400),
        ("invalid_grammar", 400),
        ("engine_failed", 500),
        ("something new", 500),
    ],
)
def test_statuses_of_errors(code: str, status: int) -> None:
    async def test(server: Server) -> None:
        server.llm.fail_at, server.llm.failure = 0, RequestError("no", code)
        client = server.ask()
        await client.end()
        assert client.status == status

    run(test)


def test_checks_of_grammars_are_the_models_and_hold_nobody_up() -> None:
    async def test(server: Server) -> None:
        server.llm.checking = asyncio.Event()
        messages = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hi"}]}
        clients = [server.ask(regex=f"a{n}") for n in range(6)]
        clients += [server.ask(regex=f"b{n}", **messages) for n in range(6)]
        await until(lambda: len(server.llm.checks) == 12)
        for free in (server.ask(), server.ask(**messages), server.ask("/tokenize", content="Once")):
            await free.end()
            assert free.status == 200
        server.llm.refusal = GrammarError("no such rule")
        server.llm.checking.set()
        for client in clients:
            await client.end()
            error = json.loads(client.body)["error"]
            assert client.status == 400
            assert (error["code"], error["param"]) == ("invalid_grammar", "regex")
            assert error["message"] == "regex: no such rule"

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        {"json_schema": {"type": "object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {
            "path": "/v1/chat/completions",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ],
    ids=lambda body: [*body][-1],
)
def test_reading_a_schema_holds_nobody_up(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    others_served = threading.Event()

    def slow(*args: object, **more: object) -> Rewritten:
        assert others_served.wait(PATIENCE_S), "nobody else was served meanwhile"
        return Rewritten({"type": "object"}, ())

    monkeypatch.setattr(constraint, "read", slow)
    monkeypatch.setattr(tool_grammar, "read", slow)

    async def test(server: Server) -> None:
        client, other = server.ask(**body), server.ask()
        await other.end()
        others_served.set()
        await client.end()
        assert (client.status, other.status) == (200, 200)

    run(test)


def test_an_error_amid_a_stream_ends_it() -> None:
    async def test(server: Server) -> None:
        server.llm.fail_at = 2
        client = server.ask(stream=True)
        await client.end()
        *chunks, error = client.events
        assert client.status == 200 and "".join(each["choices"][0]["text"] for each in chunks) == "a b"
        assert error["error"]["code"] == "engine_failed" and b"[DONE]" not in client.body

    run(test)


def test_an_error_amid_an_answer_is_a_status() -> None:
    async def test(server: Server) -> None:
        server.llm.fail_at = 2
        client = server.ask()
        await client.end()
        assert client.status == 500 and "text" not in json.loads(client.body)

    run(test)


def test_one_error_ends_all_choices() -> None:
    async def test(server: Server) -> None:
        server.llm.words, server.llm.pace_s = ("word ",) * 10_000, 0.001
        server.llm.fail_at = 5
        client = server.ask(stream=True, n=4)
        await client.end()
        assert "error" in client.events[-1]

    run(test)


def test_a_defect_is_told_without_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(server: Server) -> None:
        server.llm.fail_at, server.llm.failure = 0, RuntimeError("the prompt was Once upon")  # type: ignore[assignment]
        client = server.ask()
        await client.end()
        assert client.status == 500
        assert b"Once upon" not in client.body and b"Traceback" not in client.body
        server.llm.fail_at = None
        again = server.ask()
        await again.end()
        assert again.status == 200

    run(test)
    assert "Once upon" not in "".join(capsys.readouterr())


def test_a_client_that_reads_nothing_is_dropped() -> None:
    async def test(server: Server) -> None:
        client = server.ask(stream=True)
        client.reads.clear()
        await client.end()
        assert client.dropped and not client.sent

    run(test, write_s=0.01)


@STREAMS
def test_draining_lets_requests_finish(stream: bool) -> None:
    async def test(server: Server) -> None:
        server.llm.held = asyncio.Event()
        running = server.ask(stream=stream)
        await until(lambda: server.llm.running == 1)
        drain = asyncio.create_task(server.service.drain(PATIENCE_S))
        await until(lambda: server.service.state == "draining")
        late = server.ask()
        await late.end()
        assert late.status == 503 and any(name == b"retry-after" for name, _ in late.sent[0]["headers"])
        server.llm.held.set()
        await running.end()
        await drain
        assert running.status == 200 and b"a" in running.body

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_draining_waits_for_what_is_still_being_read(path: str) -> None:
    async def test(server: Server) -> None:
        running = server.ask(path, messages=[{"role": "user", "content": "Hello"}], content="Hello")
        running.writes.clear()
        await until(lambda: running.asked)
        drain = asyncio.create_task(server.service.drain(PATIENCE_S))
        await until(lambda: server.service.state == "draining")
        assert not drain.done()
        running.writes.set()
        await running.end()
        await asyncio.wait_for(drain, PATIENCE_S)
        assert running.status == 200

    run(test)


def test_what_does_not_finish_in_time_is_told_so() -> None:
    async def test(server: Server) -> None:
        server.llm.words, server.llm.pace_s = ("word ",) * 10_000, 0.001
        stream, whole = server.ask(stream=True), server.ask()
        await until(lambda: server.llm.running == 2 and len(stream.sent) > 2)
        await server.service.drain(0.01)
        await stream.end()
        await whole.end()
        assert stream.events[-1]["error"]["code"] == "shutting_down" and whole.status == 503

    run(test)
