"""The two published files, and what llama.cpp made of them (``make_goldens.py`` wrote tests/data/real)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from support.published import named_model

from hotcold.formats.gguf import open_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel
from hotcold.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).resolve().parent.parent / "data" / "real"
NAMES = ("smollm2", "gemma3")


@dataclass(frozen=True)
class Published:
    """A file and its golden figures. What is costly is made when first asked for."""

    name: str
    path: Path
    golden: dict[str, Any]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with open_gguf(self.path) as file:
            return Tokenizer.from_metadata(file.metadata)

    @cached_property
    def model(self) -> LoadedModel:
        return load(self.path, LoadOptions(sparsity="off", context=512, sequences=8, threads=2))


@pytest.fixture(scope="session", params=NAMES)
def published(request: pytest.FixtureRequest) -> Published:
    """Each of the two in turn."""
    name = str(request.param)
    path = named_model(f"HOTCOLD_{name.upper()}")
    golden = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != golden["file_sha256"]:
            pytest.fail(f"HOTCOLD_{name.upper()} names another file than the one that goldens were made of")
    return Published(name, path, golden)
