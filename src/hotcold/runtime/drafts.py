"""Checks that a smaller model can guess the tokens of a larger one, before either is read."""

from pathlib import Path

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.runtime.options import LoadError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import printable

_PADDING = 512  # tokens that vocabularies of one family may differ by, at their end


def check_draft(path: Path, larger: Path, config: Config, tokenizer: Tokenizer) -> int:
    """Checks the draft model in a file for the model of ``larger``, whose configuration and tokenizer are
    given; returns how long its texts may be. LoadError: the vocabularies differ, or the smaller one keeps
    states of sequences."""
    names = f"`draft={printable(path.name)}` and {printable(larger.name)}"
    with open_gguf(path) as file:
        try:
            its = Config.from_metadata(file.metadata, file.magic, file.tensors)
            own = Tokenizer.from_metadata(file.metadata)
        except ValueError as error:
            raise LoadError(f"`draft={printable(path.name)}`: {error}") from error
    if its.slot_bytes:
        seen = f"`draft={printable(path.name)}` has recurrent layers, whose states cannot go back a step"
        raise LoadError(f"{seen}: choose a smaller model with only attention layers")
    fix = "a draft model must have the vocabulary of the larger model"
    if difference := own.difference(tokenizer):
        raise LoadError(f"{names} have different vocabularies, {difference}: {fix}")
    if abs(own.vocab_size - tokenizer.vocab_size) > _PADDING:
        seen = f"{own.vocab_size} and {tokenizer.vocab_size} tokens"
        raise LoadError(f"{names} have different vocabularies, {seen}: {fix}")
    return its.context
