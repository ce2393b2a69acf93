"""Made-up vocabularies in llama.cpp: the same tokens end a text, and text between special ones is alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.vocabularies import CONTROL, NORMAL, USER_DEFINED, bpe, spm

from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.test_end_tokens import ENDS

llama_cpp = pytest.importorskip("llama_cpp")

#: It takes any of several names of one kind, and with Gemma 4's and PLaMo's it never has </s> for a token.
_ONE_OF = (ENDS[22:27], ENDS[27:32])
_APART = ("</s>", "<|tool_response>")
_SHAPE = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.block_count": 1, "llama.feed_forward_length": 32, "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
}  # fmt: skip
_TYPES: dict[type, type] = {np.int64: np.int32, np.float64: np.float32}


def vocabulary(draw: random.Random, kind: str) -> dict[str, Any]:
    """Metadata of one with some of the names, of any type, and some ids, not all of them a token's."""
    names = draw.sample([name for name in ENDS if name not in _APART], 6)
    if draw.random() < 0.5:
        names += ["<|end|>", *draw.sample(["<|return|>", "<|call|>", "<|calls|>", "<|flush|>"], 2)]
    for group in _ONE_OF:
        for name in [name for name in names if name in group][1:]:
            names.remove(name)
    if kind == "phi3":
        names += ["<|endoftext|>"]  # which llama.cpp asks for there
    special = [(name, draw.choice([CONTROL, NORMAL, USER_DEFINED])) for name in sorted(set(names))]
    # Tokens of keys are reserved here whatever their type, which llama.cpp leaves as it is.
    special.append(("<last>", CONTROL))
    if kind != "bpe":
        metadata = spm(special)
    else:
        metadata = bpe("gpt-2", "ab", [("<stop>", CONTROL), *special], bos_token_id=None)
        metadata["tokenizer.ggml.tokens"][256] = "<unlisted>"
    size = len(metadata["tokenizer.ggml.tokens"])
    for key in draw.sample(["eot", "eom", "fim_pad", "fim_rep", "fim_sep", "padding"], 3):
        metadata[f"tokenizer.ggml.{key}_token_id"] = draw.choice([size - 1, size, 2**32 - 1])
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            metadata[key] = value.astype(_TYPES.get(value.dtype.type, value.dtype))
        elif key.endswith("_token_id"):
            metadata[key] = np.uint32(value)
    return {**_SHAPE, "llama.vocab_size": size, **metadata}


@pytest.mark.parametrize("kind", ["spm", "bpe", "phi3"])
def test_llama_cpp_ends_at_the_same_tokens(kind: str, tmp_path: Path) -> None:
    draw = random.Random(kind)
    end_tokens: set[str] = set()
    for i in range(12):
        metadata = vocabulary(draw, kind)
        if kind == "phi3":
            metadata["general.name"] = "My Phi-3"
        path = tmp_path / f"{i}.gguf"
        write_gguf(path, metadata, {})
        with open_gguf(path) as file:
            ours = Tokenizer.from_metadata(file.metadata)
        theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        found = llama_cpp.llama_model_get_vocab(theirs.model)
        ends = {id for id in range(ours.vocab_size) if llama_cpp.llama_vocab_is_eog(found, id)}
        assert ours.stop_ids == ends
        tokens = metadata["tokenizer.ggml.tokens"]
        end_tokens |= {tokens[id] for id in ends}
        pieces = [*tokens[-6:], "a", " ", "\n", " \t", "ab", "c"]
        for _ in range(10):
            text = "".join(draw.choices(pieces, k=9))
            ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
            assert ours.encode(text, add_bos=False, parse_special=True) == ids, text
        theirs.close()
    assert len(end_tokens) > 15
