"""From a model file to a model in memory: what fits, where each part lies, and then the weights."""

from pathlib import Path

from hotcold.demo import model_path
from hotcold.engine.load_options import LoadError, LoadOptions
from hotcold.engine.memory import check_memory
from hotcold.engine.placing import open_devices
from hotcold.engine.session import LoadedModel
from hotcold.engine.sparsity_mode import choose_mode
from hotcold.errors import UserError
from hotcold.formats.gguf import GGUFFile, open_gguf, printable
from hotcold.kernels.backend import DECODE_ROWS, PAGE, BatchLimits
from hotcold.model.config import Config
from hotcold.model.tokenizer import Tokenizer
from hotcold.model.weights import Progress, check_tensors, load_weights
from hotcold.sparse.predictor import find_predictors, predictor_names


def load(path: Path | None, options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Loads a GGUF file, or the built-in model; ``progress`` is called with bytes read so far and in all.

    ValueError: not a model file (GGUFError), a model that is not supported (ModelError), or options that do
    not fit it or the machine (LoadError). Weights are read last, when a session has been found to fit."""
    with open_gguf(path or model_path()) as file:
        try:
            return _load(file, options, progress)
        except UserError:
            raise
        except ValueError as error:  # a shape that is right and that a kernel has no room for, say
            raise LoadError(f"{printable(file.path.name)} cannot run here: {error}") from error


def _load(file: GGUFFile, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    factors, predictor = predictor_names(file), find_predictors(file, options.predictor)
    config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    fingerprint = file.fingerprint()
    weight_bytes = check_tensors(file, config, factors)
    mode = choose_mode(options.sparsity, config, file.path, predictor, fingerprint)
    limits, context, chunk = _limits(config, options)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    used = mode.predictors.path if mode.predictors else None
    devices, notes = open_devices(file, config, options, limits, used)
    if "output.weight" not in file.tensors and devices.head is not devices.embedding:
        weight_bytes += file.tensors["token_embd.weight"].nbytes  # each of the two has the table
    if mode.predictors:
        weight_bytes += mode.predictors.nbytes
    check_memory(weight_bytes, options.cache_type, config, limits, devices)
    return LoadedModel(
        path=file.path,
        fingerprint=fingerprint,
        config=config,
        tokenizer=tokenizer,
        weights=load_weights(file, config, devices, progress, factors),
        devices=devices,
        limits=limits,
        context=context,
        chunk=chunk,
        cache_type=options.cache_type,
        sparsity=options.sparsity,
        predictor=predictor,
        notes=(*config.notes, *notes),
    )


def _limits(config: Config, options: LoadOptions) -> tuple[BatchLimits, int, int]:
    """Of a step, and the most positions of a sequence and prompt rows of a step."""
    asked, most = options.context, config.context
    if asked is not None and not 2 <= asked <= most:
        raise LoadError(f"context of {asked} positions (-c): this model allows 2 to {most}")
    context = asked or min(most, options.default_context)
    chunk = min(options.chunk, context)
    pages, logits = -(-context // PAGE), max(DECODE_ROWS, options.sequences)
    return BatchLimits(DECODE_ROWS + chunk, options.sequences, pages, logits), context, chunk
