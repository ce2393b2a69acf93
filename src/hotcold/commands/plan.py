"""Plans what of a model a GPU and a CPU get, and predicts the speed, at a full context. Allocates nothing."""

import argparse
from typing import Any

from hotcold import __version__
from hotcold.commands import options
from hotcold.demo import model_path
from hotcold.formats.blocks import block_type
from hotcold.formats.files import printable
from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config
from hotcold.model.kv_cache import CACHE_TYPES
from hotcold.sparse.hardware import DEFAULT, PRESETS, find_hardware
from hotcold.sparse.placement import Profile, find_profile, read_placement, write_placement
from hotcold.sparse.sizes import SHAPES, Sizes, sizes_of_file, sizes_of_shape
from hotcold.sparse.solver import Costs, Solver, last_layers, layer_split, paper_placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path = parser.add_argument, options.file_path
    model = parser.add_mutually_exclusive_group()
    model.add_argument("-m", "--model", type=path, metavar="FILE", help="GGUF file (default: built in)")
    what = f"a model without a file: {', '.join(SHAPES)}"
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=what)
    add("--type", type=str.upper, default="Q4_0", metavar="TYPE", help="block type of a --shape (q4_0)")
    what = "positions (the model's, 4096 at most; of a --shape 2048)"
    add("-c", "--ctx-size", "--ctx", type=options.whole_number(2), metavar="N", help=what)
    add("--cache-type", choices=tuple(CACHE_TYPES), default="f16", help="of keys and values (f16)")
    what = "for all of Hotcold, as 8GiB or 512MiB; bare numbers are GiB (the card but an eighth, or 1GiB)"
    add("--vram-budget", type=options.byte_size, metavar="SIZE", help=what)
    what = "made by hotcold profile (MODEL.profile.gguf beside the model, else a power law)"
    add("--profile", type=path, metavar="FILE", help=what)
    what = "JSON, or a preset, such as rtx2080ti-i7 or rtx3060 (rtx4090-i9)"
    add("--hardware", default=DEFAULT, metavar="FILE|NAME", help=what)
    what = "least time of a token, or most firings on the GPU, as PowerInfer (time)"
    add("--objective", choices=("time", "paper"), default="time", help=what)
    add("--placement", type=path, metavar="FILE", help="a .gpuidx to judge, instead of solving")
    add("-o", "--output", type=options.new_file, metavar="FILE", help="write a .gpuidx")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    hardware = find_hardware(args.hardware)
    vram, budget = int(hardware.vram_bytes), args.vram_budget
    if not vram:
        seen = f"--hardware {printable(args.hardware)}: no GPU was measured, so nothing is to be placed"
        raise ValueError(f"{seen}; choose a preset, {', '.join(PRESETS)}, or leave it out")
    budget = vram - min(1 << 30, vram // 8) if budget is None else budget
    if not 0 < budget <= vram:
        allowed = f"more than 0, which is the CPU alone, and at most the card's {vram / 2**30:g} are needed"
        raise ValueError(f"--vram-budget is {budget / 2**30:g} GiB: {allowed}")
    sizes, profile, context = _model(args)
    costs = Costs(sizes, profile, hardware)
    if args.placement:
        placement = read_placement(args.placement, sizes)
        if (needed := placement.gpu_bytes(sizes)) > budget:
            raise ValueError(f"{args.placement} needs {needed} bytes: --vram-budget is {budget}")
    elif args.objective == "paper":
        placement = paper_placement(sizes, profile, hardware, budget)
    else:
        placement = Solver(sizes, profile, costs).solve(budget)
    everything, nothing = (last_layers(sizes, n) for n in (len(sizes.neurons), 0))
    dense, split = layer_split(sizes, budget)
    firing, parts = profile.firing, placement.bill(sizes)
    fired = sum(each[hot].sum() for each, hot in zip(firing, placement.hot, strict=True))
    report: dict[str, Any] = {
        "model": sizes.name, "fingerprint": sizes.fingerprint, "context": context, "profile": profile.source,
        "hardware": hardware.name, "hardware_source": hardware.source,
        "objective": "given" if args.placement else args.objective, "budget_bytes": budget,
        "gpu_bytes": sum(part["gpu_bytes"] for part in parts),
        "cpu_bytes": sum(part["cpu_bytes"] for part in parts),
        "hot_share": sum(int(hot.sum()) for hot in placement.hot) / int(sizes.neurons.sum()),
        "hot_activation_share": float(fired / sum(each.sum() for each in firing)),
        "predicted_tok_s": 1 / costs.token(placement), "cpu_tok_s": 1 / costs.token(nothing),
        "layer_split_tok_s": 1 / Costs(dense, profile, hardware).token(split),
        "layer_split_layers": len(split.layers), "all_gpu_tok_s": 1 / costs.token(everything),
        "all_gpu_bytes": everything.gpu_bytes(sizes), "parts": parts,
    }  # fmt: skip
    if args.output:
        write_placement(args.output, sizes, placement, __version__)
    _print(report)
    return options.end(args, report)


def _model(args: argparse.Namespace) -> tuple[Sizes, Profile, int]:
    context, kind = args.ctx_size or 2048, block_type(args.type)
    path = args.model or model_path()
    if args.shape:
        sizes = sizes_of_shape(args.shape, kind, context, args.cache_type)
    else:
        with open_gguf(path) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            context = args.ctx_size or min(config.context, 4096)
            if context > config.context:
                raise ValueError(f"-c {context}: this model has {config.context} positions")
            sizes = sizes_of_file(file, config, context, args.cache_type)
    known = (SHAPES[args.shape],) if args.shape else ()
    return sizes, find_profile(sizes, args.profile, None if args.shape else path, *known), context


def _print(report: dict[str, Any]) -> None:
    size = options.size
    for name in ("model", "profile", "hardware", "hardware_source"):
        print(printable(f"{name.split('_')[-1]:<12}{report[name]}", 80))
    print(f"{'context':<12}{report['context']}\n{'budget':<12}{size(report['budget_bytes'])}")
    print(f"\n{'':<12}{'GPU':>12}{'CPU':>12}")
    parts = report["parts"]
    for kind in [*dict.fromkeys(part["kind"] for part in parts), "total"]:
        rows = [part for part in parts if kind in (part["kind"], "total")]
        gpu, cpu = (size(sum(row[side] for row in rows)) for side in ("gpu_bytes", "cpu_bytes"))
        print(f"{kind:<12}{gpu:>12}{cpu:>12}")
    print("\nhot: {hot_share:.1%} of neurons, {hot_activation_share:.1%} of firings\n".format(**report))
    needs, split = f"needs {size(report['all_gpu_bytes'])}", f"{report['layer_split_layers']} layers, dense"
    notes = {"predicted": "", "cpu": "", "layer split": split, "all GPU": needs}
    for name, note in notes.items():
        print(f"{name:<12}{report[name.lower().replace(' ', '_') + '_tok_s']:>9.2f} tok/s  {note}".rstrip())
    print("\nhot neurons by layer")
    on_gpu = {part["layer"] for part in parts if part["kind"] == "attention" and part["gpu_bytes"]}
    for part in (part for part in parts if part["kind"] == "neurons"):
        share, i = part["hot_share"], part["layer"]
        print(f"{i:>5} {'#' * round(60 * share):<60}{f'{share:.1%}' if i in on_gpu else 'CPU':>8}")
