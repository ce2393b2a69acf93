"""A failure within an answer reaches every dialect as an error, streamed and not; it never looks whole."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.asgi import Client
from support.faulty_engine import MOMENTS, STAGES, launcher, max_tokens_of
from support.made_up_llm import MadeUpLLM

import hotcold
from hotcold import AsyncLLM
from hotcold.chat.chat import Chat
from hotcold.chat.rendering import TemplateError
from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, RequestError
from hotcold.errors import UserError
from hotcold.grammar.error import GrammarError
from hotcold.server import framing
from hotcold.server.app import make_app
from hotcold.server.protocol import json_parts, replies
from hotcold.server.service import Service
from hotcold.server.settings import Settings

CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}]}
#: Routes with a body and where their clients say how long an answer may be.
ROUTES: dict[str, Callable[[int], dict[str, Any]]] = {
    "/v1/chat/completions": lambda n: {**CHAT, "max_tokens": n},
    "/v1/completions": lambda n: {"prompt": "Once", "max_tokens": n},
    "/completion": lambda n: {"prompt": "Once", "n_predict": n},
    "/v1/responses": lambda n: {"input": "Once", "max_output_tokens": n},
    "/v1/messages": lambda n: {**CHAT, "max_tokens": n},
    "/api/chat": lambda n: {**CHAT, "options": {"num_predict": n}},
    "/api/generate": lambda n: {"prompt": "Once", "options": {"num_predict": n}},
}
#: By how far the answer got: words, or all of it.
ERRORS: list[Exception] = [
    RequestError("no", "engine_failed"),
    RequestError("late", "deadline"),
    GrammarError("no rule"),
    UserError("no"),
    RuntimeError("a defect"),
    MemoryError(),
    TimeoutError(),
    ConnectionError("pipe"),
    StopIteration(),
    asyncio.CancelledError(),  # type: ignore[list-item]
]
WHEN = ("before", "amid", "with", "after", "no error", "no end")


def is_error_body(path: str, body: Any) -> bool:
    """True if this is an error in the route's dialect."""
    if path == "/v1/messages":
        return body.get("type") == "error" and {"type", "message"} <= set(body["error"])
    if path.startswith("/api/"):
        return isinstance(body.get("error"), str) and "done" not in body
    return set(body.get("error", ())) == {"message", "type", "param", "code"}


def failed(path: str, client: Client) -> bool:
    """True if a client of this dialect learns that the answer failed."""
    if client.status != 200:
        return client.status >= 400 and is_error_body(path, json.loads(client.body))
    text = client.body.decode()
    if path.startswith("/api/"):
        *lines, last = map(json.loads, text.splitlines())
        return is_error_body(path, last) and not any(line.get("done") for line in lines)
    blocks = [block for block in text.split("\n\n") if "data: {" in block]
    *events, last = [json.loads(block[block.index("data: ") + 6 :]) for block in blocks]
    if "[DONE]" in text:
        return False
    if path == "/v1/responses":
        kinds = [event["type"] for event in (*events, last)]
        return kinds[-2:] == ["error", "response.failed"] and "response.completed" not in kinds
    if path == "/v1/messages":
        return is_error_body(path, last) and "message_stop" not in [event["type"] for event in events]
    return is_error_body(path, last)


class FailingLLM(MadeUpLLM):
    """Fails at a moment of each answer."""

    def __init__(self, when: str, error: Exception) -> None:
        super().__init__()
        self.when, self.error = when, error

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        if self.when == "before":
            raise self.error.with_traceback(None)
        async for piece in super().stream(job):
            last = piece.finish_reason is not None
            if self.when in ("with", "no error") and last:
                piece = replace(piece, finish_reason="error")
            if self.when != "no end" or not last:
                yield piece
            if self.when == "amid":
                raise self.error.with_traceback(None)
        if self.when in ("with", "after"):
            raise self.error.with_traceback(None)


def ask(app: Any, path: str, stream: bool, n: int = 50) -> Client:
    return Client(app, path, {**ROUTES[path](n), "stream": stream})


async def failures(
    service: Service,
    rounds: int,
    asked: Callable[[Any, str, bool], Client] = ask,
    injected: Callable[[str], bool] = lambda path: True,
) -> list[str]:
    """Answers in which a fault was injected and which did not fail."""
    app, wrong = make_app(service), []
    for path in ROUTES:
        for stream in (True, False):
            for _ in range(rounds):
                client = asked(app, path, stream)
                await asyncio.gather(client.end(), return_exceptions=True)
                if injected(path) and not (client.sent and failed(path, client)):
                    wrong.append(f"{path} {stream}: {client.sent}")
    return wrong


