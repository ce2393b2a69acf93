"""Opening of a user's model: a file, a name on the hub, or a loaded model."""

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

#: A GGUF file, ``hf:OWNER/NAME/FILE.gguf`` on the hub, or a loaded model
#: (:func:`~hotcold.runtime.loading.load`). None is the built-in model.
Source: TypeAlias = str | os.PathLike[str] | LoadedModel | None


def file_of(model: Source, progress: Progress | None = None) -> Path:
    """Returns the path of a model; downloads a hub file that is not in the cache. ``progress`` gets the phase
    ``downloading``."""
    if isinstance(model, LoadedModel):
        return model.path
    advance = partial(progress, "downloading") if progress else None
    return model_path() if model is None else located(model, advance)


def opened(
    model: Source, options: Mapping[str, Any], progress: Progress | None = None, **fixed: Any
) -> LoadedModel:
    """Returns the model, loaded now if it is a file. ``options`` are the user's (None: not given), ``fixed``
    the caller's; both are :class:`AllOptions`. UserError: options for a model that is already loaded, and
    errors of :func:`~hotcold.runtime.loading.load`."""
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(model, LoadedModel):
        advance = partial(progress, "loading") if progress else None
        return load(file_of(model, progress), {**given, **fixed}, advance)
    if given:
        fix = "leave it out, or give the model's file"
        raise UserError(f"{min(given)} is an option of loading, and the model is loaded already: {fix}")
    return model
