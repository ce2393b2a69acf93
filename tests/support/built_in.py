"""Parts of the built-in model."""

from __future__ import annotations

from functools import cache

from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.tokenizer.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    with open_gguf(model_path()) as file:
        return Tokenizer.from_metadata(file.metadata)