def wrong_answers(llm: MadeUpLLM, rounds: int, *how: Any) -> list[str]:
    async def test() -> list[str]:
        service = Service(llm, Settings(log=False))  # type: ignore[arg-type]
        await service.load()
        try:
            return await failures(service, rounds, *how)
        finally:
            service.close()

    return asyncio.run(test())


@pytest.fixture
def rounds() -> int:
    """How often each fault is injected. Races need more rounds than CI has time for."""
    return int(os.environ.get("HOTCOLD_FAULT_ROUNDS", "1"))


@pytest.mark.parametrize("when", WHEN)
def test_an_error_at_any_moment(when: str, rounds: int) -> None:
    for error in ERRORS:
        assert wrong_answers(FailingLLM(when, error), max(1, rounds // len(ERRORS))) == []


def test_a_last_piece_that_comes_with_an_error_ends_no_answer() -> None:
    """No choice, item or block of the stream says that it ended well."""
    ends = ("finish_reason", "stop_reason", "response.output_item.done", "content_block_stop", '"done": true')
    clients: list[Client] = []

    def asked(app: Any, path: str, stream: bool) -> Client:
        clients.append(ask(app, path, True))
        return clients[-1]

    for when in ("with", "no error"):
        assert wrong_answers(FailingLLM(when, RuntimeError("a defect")), 1, asked) == []
    for client in clients:
        text = client.body.decode().replace('"finish_reason":null', "").replace('"stop_reason":null', "")
        assert not [end for end in ends if end in text], text


@pytest.mark.parametrize("method", ["add", "end", "whole", "to_json", "lines"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_the_encoder(
    method: str, call: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at one of the first calls for an answer, if there are as many."""
    calls, hit = 0, set()

    def counted(right: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*values: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise ValueError("not JSON")
            return right(*values, **options)

        return faulty

    def asked(app: Any, path: str, stream: bool) -> Client:
        nonlocal calls
        calls = 0
        return ask(app, path, stream)

    def injected(path: str) -> bool:
        hit.update([path] if calls >= call else [])
        return calls >= call

    if method in ("add", "end", "whole"):
        for kind in _reply_classes(replies.Reply):
            if method in vars(kind):
                monkeypatch.setattr(kind, method, counted(vars(kind)[method]))
    elif method == "lines":
        monkeypatch.setattr(framing.Frames, "lines", counted(framing.Frames.lines))
    else:
        faulty = counted(framing.to_json)
        monkeypatch.setattr(framing, "to_json", faulty)
        monkeypatch.setattr(json_parts, "to_json", faulty)
    assert wrong_answers(MadeUpLLM(), rounds, asked, injected) == []
    assert hit == ({*ROUTES} if call == 1 or method in ("add", "to_json", "lines") else set())


def _reply_classes(kind: type) -> list[type]:
    return [kind, *(each for sub in kind.__subclasses__() for each in _reply_classes(sub))]


@pytest.mark.parametrize("error", [TemplateError("no role"), RuntimeError("a defect"), MemoryError()])
def test_an_error_in_the_template(error: Exception, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(*_: Any, **__: Any) -> Any:
        raise error.with_traceback(None)

    monkeypatch.setattr(Chat, "ids", ids)
    for path in [path for path in ROUTES if path in ("/v1/completions", "/completion")]:
        monkeypatch.delitem(ROUTES, path)
    assert wrong_answers(MadeUpLLM(), rounds) == []


@pytest.mark.skipif(sys.platform == "win32", reason="starts a script in place of Python")
def test_an_error_in_the_engine_process(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a step, in a constraint, in the text of tokens, in the pipe, or with the last piece."""
    monkeypatch.syspath_prepend(str(Path(hotcold.__file__).parents[1]))
    python = sys.executable
    llm = AsyncLLM(threads=1)
    service = Service(llm, Settings(log=False))

    async def test() -> None:
        monkeypatch.setattr(sys, "executable", str(launcher(tmp_path)))
        loading = asyncio.create_task(service.load())
        while llm.status == "new" or llm.front._transport is None:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(sys, "executable", python)
        await loading
        try:
            for stage in STAGES:
                for moment in MOMENTS:
                    n = max_tokens_of(stage, moment)

                    def asked(app: Any, path: str, stream: bool, n: int = n) -> Client:
                        return ask(app, path, stream, n)

                    assert await failures(service, rounds, asked) == [], (stage, moment)
                    right = [piece async for piece in llm.stream(Job([9], max_tokens=3, ignore_eos=True))]
                    assert right[-1].finish_reason == "length"
        finally:
            await llm.close()
            service.close()

    asyncio.run(test())
