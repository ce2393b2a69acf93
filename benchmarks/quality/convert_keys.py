"""Compares converted checkpoints with transformers while single keys of config.json change.

    python benchmarks/quality/convert_keys.py [--only NAME ...] [--json FILE]

Each golden checkpoint of tests/data that transformers knows, and each model of other parts that
tests/support/wrappers.py makes of one, is loaded by transformers and converted, and the logits are compared:

* with config.json as its publishers write it, and as transformers saves it;
* with each key removed, of config.json and of the objects in it;
* with each value changed, and with each key added that the class has and config.json lacks;
* with a head that differs from the embedding, and with none, under each combination of
  `tie_word_embeddings`.

A case is right if the logits are equal, or if `convert` refuses it and names the key. Cases in which
transformers itself fails, or draws missing weights at random, have no oracle: `convert` must refuse them or
name the key in a note. The last line of stdout is a JSON object; the exit status is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hotcold.convert import ConvertOptions, convert
from hotcold.errors import UserError
from hotcold.kernels.reference import ReferenceBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.checkpoints import copy_checkpoint, tensors_of, write_safetensors
from support.runner import Runner
from support.wrappers import WRAPPERS, make_wrapper

DATA = Path(__file__).resolve().parents[2] / "tests/data"
CLOSE = 1e-3  # of the deviation of logits
#: Share of positions that must be close where routers choose: rounding may tip a choice that is nearly a tie.
LEAST = 0.9
#: Models and keys whose results differ for a reason.
EXPLAINED = {
    ("tiny-phi3", "original_max_position_embeddings"):
        "files have one set of longrope's factors for all texts, as in llama.cpp; transformers changes it "
        "where a text becomes longer than the original context",
}  # fmt: skip
#: Keys that have no part in a model's arithmetic; changes of them are not tried.
UNTRIED = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "vision_config")
#: Names of tensors that no text needs.
UNUSED = r"visual|vision|audio|m\w*_projector|mtp"
#: Keys with which transformers changes weights after it has loaded them.
INITIAL = ("rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor")

Path_ = tuple[str, ...]  # of a key: the objects that it is in, then its name
Logits = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    change: str  #: what was done
    key: str  #: the key that changed
    config: dict[str, Any]


def removed(config: dict[str, Any], inside: Path_ = ()) -> Iterator[Case]:
    """config.json without one key each."""
    for path in _paths(config):
        if path[-1] not in UNTRIED:
            changed = copy.deepcopy(config)
            del _object(changed, path)[path[-1]]
            yield Case("removed", ".".join(path), changed)


def changed(config: dict[str, Any], of_class: dict[str, Any]) -> Iterator[Case]:
    """config.json with another value of one key each; keys that it lacks come from ``of_class``."""
    text = ("text_config",) if "text_config" in config else ()
    lacking = [(*text, key) for key in of_class if key not in _object(config, (*text, key))]
    for path in [*_paths(config), *lacking]:
        here = _object(config, path)
        old = here.get(path[-1], of_class.get(path[-1]))
        if path[-1] in (*UNTRIED, *INITIAL) or path[-1].startswith("_"):
            continue
        for new in _others(old):
            other = copy.deepcopy(config)
            _object(other, path)[path[-1]] = new
            change = "changed" if path[-1] in here else "added"
            yield Case(f"{change} to {json.dumps(new)[:60]}", ".".join(path), other)


def _others(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2] if value else [1]
    if isinstance(value, float):
        return [value * 1.5] if value else [0.5]
    if isinstance(value, list) and value:
        first = _others(value[0])[:1]
        return [[*first, *value[1:]], value[::-1]]
    if value is None:
        return [4, 0.5, True]
    return (
        {"silu": ["gelu", "relu"], "gelu_pytorch_tanh": ["silu", "gelu"]}.get(value, [])
        if isinstance(value, str)
        else []
    )


def _paths(config: dict[str, Any], inside: Path_ = ()) -> Iterator[Path_]:
    for key, value in config.items():
        if key in UNTRIED:
            continue
        if isinstance(value, dict):
            yield from _paths(value, (*inside, key))
        if key != "text_config":
            yield (*inside, key)


def _keys(config: dict[str, Any]) -> set[str]:
    return {path[-1] for path in _paths(config)}


def _object(config: dict[str, Any], path: Path_) -> dict[str, Any]:
    for key in path[:-1]:
        config = config[key]
    return config


def heads(config: dict[str, Any], head: str) -> Iterator[Case]:
    """All combinations of ``tie_word_embeddings`` in config.json and in its text_config; ``head`` describes
    what is stored."""
    for outer in (True, False, None):
        for inner in (True, False, None) if "text_config" in config else (None,):
            other = copy.deepcopy(config)
            for place, value in ((other, outer), (other.get("text_config", {}), inner)):
                place.pop("tie_word_embeddings", None)
                if value is not None:
                    place["tie_word_embeddings"] = value
            yield Case(f"{head}, tied {outer}, in text_config {inner}", "lm_head", other)


class Checkpoints:
    """A folder whose config.json changes, and what transformers and Hotcold compute of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with np.load(folder / "golden.npz", allow_pickle=False) as arrays:
            self.prompt = [int(each) for each in arrays["prompt"]]

    def oracle(self, load: Any = None) -> tuple[Any, Logits] | str:
        """The model and its logits as transformers has them; a text: why there are none."""
        try:
            config = json.loads((self.folder / "config.json").read_text())
            kind = (
                transformers.AutoModelForImageTextToText
                if "vision_config" in config
                else transformers.AutoModelForCausalLM
            )
            torch.manual_seed(0)
            model, info = kind.from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            names = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
            if wrong := [str(name) for name in names if not re.search(UNUSED, str(name))]:
                return f"tensors: {wrong[0][:80]}"
            for part in model.modules():
                if type(part).__name__.startswith("NemotronH") and hasattr(part, "time_step_limit"):
                    # As NVIDIA's code; transformers cuts time steps at the smallest one of training.
                    part.time_step_limit = (0.0, float("inf"))
            with torch.no_grad():
                logits = model(torch.tensor([self.prompt])).logits[0].float().numpy()
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        return model, logits

    def ours(self) -> tuple[list[str], Logits] | str:
        """Notes and logits of the converted file; a text: why it was refused."""
        path = self.folder / "model.gguf"
        try:
            result = convert(self.folder, path, ConvertOptions("F32", force=True, dense=False))
            runner = Runner(path, ReferenceBackend(), cache_type="f32")
            return result.notes, runner.run(self.prompt)
        except UserError as error:
            return str(error)
        except Exception as error:
            return f"CRASH {type(error).__name__}: {error}"


