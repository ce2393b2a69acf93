"""Requests are prepared in threads: large ones few at a time, and none of them before a small one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.asgi import PATIENCE_S, Client, until
from support.built_in import tokenizer
from support.made_up_llm import CONTEXT, MadeUpLLM

from hotcold.server import framing, reading, sending
from hotcold.server.app import make_app
from hotcold.server.preparing import LANES, Lane, Preparing
from hotcold.server.protocol import json_parts
from hotcold.server.protocol.errors import APIError
from hotcold.server.request_log import _Ended
from hotcold.server.service import Service
from hotcold.server.settings import Settings
from hotcold.tokenizer.tokenizer import Tokenizer

FEW = (Lane(100, 1, float("inf")), Lane(float("inf"), 2, 3))
LARGE = 1 << 16


@dataclass
class Blocked:
    """A function that waits until it may return."""

    begun: threading.Event = field(default_factory=threading.Event)
    may_return: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_return.wait(PATIENCE_S)
        return "done"


def run(test: Callable[[Preparing], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        preparing = Preparing(FEW)
        async with asyncio.timeout(PATIENCE_S):
            await test(preparing)
        preparing.close()

    asyncio.run(bounded())


def test_small_ones_run_while_large_ones_fill_their_lane() -> None:
    async def test(preparing: Preparing) -> None:
        blocked = [Blocked() for _ in range(4)]
        tasks = [asyncio.create_task(preparing.run(101, each)) for each in blocked]
        await until(lambda: blocked[0].begun.is_set() and blocked[1].begun.is_set())
        assert await preparing.run(100, lambda: "small") == "small"
        assert [each.begun.is_set() for each in blocked] == [True, True, False, False]
        for each in blocked:
            each.may_return.set()
        assert await asyncio.gather(*tasks) == ["done"] * 4

    run(test)


def test_where_too_many_wait_the_next_is_refused_and_later_ones_are_not() -> None:
    async def test(preparing: Preparing) -> None:
        blocked = [Blocked() for _ in range(5)]
        tasks = [asyncio.create_task(preparing.run(101, each)) for each in blocked]
        await until(lambda: blocked[1].begun.is_set())
        with pytest.raises(APIError, match="5 requests of this size") as caught:
            await preparing.run(101, lambda: "never called")
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert caught.value.retry_after is not None
        blocked[0].may_return.set()
        await tasks[0]
        await until(lambda: blocked[2].begun.is_set())
        tasks.append(asyncio.create_task(preparing.run(101, lambda: "done")))
        for each in blocked:
            each.may_return.set()
        assert await asyncio.gather(*tasks) == ["done"] * 6

    run(test)


def test_who_goes_while_it_waits_is_never_called_and_leaves_its_place() -> None:
    async def test(preparing: Preparing) -> None:
        blocked = [Blocked() for _ in range(5)]
        tasks = [asyncio.create_task(preparing.run(101, each)) for each in blocked]
        await until(lambda: blocked[1].begun.is_set())
        tasks[3].cancel()
        await asyncio.wait([tasks[3]])
        last = asyncio.create_task(preparing.run(101, lambda: "last"))
        for each in blocked:
            each.may_return.set()
        assert await last == "last" and await tasks[4] == "done"
        assert not blocked[3].begun.is_set()

    run(test)


def test_a_thread_keeps_its_place_when_its_client_goes() -> None:
    async def test(preparing: Preparing) -> None:
        blocked, next = [Blocked() for _ in range(2)], Blocked()
        tasks = [asyncio.create_task(preparing.run(101, each)) for each in blocked]
        await until(lambda: blocked[0].begun.is_set() and blocked[1].begun.is_set())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        waiting = [asyncio.create_task(preparing.run(101, next)) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not next.begun.is_set()
        with pytest.raises(APIError, match="5 requests of this size"):
            await preparing.run(101, lambda: "never called")
        blocked[1].may_return.set()
        next.may_return.set()
        assert await asyncio.gather(*waiting) == ["done"] * 3
        blocked[0].may_return.set()

    run(test)


def test_an_error_is_the_callers_and_leaves_the_place() -> None:
    async def test(preparing: Preparing) -> None:
        for _ in range(6):
            with pytest.raises(ZeroDivisionError):
                await preparing.run(101, lambda: 1 // 0)
        assert await preparing.run(101, lambda: "next") == "next"

    run(test)


def test_lanes_are_ordered_and_all_sizes_have_one() -> None:
    assert [lane.body_bytes for lane in LANES] == sorted(lane.body_bytes for lane in LANES)
    assert LANES[0].body_bytes == LARGE and LANES[-1].body_bytes == float("inf")
    assert LANES[0].waiting == float("inf") and all(lane.waiting <= 32 for lane in LANES[1:])


# --- routes ---------------------------------------------------------------------------------------

TEXT = "Once upon a time "
#: Requests with a text, by path.
ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 3},
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}], "stream": False},
    "/api/generate": lambda text: {"prompt": text, "stream": False},
    "/v1/completions": lambda text: {"prompt": text},
    "/completion": lambda text: {"prompt": text},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/tokenize": lambda text: {"content": text},
    "/apply-template": lambda text: {"messages": [{"role": "user", "content": text}]},
}
ANY_LENGTH = ("/v1/messages/count_tokens", "/tokenize", "/apply-template")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, MadeUpLLM, Service]]:
    llm = MadeUpLLM()
    service = Service(llm, Settings(log=False))  # type: ignore[arg-type]
    await service.load()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield make_app(service), llm, service
    finally:
        service.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("size", [40_000, 1_000_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT * (size // len(TEXT))
    encoded: list[int] = []
    encode_parts = Tokenizer.encode_parts

    def spy(self: Tokenizer, parts: Any) -> list[int]:
        ids = encode_parts(self, parts)
        encoded.extend([len(ids)] * (len(ids) > CONTEXT))
        return ids

    monkeypatch.setattr(Tokenizer, "encode_parts", spy)

    async def test() -> Client:
        async with served() as (app, _, _):
            client = Client(app, path, ROUTES[path](text))
            await client.end()
            return client

    client = asyncio.run(test())
    if path in ANY_LENGTH:
        assert client.status == 200
        return
    assert client.status == 400 and not encoded
    error = json.loads(client.body)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"context length is {CONTEXT} tokens" in message and "tokens or more." in message
    if "code" in error:
        assert error["code"] == "context_length_exceeded"
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error" and message.startswith("prompt is too long: ")


@pytest.mark.parametrize(("least", "status"), [(CONTEXT - 1, 200), (CONTEXT, 400)])
def test_a_prompt_needs_a_place_for_the_answer(
    least: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: least)

    async def test() -> None:
        async with served() as (app, _, _):
            for path in ("/v1/completions", "/v1/chat/completions"):
                client = Client(app, path, ROUTES[path](TEXT))
                await client.end()
                assert client.status == status

    asyncio.run(test())


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in ANY_LENGTH])
def test_the_longest_text_that_fits_is_taken(path: str) -> None:
    known = tokenizer()
    longest = max((known.piece(id) for id in range(known.vocab_size)), key=len).decode().strip()
    text = f" {longest}" * (CONTEXT - 40)
    assert len(known.encode(text)) < CONTEXT

    async def test() -> int:
        async with served() as (app, _, _):
            client = Client(app, path, ROUTES[path](text))
            await client.end()
            return client.status

    assert asyncio.run(test()) == 200


class Watched:
    """Notes the threads in which functions run that take long for a large request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        self.blocked: Blocked | None = None
        for owner, name in (
            (reading, "parse"),
            (Tokenizer, "encode_parts"),
            (Tokenizer, "left_out"),
            (Tokenizer, "least_tokens"),
            (Service, "prepare"),
            (json_parts, "is_large"),
            (sending, "json_parts"),
        ):
            monkeypatch.setattr(owner, name, self._watching(name, getattr(owner, name)))

    def _watching(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*values: Any, **options: Any) -> Any:
            self.found.append((name, threading.get_ident()))
            if name == "parse" and self.blocked is not None and len(values[0]) > LARGE:
                self.blocked()
            return function(*values, **options)

        return watched


