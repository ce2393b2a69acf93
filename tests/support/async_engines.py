"""Engines in processes of their own, in loops that no test outlives; ways to read them and wait for them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.threads import begun_threads

from hotcold import AsyncLLM
from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, RequestError
from hotcold.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
LIMIT_S = 240
#: Runs to the end of the context, 256 positions, unless it is stopped.
ENDLESS = Job([9], GREEDY, max_tokens=1000, ignore_eos=True)


def run(program: Coroutine[Any, Any, Any]) -> Any:
    """In a new loop, which a test that hangs does not outlive; no task, child or thread may be left."""
    begun, before = begun_threads(), children()

    async def bounded() -> Any:
        found = await asyncio.wait_for(program, LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        return found

    found = asyncio.run(bounded(), debug=True)
    assert children() <= before
    assert len(begun()) <= 1  # one that waits for a child may be about to end
    return found


def children() -> set[int]:
    """Process ids of this process's children, including zombies."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        if parent == os.getpid():
            found.add(int(path.parent.name))
    return found


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(threads=1, **options)
    async with llm:
        yield llm


def process_id(llm: AsyncLLM) -> int | None:
    """The id of the engine process, while there is one."""
    transport = llm.front._transport
    return None if transport is None or llm.front._exited.is_set() else transport.get_pid()


async def read(llm: AsyncLLM, job: Job) -> list[Piece]:
    return [piece async for piece in llm.stream(job)]


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def refused(llm: AsyncLLM, job: Job) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await read(llm, job)
    return caught.value


async def begun(llm: AsyncLLM, job: Job) -> Any:
    """A stream that has given its first piece."""
    stream = llm.stream(job)
    await anext(stream)
    return stream


async def halted(llm: AsyncLLM, count: int = 1) -> list[Any]:
    """Begins streams, and stops the engine process by SIGSTOP before any of them ends."""
    process = process_id(llm)
    assert process is not None
    while True:
        streams = [await begun(llm, ENDLESS) for _ in range(count)]
        os.kill(process, signal.SIGSTOP)
        await asyncio.sleep(0.05)  # what was sent before arrives
        if len(llm.front._replies) == count:
            return streams
        resume(llm)  # A stream ended first, which happens on a busy machine: begin new ones.
        for stream in streams:
            await stream.aclose()


def resume(llm: AsyncLLM) -> None:
    """Continues an engine process that `halted` stopped."""
    process = process_id(llm)
    assert process is not None
    os.kill(process, signal.SIGCONT)


async def assert_all_is_free(llm: AsyncLLM) -> None:
    stats = await llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_pages + stats.shared_pages == stats.pages
