"""A model in a process of its own: its texts are those of a model in this one, and nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.async_engines import (
    ENDLESS,
    GREEDY,
    LIMIT_S,
    assert_all_is_free,
    halted,
    read,
    refused,
    resume,
    run,
    started,
    until,
)

from hotcold import LLM, AsyncLLM
from hotcold.demo import model_path
from hotcold.engine.generation import Generation, Piece
from hotcold.engine.request import Grammar, Job, RequestError
from hotcold.engine.sampler import Allowed
from hotcold.errors import UserError
from hotcold.grammar.checking import GrammarProcess
from hotcold.hosting.messages import Submit
from hotcold.runtime.sampling import SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def test_a_stream_is_what_a_model_in_this_process_generates(llm: LLM) -> None:
    async def program() -> list[Piece]:
        async with started() as engine:
            ids = engine.tokenizer.encode(PROMPT)
            return await read(engine, Job(ids, SamplingParams(seed=5), max_tokens=40, logprobs=2))

    pieces = run(program())
    expected = list(llm.stream(PROMPT, max_tokens=40, seed=5, logprobs=2))
    assert [(each.text, each.ids, each.logprobs) for each in pieces] == [
        (each.text, each.ids, each.logprobs) for each in expected
    ]
    assert pieces[-1].finish_reason == expected[-1].finish_reason == "length"
    assert (pieces[-1].prompt_tokens, pieces[-1].seed) == (5, 5)


def comparable(found: Generation) -> tuple[Any, ...]:
    error = found.error and str(found.error)[:30]  # that of a long prompt speaks of other memory here
    return found.text, found.ids, found.finish_reason, found.stop, found.seed, found.context_full, error


def test_generate_is_that_of_llm(llm: LLM) -> None:
    prompts: list[Any] = [PROMPT, [1, 9, 9], "", "The king", [5] * 300, "I"]

    async def program() -> None:
        async with started(sequences=3) as engine:
            for options in (
                {"seed": 3},
                {"seed": 0, "temperature": 0, "stop": ["the", "a"], "max_tokens": 300},
            ):
                together = await engine.generate(prompts, **{"max_tokens": 25, **options})
                expected = llm.generate(prompts, **{"max_tokens": 25, **options})
                assert list(map(comparable, together)) == list(map(comparable, expected))
                one = await engine.generate(PROMPT, **{"max_tokens": 25, **options})
                assert comparable(one) == comparable(expected[0])
            text = "".join([piece.text async for piece in engine.stream_text("The", seed=1, max_tokens=9)])
            assert text == llm.generate("The", seed=1, max_tokens=9).text
            assert await engine.generate([]) == []
            assert (await engine.generate("I", max_tokens=1)).seed != (
                await engine.generate("I", max_tokens=1)
            ).seed

    run(program())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ""}, "stop holds"),
        ({"deadline_s": -1}, "deadline_s is -1"),
        ({"constraint": lambda output: None}, "AsyncLLM takes no constraint"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    async def program() -> None:
        with pytest.raises(UserError, match=message):
            await AsyncLLM().generate(PROMPT, **options)
        with pytest.raises(TypeError, match="unknown option 'heat'"):
            await AsyncLLM().generate(PROMPT, heat=1)  # type: ignore[call-overload]

    run(program())


def test_sixteen_mixed_jobs_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [
        "Once upon a time",
        "The king",
        "I",
        "Peter and Heidi went up the mountain, and there they found",
    ]
    jobs = [
        (
            prompts[i % 4] + " and" * (i // 4),
            {"seed": i, "max_tokens": 10 + 3 * i, "temperature": 0.5 * (i % 3)},
        )
        for i in range(16)
    ]

    async def program() -> list[Generation]:
        async with started(sequences=5, chunk=8) as engine:
            found = await asyncio.gather(*(engine.generate(text, **options) for text, options in jobs))
            await assert_all_is_free(engine)
            return list(found)

    for (text, options), found in zip(jobs, run(program()), strict=True):
        assert comparable(found) == comparable(llm.generate(text, **options))


def test_chat_is_that_of_llm(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Once upon a time there was a fox."}]

    async def program() -> None:
        async with started() as engine:
            expected = llm.chat(messages, seed=4, max_tokens=20)
            found = await engine.chat(messages, seed=4, max_tokens=20)
            assert comparable(found) == comparable(expected) and found.message == expected.message
            pieces = [piece async for piece in engine.stream_chat(messages, seed=4, max_tokens=20)]
            assert "".join(map(str, pieces)) == expected.text
            with pytest.raises(UserError, match="wizard"):
                await engine.chat([{"role": "wizard", "content": "x"}])
            with pytest.raises(TypeError, match="unknown option"):
                await engine.chat(messages, heat=1)  # type: ignore[call-arg]

    run(program())


def test_a_grammar_is_checked_before_and_then_held_to(llm: LLM) -> None:
    options: Any = {"max_tokens": 40, "seed": 2, "grammar": Grammar("regex", "[0-9]{3}")}
    expected = llm.generate(PROMPT, **options)

    async def program() -> None:
        async with started() as engine:
            number = await engine.generate(PROMPT, **options)
            assert re.fullmatch("[0-9]{3}", number.text) and number.finish_reason == "stop"
            assert comparable(number) == comparable(expected)
            checked = await engine.check(Grammar("regex", "[0-9]{3}", param="regex"))
            assert (checked.kind, checked.param) == ("checked", "regex")
            for wrong in (Grammar("regex", "(("), Grammar("json_schema", "{"), Grammar("gbnf", "")):
                error = await refused(engine, Job([9], grammar=wrong))
                assert error.code == "invalid_grammar" and "\n" not in str(error)
            await assert_all_is_free(engine)

    run(program())
    with pytest.raises(RequestError, match="grammar is not valid"):
        llm.generate(PROMPT, grammar=Grammar("regex", "(("))
    with pytest.raises(UserError, match="a grammar and a constraint are both given"):
        llm.generate(PROMPT, constraint=lambda output: Allowed(), **options)


def test_the_engine_process_gets_grammars_as_their_check_left_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that checks reads what is slow to read, once for all who ask for it."""
    checks: list[str] = []
    check = GrammarProcess.check
    monkeypatch.setattr(
        GrammarProcess, "check", lambda self, grammar: checks.append(grammar.source) or check(self, grammar)
    )

    async def program() -> None:
        async with started() as engine:
            sent: list[Any] = []
            send = engine.front._send
            monkeypatch.setattr(engine.front, "_send", lambda command: sent.append(command) or send(command))
            grammar = Grammar("gbnf", 'root ::= [0-9]{3} "!"')
            found = await engine.generate([PROMPT] * 4, grammar=grammar, max_tokens=20, seed=1)
            assert all(re.fullmatch("[0-9]{3}!", each.text) for each in found)
            await engine.check(grammar)
            jobs = [command.job for command in sent if isinstance(command, Submit)]
            assert [job.grammar.kind for job in jobs if job.grammar] == ["checked"] * 4
            assert checks == [grammar.source]

    run(program())


