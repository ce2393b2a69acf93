"""Shows how often looked-up tokens are right in a model's own answers, and what they bring.

    python benchmarks/quality/lookup.py -m SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/quality/lookup.py -m FILE --tokens 40 --kinds code --temperatures 0

Answers of four kinds are made without guesses: a story, source code that is edited, a table that is repeated
with changes, and questions about a document that answers quote. Each is then followed by the engine's own
rules, step by step, as if a step cost what it costs on two processors (docs/results.md), or its rows nothing:
the share of guesses that is right, tokens a step, and the speed against a step for each token. So the same
file gives the same figures on any machine. ``--real`` also makes each answer once more with guesses, and
prints the ratio of seconds on this machine.

Greedy answers of small models end in loops, which look-up guesses: ``loops`` marks answers whose last 24
tokens repeat a stretch of at most 12, and the sum is printed without them, too. The last line of stdout is a
JSON object.

With ``--llama FOLDER`` the program llama-lookup of that folder, llama.cpp's, answers the same prompts,
greedily: with as many guesses a step as ours may have, and with the number that it takes of itself. Its rule
depends on no cost, and its answers are its own: they part from ours where two tokens are nearly as likely.
So our rules then follow its texts, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotcold.chat.chat import Chat
from hotcold.engine.drafts import forced, look_up
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation, speculation_of
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit

#: Milliseconds of a dense step of 1 to 8 rows in Q4_0: measured on Zen 5; on Zen 3 and 4 eight rows cost 3.15
#: of one, and those between are on a line. Where rows are free, as many tokens are guessed as may be: so
#: tokens a step are what others' rules without costs are held against.
CURVES = {
    "Zen 5": (14.8, 17.9, 21.3, 22.2, 27.2, 30.2, 31.4, 35.2),
    "Zen 3 and 4": (10.0, 13.1, 16.1, 19.2, 22.3, 25.4, 28.4, 31.5),
    "free rows": (10.0,) * 8,
}

_CODE = """def read_scores(path):
    scores = {}
    with open(path) as file:
        for line in file:
            name, value = line.split(",")
            scores[name] = int(value)
    return scores


def best_player(scores):
    best = None
    for name in scores:
        if best is None or scores[name] > scores[best]:
            best = name
    return best
"""
_TABLE = """| city | country | river | people |
|---|---|---|---|
| Vienna | Austria | Danube | 1,900,000 |
| Cologne | Germany | Rhine | 1,080,000 |
| Lyon | France | Rhone | 520,000 |
| Turin | Italy | Po | 850,000 |
| Zaragoza | Spain | Ebro | 680,000 |
"""
_DOCUMENT = """The lighthouse of Skerry Point was built in 1854 by the engineer Anna Stevenson. Its tower
is 38 metres high and was made of grey granite that came by ship from the quarries of Mull. The lamp burned
whale oil until 1871, then paraffin, and has been electric since 1929. Three keepers lived there at a time,
and each of them kept watch for four hours. In the storm of January 1883 the gallery was torn away, and the
keepers held the light by hand for eleven nights. The last keeper, Donald Munro, left the tower on 31 March
1988, when the lamp was made automatic."""

#: Of each kind, what is asked of the model.
TASKS: dict[str, tuple[str, ...]] = {
    "story": (
        "Tell a story about a fox who wants to cross a frozen river.",
        "Write a short story about a clockmaker and her apprentice.",
    ),
    "code": (
        f"Rename the variable `scores` to `points` everywhere. Give the whole file.\n\n{_CODE}",
        f"Add a docstring to each function. Give the whole file.\n\n{_CODE}",
    ),
    "table": (
        f"Repeat this table, with Vienna's people changed to 2,000,000.\n\n{_TABLE}",
        f"Repeat this table without the row of Lyon.\n\n{_TABLE}",
    ),
    "quotes": (
        f"{_DOCUMENT}\n\nWhat burned in the lamp over the years? Quote the sentence from the text.",
        f"{_DOCUMENT}\n\nWhat happened in January 1883? Quote the text, then explain it.",
    ),
}


class Followed(NamedTuple):
    """An answer under the engine's rules and one curve of costs."""

    guessed: int
    right: int
    steps: int
    speed: float  #: tokens a cost, against a step for each token


