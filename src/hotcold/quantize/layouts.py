"""Rewrites GGUF files: down matrices by neuron or by output, PowerInfer's file from a model and its
predictors, and a model and a sidecar from PowerInfer's file."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import BlockTypeError, Tensor, block_type
from hotcold.formats.files import check_output, naming
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.formats.words import HOT_FIRST_KEY, SIDE_BY_SIDE_KEY
from hotcold.model.config import Config
from hotcold.model.weights import check_tensors
from hotcold.quantize.one_threshold import OneThreshold, check_computed, from_folder, from_sidecar
from hotcold.quantize.reordering import (
    PARTS,
    Order,
    check_order,
    check_side_by_side,
    reordered,
    rows_of_experts,
    side_by_side,
)
from hotcold.quantize.rewriting import (
    Plan,
    PlannedTensor,
    Progress,
    QuantizeError,
    copied,
    kept_metadata,
    rewrite,
)
from hotcold.quantize.transposing import transposed
from hotcold.sparse.predictor import (
    THRESHOLD_KEY,
    check_predictors,
    predictor_names,
    read_predictor,
    write_sidecar,
)
from hotcold.values import shown
from hotcold.version import __version__

#: Activation -> the architecture for which PowerInfer uses it, with a gate and without.
_WITH_GATE = {"relu": "llama", "drelu": "bamboo"}
_WITHOUT_GATE = {"relu": ("falcon", "opt")}
_SOURCES = ("llama", "bamboo", "falcon", "opt")  # architectures that PowerInfer's code computes correctly
_KEYS = (
    "hotcold.ffn.activation",
    "hotcold.ffn.threshold",
    "hotcold.ffn.down_layout",
    SIDE_BY_SIDE_KEY,
    THRESHOLD_KEY,
)
_DOWN = re.compile(r"(blk\.\d+\.(?:ffn_down|channel_mix_value))(?:_t)?(_exps|_shexp)?\.(weight|bias)")
_COMPUTED_SPARSELY = re.compile(r"blk\.\d+\.(ffn_(gate|up|down|down_t)|fc[12])\.weight")


def _known(layer: str, outside: str) -> re.Pattern[str]:
    return re.compile(rf"({outside})|blk\.\d+\.({layer})")


_PARTS = r"(ffn_up|ffn_down(_t)?|fc[12])\.weight"
_LLAMA = _known(
    rf"(attn_norm|attn_[qkv]|attn_output|ffn_norm|ffn_gate)\.weight|{_PARTS}",
    r"(token_embd|output_norm|output)\.weight",
)
#: Tensors that PowerInfer's loader knows, by architecture.
_KNOWN = {
    "llama": _LLAMA,
    "bamboo": _LLAMA,
    "falcon": _known(
        rf"attn_norm(_2)?\.(weight|bias)|(attn_qkv|attn_output)\.weight|{_PARTS}",
        r"(token_embd|output)\.weight|output_norm\.(weight|bias)",
    ),
    "opt": _known(
        rf"(attn_norm|attn_[qkv]|attn_output|ffn_norm|ffn_up|ffn_down(_t)?)\.(weight|bias)|{_PARTS}",
        r"(token_embd|position_embd|output)\.weight|output_norm\.(weight|bias)",
    ),
}


@dataclass(frozen=True)
class LayoutOptions:
    down: str | None = None  #: ``by_neuron`` or ``by_output``; None: unchanged, or as the format needs
    format: str | None = None  #: ``gguf`` or ``powerinfer``; None: unchanged, ``powerinfer`` with predictors
    predictors: Path | None = None  #: to put into the file: a sidecar, or a folder of PowerInfer's
    take_predictors: Path | None = None  #: a sidecar to write, from predictors inside the old file
    type: str | None = None  #: block type of rewritten down matrices; None: their current type
    threads: int | None = None  #: None: one per core
    force: bool = False  #: replace existing files
    #: by layer, the order of each expert's neurons (:func:`hotcold.tasks.hot_first.hot_first`), or None
    order: Mapping[int, Order] | None = None
    side_by_side: bool = False  #: with an order: store a neuron's rows of gate, up and down together


@dataclass(frozen=True)
class Rewritten:
    output: Path
    nbytes: int
    format: str  #: ``gguf`` or ``powerinfer``
    down_layout: str
    types: dict[str, int]  #: number of tensors of each block type
    requantised: int  #: down matrices that were quantised again, which loses a little
    notes: list[str]


def change_layout(
    model: Path, output: Path, options: LayoutOptions, progress: Progress | None = None
) -> Rewritten:
    """Writes ``output``, a file of the same model, completely or not at all; then the sidecar.

    ``progress`` is called with the bytes written so far and their total. ``QuantizeError``: the options do
    not fit the file or each other, and errors of :func:`~hotcold.quantize.rewriting.rewrite`. Other errors
    are about the file: a ModelError, PredictorError, ConvertError or GGUFError."""
    with open_gguf(model) as source:
        with naming(model, QuantizeError):
            config = Config.from_metadata(source.metadata, source.magic, source.tensors)
            check_tensors(source, config, predictor_names(source))
            wanted = _Wanted.from_source(source, config, options)
            plan = _plan(source, config, wanted)
        if options.take_predictors is not None:
            _check_taking(source, config, options, output)
        rewrite(source, output, plan, progress, force=options.force, threads=options.threads)
        if options.take_predictors is not None:
            _take(source, config, output, options.take_predictors)
    return Rewritten(
        output=output,
        nbytes=output.stat().st_size,
        format=wanted.format,
        down_layout=wanted.down,
        types=dict(Counter(each.type.name for each in plan.tensors.values())),
        requantised=0 if wanted.down == _layout(source, config) else _requantised(source, plan),
        notes=wanted.notes,
    )


@dataclass(frozen=True)
class _Wanted:
    format: str
    down: str
    type: str | None
    own_predictors: bool  #: predictors inside the file stay
    predictors: OneThreshold | None  #: new ones
    notes: list[str]
    order: Mapping[int, Order]
    side_by_side: bool

    @classmethod
    def from_source(cls, source: GGUFFile, config: Config, options: LayoutOptions) -> "_Wanted":
        """Resolves the options. QuantizeError: they contradict each other."""
        before, inside = "powerinfer" if source.magic == "PWRI" else "gguf", bool(predictor_names(source))
        default = "powerinfer" if options.predictors else "gguf" if options.take_predictors else before
        format = options.format or default
        down = options.down or ("by_neuron" if format == "powerinfer" else _layout(source, config))
        if format == "powerinfer" and down == "by_output":
            raise QuantizeError(
                "`down=by_output`: PowerInfer's format has rows by neuron; give `format=gguf` too"
            )
        if format == "gguf" and options.predictors:
            raise QuantizeError("a GGUF file has no predictors inside: leave `format` out, or the predictors")
        if format == "powerinfer" and not (options.predictors or inside):
            raise QuantizeError("PowerInfer's programs need predictors in the file: give `predictors`")
        if options.type is not None and down == _layout(source, config):
            raise QuantizeError(f"`type` is for down matrices that change: down is {down} already")
        notes = []
        if inside and format == "gguf" and not options.take_predictors:
            notes.append(
                "the predictors in the file are left out: `take_predictors` saves them in a file of their own"
            )
        new = None
        if options.predictors is not None:
            new = _predictors(options.predictors, source, config)
            notes += [new.note] * bool(new.note)
        order = options.order or {}
        if order:
            check_order(source, config, order, format, (down, _layout(source, config)))
            if options.side_by_side:
                check_side_by_side(source)
        keeps_own = inside and new is None
        return cls(format, down, options.type, keeps_own, new, notes, order, options.side_by_side)


def _layout(source: GGUFFile, config: Config) -> str:
    return "by_neuron" if "blk.0.ffn_down_t.weight" in source.tensors else config.down_layout


def _predictors(path: Path, source: GGUFFile, config: Config) -> OneThreshold:
    return from_folder(path, config) if path.is_dir() else from_sidecar(path, source, config)


def _plan(source: GGUFFile, config: Config, wanted: _Wanted) -> Plan:
    powerinfer = wanted.format == "powerinfer"
    if powerinfer:
        _check_powerinfer(source, config)
    tensors: dict[str, PlannedTensor] = {}
    inside = predictor_names(source)
    for name in source.tensors:
        if name in inside and not (powerinfer and wanted.own_predictors):
            continue
        new = name
        if down := _DOWN.fullmatch(name):
            new = f"{down[1]}{'_t' * powerinfer}{down[2] or ''}.{down[3]}"
        if down and down[3] == "weight" and wanted.down != _layout(source, config):
            tensors[new] = transposed(source, name, _new_type(source, name, wanted.type))
        elif (rows := rows_of_experts(name)) is not None and rows in wanted.order:
            if not wanted.side_by_side:
                tensors[new] = reordered(source, name, wanted.order[rows])
            elif "ffn_gate_exps" in name:
                whole, planned = side_by_side(source, rows, wanted.order[rows])
                tensors[whole] = planned
        else:
            tensors[new] = copied(source, name)
    if powerinfer and "output.weight" not in source.tensors and config.architecture != "opt":
        tensors["output.weight"] = copied(source, "token_embd.weight")  # no shared table there
    for i, factors in enumerate(wanted.predictors.layers if wanted.predictors else ()):
        for part, tensor in zip(("fc1", "fc2"), factors, strict=True):
            tensors[f"blk.{i}.{part}.weight"] = _in_memory(tensor)
    return Plan(_metadata(source, config, wanted), tensors, "PWRI" if powerinfer else "GGUF")


def _new_type(source: GGUFFile, name: str, type: str | None) -> Any:
    try:
        return source.tensors[name].type if type is None else block_type(type.upper())
    except BlockTypeError as error:
        raise QuantizeError(f"`type`: {error}") from None


def _in_memory(tensor: Tensor) -> PlannedTensor:
    return PlannedTensor(tensor.type, tensor.shape, lambda: [lambda: tensor.data])


def _metadata(source: GGUFFile, config: Config, wanted: _Wanted) -> Mapping[str, Any]:
    """The old file's metadata, under the new architecture's name, then the keys about the FFN."""
    kept = {key: value for key, value in kept_metadata(source).items() if key not in _KEYS}
    if wanted.format == "gguf":
        kept["hotcold.ffn.activation"] = config.activation
        if config.threshold:
            kept["hotcold.ffn.threshold"] = np.asarray(config.threshold, np.float32)[()]
        kept["hotcold.ffn.down_layout"] = wanted.down
        if wanted.order:
            kept[HOT_FIRST_KEY] = True
        if wanted.side_by_side:
            kept[SIDE_BY_SIDE_KEY] = [f"ffn_{part}_exps" for part in PARTS]
        return kept
    old, new = config.architecture, _architecture(config)
    kept = {re.sub(rf"^{re.escape(old)}\.", f"{new}.", key): value for key, value in kept.items()}
    kept["general.architecture"] = new
    model_threshold = source.metadata.get(THRESHOLD_KEY, 0.0)
    kept[THRESHOLD_KEY] = np.float32(wanted.predictors.threshold if wanted.predictors else model_threshold)
    return kept


def _architecture(config: Config) -> str:
    """The architecture by which PowerInfer selects the activation. QuantizeError: there is none."""
    name, activation = config.architecture, config.activation
    if config.experts is None and not config.threshold and name in _SOURCES:
        if config.gated and name in ("llama", "bamboo") and activation in _WITH_GATE:
            return _WITH_GATE[activation]
        if not config.gated and name in _WITHOUT_GATE.get(activation, ()):
            return name
    got = f"{name} with {activation}"
    if isinstance(config.threshold, tuple):
        got += ", thresholds by layer"
    elif config.threshold:
        got += f", threshold {config.threshold:g}"
    got += f" and {config.experts.count} experts" if config.experts else ""
    raise QuantizeError(f"{got}: PowerInfer computes llama with relu or drelu, falcon and opt with relu")


def _check_powerinfer(source: GGUFFile, config: Config) -> None:
    """Raises QuantizeError if PowerInfer's programs would refuse the file, or silently give wrong results."""
    _architecture(config)
    known = _KNOWN[config.architecture]
    if unknown := [name for name in source.tensors if not known.fullmatch(name)]:
        raise QuantizeError(f"tensor {unknown[0]}: PowerInfer's programs do not know it")
    computed = [name for name in source.tensors if _COMPUTED_SPARSELY.fullmatch(name)]
    check_computed(computed, source)


