"""Describes a model file: its shape, its sizes by block type, its tokenizer and its predictors."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.commands import options
from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.formats.gguf import GGUFFile, TensorInfo, open_gguf, printable

_WIDTH = 80
_LABEL = 14
_LONGEST_LIST = 4096  # of numbers per layer that are reported
_FLOATS = ("F32", "F16", "BF16")
_PREDICTOR = re.compile(r"blk\.(\d+)\.fc([12])\.weight")
_DOWN = re.compile(r"blk\.\d+\.ffn_(down|down_t|down_exps)\.weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="GGUF file (default: the built-in model)"
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors as well")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    path = args.file
    if path is None:
        from hotcold.demo import model_path

        path = model_path()
    with open_gguf(path) as file:
        report = describe(file)
        tensors = list(file.tensors.values()) if args.tensors else []
    if args.json:
        if args.tensors:
            report["tensor_list"] = [_tensor_entry(info) for info in tensors]
        print(json.dumps(report, allow_nan=False))
        return 0
    for line in (*_lines(report), *_tensor_lines(tensors)):
        print(line)
    return 0


def describe(file: GGUFFile) -> dict[str, Any]:
    """What ``--json`` prints; None stands for what the file does not state."""
    architecture = _text(file.metadata.get("general.architecture"))
    report: dict[str, Any] = {
        "path": printable(str(file.path), 4096),
        "file_bytes": file.size,
        "magic": file.magic,
        "version": file.version,
        "name": _text(file.metadata.get("general.name")),
        "architecture": architecture,
        "fingerprint": file.fingerprint(),
        "parameters": sum(math.prod(info.shape) for info in file.tensors.values()),
        "tensors": len(file.tensors),
        "tensor_bytes": sum(info.nbytes for info in file.tensors.values()),
        "types": _types(file.tensors.values()),
    }
    for name, key in (
        ("layers", "block_count"),
        ("context", "context_length"),
        ("dim", "embedding_length"),
        ("heads", "attention.head_count"),
        ("kv_heads", "attention.head_count_kv"),
        ("neurons", "feed_forward_length"),
    ):
        report[name] = _numbers(file.metadata.get(f"{architecture}.{key}"))
    report["activation"] = _text(file.metadata.get("hotcold.ffn.activation"))
    report["down_layout"] = _down_layout(file)
    return report | _predictors(file) | _tokenizer(file.metadata)


def _types(infos: Iterable[TensorInfo]) -> list[dict[str, Any]]:
    """Totals by block type, the largest first."""
    totals: dict[str, dict[str, Any]] = {}
    for info in infos:
        name = info.type.name
        empty: dict[str, Any] = {"type": name, "tensors": 0, "parameters": 0, "bytes": 0}
        entry = totals.setdefault(name, empty | {"supported": info.type.supported})
        entry["tensors"] += 1
        entry["parameters"] += math.prod(info.shape)
        entry["bytes"] += info.nbytes
    return sorted(totals.values(), key=lambda entry: (-entry["bytes"], entry["type"]))


def _down_layout(file: GGUFFile) -> str | None:
    """``by_neuron`` or ``by_output`` as stored, None without an FFN; docs/formats.md says what follows."""
    names = [name for name in file.tensors if _DOWN.fullmatch(name)]
    if not names:
        return None
    if all("ffn_down_t." in name for name in names):
        return "by_neuron"
    return _text(file.metadata.get("hotcold.ffn.down_layout")) or "by_output"


def _predictors(file: GGUFFile) -> dict[str, Any]:
    """PowerInfer's: how many layers have both factors, their ranks and size."""
    factors = {m.groups(): info for name, info in file.tensors.items() if (m := _PREDICTOR.fullmatch(name))}
    layers = sorted({layer for layer, _ in factors if (layer, "1") in factors and (layer, "2") in factors})
    ranks = sorted({factors[layer, "1"].shape[0] for layer in layers})
    return {
        "predictor_layers": len(layers),
        "predictor_ranks": ranks,
        "predictor_parameters": sum(math.prod(info.shape) for info in factors.values()),
        "predictor_bytes": sum(info.nbytes for info in factors.values()),
        "predictor_threshold": _number(file.metadata.get("powerinfer.sparse_threshold", 0.0))
        if layers
        else None,
    }


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return {
        "tokenizer": _text(metadata.get("tokenizer.ggml.model")),
        "tokenizer_pre": _text(metadata.get("tokenizer.ggml.pre")),
        "vocab": len(tokens) if isinstance(tokens, list) else None,
        "chat_template": "tokenizer.chat_template" in metadata,
    }


