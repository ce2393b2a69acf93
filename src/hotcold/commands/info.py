"""Describes a model file: its shape, its sizes by block type, its tokenizer and its predictors."""

import argparse
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hotcold.commands import options
from hotcold.commands.flags import in_flags
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import GGUFFile, TensorInfo, open_gguf
from hotcold.formats.words import HOT_FIRST_KEY
from hotcold.model.config import Config, ModelError
from hotcold.model.draft_block import draft_bytes, with_draft
from hotcold.placement.sizes import placed_by
from hotcold.values import printable

_WIDTH, _LABEL = 80, 16
_LONGEST_LIST = 4096  # limit of items in reported lists
_PREDICTOR = re.compile(r"blk\.(\d+)\.fc([12])\.weight")
_DOWN = re.compile(r"blk\.\d+\.ffn_(down|down_t|down_exps)\.weight")
#: Reported facts of an architecture, and their metadata keys without its name.
_NUMBERS = {
    "layers": "block_count", "context": "context_length", "dim": "embedding_length",
    "heads": "attention.head_count", "kv_heads": "attention.head_count_kv", "neurons": "feed_forward_length",
    "experts": "expert_count", "experts_used": "expert_used_count",
    "expert_neurons": "expert_feed_forward_length",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="also list the tensors")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with open_gguf(options.local_model(args.model) or model_path()) as file:
        report = describe(file)
        tensors = list(file.tensors.values()) if args.tensors else []
    if not args.json:
        print("\n".join([*_lines(report), *_tensor_lines(tensors)]))
    elif args.tensors:
        report["tensor_list"] = [
            {"name": t.name, "shape": t.shape, "type": t.type.name, "offset": t.offset, "bytes": t.nbytes}
            for t in tensors
        ]
    return options.end(args, report)


