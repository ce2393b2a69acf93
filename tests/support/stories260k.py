"""stories260K as GGUF: reads llama2.c's checkpoint and tokenizer, formats that nothing else needs."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import write_gguf

FOLDER = Path(__file__).parent.parent / "data" / "stories260k"


@dataclass(frozen=True)
class Reference:
    """Greedy decoding from BOS: 200 ``ids`` after it, their text, logits ``[4, 512]`` of BOS and 3 ids."""

    ids: list[int]
    text: str
    logits: npt.NDArray[np.float64]


def reference() -> Reference:
    values = json.loads((FOLDER / "greedy_ref.json").read_text())
    return Reference(values["ids"], values["text"], np.array(values["logits"]))


def write_stories260k(path: Path, *, type: str = "F32") -> None:
    """Writes the model; down has rows of 172 weights, so ``type`` must be a float type."""
    metadata, arrays = _checkpoint((FOLDER / "stories260K.bin").read_bytes())
    metadata |= _tokenizer((FOLDER / "tok512.bin").read_bytes(), metadata["llama.vocab_size"])
    tensors: dict[str, Tensor] = {
        name: quantise(values, "F32" if values.ndim == 1 else type) for name, values in arrays.items()
    }
    write_gguf(path, metadata, tensors)


def _checkpoint(data: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    """The legacy format: seven int32, then float32 arrays, each kind for all layers before the next kind."""
    dim, neurons, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    assert vocab > 0, "a negative vocabulary size would mean that the head is not tied"
    rest = np.frombuffer(data, "<f4", offset=28)
    kv_dim, head_dim = dim // heads * kv_heads, dim // heads
    position = 0

    def take(*shape: int) -> npt.NDArray[np.float32]:
        nonlocal position
        size = int(np.prod(shape))
        position += size
        return rest[position - size : position].reshape(shape)

    embedding = take(vocab, dim)
    # Rotary positions turn neighbours in llama2.c as in GGUF's llama: q and k need no permutation.
    stacked = {
        "attn_norm": take(layers, dim),
        "attn_q": take(layers, dim, dim),
        "attn_k": take(layers, kv_dim, dim),
        "attn_v": take(layers, kv_dim, dim),
        "attn_output": take(layers, dim, dim),
        "ffn_norm": take(layers, dim),
        "ffn_gate": take(layers, neurons, dim),
        "ffn_down": take(layers, dim, neurons),
        "ffn_up": take(layers, neurons, dim),
    }
    arrays = {"token_embd.weight": embedding, "output_norm.weight": take(dim)}
    take(2, context, head_dim // 2)  # tables of cosines and sines, which follow from the rest
    assert position == len(rest)
    for layer in range(layers):
        arrays |= {f"blk.{layer}.{name}.weight": values[layer] for name, values in stacked.items()}
    metadata = {
        "general.architecture": "llama",
        "general.name": "stories260K",
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": dim,
        "llama.feed_forward_length": neurons,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.vocab_size": vocab,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": np.float32(10000.0),
    }
    return metadata, arrays


def _tokenizer(data: bytes, vocab: int) -> dict[str, Any]:
    """tok512.bin: an int32, then per token a float32 score, an int32 length, and text with plain spaces."""
    position, texts, scores = 4, [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", data, position)
        position += 8 + length
        texts.append(data[position - length : position].decode().replace(" ", "\u2581"))
        scores.append(score)
    assert position == len(data)
    texts[:3] = ["<unk>", "<s>", "</s>"]  # the file pads these names with line feeds
    kinds = [2, 3, 3] + [6] * 256 + [1] * (vocab - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