def test_no_grammar_is_checked_before_the_model_is_loaded_or_after_it_was_closed() -> None:
    async def program() -> None:
        engine = AsyncLLM(threads=1)
        job = Job([9], grammar=Grammar("regex", "(("))
        assert (await refused(engine, job)).code == "not_ready"
        await engine.close()
        assert (await refused(engine, job)).code == "closed"
        async with started() as engine:
            await engine.check(Grammar("regex", "a"))
        assert (await refused(engine, job)).code == "closed"
        with pytest.raises(RequestError, match="closed"):
            await engine.check(Grammar("regex", "b"))

    run(program())


def test_who_leaves_a_check_does_not_end_it_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def check(self: GrammarProcess, grammar: Grammar) -> str:
        begun.set()
        assert go.wait(60)
        return "start: /a/"

    monkeypatch.setattr(GrammarProcess, "check", check)

    async def program() -> None:
        async with started() as engine:
            grammar = Grammar("regex", "a")
            first, second = (asyncio.create_task(engine.check(grammar)) for _ in range(2))
            await until(begun.is_set)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            go.set()
            await second

    run(program())


def test_a_stream_that_is_left_frees_its_slot_wherever_the_job_is() -> None:
    async def program() -> None:
        async with started(sequences=1, chunk=1) as engine:
            (decoding,) = await halted(engine)
            waiting = asyncio.create_task(read(engine, ENDLESS))
            await until(lambda: len(engine.front._replies) == 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await decoding.aclose()
            resume(engine)
            # A prompt row a step: this one reads its prompt for long, as seen from here most of the times.
            for token in range(5, 100):
                reading = asyncio.create_task(read(engine, Job([token] * 250, GREEDY)))
                steps = (await engine.stats()).steps
                while (await engine.stats()).steps < steps + 3 and not reading.done():
                    pass
                if not reading.done():
                    break
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            async with aclosing(engine.stream(ENDLESS)):
                pass  # it never began
            await assert_all_is_free(engine)
            whole = await read(engine, ENDLESS)
            assert (whole[-1].finish_reason, whole[-1].context_full) == ("length", True)
            await whole_stream_then_close(engine)
            await assert_all_is_free(engine)

    async def whole_stream_then_close(engine: AsyncLLM) -> None:
        """No abort is sent for a job that has ended, even when its last piece is the last one read."""
        sent: list[Any] = []
        send = engine.front._send
        engine.front._send = lambda command: (sent.append(command), send(command))[1]  # type: ignore[method-assign]
        stream = engine.stream(Job([9], GREEDY, max_tokens=3, ignore_eos=True))
        async for piece in stream:
            if piece.finish_reason:
                break
        await stream.aclose()
        assert [type(each).__name__ for each in sent] == ["Submit"]
        (stream,) = await halted(engine)
        sent.clear()
        await stream.aclose()
        await stream.aclose()
        resume(engine)
        assert [type(each).__name__ for each in sent] == ["Abort"]

    run(program())


def test_a_full_queue_refuses_at_once_and_takes_jobs_again() -> None:
    async def program() -> None:
        async with started(sequences=1, max_waiting=2) as engine:
            streams = await halted(engine)
            waiting = [asyncio.create_task(read(engine, Job([9], GREEDY, max_tokens=2))) for _ in range(2)]
            await until(lambda: len(engine.front._replies) == 3)
            error = await refused(engine, ENDLESS)
            assert error.code == "queue_full" and error.retry_after_s is not None
            assert 1 <= error.retry_after_s <= 60
            await streams[0].aclose()
            resume(engine)
            for task in waiting:
                assert (await task)[-1].finish_reason == "length"
            assert (await read(engine, ENDLESS))[-1].finish_reason == "length"

    run(program())


def test_several_prompts_never_refuse_each_other() -> None:
    """Also where fewer may wait than run."""

    async def program() -> list[Generation]:
        async with started(sequences=2, max_waiting=0) as llm:
            return await llm.generate(["A", "B", "C", "D", "E"], max_tokens=20)

    assert [each.error for each in run(program())] == [None] * 5
    with pytest.raises(UserError, match="max_waiting is -1: allowed are the whole numbers 0 to"):
        AsyncLLM(max_waiting=-1)


def test_jobs_that_cannot_run_say_why() -> None:
    async def program() -> None:
        async with started(context=64) as engine:
            for prompt in ([5] * 64, [5] * 100_000):
                assert (await refused(engine, Job(prompt))).code == "context_length_exceeded"
            for job in (Job([]), Job([1 << 30]), Job([1 << 40]), Job([-1])):
                assert (await refused(engine, job)).code == "invalid_request"
            error = await refused(engine, Job([9], deadline_s=0))
            assert error.code == "deadline"
            await assert_all_is_free(engine)

    run(program())


def test_what_is_known_of_a_model_that_is_ready(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    shutil.copy(model_path(), path)

    async def program() -> None:
        async with AsyncLLM(path, sequences=3, context=100, sparsity="off") as engine:
            info = engine.info
            assert (info.name, info.path, info.fingerprint) == ("mine", str(path), llm.model.fingerprint)
            assert (info.context, info.slots, info.sparsity) == (100, 3, "off")
            assert (info.vocab, info.params) == (llm.tokenizer.vocab_size, 7343360)
            assert (info.size_bytes, info.created) == (path.stat().st_size, int(path.stat().st_mtime))
            assert engine.status == "ready" and engine.loaded == 1
            assert engine.metadata["general.architecture"] == info.family
            assert engine.tokenizer.encode(PROMPT) == llm.tokenizer.encode(PROMPT)
            stats = await engine.stats()
            assert stats.rss_bytes > info.size_bytes and stats.slots == 3

    run(program())


def test_the_documented_example(repository: Path) -> None:
    """The first block of Python in the section, as it stands there."""
    section = (repository / "docs" / "server.md").read_text().partition("## From Python")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert "AsyncLLM" in code
    found = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr and len(found.stdout) > 50
