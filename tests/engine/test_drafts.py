"""Looks up guesses in a text: the same by brute force, and llama.cpp's beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.llama_lookup import steps_of

from hotcold.engine.drafts import Draft, Kind, Lookup, copied, look_up
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
HEIDI = Path(__file__).parents[1] / "data" / "heidi.txt"


def longest(tokens: list[int]) -> tuple[int, int]:
    """Where else a text ends, of several places the last, and how many tokens are the same; -1 for none."""
    best, at = 1, -1
    for end in range(len(tokens) - 2, 0, -1):
        same = 0
        while same <= end and same < 32 and tokens[end - same] == tokens[len(tokens) - 1 - same]:
            same += 1
        if same > best:
            best, at = same, end
    return at, best


def draft_by_search(tokens: list[int], most: int) -> list[int] | None:
    """The same by brute force; where the text stood nowhere, the last token took the place of another one."""
    at, _ = longest(tokens)
    if at < 0:
        at, same = longest(tokens[:-1])
        at += 1
        if same < 8:
            return None
    found = list(tokens)
    for i in range(most):
        found.append(found[at + 1 + i])
    return found[len(tokens) :]


def test_the_longest_end_that_stood_before_is_found() -> None:
    random, gaps = np.random.default_rng(1), 0
    for _ in range(400):
        tokens = random.integers(0, int(random.integers(2, 7)), int(random.integers(0, 24))).tolist()
        if random.random() < 0.3:  # the same again, with a token that is nowhere
            tokens = [*tokens, *tokens[: int(random.integers(0, 24))], 99]
        index = Lookup()
        for i in range(0, len(tokens), 3):
            index.extend(tokens[i : i + 3])
        found = index.find(5)
        gaps += found is not None and found.kind is Kind.SHORT and found.length >= 8
        assert (None if found is None else list(found.tokens)) == draft_by_search(tokens, 5)
    assert gaps > 20


def test_what_is_looked_up_grows_with_the_answer() -> None:
    request = Request(Job([1, 2, 3, 4], GREEDY))
    assert look_up(request, 3) is None
    request.output += [9, 1, 2]
    assert look_up(request, 3) == Draft([3, 4, 9], Kind.SHORT, 2)
    assert copied(request, 3) is None
    request.output += [3, 4, 9, 1, 2]
    assert look_up(request, 4) == copied(request, 4) == Draft([3, 4, 9, 1], Kind.LONG, 7)
    request.output += [7]  # in place of 3, after too few tokens
    assert look_up(request, 2) is None
    request.output += [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 6]  # in place of 7
    assert look_up(request, 2) == Draft([1, 2], Kind.SHORT, 12) and copied(request, 2) is None


def test_a_guess_becomes_surer_with_its_right_tokens() -> None:
    draft = Draft([1] * 9, Kind.SHORT, 2)
    assert [draft.kind_of(i) for i in range(9)] == [*[Kind.SHORT] * 2, *[Kind.LONG] * 7]
    assert {Draft([1] * 9, Kind.MODEL).kind_of(i) for i in range(9)} == {Kind.MODEL}
    gap = Draft([1] * 2, Kind.SHORT, 12)
    assert [gap.kind_of(i) for i in range(2)] == [Kind.SHORT, Kind.LONG]


def texts() -> dict[str, tuple[str, str]]:
    """Prompts and answers: quotes of a document, a name that becomes another one, a table with changes."""
    story = HEIDI.read_text(encoding="utf-8")[4000:6500]
    sentences = re.findall(r"[A-Z][^.!?]{40,200}[.!?]", story)
    assert len(sentences) > 5
    quotes = " ".join(
        f'It says: "{each}" So {each[:60]}, and that is why.' for each in (*sentences[1:3], sentences[5])
    )
    code = "for name in scores: total += scores[name]; best = max(scores, key=lambda each: scores[each])\n"
    code += "def all_of(scores):\n  return [scores[name] for name in scores if scores[name] > best]\n"
    table = "".join(f"| {name} | {i * 317} | {i * i} |\n" for i, name in enumerate(story.split()[:12]))
    changed = table.replace("634", "700")
    return {
        "quotes": (story, quotes),
        "code": (code, code.replace("scores", "points")),
        "table": (table, changed),
        "story": (story[:300], story[300:]),
    }


@pytest.mark.parametrize("kind", ["quotes", "code", "table", "story"])
def test_as_many_tokens_a_step_as_llama_cpp(kind: str) -> None:
    """Both may guess seven tokens, and rows cost nothing."""
    ids: dict[str, int] = {}
    prompt, answer = (
        [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+|\W", text)] for text in texts()[kind]
    )
    speculation = Speculation([look_up], 7, DECODE_ROWS)
    costs: Any = speculation.costs
    costs.measured, costs.of = lambda rows: True, lambda rows: 1.0
    request, steps = Request(Job(prompt, GREEDY, max_tokens=len(answer))), 0
    request.output += answer[:1]
    while len(request.output) < len(answer):
        coming = answer[len(request.output) :]
        drafts = speculation.choose({request: 7}, 1, 15).get(request, ())
        pairs = enumerate(zip(drafts, coming, strict=False))
        right = next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(coming)))
        request.output += coming[: right + 1]
        speculation.learn(request, len(drafts), right, coming[: right + 1])
        steps += 1
    theirs = steps_of(prompt, answer, 7)
    assert steps <= theirs < len(answer)
