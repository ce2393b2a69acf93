"""Measures how well a model predicts a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np

from hotcold.api.llm import Model, source_of
from hotcold.runtime.opening import opened
from hotcold.runtime.options import ModelOptions, Progress, check_loading
from hotcold.runtime.session import LoadedModel
from hotcold.tasks import scoring
from hotcold.tasks.profiling import LONGEST_WINDOW, window_length
from hotcold.tasks.texts import text_of
from hotcold.tasks.windows import text_windows
from hotcold.values import whole


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text; ``str()`` gives it in a line."""

    value: float
    error: float | None  #: standard error; None for one token
    tokens: int  #: number of predicted tokens
    windows: int

    def __str__(self) -> str:
        error = "" if self.error is None else f" +- {self.error:.4f}"
        return f"perplexity {self.value:.4f}{error} over {self.tokens} tokens in {self.windows} windows"


def perplexity(
    text: str | Path,
    model: Model = None,
    *,
    chunks: int | None = None,
    special: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ModelOptions],
) -> Perplexity:
    """Measures the perplexity of a text; each token is computed as in decoding.

    >>> print(hotcold.perplexity(Path("text.txt"), "model.gguf", chunks=2))

    Args:
        text: a text, or the ``Path`` of a file in UTF-8, cut into windows of ``context`` tokens (at most 512
            by default).
        model: a GGUF file, or what was loaded from one; None is the built-in model.
        chunks: how many windows to take, the first ones; None takes all.
        special: whether names of control tokens in the text become these tokens.
        progress: gets the phases ``loading`` and ``windows``.
        options: as in :class:`LLM`, for a model that is not loaded yet.

    UserError: a value is not allowed, the text is shorter than a window, or loading fails."""
    check_loading(options, ModelOptions)
    chunks = None if chunks is None else whole("chunks", chunks, 1)
    words, source = text_of(text), source_of(model)
    more = {} if isinstance(source, LoadedModel) else {"default_context": LONGEST_WINDOW, "draft_max": 0}
    base = opened(source, options, progress, **more)
    windows = text_windows(base.tokenizer, words, window_length(base.context, None), special=special)[:chunks]
    scorer, parts = scoring.Scorer(base.session()), []
    for done, window in enumerate(windows, 1):
        parts.append(scoring.score(scorer, window))
        if progress is not None:
            progress("windows", done, len(windows))
    nll = np.concatenate(parts)
    error = scoring.perplexity_error(nll) if len(nll) > 1 else None
    return Perplexity(scoring.perplexity(nll), error, len(nll), len(windows))