def _tensor_entry(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type.name,
        "offset": info.offset,
        "bytes": info.nbytes,
    }


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _numbers(value: Any) -> Any:
    """A finite number, or a list of numbers where a file has one per layer; None for anything else."""
    if isinstance(value, np.ndarray) and 0 < len(value) <= _LONGEST_LIST and value.dtype.kind in "iu":
        return value.tolist()
    return _number(value)


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


# --- for people ---


def _lines(report: dict[str, Any]) -> list[str]:
    container = f"{report['magic']} version {report['version']}"
    if report["magic"] == "PWRI":
        container += " (PowerInfer)"
    lines = [
        _line("file", _shortened(report["path"])),
        _line("format", f"{container}, {_size(report['file_bytes'])}"),
        _line("name", report["name"]),
        _line("architecture", report["architecture"]),
        _line("fingerprint", report["fingerprint"]),
        _line("parameters", f"{_count(report['parameters'])} in {report['tensors']} tensors"),
    ]
    if report["tensors"] == 0:
        lines[-1] = _line("parameters", "none: a vocabulary only")
    for name in ("layers", "context", "dim", "heads", "kv_heads", "neurons"):
        lines.append(_line(name.replace("_", " "), _per_layer(report[name])))
    lines += [_line("activation", report["activation"]), _line("down layout", report["down_layout"])]
    lines += [_line("predictors", _predictor_text(report)), _line("tokenizer", _tokenizer_text(report))]
    return [line for line in lines if line] + _type_lines(report["types"])


def _line(label: str, value: Any) -> str:
    return "" if value is None else f"{label:<{_LABEL}}{printable(str(value), _WIDTH - _LABEL)}"


def _type_lines(types: list[dict[str, Any]]) -> list[str]:
    if not types:
        return []
    lines = ["", f"{'type':<{_LABEL}}{'tensors':>8}{'parameters':>12}{'size':>12}"]
    for entry in types:
        mark = "" if entry["supported"] else "  not supported"
        lines.append(
            f"{entry['type']:<{_LABEL}}{entry['tensors']:>8}{_count(entry['parameters']):>12}"
            f"{_size(entry['bytes']):>12}{mark}"
        )
    if not all(entry["supported"] for entry in types):
        lines += ["", f"This model cannot run here: supported types are {', '.join(BLOCK_TYPES)}."]
    return lines


def _tensor_lines(infos: list[TensorInfo]) -> list[str]:
    lines = [""] if infos else []
    for info in infos:
        shape = " x ".join(map(str, info.shape))
        rest = f"{info.type.name:<8}{shape:>20}{_size(info.nbytes):>12}"
        # A long name gets a line of its own, so that columns stay within 80.
        lines += [f"{info.name:<38}{rest}"] if len(info.name) < 38 else [info.name, f"{'':<38}{rest}"]
    return lines


def _predictor_text(report: dict[str, Any]) -> str:
    layers, ranks = report["predictor_layers"], report["predictor_ranks"]
    if not layers:
        return "none"
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    threshold = report["predictor_threshold"]
    return (
        f"{layers} layers, rank {rank}, {_size(report['predictor_bytes'])}, "
        f"threshold {'not a number' if threshold is None else format(threshold, 'g')}"
    )


def _tokenizer_text(report: dict[str, Any]) -> str | None:
    if report["tokenizer"] is None:
        return None
    kind = report["tokenizer"] + (f" ({report['tokenizer_pre']})" if report["tokenizer_pre"] else "")
    vocab = "no tokens" if report["vocab"] is None else f"{report['vocab']} tokens"
    return f"{kind}, {vocab}{', chat template' if report['chat_template'] else ''}"


def _per_layer(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return value[0] if min(value) == max(value) else f"{min(value)} to {max(value)}, by layer"


def _shortened(path: str) -> str:
    room = _WIDTH - _LABEL
    return path if len(path) <= room else f"...{path[3 - room :]}"


def _count(n: int) -> str:
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return str(n)


def _size(n: int) -> str:
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} B"
