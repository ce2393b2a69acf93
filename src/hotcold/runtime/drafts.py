"""Checks of a draft model against the larger model, before either is read."""

from pathlib import Path

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.runtime.options import LoadError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import printable

_PADDING = 512  # tokens by which vocabularies of one family may differ at their end


def check_draft(path: Path, larger: Path, config: Config, tokenizer: Tokenizer) -> int:
    """Checks the draft model in a file against the model of ``larger``, with this configuration and
    tokenizer; returns the draft model's context. LoadError: the vocabularies differ, or the draft model keeps
    states."""
    names = f"`draft={printable(path.name)}` and {printable(larger.name)}"
    with open_gguf(path) as file:
        try:
            draft_config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            draft_tokenizer = Tokenizer.from_metadata(file.metadata)
        except ValueError as error:
            raise LoadError(f"`draft={printable(path.name)}`: {error}") from error
    if draft_config.slot_bytes:
        got = f"`draft={printable(path.name)}` has recurrent layers, whose states cannot go back a step"
        raise LoadError(f"{got}: choose a smaller model with only attention layers")
    fix = "a draft model must have the vocabulary of the larger model"
    if difference := draft_tokenizer.difference(tokenizer):
        raise LoadError(f"{names} have different vocabularies, {difference}: {fix}")
    if abs(draft_tokenizer.vocab_size - tokenizer.vocab_size) > _PADDING:
        got = f"{draft_tokenizer.vocab_size} and {tokenizer.vocab_size} tokens"
        raise LoadError(f"{names} have different vocabularies, {got}: {fix}")
    return draft_config.context
