"""Measures what a change of a model's file costs: how far its predictions are from the old file's."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hotcold.errors import UserError
from hotcold.kernels.gpus import OFF
from hotcold.runtime.loading import load
from hotcold.tasks.profiling import LONGEST_WINDOW
from hotcold.tasks.scoring import Divergence, Scorer, compare, join, perplexity
from hotcold.tasks.windows import evenly, text_windows

_WINDOWS = 16  # spread over the text


@dataclass(frozen=True)
class LayoutCost:
    """``str()`` gives the line that ``hotcold convert`` prints."""

    tokens: int
    divergence: Divergence

    def report(self) -> dict[str, float | None]:
        return {
            "tokens": self.tokens,
            "new_ppl": perplexity(self.divergence.nll),
            **self.divergence.summary(),
        }

    def __str__(self) -> str:
        figures = self.divergence.summary()
        return (
            f"over {self.tokens} tokens against the old file (perplexity {figures['ppl']:.4f}): ratio "
            f"{figures['ppl_ratio']:.5f}, KL divergence mean {figures['kl_mean']:.3g}, P99 "
            f"{figures['kl_p99']:.3g} nats; same most likely token {figures['top1_agreement']:.2%}"
        )


def layout_cost(
    new: Path, old: Path, text: str, progress: Callable[[int, int], None] | None = None
) -> LayoutCost:
    """Computes up to 16 windows of a text with both files, all neurons of both; each model is in memory.

    UserError: the files do not have one vocabulary, or the text is empty; LoadError: no memory for both."""
    options = {"sparsity": "off", "default_context": LONGEST_WINDOW, "gpu": OFF}
    first, second = load(new, options), load(old, options)
    if first.config.vocab != second.config.vocab:
        raise UserError(f"vocabularies of {first.config.vocab} and {second.config.vocab}: one is needed")
    windows = evenly(text_windows(second.tokenizer, text, second.context), _WINDOWS)
    with closing(first.session("off")) as of_new, closing(second.session("off")) as of_old:
        scorers, parts = (Scorer(of_new), Scorer(of_old)), []
        for done, window in enumerate(windows, 1):
            parts.append(compare(*scorers, window))
            if progress:
                progress(done, len(windows))
    found = join(parts)
    return LayoutCost(len(found.kl), found)
