"""Compares a model's logits with those of transformers for its golden."""

from __future__ import annotations

import numpy as np
from support.golden import Golden
from support.runner import Runner

from hotcold.kernels.backend import Backend


def close(logits: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def check_logits(tiny: Golden, backend: Backend) -> None:
    """Prompt at once, then a token a step; the prompt in chunks, as decode rows, and a token a step."""
    runner = Runner(tiny.path, backend, cache_type="f32")
    close(runner.run(tiny.prompt), tiny.prompt_logits)
    close(np.vstack([runner.run([int(token)], decode=True) for token in tiny.steps]), tiny.step_logits)
    for size, decode in ((7, False), (16, True), (1, False)):
        runner.length = 0
        parts = [tiny.prompt[i : i + size] for i in range(0, len(tiny.prompt), size)]
        close(np.vstack([runner.run(part, decode=decode) for part in parts]), tiny.prompt_logits)
