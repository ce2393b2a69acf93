"""Shows that guessed tokens change no text: the same tokens with and without, 10,000 of them.

    python benchmarks/quality/drafts.py
    python benchmarks/quality/drafts.py --gpu llvmpipe  # cases with a GPU on this one; `off`: without them
    python benchmarks/quality/drafts.py -m FILE --tokens 2000  # a file of one's own

For each model (the built-in one with random predictors, random experts, and a hybrid of Mamba-2, attention
and experts), place (the CPU; a GPU; a GPU with half of the weights that it could have, and the CPU), mode,
temperature, batch, number of threads and share of right guesses (a table with each pair of
values, except `predicted` on the hybrid) texts are made without guesses, and then with as many as a step can
have: right, wrong and looked-up ones. Some requests are cancelled at a random step:
they must have the beginning of their text. Exits with 1 where a token differs.

The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.demo import model_path
from hotcold.engine.drafts import look_up
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import DECODE_ROWS, PredictorTensors
from hotcold.kernels.gpus import find_gpus, slack_bytes
from hotcold.model.config import Config
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel, Session
from hotcold.sparse.predictor import write_sidecar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import hybrids
from lib.machine import commit
from lib.models import Recipe, Shape, write

FACTORS: dict[str, Sequence[Any]] = {
    "model": ("built-in", "experts", "states"),
    "place": ("CPU", "GPU", "both"),
    "sparsity": ("off", "exact", "predicted"),
    "temperature": (0.0, 0.8),
    "batch": (1, 3, 5, 16),
    "threads": (1, 2, 5),
    "right": (0.0, 0.5, 0.9),
    "cancelled": (False, True),
}


#: The hybrid with states, whose squared ReLU gives zeros.
STATES = hybrids.Hybrid(
    layers=5, vocab=1000, context=512, architecture="nemotron_h_moe", name="States", dim=512, neurons=256,
    parts=(("mamba",), ("experts",), ("mamba",), ("attention",), ("experts",)), heads=8, kv_heads=2, width=64,
    experts=8, chosen=2, shared=256, inner=512, state=32, groups=2, state_heads=8, ungated=True,
)  # fmt: skip


def possible(case: Mapping[str, Any]) -> bool:
    """The hybrid has no predictors."""
    return case["model"] != "states" or case["sparsity"] != "predicted"


class Reckless(Speculation):
    """Verifies random numbers of guesses with a share of right ones."""

    def __init__(self, texts: Mapping[Request, Sequence[int]], share: float, vocab: int, seed: int) -> None:
        super().__init__([look_up], DECODE_ROWS - 1, DECODE_ROWS)
        self._texts, self._share, self._vocab = texts, share, vocab
        self._random = np.random.default_rng(seed)

    def choose(self, buffers: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        chosen: dict[Request, Sequence[int]] = {}
        for request, limit in buffers.items():
            n = int(self._random.integers(0, max(min(limit, spare), 0) + 1))
            coming = [*self._texts[request][len(request.output) :]][:n]
            drafts = [self._propose(id) for id in coming]
            if self._random.random() < 0.3 and n:
                looked_up = look_up(request, n)
                drafts = [*looked_up.tokens] if looked_up else drafts
            if drafts:
                chosen[request] = drafts
                spare -= len(drafts)
        return chosen

    def _propose(self, id: int) -> int:
        if self._random.random() < self._share:
            return id
        return int(self._random.integers(self._vocab))


def pairwise_cases(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Allowed cases in which each pair of values of two factors comes up, found greedily."""
    names = [*factors]
    every = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]
    every = [case for case in every if allowed(case)]
    left = {(a, case[a], b, case[b]) for case in every for a, b in combinations(names, 2)}

    def new(case: dict[str, Any]) -> int:
        return sum((a, case[a], b, case[b]) in left for a, b in combinations(names, 2))

    cases = []
    while left:
        best = max(every, key=new)
        left -= {(a, best[a], b, best[b]) for a, b in combinations(names, 2)}
        cases.append(best)
    return cases


def written(folder: Path) -> dict[str, Path]:
    """The files of the models, two with predictors that name half of the neurons."""
    files = {name: folder / f"{name}.gguf" for name in FACTORS["model"]}
    shutil.copy(model_path(), files["built-in"])
    with open_gguf(files["built-in"]) as file:
        config, fingerprint = (
            Config.from_metadata(file.metadata, file.magic, file.tensors),
            file.fingerprint(),
        )
    random, layers = np.random.default_rng(1), []
    for neurons in config.neurons:
        first, second = random.normal(size=(32, config.dim)), random.normal(size=(neurons, 32))
        factors = (quantise(each.astype(np.float32), "Q8_0") for each in (first, second))
        layers.append(PredictorTensors(*factors, np.zeros(neurons, np.float32), relu=False))
    facts = {"input": "normed"}
    write_sidecar(folder / "built-in.predictor.gguf", fingerprint, layers, facts)
    shape = Shape(512, 512, 2, 8, 4, 1000, 512, "llama", 8, 2)
    write(files["experts"], Recipe(shape, "Q8_0", active=0.2))
    hybrids.write(files["states"], hybrids.HybridRecipe(STATES, "Q8_0", 0.2))
    return files


