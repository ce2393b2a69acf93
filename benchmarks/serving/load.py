"""Many clients at once, and some leave: checks that each answer is right and complete, and nothing stays
behind.

    python benchmarks/serving/load.py  # the built-in model, 64 clients, 2 minutes
    python benchmarks/serving/load.py -m stock.gguf -np 8 -c 512  # a file of yours
    python benchmarks/serving/load.py --dialects  # a third of them in each dialect
    python benchmarks/serving/load.py --url http://127.0.0.1:8081  # llama-server, or another

Requests of all routes, streamed and not, are first sent one at a time; these answers are what every later
one is compared with. Then the clients send them in random order for ``--seconds``. A tenth of them
(``--leave``) end the connection at a random moment: in the queue, in the prompt, while the answer comes.
Counted are answers that are lost (an error, or none in time), cut (a stream without its end) and different.
At the end no request may be running or waiting, and all pages of the cache must be free or kept for prompts
to come; the memory of the server's processes, sampled each second, must be flat: the last quarter at most 5
% and 8 MiB above the second.

With ``--url`` the server is not started here, and its pages and memory are not looked at; answers that
differ are counted and not held against it, since batches change the answers of other engines.
``--ignore-eos`` gives all answers their full length, except in dialects without such a field. With
``--dialects`` a third of the clients speaks each dialect: OpenAI's and llama.cpp's routes, Anthropic's,
Ollama's. The last line of stdout is a JSON object; the exit code
is 1 where something was wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.client import CHAT, COMPLETIONS, NATIVE, Answer, Ask, Connection, Server, ask
from lib.dialects import MESSAGES, OLLAMA, RESPONSES, conversation, with_stops
from lib.report import percentiles
from lib.server import ServerProcess, serving

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "heidi.txt"
ROUTES = {"chat": CHAT, "completions": COMPLETIONS, "native": NATIVE}
DIALECTS = {"responses": RESPONSES, "messages": MESSAGES, "ollama": OLLAMA}
_PATIENCE_S = 300.0
_RETRIES = 100
_SETTLE_S = 30.0  # for the server to notice that the last clients are gone


@dataclass
class Findings:
    """The results that the clients saw."""

    answers: list[Answer] = field(default_factory=list)  #: whole ones
    streamed: list[Answer] = field(default_factory=list)  #: those of them that came piece by piece
    left: int = 0
    refused: int = 0  #: with 429 or 503, and sent again
    reconnected: int = 0  #: connections that a server had closed between two requests
    lost: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    tokens_left: int = 0  #: that came to those who left
    memory: list[dict[int, int]] = field(default_factory=list)


def requests(options: argparse.Namespace) -> list[Ask]:
    """Requests of all routes in turn; prompts of ``--prompt`` characters at most, half of them with an equal
    beginning."""
    text, chosen = TEXT.read_text(encoding="utf-8"), random.Random(options.seed)
    longest, tokens, ignore_eos = options.prompt, options.tokens, options.ignore_eos
    shared = text[: longest // 2]
    made: list[Ask] = []
    for number in range(options.requests):
        at = chosen.randrange(len(text) - longest)
        own_text = text[at : at + chosen.randrange(longest // 8, longest // 2)]
        prompt = shared + own_text if chosen.random() < 0.5 else own_text
        sampling: dict[str, Any] = {
            "temperature": chosen.choice([0.0, 0.8, 1.2]),
            "top_p": chosen.choice([1.0, 0.9]),
            "seed": number,
        }
        length = chosen.randrange(tokens // 4, tokens + 1)
        route = (ROUTES | DIALECTS)[options.routes[number % len(options.routes)]]
        if ignore_eos and route in ROUTES.values():
            sampling["ignore_eos"] = True
        if route == NATIVE:
            body = {"prompt": prompt, "n_predict": length, **sampling}
        elif route == COMPLETIONS:
            body = {"prompt": prompt, "max_tokens": length, **sampling}
            body |= {"n": 2} if chosen.random() < 0.2 else {}
            body |= {"logprobs": 2} if chosen.random() < 0.2 else {}
        else:
            body = conversation(route, prompt, length, sampling)
        if chosen.random() < 0.2 and not ignore_eos:
            body = with_stops(route, body, [". ", "\n"])
        made.append(Ask(route, body))
    return made


class Load:
    """Clients, and what they compare with."""

    def __init__(self, server: Server, asks: list[Ask], options: argparse.Namespace) -> None:
        self.server, self.asks, self.options = server, asks, options
        #: which requests the clients send: each client those of its own dialect
        self.groups = _by_dialect(asks) if options.dialects else [[*range(len(asks))]]
        self.alone: list[Answer] = []
        self.found = Findings()
        self.seconds = 0.0

    async def answer_alone(self) -> None:
        """Each request by itself. SystemExit: one fails even so."""
        async with Connection(self.server) as connection:
            for request in self.asks:
                answer = await ask(connection, self.server, request, False)
                if not answer.whole:
                    raise SystemExit(f"alone, {request.route} {request.body}: {answer.error or 'not whole'}")
                self.alone.append(answer)
        lengths = [sum(map(len, answer.texts.values())) for answer in self.alone]
        typical = statistics.median(answer.seconds for answer in self.alone)
        typical_answer = f"{statistics.mean(lengths):.0f} characters, {typical:.3f} s"
        print(f"{len(self.alone)} answers alone, {typical_answer}", flush=True)

    async def run(self, process: ServerProcess | None) -> None:
        start = time.perf_counter()
        ends = start + self.options.seconds
        clients = [self._client(number, ends) for number in range(self.options.clients)]
        watching = asyncio.create_task(self._watch(process))
        await asyncio.gather(*clients)
        self.seconds = time.perf_counter() - start
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, process: ServerProcess | None) -> None:
        while process is not None:
            self.found.memory.append(process.resident_bytes())
            await asyncio.sleep(1)

    async def _client(self, number: int, ends: float) -> None:
        chosen = random.Random(1000 * self.options.seed + number)
        own_asks = self.groups[number % len(self.groups)] if self.asks else []
        async with Connection(self.server) as connection:
            while time.perf_counter() < ends:
                which, stream = chosen.choice(own_asks), chosen.random() < 0.6
                if chosen.random() < self.options.leave:
                    await self._leave(connection, which, stream, chosen)
                else:
                    await self._whole(connection, which, stream)
            self.found.reconnected += connection.reconnected

    async def _leave(self, connection: Connection, which: int, stream: bool, chosen: random.Random) -> None:
        """Goes away after a random time, from at once to about when the answer would be whole."""
        usual = statistics.median(each.seconds for each in self.found.answers[-50:] or self.alone)
        asking = asyncio.create_task(ask(connection, self.server, self.asks[which], stream))
        await asyncio.wait([asking], timeout=chosen.random() ** 2 * usual)
        if asking.done():
            self._judge(which, stream, asking.result())
            return
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        connection.drop()
        self.found.left += 1

    async def _whole(self, connection: Connection, which: int, stream: bool) -> None:
        for _ in range(_RETRIES):
            asking = ask(connection, self.server, self.asks[which], stream)
            try:
                answer = await asyncio.wait_for(asking, _PATIENCE_S)
            except TimeoutError:
                connection.drop()
                answer = Answer(error=f"no answer in {_PATIENCE_S:.0f} s")
            if answer.status not in (429, 503):
                self._judge(which, stream, answer)
                return
            self.found.refused += 1
            await asyncio.sleep(answer.retry_after_s or 0.5)
        self.found.lost.append(f"{self._name(which, stream)}: refused {_RETRIES} times")

    def _judge(self, which: int, stream: bool, answer: Answer) -> None:
        results, alone, name = self.found, self.alone[which], self._name(which, stream)
        if answer.error:
            results.lost.append(f"{name}: {answer.error}")
        elif not answer.whole:
            results.cut.append(name)
        else:
            if (answer.texts, answer.reasons) != (alone.texts, alone.reasons):
                results.different.append(f"{name}: {answer.texts} {answer.reasons}, alone {alone.texts}")
            results.answers.append(answer)
            if stream:
                results.streamed.append(answer)

    def _name(self, which: int, stream: bool) -> str:
        return f"request {which} to {self.asks[which].route}, {'streamed' if stream else 'whole'}"


def _by_dialect(asks: list[Ask]) -> list[list[int]]:
    """Places of the requests to OpenAI's and llama.cpp's routes, Anthropic's and Ollama's."""
    by_route: dict[str, list[int]] = {}
    for i, question in enumerate(asks):
        by_route.setdefault(question.route if question.route in (MESSAGES, OLLAMA) else "", []).append(i)
    return [*by_route.values()]


async def idle(server: Server) -> dict[str, float]:
    """The server's own figures when nothing runs any more, or after a while those of then."""
    ends = time.perf_counter() + _SETTLE_S
    while True:
        status, data = await server.get("/metrics")
        figures = dict(_figures(data.decode())) if status == 200 else {}
        busy = figures.get("requests_running", 0) + figures.get("requests_waiting", 0)
        if not busy or time.perf_counter() > ends:
            return figures
        await asyncio.sleep(0.2)


