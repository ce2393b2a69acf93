"""OpenVINO GenAI on a GGUF file, in a process and perhaps a Python of its own.

    python benchmarks/lib/openvino_process.py MODEL.gguf THREADS

Reads lines of JSON, ``{"prompt": tokens, "generate": steps, "vocab": n, "seed": s}``, and answers each with
``{"seconds": t}``: of the prompt where ``generate`` is 0, else of so many steps after it. Needs
openvino-genai and NumPy, and nothing of Hotcold. Settings are OpenVINO's own: its KV cache has 8 bits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

FIRST_TOKEN = 259


def seconds_of(pipeline: Any, asked: dict[str, int]) -> float:
    import numpy as np
    import openvino

    rng = np.random.default_rng(asked["seed"])
    tokens = rng.integers(FIRST_TOKEN, asked["vocab"], (1, asked["prompt"]), np.int64)
    steps = asked["generate"]
    result = pipeline.generate(
        openvino.Tensor(tokens), max_new_tokens=steps + 1, ignore_eos=True, do_sample=False
    )
    metrics = result.perf_metrics
    return float(steps * metrics.get_tpot().mean if steps else metrics.get_ttft().mean) / 1000


def main() -> None:
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds_of(pipeline, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
