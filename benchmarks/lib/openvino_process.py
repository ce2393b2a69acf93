"""OpenVINO GenAI on a GGUF file, in a process and perhaps a Python of its own: MODEL.gguf THREADS.

Answers ``{"prompt": tokens, "generate": steps, "vocab": n, "seed": s}`` with seconds: of the prompt if
``generate`` is 0, else of this number of steps after it. Needs openvino-genai and NumPy, and nothing of
Hotcold. Settings are OpenVINO's own: its KV cache has 8 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import serve

FIRST_TOKEN = 259


def main() -> None:
    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))

    def seconds(asked: dict[str, int]) -> float:
        rng, steps = np.random.default_rng(asked["seed"]), asked["generate"]
        tokens = rng.integers(FIRST_TOKEN, asked["vocab"], (1, asked["prompt"]), np.int64)
        result = pipeline.generate(
            openvino.Tensor(tokens), max_new_tokens=steps + 1, ignore_eos=True, do_sample=False
        )
        metrics = result.perf_metrics
        return float(steps * metrics.get_tpot().mean if steps else metrics.get_ttft().mean) / 1000

    serve(seconds, openvino_genai.__version__)


if __name__ == "__main__":
    main()