def _figures(text: str) -> Iterator[tuple[str, float]]:
    for match in re.finditer(r"^hotcold_(\w+) (\S+)$", text, re.MULTILINE):
        yield match[1], float(match[2])


def growth(memory: list[dict[int, int]]) -> tuple[int, int]:
    """Median bytes of all processes in the second quarter of the run, and in the last."""
    totals = [sum(sample.values()) for sample in memory]
    quarter = len(totals) // 4
    if quarter == 0:
        return 0, 0
    return int(statistics.median(totals[quarter : 2 * quarter])), int(statistics.median(totals[-quarter:]))


def report(load: Load, figures: dict[str, float], own_server: bool) -> dict[str, Any]:
    results = load.found
    first = [moments[0] for answer in results.streamed for moments in answer.moments.values()]
    between = [
        later - earlier
        for answer in results.streamed
        for moments in answer.moments.values()
        for earlier, later in pairwise(moments)
    ]
    before, after = growth(results.memory)
    tokens = sum(answer.tokens for answer in results.answers)
    pages = {name: figures.get(f"cache_pages{name}", 0.0) for name in ("", "_free", "_shared")}
    wrong = {
        "lost": len(results.lost),
        "cut": len(results.cut),
        "different": len(results.different) if own_server else 0,
        "reconnected": results.reconnected if own_server else 0,
        "running": figures.get("requests_running", 0) + figures.get("requests_waiting", 0),
        "pages_leaked": pages[""] - pages["_free"] - pages["_shared"],
        "figures_missing": int(own_server and "requests_running" not in figures),
        "memory_grew": int(after > before * 1.05 + (8 << 20)),
    }
    return {
        "server": f"{load.server.host}:{load.server.port}",
        "clients": load.options.clients,
        "seconds": round(load.seconds, 2),
        "answers": len(results.answers),
        "streamed": len(results.streamed),
        "left": results.left,
        "refused_and_sent_again": results.refused,
        "reconnected": results.reconnected,
        "different": len(results.different),
        "wrong": wrong,
        "ttft_s": percentiles(first),
        "between_pieces_s": percentiles(between),
        "request_s": percentiles([answer.seconds for answer in results.answers]),
        "tokens": tokens,
        "tok_s": round(tokens / load.seconds, 2),
        "resident_bytes": {"second_quarter": before, "last_quarter": after},
        "figures": {name: figures[name] for name in sorted(figures) if not name.endswith("_created")},
        "ok": not any(wrong.values()),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", help="GGUF file (default: the built-in model); with --url its name there")
    add("--url", help="measure this server instead of starting one")
    add("--key", help="its API key")
    add("--clients", type=int, default=64)
    add("--seconds", type=float, default=120.0)
    add("--leave", type=float, default=0.1, help="share of requests whose client goes away (0.1)")
    add("--requests", type=int, default=48, help="different ones (48)")
    add("-np", "--parallel", type=int, default=16, help="slots of the server that is started (16)")
    add("-c", "--ctx-size", type=int, help="its context")
    add("-n", "--tokens", type=int, default=64, help="the most of an answer (64)")
    add("--prompt", type=int, default=320, help="the most characters of a prompt (320)")
    routes = {**ROUTES, **DIALECTS}
    add("--routes", nargs="+", choices=routes, help="default: those of OpenAI and llama.cpp")
    add("--dialects", action="store_true", help="all routes; a third of the clients in each dialect")
    add("--ignore-eos", action="store_true")
    add("--sparsity", default="auto")
    add("--seed", type=int, default=1)
    options = parser.parse_args()
    options.routes = options.routes or list(routes if options.dialects else ROUTES)
    return options


async def measured(
    server: Server, process: ServerProcess | None, options: argparse.Namespace
) -> dict[str, Any]:
    load = Load(server, requests(options), options)
    await load.answer_alone()
    await load.run(process)
    figures = await idle(server) if process else {}
    for kind in ("lost", "cut", "different"):
        lines: list[str] = getattr(load.found, kind)
        for line, times in Counter(lines).most_common(5):
            print(f"{kind} {times} x: {line[:600]}")
    return report(load, figures, own_server=process is not None)


def main() -> int:
    options = parsed()
    with ExitStack() as stack:
        process = None
        if options.url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            arguments = ["-np", str(options.parallel), "--max-waiting", "256", "--sparsity", options.sparsity]
            arguments += ["-m", options.model] if options.model else []
            arguments += ["-c", str(options.ctx_size)] if options.ctx_size else []
            process = stack.enter_context(serving(arguments, folder / "log"))
        server = Server(
            process.url if process else options.url, options.key, None if process else options.model
        )
        report_of_load = asyncio.run(measured(server, process, options))
    print(json.dumps(report_of_load))
    return 0 if report_of_load["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
