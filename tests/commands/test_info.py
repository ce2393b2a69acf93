"""``hotcold info``: what it says of a file, to people and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed
from support.draft_blocks import with_block
from support.hybrid_models import write_hybrid

from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.runtime import memory
from hotcold.runtime.loading import load, plan_load
from hotcold.runtime.options import LoadOptions

D, N, R, V = 32, 64, 8, 5


def tensors(down: str = "ffn_down", layers: int = 2, **predictors: int) -> dict[str, Tensor]:
    """A tiny Llama in Q8_0; ``first`` and ``second`` are how many layers have that factor of a predictor."""
    found = {
        "token_embd.weight": quantise(np.ones((V, D)), "F16"),
        "output_norm.weight": quantise(np.ones(D), "F32"),
    }
    for i in range(layers):
        shape = (D, N) if down == "ffn_down" else (N, D)
        found[f"blk.{i}.ffn_up.weight"] = quantise(np.full((N, D), i + 1), "Q8_0")
        found[f"blk.{i}.{down}.weight"] = quantise(np.ones(shape), "Q8_0")
        if i < predictors.get("first", 0):
            found[f"blk.{i}.fc1.weight"] = quantise(np.ones((R + i, D)), "F16")
        if i < predictors.get("second", 0):
            found[f"blk.{i}.fc2.weight"] = quantise(np.ones((N, R + i)), "F16")
    return found


METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.feed_forward_length": N,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["a"] * V,
}


def info(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["info", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(info(capsys, *arguments, "--json").splitlines()[-1])
    return result


def values(text: str) -> dict[str, str]:
    """The lines ``label   value`` above the table of types."""
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in text.split("\n\n")[0].splitlines())


def test_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    shown = values(info(capsys))
    assert shown["file"].endswith(model_path().name)
    assert (shown["layers"], shown["dim"], shown["neurons"], shown["context"]) == ("6", "256", "1024", "256")
    assert (shown["down layout"], shown["predictors"]) == ("by_neuron", "none")
    assert shown["parameters"].startswith("7.34 M")
    first, second = report(capsys), report(capsys, model_path())
    assert first.pop("here").keys() == second.pop("here").keys()  # free memory varies
    assert first == second


def test_whether_a_model_can_be_loaded_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    with open_gguf(model_path()) as file:
        needed = sum(plan_load(file, {})[0].cpu_bytes().values())
    assert report(capsys)["here"] == {
        "context": 256,
        "bytes": needed,
        "free_bytes": 1 << 30,
        "refused": None,
    }
    text = info(capsys)
    assert f"takes {needed / 2**20:.2f} MiB of 1.00 GiB free, with a context of 256 tokens" in one_line(text)
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    text = one_line(info(capsys))
    assert "On this machine it cannot be loaded: not enough memory: the model needs 0.01 GiB" in text
    assert "use a smaller context (-c)" in text
    load(None, LoadOptions(context=128)).session().close()


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_model_in_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, METADATA, tensors())
    found = report(capsys, path)
    with open_gguf(path) as file:
        assert found["fingerprint"] == file.fingerprint()
    weights = 4 * N * D
    assert found["types"] == [
        {"type": "Q8_0", "tensors": 4, "parameters": weights, "bytes": weights // 32 * 34, "supported": True},
        {"type": "F16", "tensors": 1, "parameters": V * D, "bytes": V * D * 2, "supported": True},
        {"type": "F32", "tensors": 1, "parameters": D, "bytes": D * 4, "supported": True},
    ]
    expected = {
        "path": str(path),
        "file_bytes": path.stat().st_size,
        "magic": "GGUF",
        "version": 3,
        "name": "tiny",
        "architecture": "llama",
        "parameters": weights + V * D + D,
        "tensors": 6,
        "layers": 2,
        "context": 128,
        "dim": D,
        "heads": 4,
        "kv_heads": 2,
        "neurons": N,
        "activation": None,
        "down_layout": "by_output",
        "predictor_layers": 0,
        "predictor_ranks": [],
        "predictor_threshold": None,
        "tokenizer": "llama",
        "tokenizer_pre": None,
        "vocab": V,
        "chat_templates": [],
    }
    assert {key: found[key] for key in expected} == expected
    assert found["tensor_bytes"] == sum(entry["bytes"] for entry in found["types"])


def test_a_powerinfer_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.powerinfer.gguf"
    metadata = METADATA | {"powerinfer.sparse_threshold": -0.5}
    write_gguf(path, metadata, tensors("ffn_down_t", first=2, second=2), magic="PWRI", version=2)
    found = report(capsys, path)
    assert (found["magic"], found["version"], found["down_layout"]) == ("PWRI", 2, "by_neuron")
    assert (found["predictor_layers"], found["predictor_ranks"], found["predictor_threshold"]) == (
        2,
        [R, R + 1],
        -0.5,
    )
    assert found["predictor_parameters"] == (2 * R + 1) * (D + N)
    assert found["predictor_bytes"] == 2 * found["predictor_parameters"]
    shown = values(info(capsys, path))
    assert shown["format"].startswith("PWRI version 2 (PowerInfer)")
    assert shown["predictors"] == "2 layers, rank 8 to 9, 3.19 KiB, threshold -0.5"


def test_a_layer_with_half_a_predictor_does_not_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", METADATA, tensors("ffn_down_t", first=2, second=1), magic="PWRI")
    found = report(capsys, tmp_path / "tiny.gguf")
    assert (found["predictor_layers"], found["predictor_ranks"], found["predictor_threshold"]) == (
        1,
        [R],
        0.0,
    )


def test_values_by_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = {"llama.feed_forward_length": [64, 32], "llama.attention.head_count_kv": [2, 2]}
    write_gguf(tmp_path / "tiny.gguf", METADATA | keys, tensors())
    found = report(capsys, tmp_path / "tiny.gguf")
    assert (found["neurons"], found["kv_heads"]) == ([64, 32], [2, 2])
    shown = values(info(capsys, tmp_path / "tiny.gguf"))
    assert (shown["neurons"], shown["kv heads"]) == ("32 to 64, by layer", "2")


def test_the_list_of_tensors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    long = "blk.0." + "x" * 51 + ".weight"
    write_gguf(path, METADATA, tensors() | {long: quantise(np.ones((2, 3, 4, 32)), "BF16")})
    listed = report(capsys, path, "--tensors")["tensor_list"]
    with open_gguf(path) as file:
        assert [(entry["name"], tuple(entry["shape"]), entry["type"]) for entry in listed] == [
            (tensor.name, tensor.shape, tensor.type.name) for tensor in file.tensors.values()
        ]
    text = info(capsys, path, "--tensors")
    words = text.split()
    for entry in listed:
        assert entry["name"] in words
    assert "2 x 3 x 4 x 32" in text and "BF16" in words
    assert "tensor_list" not in report(capsys, path)


def test_a_vocabulary_only_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": "default", "tokenizer.chat_template": "{{ messages }}"}
    write_gguf(tmp_path / "vocab.gguf", METADATA | keys, {})
    shown = values(info(capsys, tmp_path / "vocab.gguf"))
    assert shown["parameters"] == "none (a vocabulary without a model)"
    assert shown["tokenizer"] == "llama (default), 5 tokens, chat template"
    assert "down layout" not in shown
    named = {"tokenizer.chat_templates": ["rag", "tool_use"], "tokenizer.chat_template.rag": "{{ 1 }}"}
    write_gguf(tmp_path / "named.gguf", METADATA | keys | named, {})
    assert report(capsys, tmp_path / "named.gguf")["chat_templates"] == ["default", "rag", "tool_use"]
    shown = values(info(capsys, tmp_path / "named.gguf"))
    assert shown["tokenizer"] == "llama (default), 5 tokens, chat templates default, rag, tool_use"


def test_states_of_sequences_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_hybrid(tmp_path / "lfm2.gguf", "lfm2")
    found = report(capsys, path)  # two inputs of 32 channels, float32, of a convolution of three
    assert (found["state_layers"], found["state_bytes"]) == (2, 2 * 2 * 32 * 4)
    assert values(info(capsys, path))["states"] == "512 B per sequence (layers: 2)"
    assert "draft tokens" not in values(info(capsys, path))
    assert "states" not in values(info(capsys, model_path()))


def test_a_type_that_cannot_run_is_marked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, METADATA, {"blk.0.ffn_up.weight": quantise(np.ones((18, 256)), "F16")})
    data = bytearray(path.read_bytes())
    at = data.index(b"ffn_up.weight") + len(b"ffn_up.weight") + 4 + 16
    assert data[at] == 1
    data[at] = 25  # I16, which is as long as F16
    path.write_bytes(data)
    assert report(capsys, path)["types"] == [
        {"type": "I16", "tensors": 1, "parameters": 18 * 256, "bytes": 18 * 512, "supported": False}
    ]
    text = info(capsys, path)
    assert re.search(r"I16 .* not supported\n", text)
    assert "supported types are F32, F16, BF16, Q8_0, Q4_0, Q4_1," in text


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\u202e\x9b" * 30


@pytest.mark.parametrize("arguments", [[], ["--tensors"]], ids=str)
def test_text_of_a_file_cannot_command_the_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostile = {"general.name": HOSTILE, "tokenizer.ggml.model": HOSTILE, "hotcold.ffn.activation": HOSTILE}
    architecture = {
        "general.architecture": HOSTILE,
        "hotcold.ffn.down_layout": HOSTILE,
        "tokenizer.ggml.pre": HOSTILE,
    }
    write_gguf(tmp_path / "tiny.gguf", METADATA | hostile | architecture, tensors())
    text = info(capsys, tmp_path / "tiny.gguf", *arguments)
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert [line for line in text.splitlines() if len(line) > 80] == []
    found = report(capsys, tmp_path / "tiny.gguf")
    assert all(value.isprintable() for value in found.values() if isinstance(value, str))


@pytest.mark.parametrize(
    "odd",
    [float("nan"), float("inf"), True, "six", ["a"], [0.5], np.arange(10_000), np.array([], np.int32)],
    ids=repr,
)
def test_metadata_of_the_wrong_type_is_left_out(
    odd: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = {key: odd for key, value in METADATA.items() if isinstance(value, int)}
    keys["powerinfer.sparse_threshold"] = odd
    path = tmp_path / "tiny.gguf"
    write_gguf(path, METADATA | keys, tensors("ffn_down_t", first=1, second=1))
    assert report(capsys, path)["layers"] is None
    assert "layers" not in values(info(capsys, path))
    write_gguf(path, METADATA | {"general.architecture": odd, "tokenizer.ggml.tokens": odd}, {})
    assert report(capsys, path)["dim"] is None


def test_a_draft_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_hybrid(tmp_path / "plain.gguf", "qwen35")
    path = with_block(plain, tmp_path / "block.gguf", 1)
    assert values(info(capsys, path))["draft tokens"] == "draft block blk.3, 39.62 KiB"
    lacking = changed(path, tmp_path / "lacking.gguf", {}, {"blk.3.nextn.enorm.weight": None})
    said = values(info(capsys, lacking))["draft tokens"]
    assert said.startswith("the draft block blk.3 is left out: tensor blk.3.nextn.eno")
