"""Profiling: counts how often each neuron of a model is active on a text; tokens are computed as in
decoding."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.files import output_file
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import SPARSE_ACTIVATIONS
from hotcold.kernels.gpus import OFF
from hotcold.model.config import Config
from hotcold.placement.profiles import Profile, write_profile
from hotcold.runtime.opening import Source, file_of, opened
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.profiler import KEPT_EXPERTS, ActivityCounter, import_counts
from hotcold.tasks.profile_picture import power_law_picture
from hotcold.tasks.reports import Setup
from hotcold.tasks.scoring import Scorer
from hotcold.tasks.texts import text_of
from hotcold.tasks.windows import evenly, text_windows
from hotcold.values import integer, printable, whole
from hotcold.version import __version__

LONGEST_WINDOW = 512  #: default limit of a window, in positions


@dataclass(frozen=True)
class ModelProfile(Profile):
    """How often each neuron of a model is active; ``str()`` gives the lines that ``hotcold profile``
    prints."""

    model: str
    fingerprint: str  #: the model's fingerprint
    tokens: int | None  #: number of counted tokens; None for imported counts
    #: figures by name, one per layer. ``active``: mean share of active neurons. ``hottest_fifth``: share of
    #: activations in the most active fifth. ``overlap``: share of a token's active neurons that were also
    #: active for the previous token. ``union_2`` to ``union_64``: share of neurons active in that many
    #: tokens. With experts, ``most_chosen`` and ``least_chosen``: share of tokens that choose the most and
    #: least chosen expert; ``kept_experts``: share of a token's experts that the previous token also chose
    columns: dict[str, list[float]] = field(repr=False)
    setup: Setup | None  #: how the model ran; None for imported counts

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. ``plan`` and the commands find it as ``MODEL.profile.gguf`` in the model's
        folder."""
        facts: dict[str, Any] = {"version": __version__, "model_fingerprint": self.fingerprint}
        if self.tokens is not None:
            facts["tokens"] = self.tokens
        write_profile(Path(path), self, facts | self.columns)

    def picture(self) -> str:
        """Returns an SVG: how often the neurons of each layer are active, the most active first."""
        return power_law_picture(self.model, self.firing)

    def report(self) -> dict[str, Any]:
        """Returns the report for ``--json``."""
        facts = {"model": self.model, "model_fingerprint": self.fingerprint, "source": self.source}
        counted = {} if self.setup is None else asdict(self.setup) | {"tokens": self.tokens}
        return facts | counted | self.columns

    def __str__(self) -> str:
        titles = [name.replace("union_", "in ").replace("_", " ") for name in self.columns]
        widths = [max(7, len(title) + 2) for title in titles]
        heads = (f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
        lines = [printable(f"{self.model}: {self.source}", 80), "layer" + "".join(heads)]
        for layer, row in enumerate(zip(*self.columns.values(), strict=True)):
            shares = (f"{share:{width}.1%}" for share, width in zip(row, widths, strict=True))
            lines.append(f"{layer:5}" + "".join(shares))
        if self.tokens is not None:
            lines.append("overlap: also active for the previous token; in N: active for one of N tokens")
        return "\n".join(lines)


def profile(
    model: Model = None,
    text: str | Path | None = None,
    *,
    counts: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    context: int | None = None,
    special: bool = False,
    threads: int | None = None,
    cache_type: str | None = None,
    backend: str | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Counts for how many tokens of a text each neuron of a model is active.

    >>> found = hotcold.profile("model.gguf", Path("text.txt"), tokens=8192, output="model.profile.gguf")

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        text: a text, or the ``Path`` of a file in UTF-8. It is cut into windows of ``context`` positions (at
            most 512 by default), each computed by itself.
        counts: instead of a text, a folder with PowerInfer's counts (``activation_0.pt``, ...). No pickle in
            them is executed.
        tokens: number of tokens to take, spread over the text; None takes all. With ``counts``: the number of
            tokens that they cover; None: the largest count.
        special: whether names of control tokens in the text become these tokens.
        threads, cache_type, backend: as in :class:`LLM`, for a model that is not loaded yet.
        output: file to write the profile to; None writes nothing.
        force: whether to replace an existing ``output``.
        progress: called with the phases ``loading`` and ``windows``.

    With experts, the function also counts how often each expert is chosen, and only that if the activation
    gives no zeros.

    UserError: the model has neither an activation with zeros nor experts, the text is empty, or a value does
    not fit the model."""
    to_write = output_file(output, force=force, inputs=[model, text])
    if (text is None) == (counts is None):
        raise UserError("a text or counts are needed: give one of them")
    tokens = None if tokens is None else whole("tokens", tokens, 1)
    source = source_of(model)
    with open_gguf(file_of(source)) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        name, fingerprint = file.path.stem, file.fingerprint()
    if config.whole and (config.experts is None or text is None):
        allowed = ", ".join(SPARSE_ACTIVATIONS)
        raise UserError(f"{config.whole}: {allowed} can be profiled")
    if text is None:
        assert counts is not None
        firing = import_counts(Path(counts), config.neurons, tokens)
        origin = f"PowerInfer's counts, {Path(counts).resolve().name}"
        result = ModelProfile(firing, origin, name, fingerprint, None, _skew(firing), None)
    else:
        words = text_of(text)
        options = {"threads": threads, "cache_type": cache_type, "backend": backend}
        mode = "off" if config.whole else "exact"
        counter, setup = _count(source, mode, words, tokens, context, options, progress, special)
        origin = f"{text.name if isinstance(text, Path) else 'a text'}, {counter.tokens} tokens"
        columns = _skew(counter.firing) | counter.figures()
        routing = counter.routing
        if routing is not None:
            kept = columns.pop(KEPT_EXPERTS)
            columns |= {"most_chosen": [float(each.max()) for each in routing]}
            columns |= {"least_chosen": [float(each.min()) for each in routing], KEPT_EXPERTS: kept}
        facts = name, fingerprint, counter.tokens, columns, setup
        result = ModelProfile(counter.firing, origin, *facts, routing=routing, routes=counter.routes)
    if to_write is not None:
        result.write(to_write)
    return result


def _count(
    model: Source,
    mode: str,
    text: str,
    tokens: int | None,
    context: int | None,
    options: dict[str, Any],
    progress: Progress | None,
    special: bool,
) -> tuple[ActivityCounter, Setup]:
    """Runs the model over the text and counts activations."""
    if not isinstance(model, LoadedModel):
        options = options | {"context": context}
    fixed: dict[str, Any] = {"sparsity": mode, "gpu": OFF, "state_copies": 0, "draft_max": 0}
    base = opened(model, options, progress, default_context=LONGEST_WINDOW, **fixed)
    if base.gpus:
        fix = "load it without placement and vram_budget, or give its file"
        raise UserError(f"this model is loaded on several backends, and a profile counts on one: {fix}")
    length = window_length(base.context, context)
    experts = [base.config.experts_of(i) for i in range(base.config.layers)]
    counter = ActivityCounter(base.config.neurons, [each.count if each else 1 for each in experts])
    rows = base.limits.tokens
    windows = text_windows(base.tokenizer, text, length, special=special)
    if tokens is not None:
        windows = evenly(windows, max(1, tokens // length))
    watched = base.session(mode, wrap=lambda ffns: counter.watch(base.backend, ffns, rows))
    with closing(watched) as session:
        if session.transformer.chosen:
            routed = zip(experts, session.transformer.chosen, strict=True)
            counter.watch_routers([(base.backend, each) if has else None for has, each in routed])
        scorer = Scorer(session)
        for done, window in enumerate(windows, 1):
            counter.restart()
            for logits in scorer.logits(window):
                counter.step(len(logits))
            if progress:
                progress("windows", done, len(windows))
        return counter, Setup.from_session(session)


def window_length(most: int, asked: int | None) -> int:
    """Returns the positions of a window, for a model with at most ``most``. UserError: more were
    requested."""
    if asked is None:
        return min(most, LONGEST_WINDOW)
    if asked == 0:
        return most
    if not 2 <= integer("context", asked) <= most:
        raise UserError(f"context of {asked} positions: this model allows 2 to {most}")
    return int(asked)


def _skew(firing: Sequence[npt.NDArray[Any]]) -> dict[str, list[float]]:
    """Returns, by layer, the mean share of active neurons, and the share of activations in the most active
    fifth."""
    hottest = [np.sort(each)[-(len(each) // 5) :].sum() / (each.sum() or 1) for each in firing]
    active = [float(each.sum()) / max(1, each.size) for each in firing]
    return {"active": active, "hottest_fifth": [float(h) for h in hottest]}
