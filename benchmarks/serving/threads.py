"""Several threads on one LLM: whether each call gives what it gives in one thread, and who waits for whom.

    python benchmarks/serving/threads.py                          # the built-in model, 8 threads, 200 calls
    python benchmarks/serving/threads.py -m model.gguf --paused 20
    python benchmarks/serving/threads.py --cost 20                # what the lock costs a single thread

The calls are of all kinds: ``generate`` with one prompt and with several, ``stream``, ``chat``, ``embed``;
some have a grammar or stop strings. One thread makes all of them, then the threads share them. After that
the threads make calls for ``--paused`` seconds, first alone, then beside a stream that its thread does not
read on. The last line of stdout is a JSON object. ``different`` and ``failed`` count calls and should be 0;
``stream_different`` should be 0, too. ``calls`` and ``longest_s`` show whether that stream delays others.

``--cost`` times pairs of runs in one thread, with the lock and without it. ``lock_us`` is the time of the
lock alone, for one step."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold import LLM, Grammar
from hotcold.engine.generation import Generation
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel
from hotcold.runtime.session_lock import SessionLock

BEGINNINGS = ("Once upon a time", "The king", "Peter and Heidi went up the mountain", "I", "There was a fox")
ENDINGS = ("", " and", ", who had a daughter", " in the old house by the sea", ". Then she said")
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' }}{% endfor %}"
KINDS = ("generate", "several", "stream", "chat", "stream_chat", "embed")


@dataclass(frozen=True)
class Call:
    """A call of an LLM: the method, what it is given, and its options."""

    kind: str
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)

    def result(self, llm: LLM) -> Any:
        """Makes the call; returns what must be the same in any thread."""
        messages = [{"role": "user", "content": self.prompt}]
        match self.kind:
            case "generate":
                return same(llm.generate(self.prompt, **self.options))
            case "several":
                return [same(each) for each in llm.generate([self.prompt, "The sea", "A"], **self.options)]
            case "stream":
                return "".join(map(str, llm.stream(self.prompt, **self.options)))
            case "chat":
                return same(llm.chat(messages, **self.options))
            case "stream_chat":
                return "".join(map(str, llm.stream_chat(messages, **self.options)))
        return llm.embed([self.prompt, "A"]).tolist()


def same(done: Generation) -> tuple[Any, ...]:
    """The part of a generation that other requests must not change."""
    return done.text, done.ids, done.finish_reason, done.stop, done.logprobs, done.seed


def mixed_calls(count: int, tokens: int = 40) -> list[Call]:
    """Calls of all kinds, always the same ones."""
    random = np.random.default_rng(count)
    calls = []
    for _ in range(count):
        kind, prompt = random.choice(KINDS), random.choice(BEGINNINGS) + random.choice(ENDINGS)
        options: dict[str, Any] = {
            "max_tokens": int(random.integers(1, tokens + 1)),
            "temperature": float(random.choice([0, 0.9])),
            "seed": int(random.integers(99)),
        }
        match random.integers(6):
            case 0:
                options["stop"] = [" the", "he "]
            case 1:
                options["grammar"] = Grammar("regex", "[a-z]{2,8}( [a-z]{1,9}){2,20}")
            case 2:
                options |= {"logprobs": 2, "repeat_penalty": 1.3}
        calls.append(Call(str(kind), str(prompt), {} if kind == "embed" else options))
    return calls


def loaded(path: Path | None, **options: Any) -> LoadedModel:
    """Loads a model, and lets it have a pooling, for ``embed``, and a chat template."""
    model = load(path, LoadOptions(**options))
    keys = {"tokenizer.chat_template": TEMPLATE, **model.chat_metadata}
    return replace(model, chat_metadata={**keys, "general.architecture": "any", "any.pooling_type": 1})


def in_threads(threads: int, work: Callable[[int], None]) -> None:
    """Runs some work in threads, each with its number, until all have ended."""
    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def compare(llm: LLM, calls: Sequence[Call], expected: Sequence[Any], threads: int) -> dict[str, Any]:
    """Shares calls among threads, and counts unexpected results."""
    different: list[int] = []
    failed: list[str] = []

    def work(number: int) -> None:
        for i in range(number, len(calls), threads):
            try:
                if calls[i].result(llm) != expected[i]:
                    different.append(i)
            except Exception as error:
                failed.append(f"{calls[i]}: {type(error).__name__}: {error}")

    start = time.perf_counter()
    in_threads(threads, work)
    print(*failed, sep="\n", end="\n" if failed else "")
    return {"different": len(different), "failed": len(failed), "s": time.perf_counter() - start}


def for_seconds(llm: LLM, calls: Sequence[Call], threads: int, seconds: float) -> dict[str, Any]:
    """Makes calls in threads for some seconds; returns how many came to their end, and how long they took."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        i = number
        while (start := time.perf_counter()) < end:
            calls[i % len(calls)].result(llm)
            took.append(time.perf_counter() - start)
            i += threads

    in_threads(threads, work)
    return {"calls": len(took), "median_s": statistics.median(took), "longest_s": max(took)}


