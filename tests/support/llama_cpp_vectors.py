"""llama.cpp's vocabularies, with the ids that it gives to 46 texts; tests/data/README.md has their source."""

from __future__ import annotations

import functools
import lzma
import tempfile
from pathlib import Path
from typing import Any

from hotcold.formats.gguf import open_gguf

FOLDER = Path(__file__).parent.parent / "data" / "tokenizers"
KINDS = ("llama-spm", "gpt-2", "falcon")


def write_vocabulary(kind: str, path: Path) -> None:
    """A GGUF file without tensors; ``kind`` is one of :data:`KINDS`."""
    path.write_bytes(lzma.decompress((FOLDER / f"ggml-vocab-{kind}.gguf.xz").read_bytes()))


@functools.cache
def vocabulary(kind: str) -> dict[str, Any]:
    """The metadata of that file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        write_vocabulary(kind, path)
        with open_gguf(path) as file:
            return dict(file.metadata)


def vectors(kind: str) -> list[tuple[str, list[int]]]:
    """Texts, with their ids without BOS."""
    # The last text, too, is followed by a separator. Bytes, since some texts hold carriage returns.
    texts = (FOLDER / "ggml-vocab.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = (FOLDER / f"ggml-vocab-{kind}.out").read_text(encoding="utf-8").splitlines()
    assert len(texts) == len(lines) == 46
    return [(text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=True)]
