"""Cost of a change to a model's file: the divergence of its predictions from the old file's."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from hotcold.kernels.gpus import OFF
from hotcold.runtime.loading import load
from hotcold.tasks.profiling import LONGEST_WINDOW
from hotcold.tasks.scoring import Divergence, Scorer, compare, join
from hotcold.tasks.windows import evenly, shared_windows

_WINDOWS = 16  # windows, spread over the text


def layout_cost(
    new: Path,
    old: Path,
    text: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    special: bool = False,
) -> Divergence:
    """Compares up to 16 windows of a text with both files, with all neurons of both; both models are in
    memory. ``special``: names of control tokens in the text become these tokens. UserError: different
    tokenizers, or an empty text; LoadError: memory does not suffice for both."""
    options = {"sparsity": "off", "default_context": LONGEST_WINDOW, "gpu": OFF}
    first, second = load(new, options), load(old, options)
    windows = evenly(shared_windows(first, second, text, special=special), _WINDOWS)
    with closing(first.session("off")) as of_new, closing(second.session("off")) as of_old:
        scorers, parts = (Scorer(of_new), Scorer(of_old)), []
        for done, window in enumerate(windows, 1):
            parts.append(compare(*scorers, window))
            if progress:
                progress(done, len(windows))
    return join(parts)