def judge(model: str, case: Case, oracle: Any, ours: Any, plain: Any) -> tuple[str, str]:
    """A verdict and its reason."""
    name = case.key.split(".")[-1]
    if isinstance(ours, str):
        if ours.startswith("CRASH"):
            return "CRASH", ours
        # A message about a tensor names that; one about the file's key has GGUF's name of it.
        named = re.search(rf"\b{name}\b|tensor|expert_group|partial_rotary", ours) or isinstance(oracle, str)
        named = named or any(f" {key} is " in ours for key in _keys(case.config))
        return ("refused", ours) if named else ("REFUSED WITHOUT THE KEY", ours)
    notes, logits = ours
    said = any(name in note for note in notes)
    if isinstance(oracle, str):
        return ("no oracle, noted" if said else "no oracle", oracle)
    differences = np.abs(oracle[1] - logits).max(axis=1) / oracle[1].std()
    difference, routes = differences.max(), any("expert" in key for key in _keys(case.config))
    if not (difference < CLOSE or (routes and (differences < CLOSE).mean() >= LEAST)):
        if reason := EXPLAINED.get((model, name)):
            return "different, explained", reason
        return "WRONG", f"logits differ by {difference:.4f} deviations" + (" (noted)" if said else "")
    same = plain is not None and np.array_equal(plain, oracle[1])
    return ("equal, no effect" if same else "equal", "noted" if said else "")


