"""How fast weights are rearranged for a GPU, by block type: GB/s of a file's bytes.

    python benchmarks/gpu/packing_rates.py
    python benchmarks/gpu/packing_rates.py --types IQ4_XS Q3_K --seconds 1

`numpy` is one thread with NumPy alone, as all types were packed before; `one thread` is a thread's rate now;
`all threads` is the rate of loading. The rates are the fastest of some runs on a chunk of 8 MiB.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Bytes
from hotcold.kernels.vulkan.packing import CHUNK_BYTES, holds, pack, pack_plainly, pack_rows

COLUMNS = 4096


def rate(call: Callable[..., object], type: BlockType, data: Bytes, seconds: float) -> float:
    best, until = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call(type, data, COLUMNS)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() >= until:
            return data.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [name for name in BLOCK_TYPES if holds(name)]
    parser.add_argument("--types", nargs="+", choices=names, metavar="TYPE", default=names)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each rate (0.5)")
    args = parser.parse_args()
    rows = []
    print(f"{'type':10} {'numpy':>8} {'one thread':>11} {'all threads':>12}  GB/s")
    for name in args.types:
        type = BLOCK_TYPES[name]
        row_bytes = type.row_bytes(COLUMNS)
        shape = max(1, CHUNK_BYTES // row_bytes), row_bytes
        data = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        calls = (("numpy", pack_plainly), ("one_thread", pack_rows), ("all_threads", pack))
        rates = {title: rate(call, type, data, args.seconds) for title, call in calls}
        rows.append({"type": name, **rates})
        print(
            f"{name:10} {rates['numpy']:8.3f} {rates['one_thread']:11.3f} {rates['all_threads']:12.3f}",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
