"""The example that answers from documents: passages, the nearest of them, answers with their sources."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hotcold import LLM
from hotcold.errors import UserError


@pytest.fixture(scope="module")
def rag(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rag", repository / "examples" / "rag.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_passages_hold_all_of_a_text(rag: ModuleType) -> None:
    text = "\n\n".join(["one " * 30, "two", "x" * 250, "\n", "three " * 5])
    found = rag.passages(text, 100)
    assert max(map(len, found)) <= 100 and all(found)
    assert re.sub(r"\s", "", "".join(found)) == re.sub(r"\s", "", text)
    assert rag.passages("") == []


def test_answers_come_from_the_nearest_passages_and_name_them(
    rag: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = LLM(pooling="mean", threads=1)
    texts = {"goats.txt": "The goats went up the mountain.", "sea.txt": "A ship sailed over the sea."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    database = sqlite3.connect(tmp_path / "notes.db")
    files = [tmp_path / name for name in texts]
    assert rag.add(database, embedder, files) == rag.add(database, embedder, files) == 2
    assert database.execute("SELECT count(*) FROM passages").fetchone() == (2,)
    found = rag.nearest(database, embedder, texts["sea.txt"])
    assert found[0] == (str(tmp_path / "sea.txt"), texts["sea.txt"]) and len(found) == 2
    other, same = embedder.embed(list(texts.values())) @ embedder.embed(texts["sea.txt"])
    assert np.isclose(same, 1) and other < same  # which is why
    llm = LLM(chat_template="chatml", threads=1)
    with pytest.raises(UserError, match=r"the answer was cut \(length\)"):
        rag.ask(llm, found[:1], "Where?", max_tokens=3)
    monkeypatch.setattr(rag, "LONGEST", 20)  # and no more than some numbers of one passage fit
    answer = rag.ask(llm, found[:1], "Where?", seed=1, max_tokens=120)
    assert isinstance(answer["answer"], str) and {*answer["sources"]} <= {1}
    with pytest.raises(UserError, match="no passages"):
        rag.nearest(_empty(tmp_path / "empty.db", rag), embedder, "What?")


def _empty(path: Path, rag: ModuleType) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute(rag.TABLE)
    return database