def try_all(name: str, parent: Path, kinds: set[str]) -> list[dict[str, str]]:
    verdicts: list[dict[str, str]] = []
    folder = make_wrapper(parent, name) if name in WRAPPERS else copy_checkpoint(parent, name)
    checkpoint = Checkpoints(folder)
    published = json.loads((folder / "config.json").read_text())

    def attempt(case: Case, at: Checkpoints, plain: Any = None) -> Any:
        (at.folder / "config.json").write_text(json.dumps(case.config))
        oracle = at.oracle()
        verdict, why = judge(name, case, oracle, at.ours(), plain)
        verdicts.append(
            {"model": name, "change": case.change, "key": case.key, "verdict": verdict, "why": why[:300]}
        )
        return oracle

    first = attempt(Case("as published", "-", published), checkpoint)
    if isinstance(first, str):
        return verdicts
    model, plain = first
    saved = parent / f"{name}-saved"
    model.save_pretrained(saved)
    for file in folder.iterdir():
        if file.name not in ("model.gguf", "config.json", "model.safetensors"):
            shutil.copy(file, saved)
    other = Checkpoints(saved)
    as_saved = json.loads((saved / "config.json").read_text())
    attempt(Case("as saved", "-", as_saved), other)
    text = model.config.get_text_config()
    of_class = {k: v for k, v in text.to_dict().items() if not isinstance(v, dict)}
    if "removed" in kinds:
        for case in removed(published):
            attempt(case, checkpoint, plain)
        for case in removed(as_saved):
            attempt(Case(f"saved, {case.change}", case.key, case.config), other, plain)
    if "changed" in kinds:
        for case in changed(published, of_class):
            attempt(case, checkpoint, plain)
    if "heads" in kinds:
        arrays = dict(tensors_of(folder))
        table = next((v for k, v in arrays.items() if "embed" in k and v.ndim == 2), None)
        head = next((k for k in arrays if k.endswith("lm_head.weight")), "lm_head.weight")
        rng = np.random.default_rng(5)
        if table is not None:
            other_head = (0.3 * rng.standard_normal(table.shape)).astype(table.dtype)
            without = {key: values for key, values in arrays.items() if key != head}
            for kind, stored in (
                ("a head that differs", without | {head: other_head}),
                ("no head", without),
            ):
                write_safetensors(folder / "model.safetensors", stored)
                for case in heads(published, kind):
                    attempt(case, checkpoint)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of folders of tests/data, and of wrappers")
    parser.add_argument("--kinds", nargs="*", default=["removed", "changed", "heads"])
    parser.add_argument("--json", type=Path, help="write all cases to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = args.only or [*sorted(path.parent.name for path in DATA.glob("tiny-*/config.json")), *WRAPPERS]
    cases: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as parent:
        for name in names:
            verdicts = try_all(name, Path(parent), {*args.kinds})
            cases += verdicts
            wrong = [case for case in verdicts if case["verdict"].isupper()]
            print(f"{name}: {dict(Counter(case['verdict'] for case in verdicts))}", flush=True)
            for case in wrong:
                print(
                    f"   {case['change']} {case['key']}: {case['verdict']}: {case['why'][:200]}", flush=True
                )
    if args.json:
        args.json.write_text(json.dumps(cases, indent=0))
    totals = Counter(case["verdict"] for case in cases)
    by_model = {name: Counter(case["verdict"] for case in cases if case["model"] == name) for name in names}
    print(json.dumps({"cases": len(cases), **totals, "models": by_model}))
    return any(verdict.isupper() for verdict in totals)


if __name__ == "__main__":
    sys.exit(main())
