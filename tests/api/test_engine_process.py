"""The process of an AsyncLLM: how it starts, fails, is killed and closes; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.async_engines import (
    ENDLESS,
    LIMIT_S,
    begun,
    halted,
    process_id,
    read,
    refused,
    resume,
    run,
    started,
    until,
)

from hotcold import AsyncLLM
from hotcold.engine.request import RequestError
from hotcold.errors import UserError


def test_before_and_after_there_is_no_engine() -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1)
        assert (engine.status, engine.loaded, engine.error, process_id(engine)) == ("new", 0, None, None)
        for code in ("not_ready", "not_ready", "closed"):
            error = await refused(engine, ENDLESS)
            assert error.code == code
            assert (error.retry_after_s is not None) == (code == "not_ready")
            with pytest.raises(RequestError):
                await engine.stats()
            if code == "not_ready":
                with pytest.raises(RequestError):
                    assert engine.tokenizer
            if engine.status == "new":
                await engine.start()
                assert engine.status == "loading"
            elif engine.status == "loading":
                await engine.ready()
                await engine.close()
        assert engine.status == "closed"
        with pytest.raises(RequestError, match="closed"):
            await engine.ready()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.start()
        never = AsyncLLM()
        await never.close()
        assert never.status == "closed"

    run(program())


@pytest.mark.parametrize("content", [None, b"no model at all, but long enough for a header"])
def test_a_model_that_cannot_be_loaded(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)

    async def program() -> None:
        engine = AsyncLLM(path)
        await engine.start()
        with pytest.raises(UserError, match=r"x\.gguf") as caught:
            await engine.ready()
        assert (engine.status, engine.error) == ("failed", str(caught.value))
        assert "\n" not in str(caught.value)
        assert (await refused(engine, ENDLESS)).code == "engine_failed"
        await engine.close()
        assert engine.status == "failed"

    run(program())


def test_options_that_the_engine_process_refuses() -> None:
    async def program() -> None:
        engine = AsyncLLM(context=100_000)
        await engine.start()
        with pytest.raises(UserError, match=r"context of 100000 positions \(`context`\)"):
            await engine.ready()
        await engine.close()

    run(program())
    with pytest.raises(UserError, match="sparsity 'some'"):
        AsyncLLM(sparsity="some")
    with pytest.raises(UserError, match="sequences is 0"):
        AsyncLLM(sequences=0)
    with pytest.raises(TypeError, match="unknown option 'heat'"):
        AsyncLLM(heat=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("when", ["loading", "running"])
def test_an_engine_process_that_is_killed_ends_every_stream(when: str) -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1, sequences=2)
        await engine.start()
        process = process_id(engine)
        assert process is not None
        if when == "loading":
            os.kill(process, signal.SIGKILL)
            with pytest.raises(UserError, match="signal 9"):
                await engine.ready()
        else:
            await engine.ready()
            streams = await halted(engine, 2)
            waiting = asyncio.create_task(refused(engine, ENDLESS))
            await until(lambda: len(engine.front._replies) == 3)
            os.kill(process, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(RequestError, match="signal 9") as caught:
                    async for _ in stream:
                        pass
                assert caught.value.code == "engine_failed"
            assert (await waiting).code == "engine_failed"
            assert (await refused(engine, ENDLESS)).code == "engine_failed"
            with pytest.raises(RequestError):
                await engine.stats()
        assert engine.status == "failed" and engine.error and process_id(engine) is None
        await engine.close()

    run(program())


def test_an_engine_process_that_is_not_understood_is_ended() -> None:
    async def program() -> None:
        async with started() as engine:
            (stream,) = await halted(engine)
            assert engine.front._transport is not None
            protocol = engine.front._transport.get_protocol()
            assert isinstance(protocol, asyncio.SubprocessProtocol)
            protocol.pipe_data_received(1, b"no message at all")
            with pytest.raises(RequestError, match="invalid message") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "engine_failed" and engine.status == "failed"

    run(program())


def test_signals_are_left_to_this_process() -> None:
    async def program() -> None:
        async with started() as engine:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                process = process_id(engine)
                assert process is not None
                os.kill(process, number)
                assert (await read(engine, ENDLESS))[-1].finish_reason == "length", number

    run(program())


def test_closing_waits_for_those_that_run_and_takes_no_more() -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1)
        async with engine:
            stream = await begun(engine, ENDLESS)
            closing = asyncio.create_task(engine.close(drain_s=LIMIT_S))
            await until(lambda: engine.status == "closed")
            assert (await refused(engine, ENDLESS)).code == "closed"
            rest = [piece async for piece in stream]
            assert rest[-1].finish_reason == "length"
            await closing

    run(program())


def test_closing_again_ends_at_once() -> None:
    """Like a second Ctrl-C. It also does not wait forever for a stream without a reader."""

    async def program() -> None:
        engine = AsyncLLM(threads=1, sequences=1)
        async with engine:
            (stream,) = await halted(engine)  # nothing can end by itself
            waiting = asyncio.create_task(refused(engine, ENDLESS))
            await until(lambda: len(engine.front._replies) == 2)
            closing = asyncio.create_task(engine.close(drain_s=10 * LIMIT_S))
            await until(lambda: engine.status == "closed")
            resume(engine)
            await engine.close()
            await closing
            assert (await waiting).code == "closed"
            with pytest.raises(RequestError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "closed"

    run(program())


def test_closing_while_it_loads() -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1)
        await engine.start()
        ready = asyncio.create_task(engine.ready())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RequestError, match="closed"):
            await ready

    run(program())


def test_closing_that_is_cancelled_still_ends_the_process() -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1)
        async with engine:
            (stream,) = await halted(engine)
            closing = asyncio.create_task(engine.close(drain_s=LIMIT_S))
            await until(lambda: engine.status == "closed")
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await until(lambda: process_id(engine) is None)
            await stream.aclose()

    run(program())


def test_the_engine_process_does_not_inherit_descriptors(tmp_path: Path) -> None:
    """A server's listening socket, say: one that any process could, as this one."""

    async def program() -> None:
        inherited = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
        os.set_inheritable(inherited, True)
        try:
            async with started() as engine:
                open_files = {os.readlink(path) for path in Path(f"/proc/{process_id(engine)}/fd").iterdir()}
                assert open_files and str(tmp_path / "open") not in open_files
        finally:
            os.close(inherited)

    run(program())
