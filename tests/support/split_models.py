"""A model in several files, as llama-gguf-split writes them: all metadata in the first, tensors in each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotcold.formats.gguf import open_gguf, write_gguf


def split_model(model: Path, path: Path, parts: int) -> list[Path]:
    """Writes ``path``'s stem and ``-00001-of-00003.gguf`` and so on; gives their paths."""
    paths = [path.with_name(f"{path.stem}-{number + 1:05}-of-{parts:05}.gguf") for number in range(parts)]
    with open_gguf(model) as file:
        names = list(file.tensors)
        for number, part in enumerate(paths):
            start, stop = (len(names) * i // parts for i in (number, number + 1))
            metadata = {} if number else dict(file.metadata)
            metadata["split.no"] = np.uint16(number)
            metadata["split.count"] = np.uint16(parts)
            metadata["split.tensors.count"] = np.int32(len(names))
            write_gguf(part, metadata, {name: file.load(name) for name in names[start:stop]})
    return paths
