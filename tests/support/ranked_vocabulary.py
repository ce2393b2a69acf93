"""Vocabularies of bytes by rank, as tiktoken has them: small ones, and the ids that merging gives."""

from __future__ import annotations

from support.vocabularies import ALPHABET
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

WORDS = [
    "I'll go",
    " there",
    " won't",
    "12 3456",
    "  def f(x):\n\t",
    "été",
    "字字が",
    "🦙",
    "goes",
    "\r\n",
    " ",
]


def trained(cut: pre_tokenizers.PreTokenizer) -> list[bytes]:
    """All bytes, then tokens in the order in which training on :data:`WORDS` made them."""
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(["".join(WORDS)] * 30, trainer)
    made = [token for token, _ in sorted(theirs.get_vocab().items(), key=lambda each: each[1])]
    longer = [bytes(map(ALPHABET.index, token)) for token in made if len(token) > 1]
    return [*(bytes([byte]) for byte in range(256)), *longer]


def ranks_of(text: str, ranks: dict[bytes, int], cut: pre_tokenizers.PreTokenizer) -> list[int]:
    """Ranks as tiktoken gives them. A word that is a token stays whole. Else its bytes are merged: the pair
    with the lowest rank first."""
    found = []
    for word, _ in cut.pre_tokenize_str(text):
        parts = [word.encode()]
        if parts[0] not in ranks:
            parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]:
            i = min(pairs, key=lambda i: ranks[parts[i] + parts[i + 1]])
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ranks[part] for part in parts]
    return found