@pytest.mark.parametrize("path", ROUTES)
def test_the_event_loops_thread_prepares_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    async def test() -> None:
        async with served() as (app, _, _):
            watched.found.clear()
            client = Client(app, path, ROUTES[path](TEXT))
            await client.end()
            assert client.status == 200

    asyncio.run(test())
    names = {name for name, _ in watched.found}
    assert {"parse", "json_parts"} <= names or path == "/v1/messages/count_tokens"
    assert threading.get_ident() not in {thread for _, thread in watched.found}


def test_a_small_request_is_answered_while_large_ones_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.blocked = Blocked()
    most = LANES[-1].threads + int(LANES[-1].waiting)

    async def test() -> None:
        async with served() as (app, llm, _):
            large = [Client(app, path, ROUTES[path]("x" * (1 << 20))) for path in [*ROUTES, *ROUTES][:most]]
            assert watched.blocked is not None
            await until(watched.blocked.begun.is_set)
            await until(lambda: all(client.asked for client in large))
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                small = Client(app, path, ROUTES[path](TEXT))
                await small.end()
                assert small.status == 200
            assert not any(client.sent for client in large)
            for path in ROUTES:
                refused = Client(app, path, ROUTES[path]("x" * (1 << 20)))
                await refused.end()
                check_refused(path, refused)
            # One that waits goes: it is never parsed, and another takes its place.
            calls = len([name for name, _ in watched.found if name == "parse"])
            large[-1].leaving.set()
            await large[-1].end()
            assert large[-1].status == 499
            large.append(Client(app, "/tokenize", ROUTES["/tokenize"]("x" * (1 << 20))))
            watched.blocked.may_return.set()
            for client in large:
                await client.end()
            assert len([name for name, _ in watched.found if name == "parse"]) == calls + most - 1
            assert llm.running == 0

    asyncio.run(test())