def describe(file: GGUFFile) -> dict[str, Any]:
    """Returns the report for ``--json``; None means that the file does not state the value."""
    infos, metadata = file.tensors.values(), file.metadata
    architecture = _text(metadata.get("general.architecture"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    numbers = {name: _numbers(metadata.get(f"{architecture}.{key}")) for name, key in _NUMBERS.items()}
    config, refused = _config(file)
    return {
        "path": printable(str(file.path), 4096),
        "file_bytes": file.size,
        "magic": file.magic,
        "version": file.version,
        "name": _text(metadata.get("general.name")),
        "architecture": architecture,
        "fingerprint": file.fingerprint(),
        "parameters": sum(math.prod(info.shape) for info in infos),
        "tensors": len(infos),
        "tensor_bytes": sum(info.nbytes for info in infos),
        "types": _types(infos),
        **numbers,
        "activation": _text(metadata.get("hotcold.ffn.activation")),
        "down_layout": _down_layout(file, config),
        "neuron_order": _neuron_order(file),
        "state_layers": None if config is None else sum(each.slot_bytes > 0 for each in config.mixers),
        "state_bytes": None if config is None else config.slot_bytes,
        "guesses": _guesses(file, config),
        "placement": None if config is None else placed_by(config),
        "refused": refused,
        "here": None if config is None else _here(file),
        **_predictors(file),
        "tokenizer": _text(metadata.get("tokenizer.ggml.model")),
        "tokenizer_pre": _text(metadata.get("tokenizer.ggml.pre")),
        "vocab": len(tokens) if isinstance(tokens, list) else None,
        "chat_templates": _chat_templates(metadata),
    }


def _types(infos: Iterable[TensorInfo]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    for info in infos:
        none = {
            "type": info.type.name,
            "tensors": 0,
            "parameters": 0,
            "bytes": 0,
            "supported": info.type.supported,
        }
        entry = totals.setdefault(info.type.name, none)
        entry["tensors"] += 1
        entry["parameters"] += math.prod(info.shape)
        entry["bytes"] += info.nbytes
    return sorted(totals.values(), key=lambda entry: (-entry["bytes"], entry["type"]))


def _config(file: GGUFFile) -> tuple[Config | None, str | None]:
    """Returns the configuration. A file that cannot run here is still described, with the reason in place of
    a configuration."""
    try:
        return Config.from_metadata(file.metadata, file.magic, file.tensors), None
    except ModelError as error:
        return None, printable(str(error), _LONGEST_LIST)


def _here(file: GGUFFile) -> dict[str, Any]:
    """Returns the memory that loading on the CPU needs now. ``refused`` is the reason why the model cannot be
    loaded; None if it can."""
    from hotcold.kernels.gpus import OFF
    from hotcold.tasks.machine_plan import machine_plan

    try:
        plan = machine_plan(file, {"gpu": OFF})
    except UserError as error:
        return {"refused": printable(str(error), _LONGEST_LIST)}
    facts = {"context": plan.context, "bytes": plan.total_bytes, "free_bytes": plan.free_bytes}
    return {**facts, "refused": plan.shortage or None}


def _guesses(file: GGUFFile, config: Config | None) -> str | None:
    """Returns the draft block of the file, or why it is not used; None: the file has none."""
    if config is None or not config.drafting:
        return None
    with_block, why = with_draft(config, file.tensors)
    return (
        f"draft block blk.{config.layers}, {options.size(draft_bytes(file, with_block))}"
        if with_block.draft
        else why
    )


def _down_layout(file: GGUFFile, config: Config | None) -> str | None:
    """Returns ``by_neuron`` or ``by_output`` as stored, None without an FFN; docs/formats.md explains
    both."""
    names = [name for name in file.tensors if _DOWN.fullmatch(name)]
    if names and all("ffn_down_t." in name for name in names):
        return "by_neuron"
    if not names:
        return None
    if config is not None:
        return config.down_layout
    return _text(file.metadata.get("hotcold.ffn.down_layout")) or "by_output"


def _neuron_order(file: GGUFFile) -> str | None:
    """Returns how a file with hot neurons first stores the rows of neurons; None for other files."""
    if file.metadata.get(HOT_FIRST_KEY) is not True:
        return None
    rows = "together" if file.side_by_side else "in separate tensors"
    return f"hot first, the rows of a neuron {rows}"


def _predictors(file: GGUFFile) -> dict[str, Any]:
    """Returns facts about PowerInfer's predictors: number of layers with both factors, ranks and size."""
    factors = {m.groups(): info for name, info in file.tensors.items() if (m := _PREDICTOR.fullmatch(name))}
    layers = [layer for layer, which in factors if which == "1" and (layer, "2") in factors]
    threshold = _number(file.metadata.get("powerinfer.sparse_threshold", 0.0))
    return {
        "predictor_layers": len(layers),
        "predictor_ranks": sorted({factors[layer, "1"].shape[0] for layer in layers}),
        "predictor_parameters": sum(math.prod(info.shape) for info in factors.values()),
        "predictor_bytes": sum(info.nbytes for info in factors.values()),
        "predictor_threshold": threshold if layers else None,
    }


def _chat_templates(metadata: Mapping[str, Any]) -> list[str]:
    """Returns the names of the chat templates; ``default`` is used unless a request asks for another."""
    default = ["default"] if "tokenizer.chat_template" in metadata else []
    others = metadata.get("tokenizer.chat_templates")
    names = others if isinstance(others, list) else []
    return default + [printable(name) for name in names[:_LONGEST_LIST]]


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _numbers(value: Any) -> Any:
    """Returns a finite number, or a list of numbers if a file has one per layer; None for anything else."""
    if isinstance(value, np.ndarray) and 0 < len(value) <= _LONGEST_LIST and value.dtype.kind in "iu":
        return value.tolist()
    return _number(value)


def _number(value: Any) -> int | float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else None


# --- for people ---


def _lines(report: dict[str, Any]) -> list[str]:
    room = _WIDTH - _LABEL
    path = report["path"]
    container = f"{report['magic']} version {report['version']}"
    if report["magic"] == "PWRI":
        container += " (PowerInfer)"
    total = f"{options.scaled(report['parameters'])} in {report['tensors']} tensors"
    values = {
        "file": path if len(path) <= room else f"...{path[3 - room :]}",
        "format": f"{container}, {options.size(report['file_bytes'])}",
        **{name: report[name] for name in ("name", "architecture", "fingerprint")},
        "parameters": total if report["tensors"] else "none (a vocabulary without a model)",
        **{name.replace("_", " "): _per_layer(report[name]) for name in _NUMBERS},
        "activation": report["activation"],
        "down layout": report["down_layout"],
        "neuron order": report["neuron_order"],
        "states": _states_text(report),
        "draft tokens": report["guesses"],
        "GPU takes": report["placement"],
        "predictors": _predictor_text(report),
        "tokenizer": _tokenizer_text(report),
    }
    shown = {label: printable(str(value), room) for label, value in values.items() if value is not None}
    lines = [f"{label:<{_LABEL}}{value}" for label, value in shown.items()] + _type_lines(report["types"])
    lines += _lines_of_memory(report["here"])
    if report["refused"] is not None:
        lines += ["", *textwrap.wrap(f"This file cannot run here: {report['refused']}.", _WIDTH)]
    return lines


def _lines_of_memory(here: dict[str, Any] | None) -> list[str]:
    if here is None:
        return []
    if here["refused"]:
        text = f"On this machine it cannot be loaded: {here['refused']}"
    else:
        free = "" if here["free_bytes"] is None else f" of {options.size(here['free_bytes'])} free"
        text = f"On this machine it takes {options.size(here['bytes'])}{free}, with a context of"
        text += f" {here['context']} tokens (`hotcold plan`)."
    return ["", *textwrap.wrap(in_flags(text), _WIDTH)]


def _type_lines(types: list[dict[str, Any]]) -> list[str]:
    lines = ["", f"{'type':<{_LABEL}}{'tensors':>8}{'parameters':>12}{'size':>12}"] if types else []
    for entry in types:
        count, size = options.scaled(entry["parameters"]), options.size(entry["bytes"])
        mark = "" if entry["supported"] else "  not supported"
        lines.append(f"{entry['type']:<{_LABEL}}{entry['tensors']:>8}{count:>12}{size:>12}{mark}")
    if not all(entry["supported"] for entry in types):
        lines += ["", f"This model cannot run here: supported types are {', '.join(BLOCK_TYPES)}."]
    return lines


def _tensor_lines(infos: list[TensorInfo]) -> list[str]:
    lines = [""] if infos else []
    for info in infos:
        shape = " x ".join(map(str, info.shape))
        rest = f"{info.type.name:<8}{shape:>20}{options.size(info.nbytes):>12}"
        # A long name gets a line of its own, so that columns stay within 80.
        lines += [f"{info.name:<38}{rest}"] if len(info.name) < 38 else [info.name, f"{'':<38}{rest}"]
    return lines


def _states_text(report: dict[str, Any]) -> str | None:
    """Returns the size of the states of recurrent layers; None without such layers."""
    if not report["state_layers"]:
        return None
    return f"{options.size(report['state_bytes'])} per sequence (layers: {report['state_layers']})"


def _predictor_text(report: dict[str, Any]) -> str:
    ranks, threshold = report["predictor_ranks"], report["predictor_threshold"]
    if not ranks:
        return "none"
    rank = ranks[0] if ranks[0] == ranks[-1] else f"{ranks[0]} to {ranks[-1]}"
    size = options.size(report["predictor_bytes"])
    given = "not a number" if threshold is None else f"{threshold:g}"
    return f"{report['predictor_layers']} layers, rank {rank}, {size}, threshold {given}"


def _tokenizer_text(report: dict[str, Any]) -> str | None:
    if not report["tokenizer"]:
        return None
    text: str = report["tokenizer"]
    if report["tokenizer_pre"]:
        text += f" ({report['tokenizer_pre']})"
    text += f", {'no' if report['vocab'] is None else report['vocab']} tokens"
    templates = report["chat_templates"]
    if templates == ["default"]:
        text += ", chat template"
    elif templates:
        text += f", chat templates {', '.join(templates)}"
    return text


def _per_layer(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return value[0] if min(value) == max(value) else f"{min(value)} to {max(value)}, by layer"
