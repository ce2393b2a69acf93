"""A twin of the built-in model, several times as wide in both directions, that still writes its texts.

The residual stream is turned into a larger space by an orthonormal matrix, which changes nothing; then each
neuron becomes several, with a part of its down row each. So that there is something to predict in all
directions, each token has random features in the new directions, which no layer overwrites, and
each copy of a neuron reads them by gate weights of its own: its gate moves by :data:`NOISE` of its standard
deviation. Copies come in pairs that move in opposite directions, so that their sum stays near to the neuron.
The twin's perplexity says what that costs. Its text has the same 256 directions as before, which is easier to
predict than a trained model of that width would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import GGUFFile, open_gguf, write_gguf
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.ffn_inputs import ffn_inputs
from hotcold.tasks.windows import text_windows

Floats = npt.NDArray[Any]

NOISE = 0.25  #: of a gate's standard deviation, by which its copies move
FEATURES = 0.1  #: of an embedding's mean square, that the features have besides
_WINDOWS = 8  # of the text that tells the standard deviations of gates


def write_wide(path: Path, text: str, times: int = 4, seed: int = 1) -> None:
    """Writes the twin; ``text`` tells how far gates move. ``times`` is even."""
    random = np.random.default_rng(seed)
    with open_gguf(model_path()) as file:
        dim = file.tensors["token_embd.weight"].shape[1]
        wide = dim * times
        basis = np.linalg.qr(random.standard_normal((wide, wide)))[0]
        turn, rest = basis[:, :dim], basis[:, dim:]
        twin = _Twin(file, times, turn, rest, random, _deviations(file, text))
        arch = str(file.metadata["general.architecture"])
        metadata = dict(file.metadata) | {
            "general.name": f"{path.stem}",
            f"{arch}.embedding_length": np.uint32(wide),
            f"{arch}.feed_forward_length": np.uint32(
                times * int(file.metadata[f"{arch}.feed_forward_length"])
            ),
            f"{arch}.attention.layer_norm_rms_epsilon": np.float32(1e-5 / times),
        }
        write_gguf(path, metadata, twin.tensors())


def _deviations(file: GGUFFile, text: str) -> list[tuple[Floats, float]]:
    """By layer, each gate's standard deviation and the mean length of the residual stream."""
    model = load(None, LoadOptions(threads=1, gpu="off"))
    windows = text_windows(model.tokenizer, text, model.context)[:_WINDOWS]
    deviations = []
    for layer, inputs in enumerate(ffn_inputs(model, windows, {"normed", "residual"})):
        gate = file.load(f"blk.{layer}.ffn_gate.weight").dequantise()
        length = np.linalg.norm(inputs["residual"], axis=1).mean()
        deviations.append(((inputs["normed"] @ gate.T).std(axis=0), float(length)))
    return deviations


class _Twin:
    def __init__(
        self,
        file: GGUFFile,
        times: int,
        turn: Floats,
        rest: Floats,
        random: np.random.Generator,
        deviations: list[tuple[Floats, float]],
    ) -> None:
        self.file, self.times, self.turn, self.rest = file, times, turn, rest
        self.random, self.deviations = random, deviations

    def tensors(self) -> dict[str, Tensor]:
        embedding = self._values("token_embd.weight")
        size = np.sqrt(FEATURES * (embedding**2).sum(axis=1).mean())
        features = self.random.standard_normal((len(embedding), self.rest.shape[1]))
        features *= size / np.linalg.norm(features, axis=1, keepdims=True)
        by_name = {
            "token_embd.weight": _stored(embedding @ self.turn.T + features @ self.rest.T),
            "output_norm.weight": self._ones(),
            "output.weight": _stored(self._reading("token_embd.weight", "output_norm.weight")),
        }
        for layer, (deviation, length) in enumerate(self.deviations):
            blk = f"blk.{layer}."
            for norm in ("attn_norm", "ffn_norm"):
                by_name[f"{blk}{norm}.weight"] = self._ones()
            for name in ("attn_q", "attn_k", "attn_v"):
                by_name[f"{blk}{name}.weight"] = _stored(
                    self._reading(f"{blk}{name}.weight", f"{blk}attn_norm.weight")
                )
            name = f"{blk}attn_output.weight"
            by_name[name] = _stored(self.turn @ self._values(name))
            by_name |= self._ffn(blk, deviation / (size * np.sqrt(len(self.turn)) / np.hypot(length, size)))
        return by_name

    def _ffn(self, blk: str, moves: Floats) -> dict[str, Tensor]:
        """``moves`` ``[N]`` is the length of a gate's weights on features that moves it by its deviation."""
        gate, up = (
            self._reading(f"{blk}ffn_{part}.weight", f"{blk}ffn_norm.weight") for part in ("gate", "up")
        )
        down = self._values(f"{blk}ffn_down.weight") @ self.turn.T / self.times  # by neuron
        copies = []
        for _ in range(self.times // 2):
            noise = self.random.standard_normal((len(gate), self.rest.shape[1])) @ self.rest.T
            noise *= NOISE * moves[:, None]
            copies += [gate + noise, gate - noise]
        order = self.random.permutation(len(gate) * self.times)
        parts = {"gate": np.concatenate(copies), "up": np.tile(up, (self.times, 1))}
        parts["down"] = np.tile(down, (self.times, 1))
        return {f"{blk}ffn_{part}.weight": _stored(values[order]) for part, values in parts.items()}

    def _values(self, name: str) -> Floats:
        return self.file.load(name).dequantise().astype(np.float64)

    def _reading(self, name: str, norm: str) -> Floats:
        """A matrix that reads what is normed, with the norm's weights in it. In the larger space the norm
        makes a vector of the same direction ``sqrt(times)`` as long."""
        return (self._values(name) * self._values(norm)) @ self.turn.T / np.sqrt(self.times)

    def _ones(self) -> Tensor:
        return quantise(np.ones(len(self.turn), np.float32), "F32")


def _stored(values: Floats) -> Tensor:
    return quantise(np.ascontiguousarray(values, np.float32), "Q8_0")