def check_refused(path: str, client: Client) -> None:
    """Status 429 in the form of the route's dialect."""
    headers = dict(client.sent[0]["headers"])
    error = json.loads(client.body)["error"]
    assert client.status == 429 and int(headers[b"retry-after"]) > 0
    if path.startswith("/api/"):
        assert isinstance(error, str)
    elif path.startswith("/v1/messages"):
        assert json.loads(client.body)["type"] == "error" and error["type"] == "rate_limit_error"
    else:
        assert error["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_a_large_reply_is_written_in_parts_and_no_further_when_the_client_goes(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_PART_BYTES", 1000)
    monkeypatch.setattr(json_parts, "_PART", 100)
    text = TEXT * 3000
    written: list[int] = []
    to_json = json_parts.to_json

    def counted(value: Any) -> bytes:
        assert threading.get_ident() != loop_thread
        written.append(len(data := to_json(value)))
        return data

    loop_thread = threading.get_ident()

    async def test() -> None:
        async with served() as (app, _, _):
            body = {**ROUTES[path](text), "with_pieces": True}
            whole = Client(app, path, body)
            await whole.end()
            found = json.loads(whole.body)
            assert found.get("prompt", "").strip() == text.strip() or len(found["tokens"]) > 3000
            assert len(whole.sent) > 10 and max(len(each.get("body", b"")) for each in whole.sent) < 2000
            monkeypatch.setattr(json_parts, "to_json", counted)
            leaving = Client(app, path, body)
            leaving.reads.clear()
            await until(lambda: len(written) > 0)
            leaving.leaving.set()
            leaving.reads.set()
            await leaving.end()
            assert sum(written) < len(whole.body) / 2

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/completions", "/api/chat"])
def test_large_events_of_a_stream_are_written_in_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_parts, "_PART", 400)
    to_json, loop_thread = framing.to_json, threading.get_ident()
    large: list[int] = []

    def watched(value: Any) -> bytes:
        data = to_json(value)
        if len(data) > 800:
            large.append(threading.get_ident())
        return data

    monkeypatch.setattr(framing, "to_json", watched)
    body = ROUTES[path]("Hello") | {"stream": True}
    if path == "/v1/responses":  # whose events repeat this
        body["metadata"] = {"a": "x" * 500, "b": "x" * 500}

    async def test() -> Client:
        async with served() as (app, llm, _):
            llm.words = ("a" * 900, "b" * 900)
            client = Client(app, path, body)
            await client.end()
            return client

    client = asyncio.run(test())
    assert client.status == 200 and b"a" * 900 in client.body
    assert large and loop_thread not in large


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_large_reply_that_fails_amid_its_json_is_cut_off(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_PART_BYTES", 100)
    monkeypatch.setattr(json_parts, "_PART", 50)
    to_json, calls = json_parts.to_json, 0

    def faulty(value: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise ValueError("not JSON")
        return to_json(value)

    async def test() -> None:
        async with served() as (app, llm, _):
            llm.words = tuple("abcdefgh") * 100
            client = Client(app, path, {**ROUTES[path](TEXT * 10), "with_pieces": True, "logprobs": None})
            monkeypatch.setattr(json_parts, "to_json", faulty)
            with pytest.raises(_Ended):  # the server closes the connection
                await client.end()
            assert client.status == 200 and client.sent[-1].get("more_body", True)
            assert b"content-length" not in dict(client.sent[0]["headers"])

    asyncio.run(test())
    assert calls > 40
