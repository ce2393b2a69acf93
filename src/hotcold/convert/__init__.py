"""Converts Hugging Face checkpoints to GGUF; no other room knows their names.

``checkpoint`` opens a folder, ``huggingface`` knows its layouts, ``sentencepiece_model`` and ``vocabulary``
its tokenizer, ``chat_templates`` its chat templates; ``conversion`` writes the file."""

from hotcold.convert.conversion import Conversion, ConvertOptions, convert
from hotcold.convert.settings import ConvertError

__all__ = ["Conversion", "ConvertError", "ConvertOptions", "convert"]
