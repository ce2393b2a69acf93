"""The examples that make sparse models, run as users do, on stories260K and a text of two pages."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stories260k import write_stories260k

from hotcold.convert import ConvertOptions, convert
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.scoring import Scorer

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers", reason="training needs transformers")
pytest.importorskip("accelerate", reason="the examples are run with accelerate")

ROOT = Path(__file__).resolve().parents[2]
QUALITY = ROOT / "benchmarks" / "quality"
PASSAGES = ["Once there was a girl who lived with a goat.", "The sun was warm."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K, a dense model with SwiGLU, as a Hugging Face checkpoint."""
    folder = tmp_path_factory.mktemp("dense")
    write_stories260k(folder / "dense.gguf")
    spec = importlib.util.spec_from_file_location("converting", QUALITY / "gguf_to_checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_checkpoint(folder / "dense.gguf", folder / "checkpoint")
    return folder / "checkpoint"


def run(tmp_path: Path, *words: object) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluated(output: Path, tmp_path: Path) -> float:
    """The perplexity of a word by lm-eval, on a task of this machine."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    (tmp_path / "passages.jsonl").write_text(lines, encoding="utf-8")
    task = (QUALITY / "lm_eval" / "held_out_text.yaml").read_text(encoding="utf-8")
    (tmp_path / "held_out_text.yaml").write_text(task, encoding="utf-8")
    model = f"pretrained={output},trust_remote_code=True,dtype=float32"
    words = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--device", "cpu"]
    words += ["--tasks", "held_out_text", "--include_path", tmp_path, "--output_path", tmp_path / "results"]
    run(tmp_path, *words)
    (path,) = (tmp_path / "results").rglob("results*.json")
    found = json.loads(path.read_text(encoding="utf-8"))["results"]["held_out_text"]
    return float(found["word_perplexity,none"])


@pytest.mark.parametrize("example", ["sparse_trainer.py", "sparse_accelerate.py"])
def test_from_a_dense_checkpoint_to_the_engine(example: str, checkpoint: Path, tmp_path: Path) -> None:
    script, output = ROOT / "examples" / example, tmp_path / "sparse"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 52  # 40 of code
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = launch if example == "sparse_accelerate.py" else []
    printed = run(tmp_path, *words, script, checkpoint, ROOT / "tests" / "data" / "heidi.txt", output)
    report = json.loads((output / "sparsity.json").read_text(encoding="utf-8"))
    assert report["activation"] == "drelu" and len(report["thresholds"]) == 5
    assert min(report["held_out"]["zeros"]) > 0.6
    assert re.search(r"sparse: Measured\(.*divergence=\d", printed)

    model = transformers.AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    total = 0.0
    for text in PASSAGES:
        ids = tokenizer(text)["input_ids"]  # lm-eval puts BOS before the tokens that the tokenizer gives
        with torch.no_grad():
            logs = torch.log_softmax(model(torch.tensor([[tokenizer.bos_token_id, *ids]])).logits[0], -1)
        total += float(logs[torch.arange(len(ids)), torch.tensor(ids)].sum())
    if importlib.util.find_spec("lm_eval"):  # large, and with dependencies of its own: by hand
        wanted = math.exp(-total / sum(len(text.split()) for text in PASSAGES))
        assert evaluated(output, tmp_path) == pytest.approx(wanted, rel=1e-3)

    path = tmp_path / "sparse.gguf"
    convert(output, path, ConvertOptions("F32"))
    window = tokenizer(PASSAGES[0])["input_ids"]
    rows = {sparsity: ours(path, sparsity, window) for sparsity in ("exact", "off")}
    assert np.array_equal(rows["exact"], rows["off"])
    with torch.no_grad():
        theirs = model(torch.tensor([window])).logits[0, :-1].numpy()
    assert abs(rows["exact"] - theirs).max() < 2e-3 * theirs.std()


def ours(path: Path, sparsity: Any, window: list[int]) -> Any:
    session = load(path, LoadOptions(sparsity=sparsity, threads=1, cache_type="f32")).session()
    found = np.concatenate([np.array(rows) for rows in Scorer(session).logits(window)])
    session.close()
    return found
