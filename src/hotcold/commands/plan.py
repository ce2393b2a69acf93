"""Plans a model's memory on this machine, or which of its parts a GPU computes, and predicts the speed."""

import argparse
import textwrap

import hotcold
from hotcold.commands import options
from hotcold.commands.flags import in_flags
from hotcold.errors import UserError
from hotcold.placement.hardware import DEFAULT, PRESETS
from hotcold.placement.sizes import SHAPES
from hotcold.runtime.options import SPARSITY_MODES
from hotcold.tasks.planning import OBJECTIVES

_TYPE = "Q4_0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path = parser.add_argument, options.file_path
    model = parser.add_mutually_exclusive_group()
    options.add_model(model)
    shapes = f"plan a model without a file: {', '.join(SHAPES)}"
    model.add_argument("--shape", choices=SHAPES, metavar="NAME", help=shapes)
    add("--type", type=str.upper, metavar="TYPE", help="block type of the --shape (default: q4_0)")
    add(
        "-c",
        "--ctx-size",
        "--ctx",
        type=options.context_size,
        metavar="N",
        help="context size in tokens; 0: the largest of the model (default: the model's, at most 32768, or "
        "less if memory is short; 2048 for a --shape)",
    )
    options.add_cache_options(add)
    add(
        "--vram-budget",
        type=options.byte_sizes,
        metavar="SIZE",
        help="limit of GPU memory, such as 512MiB or 8GiB; a bare number is GiB (default: the GPU's memory "
        "minus 1 GiB, or minus 1/8 of less than 8 GiB); for several GPUs one size each: 8GiB,4GiB",
    )
    add(
        "--ram-budget",
        type=options.byte_size,
        metavar="SIZE",
        help="plan main memory instead, for an MoE model on the CPU: the RAM that it may take, such as "
        "8GiB; prints what fits and how many experts a token is expected to read from the disk "
        "(hotcold bench measures the speed)",
    )
    add(
        "--sparsity",
        choices=SPARSITY_MODES,
        help="with --ram-budget: the mode of a sparse model, which decides the neurons that stay in the "
        "file (default: auto)",
    )
    add(
        "--profile",
        type=path,
        metavar="FILE",
        help="profile file of hotcold profile (default: MODEL.profile.gguf next to the model, else a power "
        "law)",
    )
    add(
        "--hardware",
        action="append",
        metavar="FILE|NAME",
        help=f"plan for a GPU: a JSON file of hotcold doctor, or a preset: {', '.join(PRESETS)} (default "
        f"with --vram-budget: {DEFAULT}); may be repeated for different GPUs",
    )
    add(
        "--objective",
        choices=OBJECTIVES,
        default="time",
        help="time: the least predicted time per token. paper: the most activations on the GPU, as in "
        "PowerInfer (default: time)",
    )
    add(
        "--placement",
        type=path,
        metavar="FILE",
        help="predict the speed of this .gpuidx file instead of planning",
    )
    options.add_output(
        parser,
        "-o",
        "--output",
        metavar="FILE",
        help="write the placement to this .gpuidx file",
    )
    options.add_force(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.ram_budget is not None:
        return _run_ram(args)
    for_gpus = (args.shape, args.vram_budget, args.profile, args.hardware, args.placement, args.output)
    if args.objective == "time" and all(option is None for option in for_gpus):
        return _run_here(args)
    if args.sparsity is not None:
        raise UserError("`sparsity` needs `ram_budget`: leave it out of a plan for GPUs")
    plan = hotcold.plan(
        options.local_model(args.model),
        shape=args.shape,
        type=args.type or _TYPE,
        context=args.ctx_size,
        cache_type=options.cache_type(args),
        vram_budget=args.vram_budget,
        profile=args.profile,
        hardware=args.hardware or DEFAULT,
        objective=args.objective,
        placement=args.placement,
        output=args.output,
        force=args.force,
    )
    print(plan)
    return options.end(args, plan.report())


def _run_here(args: argparse.Namespace) -> int:
    from hotcold.tasks.machine_plan import plan_machine

    if args.type is not None:
        raise UserError("`type` is the block type of a `shape`: leave it out for a model")
    plan = plan_machine(
        options.local_model(args.model),
        context=args.ctx_size,
        cache_type=options.cache_type(args),
        sparsity=args.sparsity,
    )
    lines = in_flags(str(plan)).split("\n")
    print("\n".join(textwrap.fill(line, 80, subsequent_indent=" " * 12) for line in lines))
    return options.end(args, plan.report())


def _run_ram(args: argparse.Namespace) -> int:
    from hotcold.tasks.ram_planning import plan_ram

    for_gpus = {"shape": args.shape, "vram_budget": args.vram_budget, "placement": args.placement}
    for_gpus |= {"objective": None if args.objective == "time" else args.objective, "output": args.output}
    for_gpus |= {"hardware": args.hardware}
    if given := [name for name, value in for_gpus.items() if value is not None]:
        raise UserError(f"`ram_budget` plans only for the CPU: leave out `{given[0]}`")
    plan = plan_ram(
        options.local_model(args.model),
        args.ram_budget,
        context=args.ctx_size,
        cache_type=options.cache_type(args),
        sparsity=args.sparsity,
        profile=args.profile,
    )
    print(in_flags(str(plan)))
    return options.end(args, plan.report())
