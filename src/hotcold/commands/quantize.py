"""Writes a GGUF file with other block types: smaller, and slightly less exact. TYPE is one type for all
matrices, such as Q8_0, or a mixture, such as Q4_K_M, which gives more bits to the tensors that matter most,
as in llama.cpp. COPY only joins the files of a split model. Files in PowerInfer's format keep it."""

import argparse
import re
from collections.abc import Iterable

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.quantize.imatrix import read_imatrix
from hotcold.quantize.mixtures import ALIASES, TENSOR_TYPES, Wishes
from hotcold.quantize.quantization import TYPES, Quantization, QuantizeOptions, Share, quantize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=options.file_path, metavar="IN", help="GGUF file; of a split model, the first file")
    options.add_output(parser, "output", metavar="OUT", help="file to write")
    add("type", type=_file_type, metavar="TYPE", help=f"one of {', '.join(TYPES)}")
    add(
        "--imatrix",
        type=options.file_path,
        metavar="FILE",
        help="importance matrix of hotcold imatrix or llama.cpp: which columns to keep more exact",
    )
    add(
        "--tensor-type",
        type=_tensor_rule,
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="type of the tensors whose names match the regular expression, such as attn_v=q8_0; may be "
        "repeated, the first match counts",
    )
    add("--output-tensor-type", type=_tensor_type, metavar="TYPE", help="type of output.weight, the head")
    add("--token-embedding-type", type=_tensor_type, metavar="TYPE", help="type of the token embeddings")
    add(
        "--predictor-type",
        type=_tensor_type,
        metavar="TYPE",
        help="type of the predictors in a PowerInfer file (default: as other tensors)",
    )
    add("--pure", action="store_true", help="use the same type for all matrices, no mixture")
    add("--leave-output-tensor", action="store_true", help="leave output.weight as it is")
    add(
        "--allow-requantize",
        action="store_true",
        help="also convert tensors that are quantised already, which loses more than from F16",
    )
    add("--rms", action="store_true", help="measure the error of each type (takes longer)")
    options.add_force(parser)
    add(
        "-t",
        "--threads",
        type=options.threads,
        metavar="N",
        help="number of threads (default, and -1: one per physical core that this process may use)",
    )
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    wishes = Wishes(
        pure=args.pure,
        output=args.output_tensor_type,
        token_embd=args.token_embedding_type,
        predictor=args.predictor_type,
        leave_output=args.leave_output_tensor,
        patterns=args.tensor_type,
    )
    settings = QuantizeOptions(
        type=args.type,
        wishes=wishes,
        importance=read_imatrix(args.imatrix) if args.imatrix else None,
        importance_file=str(args.imatrix or ""),
        allow_requantize=args.allow_requantize,
        measure=args.rms,
        threads=args.threads,
        force=args.force,
    )
    with progress("quantising", in_bytes=True) as advance:
        done = quantize(args.model, args.output, settings, advance)
    options.print_notes(done.notes)
    print("\n".join(_table(done.shares)))
    size, before = options.size(done.after), options.size(done.before)
    got = f"{done.type}, {before} -> {size}, {done.bits:.2f} bits a weight, {done.seconds:.1f} s"
    print(f"{args.output}: {got}")
    return options.end(args, _report(done))


def _table(shares: Iterable[Share]) -> list[str]:
    """Returns a line for each type, at most 80 columns wide."""
    lines = ["type     tensors      before       after  bits/weight  relative RMS error"]
    for share in shares:
        error = "" if share.error is None else f"{share.error:.6f}"
        before, after = options.size(share.before), options.size(share.after)
        line = f"{share.type:8} {share.tensors:7} {before:>11} {after:>11} {share.bits:12.2f}  {error:>18}"
        lines.append(line.rstrip())
    if not any(share.error is not None for share in shares):
        lines[0] = lines[0].removesuffix("  relative RMS error")
    return lines


def _report(done: Quantization) -> dict[str, object]:
    return {
        "output": str(done.output),
        "type": done.type,
        "bytes_before": done.before,
        "bytes": done.after,
        "bits_per_weight": round(done.bits, 4),
        "types": {
            share.type: {
                "tensors": share.tensors,
                "bytes_before": share.before,
                "bytes": share.after,
                "relative_rms_error": share.error,
            }
            for share in done.shares
        },
        "notes": done.notes,
        "seconds": round(done.seconds, 3),
    }


def _file_type(text: str) -> str:
    name = ALIASES.get(text.upper(), text.upper())
    if name not in TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(TYPES)}")
    return name


def _tensor_type(text: str) -> str:
    if text.upper() not in TENSOR_TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(TENSOR_TYPES)}")
    return text.upper()


def _tensor_rule(text: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, type = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PATTERN=TYPE, such as attn_v=q8_0")
    try:
        return re.compile(pattern), _tensor_type(type)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r} is not a regular expression: {error}") from None
