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

DRAFT_MAX = 7  #: guesses of one sequence in a step, where nobody says otherwise

SPARSITY_MODES = ("auto", "exact", "predicted", "off")

#: Is called with the phase of the work, what of it is done, and the total: of ``loading`` in bytes.
Progress: TypeAlias = Callable[[str, int, int], None]


class LoadError(UserError):
    """A model that cannot run as asked; the message says what would work."""


class ModelOptions(TypedDict, total=False):
    """How a model is loaded and run; all optional, with defaults in parentheses."""

    #: ``auto`` (the default), ``exact``, ``predicted`` or ``off``; what it chose is in ``llm.session.notes``
    sparsity: str
    predictor: str | os.PathLike[str] | None  #: a sidecar (``MODEL.predictor.gguf`` beside the model)
    threads: int | None  #: (the cores that affinity and cgroup quota allow)
    #: tokens of each sequence; 0: all that the model has (as many, at most 32,768, that memory holds; 4096 at
    #: most with a GPU or ``ram_budget``; with LongRoPE the original length)
    context: int | None
    backend: str  #: ``cpu`` (the default), or ``reference``: NumPy, slow, for checks
    #: a GPU's name or a part of it, its number in ``hotcold doctor``, or ``off`` (a discrete card); several
    #: with commas between them: ``0,1``
    gpu: str | int | None
    #: made by ``hotcold plan -o``: what the GPU computes, and ``backend`` the rest
    placement: str | os.PathLike[str] | None
    #: instead: bytes that may be allocated on the GPU, or a size such as ``"8GiB"``, for the placement of
    #: ``plan`` (what is free); of several GPUs on each, or one size for each
    vram_budget: int | str | Sequence[int | str] | None
    #: bytes, or a size such as ``"8GiB"``, that weights, KV cache and steps may take in RAM: experts that
    #: do not fit stay in the model's file and are read when they are named (all are in memory if they
    #: fit, else as many as do)
    ram_budget: int | str | None
    cache_type: str  #: of the KV cache: ``f16`` (the default), ``q8_0`` (half as large, lossy) or ``f32``
    chat_template: str | None  #: instead of the file's: Jinja, or a name such as ``chatml`` (docs/chat.md)
    #: how a processor with AMX computes prompts: ``same`` (the default: with the bits of decoding), ``split``
    #: (float weights from two BF16 halves) or ``fast`` (all weights rounded to BF16)
    prompt_math: str
    pooling: Pooling | None  #: how texts become vectors: ``mean``, ``last`` or ``cls`` (as the file names it)


class LoadOptions(ModelOptions, total=False):
    """Keyword arguments of :class:`LLM` and :class:`AsyncLLM` besides the file."""

    chunk: int  #: the most prompt tokens of a step (128)
    sequences: int  #: how many run at the same time (1; 4 of ``AsyncLLM``)
    cache_positions: int | None  #: of the KV cache, which they share (``context`` for each)
    #: states that recurrent layers keep, for prompts that begin alike (as many as an eighth of free memory
    #: holds, at most one for each page of the KV cache); other models have none
    state_copies: int | None
    #: the most tokens of a sequence that are guessed and verified in one step (7, where so many pay); 0 is
    #: none. The text is the same
    draft_max: int
    #: a smaller model with the same vocabulary, which guesses what is not looked up; it runs on the CPU
    draft: str | os.PathLike[str] | None


class PrivateOptions(TypedDict, total=False):
    """Options that Hotcold's commands, tasks and tests give, and no other program."""

    hot_backend: str | None  #: backend in place of a GPU, for checks: ``cpu`` or ``reference``
    hot_threads: int | None  #: threads of ``hot_backend`` (as many as ``threads``)
    default_context: int  #: the most positions of a sequence where ``context`` is not given (32,768)
    second_sparsity: str | None  #: mode of a second session, whose GPU memory is planned, too


class AllOptions(LoadOptions, PrivateOptions, total=False):
    """All options of loading a model."""


_DEFAULTS = AllOptions(
    sparsity="auto",
    backend="cpu",
    cache_type="f16",
    chunk=128,
    default_context=32768,
    sequences=1,
    draft_max=DRAFT_MAX,
    prompt_math="same",
)


def complete(options: Mapping[str, Any]) -> AllOptions:
    """Returns :class:`AllOptions`: the given values, and the defaults in place of the others and of None.
    UserError: a value that cannot be right; TypeError: an unknown option."""
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
    found: Any = {**dict.fromkeys(get_type_hints(AllOptions)), **_DEFAULTS, **given}
    if found["sparsity"] not in SPARSITY_MODES:
        raise LoadError(f"sparsity {found['sparsity']!r}: choose from {', '.join(SPARSITY_MODES)}")
    if found["cache_type"] not in CACHE_TYPES:
        raise LoadError(f"cache type {found['cache_type']!r}: choose from {', '.join(CACHE_TYPES)}")
    check_prompt_math(found["prompt_math"])
    if found["pooling"] not in (None, *POOLINGS):
        raise LoadError(f"pooling {found['pooling']!r}: choose from {', '.join(POOLINGS)}")
    for name in ("sequences", "chunk", "default_context"):
        if found[name] < 1:
            raise LoadError(f"{name} is {found[name]}: at least 1 is needed")
    if (found["state_copies"] or 0) < 0:
        raise LoadError(f"state_copies is {found['state_copies']}: at least 0 is needed")
    if not 0 <= found["draft_max"] < DECODE_ROWS:
        seen = f"`draft_max={found['draft_max']}`"
        raise LoadError(f"{seen}: 0 (no guesses) to {DECODE_ROWS - 1} tokens are allowed")
    if found["draft"] is not None and not found["draft_max"]:
        raise LoadError("`draft` guesses nothing with `draft_max=0`: leave one of them out")
    if found["chat_template"] is not None:
        found["chat_template"] = template_text(found["chat_template"])
    return found  # type: ignore[no-any-return]


def ram_budget(options: AllOptions) -> int | None:
    """The bytes of ``ram_budget`` in options that :func:`complete` returned."""
    budget = options["ram_budget"]
    return None if budget is None else int(budget)


def check_loading(options: Mapping[str, Any], allowed: type[ModelOptions]) -> None:
    """Raises TypeError for an option that is neither allowed nor private."""
    private = get_type_hints(PrivateOptions)
    check_names({name: value for name, value in options.items() if name not in private}, allowed)


def check_names(options: Mapping[str, Any], allowed: type[Any]) -> None:
    """TypeError for an option that is none of a TypedDict's, as of a keyword that a function lacks."""
    names = get_type_hints(allowed)
    if unknown := options.keys() - names.keys():
        raise TypeError(f"unknown option {min(unknown)!r}: allowed are {', '.join(names)}")
