"""The built-in model, or a file, on two backends that are given: parts of it as a placement says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.model.config import Config
from hotcold.model.draft_block import load_draft
from hotcold.model.weights import load_weights
from hotcold.placement.placement import Placement
from hotcold.placement.split import SplitDevices
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session


def random_placement(
    config: Config, share: float, layers: range | None = None, *, head: bool = True
) -> Placement:
    """A share of the neurons of each of these layers is hot, chosen at random; 0 and 1 are exact."""
    random, own = np.random.default_rng(1), layers or range(config.layers)
    hot = [(random.random(n) < share) & (i in own) for i, n in enumerate(config.neurons)]
    return Placement.on_one(hot, own, head)


def on_two(
    hot: Any,
    placement: Placement | float,
    path: Path | None = None,
    *,
    cold: Any = None,
    streams: bool = False,
    **options: Any,
) -> Session:
    """The cold side is ``cpu``, on one thread, or ``cold``. ``placement`` may be a share of hot neurons in
    all layers; ``hot`` may be the backend of each GPU. ``streams``: it computes prompts' cold neurons,
    too."""
    model = load(path, LoadOptions(threads=1, gpu="off", **options))
    if not isinstance(placement, Placement):
        placement = random_placement(model.config, placement)
    gpus = hot if isinstance(hot, dict) else {0: hot}
    devices = SplitDevices.place(placement, cold or open_backend("cpu", 1), gpus, streams=streams)
    with open_gguf(model.path) as file:
        weights = load_weights(file, model.config, devices, None, model.plan.weights.read)
        if model.config.draft:
            weights = replace(weights, draft=load_draft(file, model.config, devices, weights))
    return replace(model, devices=devices, weights=weights).session()