def beside_a_paused_stream(
    llm: LLM, calls: Sequence[Call], threads: int, seconds: float
) -> tuple[dict[str, Any], bool]:
    """The figures of :func:`for_seconds` during a stream that is not read, and True if its text is right in
    the end."""
    prompt, options = BEGINNINGS[0], {"max_tokens": 150, "ignore_eos": True, "seed": 7}
    expected = llm.generate(prompt, **options).text  # type: ignore[arg-type]
    stream = llm.stream(prompt, **options)  # type: ignore[arg-type]
    text = str(next(stream)) + str(next(stream))
    figures = for_seconds(llm, calls, threads, seconds)
    text += "".join(map(str, stream))
    return figures, text == expected


def cost(model: LoadedModel, pairs: int, tokens: int) -> dict[str, Any]:
    """Times steps by the lock and without it, in turns."""
    seconds_by_way: dict[str, list[float]] = {"plain": [], "locked": []}
    with LLM(model) as llm:
        options: Any = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache": False}
        llm.generate(BEGINNINGS[0], **options)
        for _ in range(pairs):
            for name in seconds_by_way:
                request = llm.request(BEGINNINGS[0], **options)
                llm.engine.add(request)
                start = time.perf_counter()
                if name == "plain":
                    while not request.finished:
                        llm.engine._run_step()
                else:
                    llm.engine.run_until(lambda request=request: request.finished, [request])
                seconds_by_way[name].append((time.perf_counter() - start) / tokens)
    ratios = [b / a for a, b in zip(seconds_by_way["plain"], seconds_by_way["locked"], strict=True)]
    return {
        "plain_us": 1e6 * min(seconds_by_way["plain"]), "locked_us": 1e6 * min(seconds_by_way["locked"]),
        "ratio_of_least": min(seconds_by_way["locked"]) / min(seconds_by_way["plain"]),
        "ratio_median": statistics.median(ratios), "lock_us": 1e6 * of_the_lock(),
    }  # fmt: skip


def of_the_lock(steps: int = 50_000) -> float:
    """Seconds that the lock takes of a step, where nothing else does."""
    lock, left = SessionLock(), [steps]

    def step() -> None:
        left[0] -= 1

    start = time.perf_counter()
    lock.run_until(lambda: left[0] <= 0, step)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file (default: the built-in model)")
    parser.add_argument("--threads", type=int, default=8, help="that use one LLM (default: 8)")
    parser.add_argument("--calls", type=int, default=200, help="that are compared (default: 200)")
    parser.add_argument("--tokens", type=int, default=40, help="most of a call (default: 40)")
    parser.add_argument("--sequences", type=int, default=4, help="that run at once (default: 4)")
    parser.add_argument("--sparsity", default="auto", help="off, exact, predicted or auto (default)")
    parser.add_argument("--paused", type=float, default=60, help="seconds of a stream's pause (default: 60)")
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="time the lock instead")
    options = parser.parse_args()
    model = loaded(options.model, sequences=options.sequences, sparsity=options.sparsity)
    if options.cost:
        print(json.dumps(cost(model, options.cost, 200)))
        return
    calls = mixed_calls(options.calls, options.tokens)
    with LLM(model) as llm:
        start = time.perf_counter()
        expected = [call.result(llm) for call in calls]
        alone_s = time.perf_counter() - start
        report = {"calls": len(calls), "threads": options.threads, "one_thread_s": alone_s}
        report |= compare(llm, calls, expected, options.threads)
        print(f"{report['different']} of {len(calls)} results differ, {report['failed']} calls failed")
        report["alone"] = for_seconds(llm, calls, options.threads, options.paused)
        print(f"without a stream: {report['alone']}")
        report["paused"], right = beside_a_paused_stream(llm, calls, options.threads, options.paused)
        report["stream_different"] = int(not right)
        print(f"beside a stream that is not read on: {report['paused']}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
