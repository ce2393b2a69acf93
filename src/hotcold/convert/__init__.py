"""Converts Hugging Face checkpoints to GGUF; no other package knows their names.

``checkpoint`` opens a folder, ``layouts`` and ``adapting`` know the layouts of models, ``vocabulary`` the
tokenizers, ``chat_templates`` the chat templates; ``conversion`` writes the file."""

from hotcold.convert.conversion import Conversion, ConvertOptions, convert
from hotcold.convert.settings import ConvertError

__all__ = ["Conversion", "ConvertError", "ConvertOptions", "convert"]
