"""Opens the model that a user gives: a file, a name on the hub, or a loaded model."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.hub.download import located
from hotcold.runtime.loading import load
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel

#: A GGUF file, ``hf:OWNER/NAME/FILE.gguf`` of the hub, or what :func:`~hotcold.runtime.loading.load` gave;
#: None is the built-in model.
Source: TypeAlias = str | os.PathLike[str] | LoadedModel | None


def file_of(model: Source, progress: Progress | None = None) -> Path:
    """Where the model lies, or the one that it was loaded from. One of the hub that is not in the cache is
    downloaded; ``progress`` is told of that as the phase ``downloading``."""
    if isinstance(model, LoadedModel):
        return model.path
    advance = partial(progress, "downloading") if progress else None
    return model_path() if model is None else located(model, advance)


def opened(
    model: Source, options: Mapping[str, Any], progress: Progress | None = None, **more: Any
) -> LoadedModel:
    """The model, loaded now if it is a file. ``options`` and ``more`` are of :class:`AllOptions`; those of
    ``options`` that are None were not given. UserError: options for a model that is loaded already; others
    are those of :func:`~hotcold.runtime.loading.load`."""
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(model, LoadedModel):
        advance = partial(progress, "loading") if progress else None
        return load(file_of(model, progress), {**given, **more}, advance)
    if given:
        fix = "leave it out, or give the model's file"
        raise UserError(f"{min(given)} is an option of loading, and the model is loaded already: {fix}")
    return model