def _check_taking(source: GGUFFile, config: Config, options: LayoutOptions, output: Path) -> None:
    path = options.take_predictors
    assert path is not None
    check_predictors(source, config)
    if options.format == "powerinfer" or options.predictors:
        raise QuantizeError(
            "`take_predictors` makes a GGUF file without predictors: leave `format` and other options out"
        )
    if path.resolve() in (output.resolve(), source.path.resolve()):
        raise QuantizeError(f"{shown(str(path))} is the model: the predictors need a file of their own")
    with naming(path, QuantizeError):
        check_output(path, 0, force=options.force)


def _take(source: GGUFFile, config: Config, model: Path, path: Path) -> None:
    """Writes the predictors inside a file as a sidecar of the new file."""
    layers = [read_predictor(source, config, i) for i in range(config.layers)]
    facts: dict[str, Any] = {"version": __version__, "method": "trained", "input": "residual"}
    with open_gguf(model) as new:
        write_sidecar(path, new.fingerprint(), layers, facts)


def _requantised(source: GGUFFile, plan: Plan) -> int:
    """The number of down matrices with new blocks that do not hold every old value."""
    count = 0
    for name, info in source.tensors.items():
        down = _DOWN.fullmatch(name)
        if down is None or down[3] != "weight":
            continue
        names = (f"{down[1]}{t}{down[2] or ''}.weight" for t in ("", "_t"))
        new = next(plan.tensors[each] for each in names if each in plan.tensors)
        count += new.type.weights > 1 or (info.type.name, new.type.name) in _ROUNDED
    return count


#: Pairs of float types; the second does not hold every value of the first.
_ROUNDED = (("F32", "F16"), ("F32", "BF16"), ("F16", "BF16"), ("BF16", "F16"))
