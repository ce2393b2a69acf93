"""The script that runs the evaluation harness: what it can get wrong without one."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.engine.request import Job, Request


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    path = repository / "benchmarks" / "quality" / "lm_eval" / "compare.py"
    spec = importlib.util.spec_from_file_location("lm_eval_compare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_passages_are_whole_sentences_of_the_text(script: ModuleType) -> None:
    sentences = [f"Number {i} has{' very' * (i % 7)} few words." for i in range(200)]
    text = "\n".join(sentences)
    found = script.passages(text, 10, 30)
    assert len(found) == 10
    flat = " ".join(text.split())
    for passage in found:
        assert passage in flat and 20 < len(passage.split()) <= 30
        assert passage.startswith("Number") and passage.endswith("words.")
    positions = [flat.index(passage) for passage in found]
    assert positions == sorted(positions) and positions[-1] > len(flat) / 2
    assert script.passages("word " * 500, 10, 30) == []  # no sentence is short enough


def test_own_scores_are_those_of_the_library(script: ModuleType) -> None:
    """Against log-probabilities of the library's own echo: another way through the engine."""
    texts = ["Once upon a time there was a dog.", "Heidi looked at the goats."]
    own = script.own_scores(model_path(), "exact", None, 128, texts)
    with LLM(context=128) as llm:
        for i, text in enumerate(texts):
            for task, bos, first in (("held_out_text", True, 1), ("held_out_words", False, None)):
                ids = llm.tokenizer.encode(text, add_bos=bos)
                if first is None:
                    first = len(llm.tokenizer.encode(text.rsplit(" ", 1)[0], add_bos=False))
                request = Request(Job(ids, max_tokens=1, logprobs=0, echo=True))
                llm.engine.run([request])
                expected = sum(each.logprob for each in request.prompt_logprobs[first:] if each)
                assert own["passages"][task][i] == pytest.approx(expected, abs=1e-3)
    assert 0 < own["active_share"] < 0.5


def test_samples_of_the_harness_are_read_in_order(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    lines = [{"doc_id": 1, "resps": [[["-2.5", "True"]]]}, {"doc_id": 0, "resps": [[-1.5]]}]
    text = "\n".join(map(json.dumps, lines))
    (folder / "samples_held_out_text_2026.jsonl").write_text(text, encoding="utf-8")
    assert script.samples(tmp_path, "held_out_text") == [-1.5, -2.5]


def test_a_difference_is_seen(script: ModuleType) -> None:
    results: dict[str, Any] = {task: {} for task in script.TASKS}
    harness = {"passages": {task: [-3.0, -1.0] for task in script.TASKS}, "results": results}
    own = {"passages": {task: [-3.0, -1.25] for task in script.TASKS}, "active_share": 0.1}
    row = script.compare("exact", harness, own, 4)
    assert row["held_out_text"]["worst_difference"] == 0.25
    assert row["perplexity_harness"] == math.e and row["perplexity_own"] > math.e
