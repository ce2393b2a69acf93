"""Grammars of the built-in model's vocabulary, made once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.built_in import tokenizer

from hotcold.grammar.constraint import Grammars


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer())
    yield made
    made.close()
