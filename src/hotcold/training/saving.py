"""Writes sparse models as checkpoints that transformers, lm-eval and ``hotcold convert`` read."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from hotcold.convert.settings import read_settings
from hotcold.errors import UserError
from hotcold.extras import importing
from hotcold.training.libraries import torch
from hotcold.training.modeling_hotcold import DENSE_KEY
from hotcold.training.processes import in_first_process, process_rank
from hotcold.training.sparse_model import (
    Batch,
    WatchedActivation,
    activation_key,
    measure_sparsity,
    set_thresholds,
    sparse_layers,
)
from hotcold.training.thresholds import MAX_DIVERGENCE, Mode, choose_thresholds
from hotcold.training.token_data import TOKENIZER_FILES
from hotcold.values import printable

with importing("train", "training"):
    from safetensors import SafetensorError

_CODE = "modeling_hotcold"
_REPORT = "sparsity.json"
_HELD_OUT_CONTEXT = 512  # most tokens of a held-out text in one window
#: Files that a model keeps when its weights change.
_KEPT = (*TOKENIZER_FILES, "LICENSE*")


def save_sparse(
    model: Any,
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    original: str | os.PathLike[str] | None = None,
    threshold: Mode | Sequence[float] | None = None,
    held_out: Iterable[Batch | str] | None = None,
    max_divergence: float = MAX_DIVERGENCE,
    dtype: Any = None,
    report: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a model of ``make_sparse`` as a checkpoint folder, completely or not at all; returns its report.

    >>> save_sparse(model, "out", tokenizer=tokenizer, threshold="per-layer", held_out=texts)

    The folder has the weights, ``config.json``, the code for ``trust_remote_code=True`` if transformers does
    not know the activation, and the report ``sparsity.json``. In a distributed run every process must call
    this function; the first one writes.

    Args:
        model: the model, also inside DDP, FSDP2 or torch.compile. Merge adapters such as LoRA first.
        output: a new folder.
        tokenizer: of transformers; it is saved with the model, and cuts held-out texts into tokens.
        original: the checkpoint folder that the model was made of. Its ``config.json``, tokenizer and licence
            are kept.
        threshold: of the gates: ``none``, ``one`` or ``per-layer`` (see ``choose_thresholds``), or numbers by
            layer. None keeps the model's thresholds.
        held_out: list of texts, or of batches of token ids, for the choice of thresholds and the measurement.
        max_divergence: bound on the divergence that thresholds may cause, nats.
        dtype: floating type of the weights in the file, or its name; None keeps theirs.
        report: further entries of ``sparsity.json``.

    UserError: a value is not allowed, or the folder cannot be written."""
    output, inner = Path(output), unwrapped(model)
    source = None if original is None else Path(original)
    check_new(output)
    layers, base, stored_type = sparse_layers(model), _class_of(inner), _float_type(dtype)
    if source is not None and not (source / "config.json").is_file():
        raise UserError(f"{source} has no config.json: the checkpoint folder of the original is needed")
    stated = None if source is None else dict(read_settings(source / "config.json").values)
    if isinstance(held_out, str):
        raise UserError("held_out is one text: give a list of texts or batches")
    batches = None if held_out is None else [_batch(given, tokenizer) for given in held_out]
    entries: dict[str, Any] = {"activation": layers[0][0].kind}
    if isinstance(threshold, str):
        if batches is None:
            raise UserError(f"threshold {threshold!r} needs held-out text: give texts or batches as held_out")
        entries["choice"] = asdict(choose_thresholds(model, batches, threshold, max_divergence))
    elif threshold is not None:
        thresholds = _numbers(threshold)
        if len(thresholds) != len(layers) or not all(0 <= number < math.inf for number in thresholds):
            raise UserError(f"threshold {threshold!r}: {len(layers)} numbers of at least 0 are needed")
        set_thresholds(layers, thresholds)
    if batches is not None:
        entries["held_out"] = asdict(measure_sparsity(model, batches))
    entries["thresholds"] = [layer[0].threshold for layer in layers]
    entries |= dict(report or {})
    state = _state(inner, stored_type)
    config = _config(inner, base, layers, stated, state)
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    if "auto_map" in config:
        entries["code"] = f"{_CODE}.py"
        texts[entries["code"]] = _code(base)
    texts[_REPORT] = json.dumps(entries, indent=1) + "\n"
    in_first_process(lambda: _write(output, inner, state, tokenizer, source, texts))
    return entries