def follow(prompt: Sequence[int], answer: Sequence[int], costs: Sequence[float]) -> Followed:
    """Follows a text that is known already: no model runs. Costs are known, as in a process that has answered
    before; how often guesses are right is not."""
    speculation = Speculation([forced, look_up], len(costs) - 1, DECODE_ROWS)
    for rows, milliseconds in [*enumerate(costs, 1)] * 10:
        speculation.note(rows, milliseconds / 1000)
    request = Request(Job(prompt, SamplingParams(temperature=0), max_tokens=len(answer) + 1))
    cost, steps = 0.0, 0
    while len(request.output) < len(answer):
        coming = answer[len(request.output) :]
        chosen = speculation.choose({request: len(coming) - 1}, 1, len(costs) - 1)
        drafts = chosen.get(request, ())
        pairs = zip(drafts, coming, strict=False)
        right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        new = [*coming[: right + 1]]
        request.output += new
        speculation.learn(request, len(drafts), right, new)
        speculation.note(1 + len(drafts), costs[len(drafts)] / 1000)
        cost += costs[len(drafts)]
        steps += 1
    return Followed(speculation.guessed, speculation.accepted, steps, len(answer) * costs[0] / cost)


def loops(answer: Sequence[int]) -> bool:
    """True if the last 24 tokens repeat a stretch of at most 12."""
    end = [*answer[-24:]]
    return any(end[n:] == end[:-n] for n in range(1, 13)) if len(end) == 24 else False


def answered(session: Session, request: Request, speculation: Speculation | None) -> float:
    """Seconds in which an answer is made, its prompt left out."""
    engine = Engine(session, reuse=False, speculation=speculation)
    engine.add(request)
    while not request.output and not request.finished:
        engine.step()
    start = time.perf_counter()
    while not request.finished:
        engine.step()
    return time.perf_counter() - start


class Theirs(NamedTuple):
    """Answers of llama-lookup."""

    tokens: int
    guessed: int
    right: int

    @property
    def text(self) -> str:
        a_step = self.tokens / (self.tokens - self.right)
        return f"{self.right} of {self.guessed} right, {a_step:.2f} a step"


def llama_lookup(args: argparse.Namespace, prompt: str, most: int | None) -> tuple[Theirs, str]:
    """Runs the program, and returns its text, too. ``most`` guesses a step; None is what it takes of itself.

    SystemExit: it fails, or prints no figures.
    """
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "prompt.txt")).write_text(prompt, encoding="utf-8")
        command = [str(args.llama / "llama-lookup"), "-m", str(args.model), "-f", str(file), "--temp", "0"]
        command += ["-n", str(args.tokens), "-c", str(args.tokens + 600)]
        command += ["--spec-draft-n-max", str(most)] if most is not None else []
        command += ["-t", str(args.threads)] if args.threads else []
        env = os.environ | {"LD_LIBRARY_PATH": str(args.llama)}
        run = subprocess.run(command, capture_output=True, env=env, cwd=folder, check=False)
    text, log = (each.decode(errors="replace") for each in (run.stdout, run.stderr))
    matches = {
        name: re.search(rf"n_{name} += (\d+)", text + log) for name in ("predict", "drafted", "accept")
    }
    counts = [int(match[1]) for match in matches.values() if match]
    if run.returncode or len(counts) < len(matches):
        raise SystemExit(f"llama-lookup ended with {run.returncode}: {log[-2000:]}")
    return Theirs(*counts), text.partition(prompt)[2].strip()


