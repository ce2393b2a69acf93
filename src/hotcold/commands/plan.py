"""Plans what of a model a GPU and a CPU get, and predicts the speed, at a full context. Allocates nothing."""

import argparse
from typing import Any

from hotcold import __version__
from hotcold.commands import options
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.formats.blocks import block_type
from hotcold.formats.files import printable
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.model.kv_cache import CACHE_TYPES
from hotcold.sparse.baselines import last_layers, layer_split, paper_placement
from hotcold.sparse.costs import Costs
from hotcold.sparse.hardware import DEFAULT, PRESETS, Hardware, find_hardware
from hotcold.sparse.placement import Placement, read_placement, write_placement
from hotcold.sparse.predictor import find_predictors
from hotcold.sparse.profiles import Profile, find_profile, power_law_profile
from hotcold.sparse.sizes import SHAPES, Sizes, sizes_of_file, sizes_of_shape
from hotcold.sparse.solver import Solver

_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path = parser.add_argument, options.file_path
    model = parser.add_mutually_exclusive_group()
    model.add_argument("-m", "--model", type=path, metavar="FILE", help="GGUF file (default: built in)")
    shapes = f"a model without a file: {', '.join(SHAPES)}"
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=shapes)
    add("--type", type=str.upper, default="Q4_0", metavar="TYPE", help="block type of a --shape (q4_0)")
    add(
        "-c",
        "--ctx-size",
        "--ctx",
        type=options.whole_number(2),
        metavar="N",
        help="positions of the context (default: the model's, 4096 at most; of a --shape 2048)",
    )
    add("--cache-type", choices=tuple(CACHE_TYPES), default="f16", help="of keys and values (f16)")
    add(
        "--vram-budget",
        type=options.byte_size,
        metavar="SIZE",
        help="GPU memory that Hotcold may allocate, as 8GiB or 512MiB; bare numbers are GiB "
        "(default: card memory minus 1 GiB, or minus 1/8 on cards under 8 GiB)",
    )
    add(
        "--profile",
        type=path,
        metavar="FILE",
        help="made by hotcold profile (default: MODEL.profile.gguf beside the model, else a power law)",
    )
    add(
        "--hardware",
        default=DEFAULT,
        metavar="FILE|NAME",
        help=f"JSON as hotcold doctor writes it, or a preset: {', '.join(PRESETS)} (default: {DEFAULT})",
    )
    add(
        "--objective",
        choices=("time", "paper"),
        default="time",
        help="time: the least predicted time of a token. paper: the most firings on the GPU, as PowerInfer "
        "(default: time)",
    )
    add("--placement", type=path, metavar="FILE", help="judge this .gpuidx, and solve nothing")
    add("-o", "--output", type=options.new_file, metavar="FILE", help="write the placement, a .gpuidx")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    hardware = find_hardware(args.hardware)
    budget = _budget(args, hardware)
    sizes, profile, context = _model(args)
    placement = _placement(args, sizes, profile, hardware, budget)
    report: dict[str, Any] = {
        "model": sizes.name,
        "fingerprint": sizes.fingerprint,
        "context": context,
        "profile": profile.source,
        "hardware": hardware.name,
        "hardware_source": hardware.source,
        "objective": "given" if args.placement else args.objective,
        "budget_bytes": budget,
    }
    report |= _shares(sizes, profile, placement)
    report |= _speeds(sizes, profile, hardware, placement, budget)
    report["parts"] = placement.bill(sizes)
    if args.output:
        write_placement(args.output, sizes, placement, __version__)
    _print(report)
    return options.end(args, report)


