"""Makes a Hugging Face checkpoint of a GGUF file, where the original cannot be had; transformers reads it.

    pip install '.[train]' gguf accelerate
    python benchmarks/quality/gguf_to_checkpoint.py smollm2.gguf FOLDER

The weights are those of the file, decoded to float32: as exact as its blocks are, no more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def make_checkpoint(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = AutoModelForCausalLM.from_config(config).float()  # one that is not marked as quantised
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make_checkpoint(args.gguf, args.folder)
    print(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
