"""Holds the built-in model, so that the first command needs no download.

``fable-7m-q8_0.gguf`` was made by

    hotcold convert fable-7m --type q8_0 --license mit -o src/hotcold/demo/fable-7m-q8_0.gguf

from the checkpoint that ``fable-7m.md`` describes. Conversion is deterministic: a test makes the file again.
The profile in this folder was made from half a book and as much of TinyStories, 65536 tokens. A profile of a
book alone says little about stories (docs/results.md)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The path of the built-in model: a GGUF file of about 8 MB in Q8_0, down by neuron."""
    return Path(__file__).with_name("fable-7m-q8_0.gguf")