def beside(args: argparse.Namespace, session: Session, kind: str) -> list[dict[str, Any]]:
    """The figures of llama-lookup for a kind: with our largest number of guesses, and with its own; and what
    our rules do with its texts."""
    model = session.model
    chat = Chat(model.tokenizer, model.chat_metadata, model.name)
    results: list[dict[str, Any]] = []
    for most in (max(map(len, CURVES.values())) - 1, None):
        rows, same = [], []
        for task in TASKS[kind][: args.tasks]:
            asked = [{"role": "user", "content": task}]
            row, text = llama_lookup(args, chat.text(asked), most)
            ids = model.tokenizer.encode(text, add_bos=False, parse_special=True)
            rows.append(row)
            followed = {name: follow(chat.ids(asked), ids, costs)._asdict() for name, costs in CURVES.items()}
            same.append({"tokens": len(ids)} | followed)
        total = Theirs(*(sum(column) for column in zip(*rows, strict=True)))
        limit = "its own number of guesses" if most is None else f"at most {most} guesses"
        print(f"llama-lookup, {limit}: {kind:8} {total.tokens:5} tokens; {total.text}", flush=True)
        print(f"our rules on these texts: {kind:8} {_described(same)}", flush=True)
        answers = [row._asdict() for row in rows]
        results.append({"kind": kind, "most": most, "answers": answers, "ours": same})
    return results


def measured(
    session: Session, args: argparse.Namespace, kind: str, temperature: float
) -> list[dict[str, Any]]:
    """The figures of each answer of a kind."""
    model = session.model
    chat = Chat(model.tokenizer, model.chat_metadata, model.name)
    measured_rows = []
    for i, task in enumerate(TASKS[kind][: args.tasks]):
        prompt = [*chat.ids([{"role": "user", "content": task}])]
        job = Job(prompt, SamplingParams(temperature=temperature, seed=i), max_tokens=args.tokens)
        seconds = answered(session, request := Request(job), None)
        if len(request.output) < 2:
            continue
        row: dict[str, Any] = {"kind": kind, "temperature": temperature, "tokens": len(request.output)}
        row["loops"] = loops(request.output)
        row |= {name: follow(prompt, request.output, costs)._asdict() for name, costs in CURVES.items()}
        if args.real:
            again = Request(job)
            row["real"] = seconds / answered(session, again, speculation_of(session))
            assert again.output == request.output, "guesses changed a text"
        measured_rows.append(row)
        print(
            f"{kind:8} T={temperature:<4} {_described([row])}{'  loops' if row['loops'] else ''}", flush=True
        )
    return measured_rows


def _described(rows: Sequence[dict[str, Any]]) -> str:
    tokens, parts = sum(row["tokens"] for row in rows), []
    for name in CURVES:
        all_of = [row[name] for row in rows]
        guessed, right = (sum(each[what] for each in all_of) for what in ("guessed", "right"))
        steps = sum(each["steps"] for each in all_of)
        speed = tokens / sum(row["tokens"] / row[name]["speed"] for row in rows)
        parts.append(f"{name}: {right} of {guessed} right, {tokens / steps:.2f} a step, x{speed:.2f}")
    if "real" in rows[0]:
        parts.append(f"here x{tokens / sum(row['tokens'] / row['real'] for row in rows):.2f}")
    return f"{tokens:5} tokens; " + "; ".join(parts)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, required=True, help="one with a chat template")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer (200)")
    parser.add_argument("--tasks", type=int, default=2, help="of each kind (2)")
    parser.add_argument("--kinds", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--real", action="store_true", help="also time answers with guesses")
    parser.add_argument(
        "--llama", type=Path, metavar="FOLDER", help="llama.cpp's programs: llama-lookup, too"
    )
    args = parser.parse_args()
    options = LoadOptions(threads=args.threads, context=args.tokens + 600, gpu="off")
    session = load(args.model, options).session()
    rows: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        of_temperature = [row for kind in args.kinds for row in measured(session, args, kind, temperature)]
        for kind in args.kinds:
            of_kind = [row for row in of_temperature if row["kind"] == kind]
            if of_kind:
                print(f"all of {kind:8} T={temperature:<4} {_described(of_kind)}")
        straight = [row for row in of_temperature if not row["loops"]]
        if straight:
            print(f"all without loops, T={temperature}: {_described(straight)}")
        rows += of_temperature
    if args.llama:
        theirs = [row for kind in args.kinds for row in beside(args, session, kind)]
    session.model.close()
    report = {"model": args.model.name, "answers": rows, "llama.cpp": theirs, "commit": commit()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
