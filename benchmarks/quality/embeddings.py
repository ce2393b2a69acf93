"""Vectors of texts beside llama.cpp's, of one file that names each pooling in turn.

    python benchmarks/quality/embeddings.py -m SmolLM2-135M-Instruct.Q4_1.gguf --llama FOLDER_OF_BINARIES

llama-server answers `/v1/embeddings` with the file as it is, and with its weights decoded to float32; Hotcold
computes the same texts, of 3 to 300 words. Printed are the cosines of the vectors: of ours and theirs, and of
each and those of the decoded weights. Tokens are compared first. The last line of stdout is a JSON object."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hotcold import LLM
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "heidi.txt"
WORDS = (3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300)
POOLINGS = {"mean": 1, "last": 3}
_PATIENCE_S = 300


def texts() -> list[str]:
    """Texts of each length; no text begins another."""
    words = TEXT.read_text(encoding="utf-8").split()
    starts = np.cumsum([0, *WORDS])
    return [" ".join(words[start : start + count]) for start, count in zip(starts, WORDS, strict=False)]


def write(source: Path, path: Path, pooling: int, decoded: bool) -> Path:
    """Writes a copy that names the pooling, as it is or with float32 in place of all block types."""
    with open_gguf(source) as file:
        keys: dict[str, Any] = dict(file.stored_metadata())
        keys[f"{file.metadata['general.architecture']}.pooling_type"] = pooling
        loaded = {name: file.load(name) for name in file.tensors}
    if decoded:
        loaded = {name: quantise(tensor.dequantise(), "F32") for name, tensor in loaded.items()}
    write_gguf(path, keys, loaded)
    return path


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        return json.load(answer)


@contextmanager
def llama_server(folder: Path, model: Path, threads: int) -> Iterator[str]:
    """SystemExit: it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(folder / "llama-server"), "-m", str(model), "--embeddings", "--port", str(port)]
    command += ["-c", "1024", "-b", "1024", "-ub", "1024", "-np", "1", "-t", str(threads)]
    env = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{' '.join(command)} does not start") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def theirs(folder: Path, model: Path, given: list[str], threads: int) -> tuple[list[list[int]], Any]:
    """The tokens of each text, and the vectors."""
    with llama_server(folder, model, threads) as url:
        tokens = [ask(f"{url}/tokenize", {"content": text, "add_special": True})["tokens"] for text in given]
        rows = ask(f"{url}/v1/embeddings", {"input": given})["data"]
    return tokens, np.array([each["embedding"] for each in sorted(rows, key=lambda each: each["index"])])


def ours(model: Path, given: list[str], threads: int) -> tuple[list[list[int]], Any]:
    with LLM(model, context=1024, threads=threads) as llm:
        return [llm.tokenizer.encode(text) for text in given], llm.embed(given)


def cosines(mine: Any, others: Any) -> dict[str, float]:
    products = (mine.astype(np.float64) * others).sum(1)
    return {"median": round(float(np.median(products)), 6), "least": round(float(products.min()), 6)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True)
    add("--llama", type=Path, required=True, help="folder of llama.cpp's programs and libraries")
    add("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    given = texts()
    by_name: dict[str, Any] = {}
    for name, number in POOLINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            vectors = []
            for decoded in (False, True):
                path = write(options.model, Path(folder) / f"{decoded}.gguf", number, decoded)
                our_tokens, mine = ours(path, given, options.threads)
                their, others = theirs(options.llama, path, given, options.threads)
                if our_tokens != their:
                    raise SystemExit(f"the tokens differ: {our_tokens} and {their}")
                vectors += [mine, others]
        mine, others, mine_f32, others_f32 = vectors
        pairs = {
            "ours, theirs": (mine, others),
            "ours, theirs, both decoded": (mine_f32, others_f32),
            "ours, decoded": (mine, mine_f32),
            "theirs, decoded": (others, others_f32),
        }
        by_name[name] = {title: cosines(a, b) for title, (a, b) in pairs.items()}
        for title, of in by_name[name].items():
            print(f"{name:5} {title:27} {of}", flush=True)
    print(json.dumps({"model": options.model.name, "texts": len(given), "cosines": by_name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
