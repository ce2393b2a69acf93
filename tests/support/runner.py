"""Runs a Transformer on one sequence, without an engine: for tests of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import DECODE_ROWS, PAGE, Backend, BatchLimits
from hotcold.model.config import Config
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.kv_cache import SequenceState
from hotcold.model.transformer import Transformer
from hotcold.model.weights import Weights, check_tensors, load_weights
from hotcold.sparse.ffn import make_ffns
from hotcold.sparse.predictor import load_predictors, predictor_names

ROWS = 64  #: the most rows of a step

MakeFFNs = Callable[[Backend, Config, Weights], Sequence[AnyFFN]]


def dense(backend: Backend, config: Config, weights: Weights) -> Sequence[AnyFFN]:
    return make_ffns(backend, [layer.ffn for layer in weights.layers], ROWS, mode="off", count=False)


def exact(backend: Backend, config: Config, weights: Weights) -> Sequence[AnyFFN]:
    return make_ffns(backend, [layer.ffn for layer in weights.layers], ROWS, mode="exact")


def predicted(path: Path) -> MakeFFNs:
    """With the predictors in the file."""

    def make(backend: Backend, config: Config, weights: Weights) -> Sequence[AnyFFN]:
        with open_gguf(path) as file:
            predictors = load_predictors(file, config, backend)
        ffns = [layer.ffn for layer in weights.layers]
        return make_ffns(backend, ffns, ROWS, mode="predicted", predictors=predictors)

    return make


class Runner:
    """One sequence. ``run`` appends tokens and gives the logits ``[T, V]`` after each of them.

    Args:
        cache_type: of the KV cache; f32 shows errors that rounding to f16 would hide.

    Attributes:
        length: positions so far; lower it to roll back.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        make_ffns: MakeFFNs = dense,
        cache_type: str = "f16",
    ) -> None:
        with open_gguf(path) as file:
            self.config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            total = check_tensors(file, self.config, predictor_names(file))
            self.weights = load_weights(file, self.config, backend, total=total)
        pages = -(-self.config.context // PAGE)
        state = SequenceState(backend, self.config, pages + 3, cache_type, slots=2)
        state.pages.allocate("nobody", 3)  # so that no page has the number of its place in the sequence
        self._pages = state.pages.allocate("sequence", pages)[::-1]
        self.ffns = make_ffns(backend, self.config, self.weights)
        limits = BatchLimits(ROWS, 1, pages, ROWS)
        self.transformer = Transformer(self.config, self.weights, backend, self.ffns, limits, state)
        self.length = 0

    def run(self, tokens: Sequence[int], *, decode: bool = False) -> np.ndarray:
        """As decode rows 16 at a time, or as chunks of a prompt."""
        most = DECODE_ROWS if decode else ROWS
        return np.vstack([self._step(tokens[i : i + most], decode) for i in range(0, len(tokens), most)])

    def run_in_parts(self, tokens: Sequence[int], size: int, *, decode: bool = False) -> np.ndarray:
        """From the beginning, a number of tokens at a time."""
        self.length = 0
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        return np.vstack([self.run(part, decode=decode) for part in parts])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens that follow."""
        tokens = [int(self.run(prompt)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.run(tokens[-1:], decode=True)[-1].argmax()))
        return tokens

    def _step(self, tokens: Sequence[int], decode: bool) -> np.ndarray:
        batch = self.transformer.batch
        # The sequence's state is in slot 1; before its first token it has none.
        slots = {"state_from": 1 if self.length else -1, "state_to": 1}
        n = batch.put(0, 0, self.length, tokens, self._pages, **slots)
        self.length += n
        batch.logits_rows[:n] = np.arange(n)
        batch.counts[:] = (n, n if decode else 0, n, 1)
        self.transformer.run()
        return self.transformer.read_logits(0, n).copy()


def assert_same_bits_in_parts(runner: Runner, prompt: Sequence[int], expected: np.ndarray) -> None:
    """In prompts and in decoding, in chunks of any size, after other text."""
    for size, decode in ((1, True), (3, True), (16, True), (1, False), (7, False), (19, False)):
        runner.length = 0
        runner.run(prompt[::-1])
        np.testing.assert_array_equal(runner.run_in_parts(prompt, size, decode=decode), expected)
