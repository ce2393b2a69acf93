"""Options of loading a model."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, get_args, get_type_hints

from hotcold.errors import UserError
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.kernels.numpy_tiles import check_prompt_math
from hotcold.model.mixers.attention import CACHE_TYPES
from hotcold.runtime.named_templates import template_text
from hotcold.runtime.pooling import POOLINGS, Pooling
from hotcold.values import bytes_of, integer

COLD_PROMPTS = ("auto", "cpu", "gpu")
DRAFT_MAX = 7  #: default limit for the draft tokens of a sequence in a step

SPARSITY_MODES = ("auto", "exact", "predicted", "off")

#: Called with the phase, the work done, and the total (for ``loading``: bytes).
Progress: TypeAlias = Callable[[str, int, int], None]


class LoadError(UserError):
    """A model that cannot run as requested; the message says how it can."""


class ModelOptions(TypedDict, total=False):
    """How a model is loaded and run. All options are optional; defaults are in parentheses."""

    #: ``auto`` (the default), ``exact``, ``predicted`` or ``off``; ``llm.session.notes`` has the choice of
    #: ``auto``
    sparsity: str
    predictor: str | os.PathLike[str] | None  #: file with predictors (``MODEL.predictor.gguf``, if it exists)
    threads: int | None  #: (the cores that affinity and cgroup quota allow)
    #: tokens of a sequence; 0: the model's limit (what memory holds, at most 32,768; at most 4096 with a GPU
    #: or ``ram_budget``; with LongRoPE at most the original length)
    context: int | None
    backend: str  #: ``cpu`` (the default), or ``reference``: NumPy, slow, for checks
    #: a GPU's name or a part of it, its number in ``hotcold doctor``, or ``off`` (a discrete GPU); several
    #: with commas: ``0,1``
    gpu: str | int | None
    #: file of ``hotcold plan -o``: what the GPU computes; ``backend`` computes the rest
    placement: str | os.PathLike[str] | None
    #: instead of ``placement``: limit for GPU memory in bytes, or a size such as ``"8GiB"`` (the free
    #: memory); for several GPUs one value for each, or one for all
    vram_budget: int | str | Sequence[int | str] | None
    #: limit for weights, KV cache and steps in RAM, in bytes, or a size such as ``"8GiB"``. Experts beyond it
    #: stay in the model's file and are read when needed (all in memory if they fit, else as many as fit)
    ram_budget: int | str | None
    cache_type: str  #: of the KV cache: ``f16`` (the default), ``q8_0`` (half as large, lossy) or ``f32``
    chat_template: str | None  #: replaces the file's: Jinja, or a name such as ``chatml`` (docs/chat.md)
    #: how a processor with AMX computes prompts: ``same`` (the default: with the bits of decoding), ``split``
    #: (float weights from two BF16 halves) or ``fast`` (all weights rounded to BF16)
    prompt_math: str
    #: where the cold neurons of prompts are computed: ``cpu``; ``gpu``, which copies their weights to the GPU
    #: in each step with prompts and needs memory for a second copy of them; ``auto`` (the default): ``gpu``
    #: if prompts are clearly faster with it by the figures of ``hotcold doctor``, else ``cpu``
    cold_prompts: str
    pooling: Pooling | None  #: pooling of text embeddings: ``mean``, ``last`` or ``cls`` (the file's)


class LoadOptions(ModelOptions, total=False):
    """Keyword arguments of :class:`LLM` and :class:`AsyncLLM` besides the file."""

    chunk: int | None  #: limit for the prompt tokens of a step (128; 512 with a GPU that has the memory)
    sequences: int  #: limit for requests that run at the same time (1; 4 for ``AsyncLLM``)
    cache_positions: int | None  #: size of the KV cache, which sequences share (``context`` for each)
    #: states of recurrent layers to keep for prompts with the same beginning; other models have none (what an
    #: eighth of free memory holds, at most one for each page of the KV cache)
    state_copies: int | None
    #: limit for the draft tokens of a sequence in one step; 0: none (7, or fewer if that is faster). The text
    #: does not change
    draft_max: int
    #: a smaller model with the same vocabulary, which drafts tokens besides prompt lookup; it runs on the CPU
    draft: str | os.PathLike[str] | None


class PrivateOptions(TypedDict, total=False):
    """Options for Hotcold's own commands, tasks and tests; not part of the public API."""

    hot_backend: str | None  #: backend in place of a GPU, for checks: ``cpu`` or ``reference``
    hot_threads: int | None  #: threads of ``hot_backend`` (as many as ``threads``)
    default_context: int  #: limit for the default of ``context`` (32,768)
    second_sparsity: str | None  #: mode of a second session, whose GPU memory is also planned


