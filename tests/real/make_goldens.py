"""Writes tests/data/real: what llama.cpp makes of the published files that tests run.

    HOTCOLD_SMOLLM2=smollm2.gguf HOTCOLD_GEMMA3=gemma3.gguf python tests/real/make_goldens.py

Needs the package llama-cpp-python and nothing of Hotcold. For each file: the surprise of each token of a text
by llama.cpp's logits, and at every eighth the likeliest tokens; greedy continuations, and before each of
their tokens how far the two largest logits lie apart; ids of prompts that its chat template makes (rendered
by Jinja); and a hash of the ids of each of 1600 awkward strings, with and without names of special tokens as
these tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from awkward_strings import awkward_strings
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

DATA = Path(__file__).resolve().parent.parent / "data"
WINDOW = 256  #: tokens
WINDOWS = {"smollm2": 2, "gemma3": 1}
TEXT_BEGINS = 2000  #: character of heidi.txt where its table of contents has ended
EVERY, LIKELIEST = 8, 16  #: every 8th token, with its 16 likeliest
GREEDY = 24  #: tokens of a continuation
PROMPTS = {
    "smollm2": [
        "The capital of France is",
        "Once upon a time there was a little girl who",
        "def factorial(n):\n",
        "Water boils at",
        "The three primary colours are",
        "1, 2, 3, 4, 5, 6,",
    ],
    "gemma3": [
        "The capital of France is",
        "Once upon a time there was a little girl who",
        "1, 2, 3, 4, 5, 6,",
        "Die Hauptstadt von Deutschland ist",
    ],
}
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is a fox?"}],
    [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "  Hi \n"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "Und auf Deutsch? Grüße, 世界 🦊"},
    ],
]


def hashed(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:6]


def score(model: Any, windows: list[list[int]]) -> dict[str, Any]:
    """``nll`` of every token but the windows' first, nats; ``likeliest``: at every eighth position the ids of
    the likeliest tokens and their log-probabilities."""
    nll: list[float] = []
    likeliest: list[Any] = []
    for window in windows:
        model.reset()
        model.eval(window)
        for at, following in enumerate(window[1:]):
            logits = np.array(model.scores[at], np.float64)
            logits -= logits.max()
            logits -= np.log(np.exp(logits).sum())
            nll.append(round(-float(logits[following]), 4))
            if at % EVERY == 0:
                best = np.argsort(-logits)[:LIKELIEST]
                likeliest.append([best.tolist(), [round(each, 3) for each in logits[best].tolist()]])
    return {"nll": nll, "likeliest": likeliest}


def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    model.reset()
    model.eval(prompt)
    ids, gaps = [], []
    while len(ids) < GREEDY:
        logits = np.array(model.scores[model.n_tokens - 1])
        second, first = np.partition(logits, -2)[-2:]
        ids.append(int(logits.argmax()))
        gaps.append(round(float(first - second), 3))
        model.eval(ids[-1:])
    return {"prompt": prompt, "ids": ids, "gaps": gaps}


def golden(name: str, path: str) -> dict[str, Any]:
    model = llama_cpp.Llama(
        path, n_ctx=512, n_batch=512, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1
    )
    bos = [model.token_bos()] if name == "gemma3" else []  # what the files ask for

    def ids_of(text: str, special: bool = False) -> list[int]:
        ids: list[int] = model.tokenize(text.encode(), add_bos=False, special=special)
        return ids

    text = ids_of((DATA / "heidi.txt").read_text(encoding="utf-8")[TEXT_BEGINS:])
    step = WINDOW - len(bos)
    windows = [bos + text[i * step : (i + 1) * step] for i in range(WINDOWS[name])]
    strings = awkward_strings()
    found: dict[str, Any] = {
        "made_with": f"llama-cpp-python {llama_cpp.__version__}",
        "file_sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "text_ids": hashed([id for window in windows for id in window]),
        "window": WINDOW,
        **score(model, windows),
        "greedy": [greedy(model, bos + ids_of(prompt)) for prompt in PROMPTS[name]],
        "strings_sha256": hashlib.sha256(json.dumps(strings).encode()).hexdigest(),
        "plain": "".join(hashed(ids_of(each)) for each in strings),
        "special": "".join(hashed(ids_of(each, special=True)) for each in strings),
    }
    template = model.metadata.get("tokenizer.chat_template")
    if template is not None:
        formatter = Jinja2ChatFormatter(template, eos_token="<|im_end|>", bos_token="<|im_start|>")
        found["chats"] = [
            {"messages": chat, "ids": ids_of(formatter(messages=chat).prompt, special=True)}  # type: ignore[arg-type]
            for chat in CHATS
        ]
    return found


def main() -> None:
    (DATA / "real").mkdir(exist_ok=True)
    for name in WINDOWS:
        path = os.environ.get(f"HOTCOLD_{name.upper()}")
        if path is None:
            print(f"HOTCOLD_{name.upper()} is not set: {name}.json stays as it is")
            continue
        lines = json.dumps(golden(name, path), ensure_ascii=False)
        (DATA / "real" / f"{name}.json").write_text(lines.replace('], "', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
