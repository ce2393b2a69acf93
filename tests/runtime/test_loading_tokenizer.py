"""Loading makes the tokenizer in a thread while weights are read."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hotcold.runtime import loading
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.tokenizer.vocabulary import TokenizerError


def test_weights_are_read_while_the_tokenizer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, make = threading.Event(), Tokenizer.from_metadata

    def make_later(metadata: dict[str, Any]) -> Tokenizer:
        assert reading.wait(60), "the tokenizer was made before weights were read"
        return make(metadata)

    monkeypatch.setattr(loading, "Tokenizer", SimpleNamespace(from_metadata=make_later))
    load(None, LoadOptions(backend="reference"), lambda done, total: reading.set())


def test_an_invalid_vocabulary_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    started, failing, done = threading.Event(), threading.Event(), list[int]()

    def fail(metadata: dict[str, Any]) -> None:
        started.wait(60)
        failing.set()
        raise TokenizerError("merges[3] is wrong")

    def progress(read: int, total: int) -> None:
        started.set()
        failing.wait(60)
        time.sleep(0.05)  # the thread ends meanwhile
        done.append(read)

    monkeypatch.setattr(loading, "Tokenizer", SimpleNamespace(from_metadata=fail))
    with pytest.raises(TokenizerError, match="merges"):
        load(None, LoadOptions(backend="reference"), progress)
    assert 0 < done[-1] < 7_000_000