def loaded(path: Path, case: Mapping[str, Any], tokens: int, gpu: str) -> LoadedModel:
    """The model in the place of a case."""
    options = LoadOptions(
        threads=case["threads"], sparsity=case["sparsity"], sequences=16, context=tokens + 64,
        gpu="off" if case["place"] == "CPU" else gpu, draft_max=7,
    )  # fmt: skip
    model = load(path, options)
    if case["place"] != "both":
        return model
    whole = model.on_gpus[0]
    model.close()
    needed = whole.planned_bytes - whole.weight_bytes // 2
    return load(path, options | {"vram_budget": needed + slack_bytes(needed)})


def some_requests(session: Session, case: Mapping[str, Any], tokens: int) -> list[Request]:
    random = np.random.default_rng(7)
    vocab, made = session.model.config.vocab, []
    for seed in range(case["batch"]):
        prompt = random.integers(3, vocab, 6)[random.integers(0, 6, 8 + seed)].tolist()
        params = SamplingParams(temperature=case["temperature"], seed=seed, repeat_penalty=1 + seed % 2 / 10)
        max_tokens = max(tokens - 3 * seed, 8)  # so that rows become free in full batches, too
        made.append(Request(Job(prompt, params, max_tokens=max_tokens, ignore_eos=True)))
    return made


def differs(session: Session, case: Mapping[str, Any], tokens: int) -> tuple[int, int, int, int]:
    """Returns how many tokens were compared, how many differ, and the guesses, all and right ones."""
    plain, again = (some_requests(session, case, tokens) for _ in range(2))
    Engine(session, reuse=False).run(plain)
    texts = {mine: its.output for mine, its in zip(again, plain, strict=True)}
    speculation = Reckless(texts, case["right"], session.model.config.vocab, seed=tokens)
    engine = Engine(session, speculation=speculation)
    random = np.random.default_rng(tokens)
    for request in again:
        engine.add(request)
    while not all(request.finished for request in again):
        engine.step()
        if case["cancelled"] and random.random() < 0.05:
            engine.abort(again[int(random.integers(len(again)))])
    compared = wrong = 0
    for mine, its in zip(again, plain, strict=True):
        compared += len(mine.output)
        wrong += sum(a != b for a, b in zip(mine.output, its.output, strict=False))
        wrong += mine.finish_reason != "cancelled" and len(mine.output) != len(its.output)
    return compared, wrong, speculation.guessed, speculation.accepted


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, help="instead of the two")
    parser.add_argument("--tokens", type=int, default=13_500, help="of all, if none is cancelled (13500)")
    parser.add_argument("--gpu", help="for the cases with one, or off (the first that there is)")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        run(args, stack)


def chosen_gpu(asked: str | None) -> tuple[str, Sequence[str]]:
    """The GPU that cases use, and the places that there are."""
    gpus = [gpu for gpu in find_gpus()[0] if not gpu.problem] if asked is None else []
    if asked == "off" or (asked is None and not gpus):
        return "", ("CPU",)
    return asked or str(gpus[0].index), FACTORS["place"]


def run(args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    files = written(folder) if args.model is None else {"": args.model}
    gpu, places = chosen_gpu(args.gpu)
    print(f"GPU: {gpu or 'none, so the CPU alone'}")
    cases = pairwise_cases(FACTORS | {"model": [*files], "place": places}, possible)
    of_each = -(-args.tokens // sum(case["batch"] for case in cases))
    sums = np.zeros(4, np.int64)
    for case in cases:
        try:
            session = loaded(files[case["model"]], case, of_each, gpu).session()
        except UserError as error:
            print(f"left out: {case}: {error}")
            continue
        counts = differs(session, case, of_each)
        sums += counts
        session.model.close()
        print(" ".join(f"{name}={value}" for name, value in case.items()), *counts, flush=True)
    names = ("compared", "different", "guessed", "accepted")
    print(json.dumps({**dict(zip(names, sums.tolist(), strict=True)), "commit": commit()}))
    sys.exit(int(sums[1] > 0))


if __name__ == "__main__":
    main()
