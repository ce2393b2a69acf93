"""Measures what each dialect costs: the time to the first token and tokens a second, beside the chat route's.

    python benchmarks/serving/dialects.py                      # the built-in model
    python benchmarks/serving/dialects.py -m model.gguf --rounds 40 -n 128

One client streams one answer at a time, in each round one by each route, in an order that moves on from round
to round. All requests are equal, except for a number at the beginning of each prompt, so that none is in the
cache: the routes are translations to the same jobs. The ratios are those within a round, chat's time by the
dialect's or the dialect's rate by chat's, so that more than 1 is faster than the chat route. The last line of
stdout is a JSON object: medians and ranges of the figures and of the ratios."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.client import Answer, Ask, Connection, Server, ask
from lib.dialects import CHAT, CONVERSATIONS, conversation
from lib.report import spread
from lib.server import serving

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "heidi.txt"
_TRIES = 20  # answers of another beginning, where one is too short to have a rate
_LEAST = 4  # pieces of an answer that has a rate

Figures = dict[str, dict[str, float]]


def figures(answer: Answer) -> dict[str, float]:
    """Figures of a whole answer: seconds to its first piece, and tokens a second after that."""
    moments = answer.moments[0]
    seconds = moments[-1] - moments[0]
    after = answer.tokens * (len(moments) - 1) / len(moments)  # pieces stand for tokens
    return {"ttft_s": moments[0], "tok_s": after / seconds}


async def one_round(server: Server, number: int, options: argparse.Namespace) -> Figures:
    """Figures of each route."""
    text = TEXT.read_text(encoding="utf-8")[: options.prompt]
    count, by_route = len(CONVERSATIONS), {}
    async with Connection(server) as connection:
        for place in range(count):
            route = CONVERSATIONS[(number + place) % count]
            for attempt in range(_TRIES):
                begin = (number * count + place) * _TRIES + attempt
                sampling = {"temperature": 1.0, "seed": begin}
                body = conversation(route, f"{begin}. {text}", options.tokens, sampling)
                answer = await ask(connection, server, Ask(route, body), True)
                if not answer.whole:
                    raise SystemExit(f"{route}: {answer.error or 'an answer that is not whole'}")
                if len(answer.moments.get(0, ())) >= _LEAST:
                    break
            else:
                raise SystemExit(f"{route}: no answer of {_LEAST} pieces in {_TRIES}")
            by_route[route] = figures(answer)
    return by_route


def summary(rounds: list[Figures]) -> dict[str, Any]:
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for by_route in rounds:
        for route in CONVERSATIONS:
            if route != CHAT:
                ratios[route]["ttft"].append(by_route[CHAT]["ttft_s"] / by_route[route]["ttft_s"])
                ratios[route]["tok_s"].append(by_route[route]["tok_s"] / by_route[CHAT]["tok_s"])
    return {
        "figures": {
            route: {name: spread([each[route][name] for each in rounds]) for name in ("ttft_s", "tok_s")}
            for route in CONVERSATIONS
        },
        "ratio": {
            route: {name: spread(values) for name, values in by_name.items()}
            for route, by_name in ratios.items()
        },
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", help="GGUF file (default: the built-in model)")
    add("--rounds", type=int, default=20)
    add("-n", "--tokens", type=int, default=96, help="the most of an answer (96)")
    add("--prompt", type=int, default=400, help="characters of a prompt (400)")
    return parser.parse_args()


async def measured(server: Server, options: argparse.Namespace) -> list[Figures]:
    await one_round(server, 10_000, options)  # warms memory and threads
    rounds = []
    for number in range(options.rounds):
        rounds.append(await one_round(server, number, options))
        speeds = (f"{route} {found['tok_s']:.1f} tok/s" for route, found in rounds[-1].items())
        print(", ".join(speeds), flush=True)
    return rounds


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-np", "1", *(["-m", options.model] if options.model else [])]
        with serving(arguments, Path(folder) / "log") as process:
            rounds = asyncio.run(measured(Server(process.url), options))
    print(json.dumps({"model": options.model, "rounds": options.rounds, **summary(rounds)}))


if __name__ == "__main__":
    main()
