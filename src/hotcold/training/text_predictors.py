"""Trains the predictors of a GGUF file on the FFN inputs of its torch model for a text."""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.files import output_file
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.sparse.expert_fitting import Inputs
from hotcold.sparse.fitting import Fit, FitOptions
from hotcold.sparse.predictor import write_sidecar
from hotcold.training.layer import Texts, parted, train_layer
from hotcold.training.libraries import torch
from hotcold.training.modeling_hotcold import ffns, first_projection
from hotcold.training.options import TrainOptions
from hotcold.training.predictor import reproducible
from hotcold.training.sparse_model import Batch, evaluating, inputs_of


def train_predictors(
    model: Any,
    gguf: str | os.PathLike[str],
    batches: Iterable[Batch],
    held_out: Iterable[Batch],
    output: str | os.PathLike[str],
    *,
    recall: float = 0.99,
    type: str = "Q4_0",
    max_share: float = 0.15,
    training: TrainOptions | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Fit]:
    """Trains predictors of a GGUF file whose weights are those of ``model``; returns the fit of each layer.

    The model computes the FFN inputs of ``batches`` on its own device, for example a GPU. The engine finds
    the file as ``MODEL.predictor.gguf`` in the folder of ``MODEL.gguf``. The file has no measurement of cost
    and gain, so ``auto`` stays with ``exact``: ``hotcold fit-predictor`` measures. Fits are for ``held_out``.

    >>> train_predictors(model, "model.gguf", batches, held_out, "model.predictor.gguf")

    ``force`` replaces an existing ``output``.

    UserError: the file belongs to another model, the text is too short, or a value is not allowed."""
    options = FitOptions("train", recall, True, type.upper(), max_share)
    settings, batches, held_out = training or TrainOptions(), list(batches), list(held_out)
    if len(batches) < 2 or not held_out:
        problem = f"{len(batches)} batches to learn and {len(held_out)} held-out ones"
        raise UserError(f"{problem}: at least 2 and 1 are needed")
    output_file(output, force=force, inputs=[gguf])
    check, learned = parted(batches)
    best = []
    with open_gguf(gguf) as file, tempfile.TemporaryDirectory() as folder, reproducible(None):
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        for layer in range(config.layers):
            texts = Texts(*(_inputs(model, layer, config, part) for part in (learned, check, held_out)))
            best.append(train_layer(file, config, layer, options, settings, texts, Path(folder)).best)
            progress(layer + 1, config.layers)
        fits = [fitted.fit for fitted in best]
        tensors = [fitted.tensors for fitted in best]
        write_sidecar(Path(output), file.fingerprint(), tensors, options.facts(fits))
    return fits


def _inputs(model: Any, layer: int, config: Config, batches: list[Batch]) -> Inputs:
    """Inputs of a layer's FFN: ``normed``, and for experts the ``ids`` of the experts of each token."""
    kept: dict[str, list[Any]] = {"normed": [], "ids": []}
    modules = [(module, form) for module, form, number in ffns(model) if number == layer]
    if config.experts_of(layer) is not None:
        modules = [(module, form) for module, form in modules if form == "experts"]
    if len(modules) != 1:
        problem = f"layer {layer} of the model has {len(modules)} FFNs"
        raise UserError(f"{problem}: the file belongs to another model")
    module, form = modules[0]

    def keep(_: Any, args: tuple[Any, ...]) -> None:
        kept["normed"].append(args[0].detach().float().cpu().reshape(-1, args[0].shape[-1]).numpy())
        if form == "experts":
            kept["ids"].append(args[1].cpu().reshape(-1, args[1].shape[-1]).numpy())

    watched = module if form == "experts" else first_projection(module)
    hook = watched.register_forward_pre_hook(keep)
    try:
        with evaluating(model), torch.no_grad():
            for batch in batches:
                arguments, _ = inputs_of(batch, next(model.parameters()).device)
                model(**arguments, use_cache=False)
    finally:
        hook.remove()
    inputs = {name: np.concatenate(parts) for name, parts in kept.items() if parts}
    if (width := inputs["normed"].shape[1]) != config.dim:
        problem = f"FFNs of the model read {width} numbers, and of the file {config.dim}"
        raise UserError(f"{problem}: it belongs to another model")
    return inputs
