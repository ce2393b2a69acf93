"""Training of a model's predictors, layer by layer, in a folder from which a killed run continues.

Needs torch (the extra `[train]`), so fitting.py imports this module only when a user asks for training."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.fitting import Fit, FitOptions, Fitted
from hotcold.sparse.predictor import PredictorError
from hotcold.tasks.ffn_inputs import ffn_inputs, input_bytes
from hotcold.tasks.windows import evenly
from hotcold.training.layer import Texts, TrainedLayer, parted, train_layer
from hotcold.training.libraries import torch
from hotcold.training.options import TrainOptions
from hotcold.training.predictor import reproducible
from hotcold.training.work_folder import check_space, open_work_folder

Windows = list[list[int]]

_MOST_JUDGED = 8192  # tokens of the check part, and of the held-out text: their neurons are in memory
_STATE_FLOATS = 5  # numbers in the training states for each parameter
_FORMAT = 2  # of the folder; another number refuses it


def trained(
    model: LoadedModel,
    options: FitOptions,
    training: TrainOptions,
    fit_to: Windows,
    held_out: Windows,
    folder: Path,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[TrainedLayer]:
    """Trains each layer's predictor, except layers that ``folder`` already has. UserError: the folder is
    another run's, the disk is full, the text is too short, or the training of a layer failed
    (:func:`~hotcold.training.layer.train_layer`). The folder keeps all finished work."""
    check, learned = _parted(fit_to)
    held_out = evenly(held_out, max(1, _MOST_JUDGED // len(held_out[0])))
    work = open_work_folder(folder, _facts(model, options, training, (learned, check, held_out), threads))
    check_space(work, _bytes(model, options, (learned, check, held_out)))
    parts = []
    for name, windows in (("fit", learned), ("check", check), ("held-out", held_out)):

        def tell(done: int, total: int, phase: str = f"reading, {name}") -> None:
            if progress:
                progress(phase, done, total)

        parts.append(ffn_inputs(model, windows, {"normed"}, work / name, tell))
    layers = []
    with open_gguf(model.path) as file, reproducible(threads):
        for layer in range(model.config.layers):
            path = work / f"layer-{layer:03}.gguf"
            if not path.exists():
                texts = Texts(*(part[layer] for part in parts))
                with _named(work, layer):
                    result = train_layer(file, model.config, layer, options, training, texts, work)
                _save(path, result)
                for state in work.glob(f"layer-{layer:03}.*.state"):
                    state.unlink()
            layers.append(_saved(path))
            if progress:
                progress("layers", layer + 1, model.config.layers)
    return layers


@contextmanager
def _named(folder: Path, layer: int) -> Iterator[None]:
    """Adds to errors the layer, and the hint that the same command continues."""
    try:
        yield
    except PredictorError:
        raise  # the message has the layer, and a repetition would not help
    except UserError as error:
        raise UserError(f"layer {layer}: {error}") from None
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}: free some space and repeat the command, which continues"
        ) from None


def _parted(windows: Windows) -> tuple[Windows, Windows]:
    """Returns windows to check with, and windows to learn. They come from one text and do not overlap."""
    if len(windows) < 2:
        raise UserError("the text is less than three windows: give more, or make them smaller (`context`)")
    check, learned = parted(windows)
    return evenly(check, max(1, _MOST_JUDGED // len(check[0]))), learned


def _facts(
    model: LoadedModel,
    options: FitOptions,
    training: TrainOptions,
    texts: tuple[Windows, ...],
    threads: int | None,
) -> dict[str, Any]:
    """Returns all facts that affect the weights. The rate is none of them, so a smaller rate can continue a
    failed run."""
    settings: dict[str, Any] = {"recall": options.target, "type": options.stored_type}
    settings |= {"max_share": options.max_share, **asdict(training)}
    del settings["rate"]
    text = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    cores = threads or torch.get_num_threads()
    return {"format": _FORMAT, "model": model.fingerprint, "text": text} | settings | {"threads": cores}


def _bytes(model: LoadedModel, options: FitOptions, texts: tuple[Windows, ...]) -> int:
    """Returns an upper bound for the size of the folder."""
    config = model.config
    tokens = [sum(len(window) - 1 for window in windows) for windows in texts]
    inputs = input_bytes(model, {"normed"}, sum(tokens))
    chosen = config.experts.chosen * config.experts.neurons if config.experts else max(config.neurons)
    parameters = config.dim * (config.dim + max(config.neurons))
    return inputs + 4 * chosen * sum(tokens[:2]) + 4 * _STATE_FLOATS * parameters


def _save(path: Path, layer: TrainedLayer) -> None:
    keys = {"general.type": "predictor"}
    tensors: dict[str, Tensor] = {}
    for name, fitted in (("best", layer.best), ("svd", layer.svd)):
        predictor = fitted.tensors
        tensors |= {
            f"{name}.first": predictor.first,
            f"{name}.second": predictor.second,
            f"{name}.threshold": quantise(predictor.threshold, "F32"),
        }
    facts = {
        "tried": [asdict(fit) for fit in layer.tried],
        "svd": asdict(layer.svd.fit),
        "relu": layer.best.tensors.relu,
        "experts": layer.best.tensors.experts,
        "chosen": layer.best.tensors.chosen,
    }
    write_gguf(path, keys | {"hotcold.layer": json.dumps(facts)}, tensors)


def _saved(path: Path) -> TrainedLayer:
    with open_gguf(path) as file:
        facts = json.loads(str(file.metadata["hotcold.layer"]))

        def fitted(name: str, fit: Fit, relu: bool) -> Fitted:
            first, second, threshold = (
                file.load(f"{name}.{part}") for part in ("first", "second", "threshold")
            )
            tensors = PredictorTensors(
                first,
                second,
                threshold.dequantise().astype(np.float32),
                relu,
                experts=facts["experts"],
                chosen=facts["chosen"],
            )
            return Fitted(tensors, fit)

        tried = [Fit(**fit) for fit in facts["tried"]]
        return TrainedLayer(
            fitted("best", tried[0], facts["relu"]), tried, fitted("svd", Fit(**facts["svd"]), False)
        )
