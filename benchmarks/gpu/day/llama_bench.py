#!/usr/bin/env python3
"""A small llama-bench on the libraries of the published wheel ``cyllama-vulkan``, which has no such program.

    PYTHONPATH=FOLDER python benchmarks/gpu/day/llama_bench.py -m model.gguf -p 64 -n 32 -r 3 -ngl 99

FOLDER is the unpacked wheel (Python 3.12 or later). Options and report are llama-bench's, so that
``compare.py --llama-bench`` takes this file, too. The report also names the devices and has the first tokens
that greedy decoding continues with.
"""

from __future__ import annotations

import argparse
import json
import time

import cyllama.llama.llama_cpp as cpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", required=True, metavar="FILE", help="the model")
    parser.add_argument("-o", default="json", choices=["json"], help="format of the report")
    for flag, default in (("p", 64), ("n", 32), ("r", 3), ("ngl", 99), ("t", 0)):
        parser.add_argument(f"-{flag}", type=int, default=default, help=f"as llama-bench's ({default})")
    args = parser.parse_args()
    cpp.disable_logging()
    cpp.ggml_backend_load_all()
    model_params, params = cpp.LlamaModelParams(), cpp.LlamaContextParams()
    model_params.n_gpu_layers = args.ngl
    for name, value in (("n_ctx", args.p + args.n + 32), ("n_batch", max(args.p, 32))):
        setattr(params, name, value)
    if args.t:
        params.n_threads = params.n_threads_batch = args.t
    model = cpp.LlamaModel(args.m, model_params)
    context, vocab = cpp.LlamaContext(model, params), model.get_vocab().n_vocab

    def decode(tokens: list[int], position: int) -> None:
        context.decode(cpp.llama_batch_get_one(tokens, position))
        context.synchronize()

    def best() -> int:
        logits = context.get_logits_ith(-1)
        return max(range(vocab), key=logits.__getitem__)

    prompt = [3 + 37 * i % (vocab - 3) for i in range(max(args.p, 1))]
    samples: dict[str, list[float]] = {"prompt": [], "generation": []}
    for _ in range(args.r + 1):  # the first one warms
        context.kv_cache_clear()
        start = time.perf_counter()
        decode(prompt, 0)
        samples["prompt"].append(len(prompt) / (time.perf_counter() - start))
        start = time.perf_counter()
        for i in range(args.n):
            decode([prompt[i % len(prompt)]], len(prompt) + i)
        samples["generation"].append(args.n / (time.perf_counter() - start))
    context.kv_cache_clear()
    decode(prompt, 0)
    tokens: list[int] = []
    while len(tokens) < min(8, args.n):
        tokens.append(best())
        decode(tokens[-1:], len(prompt) + len(tokens) - 1)
    kind = {"n_gpu_layers": args.ngl, "devices": cpp.ggml_backend_dev_info(), "first_tokens": tokens}
    pairs = (("prompt", len(prompt), 0), ("generation", 0, args.n))
    report = [kind | {"n_prompt": p, "n_gen": n, "samples_ts": samples[name][1:]} for name, p, n in pairs]
    print(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