class AllOptions(LoadOptions, PrivateOptions, total=False):
    """All options of loading a model."""


_DEFAULTS = AllOptions(
    sparsity="auto",
    backend="cpu",
    cache_type="f16",
    default_context=32768,
    sequences=1,
    draft_max=DRAFT_MAX,
    prompt_math="same",
    cold_prompts="auto",
)


def complete(options: Mapping[str, Any]) -> AllOptions:
    """Returns :class:`AllOptions`: the given values, with defaults for missing ones and None. UserError: an
    invalid value; TypeError: an unknown option."""
    check_loading(options, LoadOptions)
    given = {name: value for name, value in options.items() if value is not None}
    for name, kind in get_type_hints(AllOptions).items():
        if name in given and int in (kind, *get_args(kind)) and str not in get_args(kind):
            given[name] = integer(name, given[name])
    for name in ("vram_budget", "ram_budget"):
        if isinstance(value := given.get(name), list | tuple) and name == "vram_budget":
            given[name] = tuple(bytes_of(name, each) for each in value)
        elif name in given:
            given[name] = bytes_of(name, value)
    completed: Any = {**dict.fromkeys(get_type_hints(AllOptions)), **_DEFAULTS, **given}
    if completed["sparsity"] not in SPARSITY_MODES:
        raise LoadError(f"sparsity {completed['sparsity']!r}: choose from {', '.join(SPARSITY_MODES)}")
    if completed["cache_type"] not in CACHE_TYPES:
        raise LoadError(f"cache type {completed['cache_type']!r}: choose from {', '.join(CACHE_TYPES)}")
    check_prompt_math(completed["prompt_math"])
    if completed["cold_prompts"] not in COLD_PROMPTS:
        got = f"`cold_prompts={completed['cold_prompts']}`"
        raise LoadError(f"{got}: choose from {', '.join(COLD_PROMPTS)}")
    if completed["pooling"] not in (None, *POOLINGS):
        raise LoadError(f"pooling {completed['pooling']!r}: choose from {', '.join(POOLINGS)}")
    for name in ("sequences", "chunk", "default_context"):
        if completed[name] is not None and completed[name] < 1:
            raise LoadError(f"{name} is {completed[name]}: at least 1 is needed")
    if (completed["state_copies"] or 0) < 0:
        raise LoadError(f"state_copies is {completed['state_copies']}: at least 0 is needed")
    if not 0 <= completed["draft_max"] < DECODE_ROWS:
        got = f"`draft_max={completed['draft_max']}`"
        raise LoadError(f"{got}: 0 (no draft tokens) to {DECODE_ROWS - 1} are allowed")
    if completed["draft"] is not None and not completed["draft_max"]:
        raise LoadError("`draft` has no effect with `draft_max=0`: leave out one of them")
    if completed["chat_template"] is not None:
        completed["chat_template"] = template_text(completed["chat_template"])
    return completed  # type: ignore[no-any-return]


def streams_prompts(options: AllOptions) -> bool:
    """Returns True if GPUs must compute the cold neurons of prompts, from streamed weights."""
    return options["cold_prompts"] == "gpu"


def ram_budget(options: AllOptions) -> int | None:
    """Returns the bytes of ``ram_budget`` in options from :func:`complete`."""
    budget = options["ram_budget"]
    return None if budget is None else int(budget)


def check_loading(options: Mapping[str, Any], allowed: type[ModelOptions]) -> None:
    """Raises TypeError for an option that is neither allowed nor private."""
    private = get_type_hints(PrivateOptions)
    check_names({name: value for name, value in options.items() if name not in private}, allowed)


def check_names(options: Mapping[str, Any], allowed: type[Any]) -> None:
    """Raises TypeError for an option that is not in a TypedDict, as for an unknown keyword argument."""
    names = get_type_hints(allowed)
    if unknown := options.keys() - names.keys():
        raise TypeError(f"unknown option {min(unknown)!r}: allowed are {', '.join(names)}")
