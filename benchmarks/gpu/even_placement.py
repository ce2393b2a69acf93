"""Writes a placement with the hottest share of every layer's neurons on the hot side, for measuring overlap.

    python benchmarks/gpu/even_placement.py half.gpuidx [-m MODEL] [--share 0.5]
    hotcold bench [-m MODEL] --placement half.gpuidx --hot-backend cpu --timeline out.json

`hotcold plan` chooses what is fastest; where both sides share the same cores and memory, that is no split at
all. All of attention and the head are on the hot side. Which neurons are hottest says the profile that lies
beside the model, else they are the first ones of a power law.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import BatchLimits
from hotcold.model.config import Config
from hotcold.placement.placement import write_placement
from hotcold.placement.profiles import find_profile
from hotcold.placement.sizes import CHUNK, sizes_of_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.placed import hottest


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path)
    parser.add_argument("-m", "--model", type=Path, default=model_path())
    parser.add_argument("--share", type=float, default=0.5)
    args = parser.parse_args()
    if not 0 <= args.share <= 1:
        parser.error(f"--share {args.share} must be 0 to 1")
    with open_gguf(args.model) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
        sizes = sizes_of_file(file, config, BatchLimits.from_context(512, 1, CHUNK), "f16")
        firing = find_profile(sizes, None, file.path).firing
    write_placement(args.out, sizes, hottest(firing, args.share))


if __name__ == "__main__":
    main()