def _budget(args: argparse.Namespace, hardware: Hardware) -> int:
    vram = int(hardware.vram_bytes)
    if not vram:
        seen = f"--hardware {printable(args.hardware)}: no GPU was measured, so nothing is to be placed"
        raise UserError(f"{seen}; choose a preset, {', '.join(PRESETS)}, or leave it out")
    if args.vram_budget is None:
        return vram - min(_GIB, vram // 8)
    budget: int = args.vram_budget
    if not 0 < budget <= vram:
        allowed = f"more than 0, which is the CPU alone, and at most the card's {vram / _GIB:g} are needed"
        raise UserError(f"--vram-budget is {budget / _GIB:g} GiB: {allowed}")
    return budget


def _model(args: argparse.Namespace) -> tuple[Sizes, Profile, int]:
    """With the positions of its context."""
    kind = block_type(args.type)
    if args.shape:
        context = args.ctx_size or 2048
        sizes = sizes_of_shape(args.shape, kind, context, args.cache_type)
        if args.profile:
            return sizes, find_profile(sizes, args.profile, None), context
        return sizes, power_law_profile(sizes, SHAPES[args.shape]), context
    path = args.model or model_path()
    with open_gguf(path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        context = args.ctx_size or min(config.context, 4096)
        if context > config.context:
            raise UserError(f"-c {context}: this model has {config.context} positions")
        predictors = find_predictors(file)
        sizes = sizes_of_file(file, config, context, args.cache_type, predictors=predictors)
    return sizes, find_profile(sizes, args.profile, path), context


def _placement(
    args: argparse.Namespace, sizes: Sizes, profile: Profile, hardware: Hardware, budget: int
) -> Placement:
    if args.placement:
        placement = read_placement(args.placement, sizes)
        needed = placement.gpu_bytes(sizes)
        if needed > budget:
            raise UserError(f"{args.placement} needs {needed} bytes: --vram-budget is {budget}")
        return placement
    if args.objective == "paper":
        return paper_placement(sizes, profile, hardware, budget)
    return Solver(sizes, profile, Costs.expected(sizes, profile, hardware)).solve(budget)


def _shares(sizes: Sizes, profile: Profile, placement: Placement) -> dict[str, Any]:
    """What the GPU and the CPU get: bytes, neurons, firings."""
    parts = placement.bill(sizes)
    hot = sum(int(mask.sum()) for mask in placement.hot)
    fired_hot = sum(each[mask].sum() for each, mask in zip(profile.firing, placement.hot, strict=True))
    return {
        "gpu_bytes": sum(part["gpu_bytes"] for part in parts),
        "cpu_bytes": sum(part["cpu_bytes"] for part in parts),
        "hot_share": hot / int(sizes.neurons.sum()),
        "hot_activation_share": float(fired_hot / sum(each.sum() for each in profile.firing)),
    }


def _speeds(
    sizes: Sizes, profile: Profile, hardware: Hardware, placement: Placement, budget: int
) -> dict[str, Any]:
    """Predicted tokens a second: of the placement, and of others to compare with."""
    costs = Costs.expected(sizes, profile, hardware)
    everything = last_layers(sizes, len(sizes.neurons))
    dense, split = layer_split(sizes, budget)
    return {
        "predicted_tok_s": 1 / costs.token(placement),
        "cpu_tok_s": 1 / costs.token(last_layers(sizes, 0)),
        "layer_split_tok_s": 1 / Costs.expected(dense, profile, hardware).token(split),
        "layer_split_layers": len(split.layers),
        "all_gpu_tok_s": 1 / costs.token(everything),
        "all_gpu_bytes": everything.gpu_bytes(sizes),
    }


def _print(report: dict[str, Any]) -> None:
    size = options.size
    for name in ("model", "profile", "hardware"):
        print(printable(f"{name:<12}{report[name]}", 80))
    print(printable(f"{'source':<12}{report['hardware_source']}", 80))
    print(f"{'context':<12}{report['context']}")
    print(f"{'budget':<12}{size(report['budget_bytes'])}")
    _print_bytes(report["parts"])
    print("\nhot: {hot_share:.1%} of neurons, {hot_activation_share:.1%} of firings\n".format(**report))
    rows = (
        ("predicted", "predicted_tok_s", ""),
        ("cpu", "cpu_tok_s", ""),
        ("layer split", "layer_split_tok_s", f"{report['layer_split_layers']} layers, dense"),
        ("all GPU", "all_gpu_tok_s", f"needs {size(report['all_gpu_bytes'])}"),
    )
    for title, name, note in rows:
        print(f"{title:<12}{report[name]:>9.2f} tok/s  {note}".rstrip())
    _print_hot_neurons(report["parts"])


def _print_bytes(parts: list[dict[str, Any]]) -> None:
    print(f"\n{'':<12}{'GPU':>12}{'CPU':>12}")
    for kind in [*dict.fromkeys(part["kind"] for part in parts), "total"]:
        rows = [part for part in parts if kind in (part["kind"], "total")]
        gpu, cpu = (options.size(sum(row[side] for row in rows)) for side in ("gpu_bytes", "cpu_bytes"))
        print(f"{kind:<12}{gpu:>12}{cpu:>12}")


def _print_hot_neurons(parts: list[dict[str, Any]]) -> None:
    print("\nhot neurons by layer")
    on_gpu = {part["layer"] for part in parts if part["kind"] == "attention" and part["gpu_bytes"]}
    for part in parts:
        if part["kind"] == "neurons":
            share, layer = part["hot_share"], part["layer"]
            label = f"{share:.1%}" if layer in on_gpu else "CPU"
            print(f"{layer:>5} {'#' * round(60 * share):<60}{label:>8}")