def _float_type(given: Any) -> Any:
    """The type of torch that is given, or that has the given name; None for None."""
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"dtype {given!r}: a floating type such as torch.bfloat16 is needed")
    return dtype


def _numbers(values: Any) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        return []


def check_new(output: Path) -> None:
    """Raises UserError if a folder cannot be made."""
    if output.exists() or not output.absolute().parent.is_dir():
        raise UserError(f"{output}: a new folder in an existing folder is needed")


def unwrapped(model: Any) -> Any:
    """The transformers model inside DDP and torch.compile. UserError: it has adapters."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), torch.nn.Module):
        model = inner
    if hasattr(model, "merge_and_unload"):
        raise UserError("the model has adapters: save model.merge_and_unload()")
    return model


def _batch(given: Batch | str, tokenizer: Any) -> Batch:
    if not isinstance(given, str):
        return given
    if tokenizer is None:
        raise UserError("held-out texts need a tokenizer: give one, or batches of token ids")
    ids = tokenizer(given, truncation=True, max_length=_HELD_OUT_CONTEXT)["input_ids"]
    return torch.tensor([ids])


def _class_of(model: Any) -> str:
    """The name of the model's class in transformers. UserError: it is no causal language model."""
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        name = printable(type(model).__name__)
        raise UserError(f"{name} predicts no tokens: only causal language models can be saved")
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers.models."):
            return base.__name__
    name = printable(type(model).__name__)
    raise UserError(f"{name} is not a class of transformers: only models of transformers can be saved")


def _code(base: str) -> str:
    """The modeling file: this package's, with a class derived from a class in transformers."""
    source = resources.files("hotcold.training").joinpath(f"{_CODE}.py").read_text(encoding="utf-8")
    source = source.replace("import torch\n", f"import torch\nfrom transformers import {base}\n", 1)
    return f"{source}\n\nclass {base}(SparseCausalLM, {base}):  # type: ignore[no-redef]\n    pass\n"


def _state(model: Any, dtype: Any) -> dict[str, Any]:
    """The complete weights; weights that are sharded are gathered in the first process."""
    state = {}
    for key, value in model.state_dict().items():
        if hasattr(value, "full_tensor"):
            value = value.full_tensor().cpu()
        if not process_rank():
            state[key] = value.to(dtype) if dtype and value.is_floating_point() else value
    return state


def _config(
    model: Any,
    base: str,
    layers: list[list[WatchedActivation]],
    stated: dict[str, Any] | None,
    state: dict[str, Any],
) -> dict[str, Any]:
    """``config.json`` with the new activation, made of that of the original if there is one. transformers
    computes a ReLU without a threshold without further code."""
    config = dict(model.config.to_dict() if stated is None else stated)
    for key in ("hidden_act_param", "auto_map", "_name_or_path"):
        config.pop(key, None)
    kind, key = layers[0][0].kind, activation_key(model.config)
    thresholds = [layer[0].threshold for layer in layers]
    config |= {"architectures": [base], key: kind}
    if dense := getattr(model.config, DENSE_KEY, None):
        config[DENSE_KEY] = dense
    if any(thresholds):
        equal = len(set(thresholds)) == 1
        config["hidden_act_param"] = thresholds[0] if equal else thresholds
        config[key] = {"relu": "fatrelu", "drelu": "drelu"}[kind]
    if config[key] != "relu":
        config["auto_map"] = {"AutoModelForCausalLM": f"{_CODE}.{base}"}
    if dtypes := {str(value.dtype).removeprefix("torch.") for value in state.values()}:
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[name] = dtypes.pop() if len(dtypes) == 1 else "float32"
    return config


def _write(
    output: Path, model: Any, state: Any, tokenizer: Any, original: Path | None, texts: dict[str, str]
) -> None:
    partial = output.with_name(f".{output.name[:200]}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        model.save_pretrained(partial, state_dict=state)
        (partial / f"{_CODE}.py").unlink(missing_ok=True)  # of a model that was loaded with this code
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if original is not None:
            (partial / "generation_config.json").unlink(missing_ok=True)  # the original's, if there is one
            for pattern in _KEPT:
                for file in original.glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, partial / file.name)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for file in partial.iterdir():
            file.chmod((partial / "config.json").stat().st_mode)  # some writers make private files
        os.rename(partial, output)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise UserError(f"{output} cannot be written: {printable(reason)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
