"""Files with a block that guesses tokens, and what it must guess.

A block's layer is one of the model's layers, with other numbers; the truth about it is a model of that one
layer whose embeddings are the block's first rows, which NumPy makes. Models are held to transformers. Where
layers are attention or an FFN alone, as Nemotron 3's, the block is two of them, and NumPy makes the LayerNorm
after them, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.changed_models import changed
from support.runner import Runner

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels.backend import Backend

Floats = npt.NDArray[np.float32]


def matrix(values: npt.NDArray[np.floating[Any]]) -> Tensor:
    return quantise(values.astype(np.float32), "F32")


def parts_of(source: int | tuple[int, int]) -> dict[str, str]:
    """Prefixes of the names of a block's tensors, by those of the layers that it is like."""
    if isinstance(source, int):
        return {f"blk.{source}.": ""}
    attention, ffn = source
    norm = {f"blk.{ffn}.attn_norm.": "post_attention_norm."}
    return {f"blk.{attention}.": "", **norm, f"blk.{ffn}.": ""}


def with_block(
    path: Path, out: Path, source: int | tuple[int, int], *, own: Sequence[str] = (), seed: int = 0
) -> Path:
    """A copy of a file with a block like its layer ``source``, or like two, attention and FFN; ``own`` of
    ``embed_tokens``, ``shared_head_head`` and ``shared_head_norm`` are there, too."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor | None] = {}
    with open_gguf(path) as file:
        arch, vocab_dim = file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
        layers = int(file.metadata[f"{arch}.block_count"])
        blk = f"blk.{layers}."
        parts = parts_of(source)
        for name in file.tensors:
            if found := max((each for each in parts if name.startswith(each)), key=len, default=""):
                values = file.load(name).dequantise()
                mixed = random.permutation(values.reshape(-1)).reshape(values.shape)
                tensors[name.replace(found, blk + parts[found])] = matrix(mixed)
        metadata = file.metadata
    vocab, dim = vocab_dim
    tensors[f"{blk}nextn.eh_proj.weight"] = matrix(random.standard_normal((dim, 2 * dim)) * dim**-0.5)
    for name in ("enorm", "hnorm", *(["shared_head_norm"] if "shared_head_norm" in own else [])):
        tensors[f"{blk}nextn.{name}.weight"] = matrix(1 + 0.2 * random.standard_normal(dim))
    for name in {"embed_tokens", "shared_head_head"} & {*own}:
        tensors[f"{blk}nextn.{name}.weight"] = matrix(random.standard_normal((vocab, dim)))
    keys: dict[str, Any] = {f"{arch}.block_count": layers + 1, f"{arch}.nextn_predict_layers": 1}
    name = f"{arch}.attention.recurrent_layers"
    if name in metadata:
        keys[name] = [*map(bool, metadata[name]), False]
    if isinstance(source, tuple):  # as llama.cpp writes it, the block counts as both
        kinds = {"attention.head_count_kv": source[0], "feed_forward_length": source[1]}
        for key, layer in kinds.items():
            each = metadata[f"{arch}.{key}"]
            keys[f"{arch}.{key}"] = np.array([*each, each[layer]], np.int32)
    return changed(path, out, keys, tensors)


def knowing_block(path: Path, out: Path, source: int) -> Path:
    """A copy of a file whose next token depends on the last one alone, with a block that always knows it."""
    blocked = with_block(path, out, source)
    tensors: dict[str, Tensor | None] = {}
    with open_gguf(blocked) as file:
        arch, dim = file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape[1]
        for name, info in file.tensors.items():
            if name.endswith(("attn_output.weight", "ffn_down.weight", "ssm_out.weight")):
                tensors[name] = matrix(np.zeros(info.shape))
        nextn = f"blk.{int(file.metadata[f'{arch}.block_count']) - 1}.nextn."
    tensors[f"{nextn}eh_proj.weight"] = matrix(np.eye(dim, 2 * dim))
    tensors[f"{nextn}enorm.weight"] = matrix(np.ones(dim))
    return changed(blocked, out, {}, tensors)


class Truth:
    """Computes what the block of a file says after a text, given the model's hidden rows."""

    def __init__(self, path: Path, folder: Path, backend: Backend) -> None:
        self._folder, self._backend = folder, backend
        with open_gguf(path) as file:
            metadata = dict(file.metadata)
            self._arch = arch = metadata["general.architecture"]
            of_rms, of_layer = (f"{arch}.attention.layer_norm_{kind}epsilon" for kind in ("rms_", ""))
            self._eps = float(metadata.get(of_rms) or metadata[of_layer])
            blk = f"blk.{int(metadata[f'{arch}.block_count']) - 1}."
            nextn = f"{blk}nextn."
            of_layer = {name: file.load(name) for name in file.tensors if name.startswith(blk)}
            ends = {name: file.load(name) for name in file.tensors if not name.startswith("blk.")}
        own = {name.removeprefix(nextn): of_layer.pop(name) for name in [*of_layer] if name.startswith(nextn)}
        self._own = {name.removesuffix(".weight"): each.dequantise() for name, each in own.items()}
        self._embedding = own.get("embed_tokens.weight", ends["token_embd.weight"]).dequantise()
        head = own.get("shared_head_head.weight") or ends.get("output.weight") or ends["token_embd.weight"]
        norm = own.get("shared_head_norm.weight") or ends["output_norm.weight"]
        self._two = f"{blk}post_attention_norm.weight" in of_layer and arch == "nemotron_h_moe"
        layer = {self._place(name.removeprefix(blk)): each for name, each in of_layer.items()}
        self._head, self._norm = head.dequantise(), norm.dequantise()
        last = matrix(np.ones(norm.shape)) if self._two else norm
        self._tensors = {**ends, **layer, "output.weight": head, "output_norm.weight": last}
        metadata[f"{arch}.block_count"] = 1 + self._two
        for key, value in ("nextn_predict_layers", 0), ("leading_dense_block_count", 0):
            metadata[f"{arch}.{key}"] = value
        if f"{arch}.ssm.state_size" in metadata:
            metadata[f"{arch}.attention.recurrent_layers"] = [False]
        for key, value in metadata.items():  # one number for each layer
            if isinstance(value, np.ndarray) and key.startswith(f"{arch}.") and "sections" not in key:
                one = value[-1:] if value[-1] else value[value > 0][:1]
                metadata[key] = (
                    one
                    if not self._two
                    else np.array([0, *one] if key.endswith("feed_forward_length") else [*one, 0], np.int32)
                )
        self._metadata = {key: each for key, each in metadata.items() if not key.startswith("tokenizer.")}

    def logits(self, hidden: Floats, tokens: Sequence[int], more: int = 0) -> Floats:
        """``hidden`` ``[T, D]`` are the model's rows, ``tokens`` the token after each; returns logits
        ``[1 + more, V]`` for the tokens after them; the block reads its own likeliest tokens."""
        rows = self._first_rows(hidden, tokens)
        runner, found = self._run(rows)
        for _ in range(more):
            own = runner.transformer.read_hidden(len(rows) - 1, len(rows))
            own = self._last_norm(own) if self._two else own
            rows = np.vstack([rows, self._first_rows(own, [int(found[-1].argmax())])])
            runner, found = self._run(rows)
        return found[len(tokens) - 1 :]

    def _place(self, name: str) -> str:
        """The name of the block's tensor in the model of one layer, or of two."""
        if not self._two or not name.startswith(("post_attention_norm", "ffn_", "exp_probs_b")):
            return f"blk.0.{name}"
        return f"blk.1.{name.replace('post_attention_norm', 'attn_norm')}"

    def _last_norm(self, normed: Floats) -> Floats:
        """The LayerNorm of rows that were divided by their root mean square."""
        centred = normed.astype(np.float64) - normed.mean(-1, keepdims=True, dtype=np.float64)
        return (self._rms(centred.astype(np.float32)) * self._norm).astype(np.float32)

    def _first_rows(self, hidden: Floats, tokens: Sequence[int]) -> Floats:
        of_tokens = self._rms(self._embedding[[*tokens]]) * self._own["enorm"]
        of_hidden = self._rms(hidden) * self._own["hnorm"]
        return (np.hstack([of_tokens, of_hidden]) @ self._own["eh_proj"].T).astype(np.float32)

    def _rms(self, x: Floats) -> npt.NDArray[np.float64]:
        return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + self._eps)

    def _run(self, rows: Floats) -> tuple[Runner, Floats]:
        """A model of one layer whose token i has the row i; its vocabulary is as large as before."""
        table = np.zeros_like(self._embedding)
        table[: len(rows)] = rows
        path = self._folder / "one-layer.gguf"
        write_gguf(path, self._metadata, {**self._tensors, "token_embd.weight": matrix(table)})
        runner = Runner(path, self._backend, cache_type="f32")
        found = runner.run(range(len(rows)))
        if self._two:
            found = self._last_norm(runner.transformer.read_hidden(0, len(rows))) @ self._head.T
        return runner, found
