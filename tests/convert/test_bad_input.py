"""Mistaken input gets one line that says what is wrong, and leaves no file, nor half of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, shard

from hotcold.commands import cli


def without_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00003-of-00003.safetensors").unlink()


def with_a_cut_shard(folder: Path) -> None:
    shard(folder)
    cut(folder / "model-00002-of-00003.safetensors", 0.7)


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def with_header(length: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])

    return change


def with_other_shapes(folder: Path) -> None:
    change_tensors(folder, model__layers__1__mlp__up_proj__weight=np.ones((64, 160), "<f2"))


def without_a_tensor(folder: Path) -> None:
    change_tensors(folder, model__layers__2__self_attn__k_proj__weight=...)


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (without_a_shard, "has no model-00003-of-00003.safetensors, which model"),
    "a shard that is cut": (with_a_cut_shard, "model-00002-of-00003.safetensors is not a whole"),
    "a file that is cut": (
        lambda folder: cut(folder / "model.safetensors", 0.5), "model.safetensors is not a whole safetensors",
    ),
    "a header of 2^63 bytes": (with_header(1 << 63), "model.safetensors is not a whole safetensors file"),
    "a header of 2^64 - 1 bytes": (with_header((1 << 64) - 1), "is not a whole safetensors file"),
    "a header of 2^40 bytes": (with_header(1 << 40), "is not a whole safetensors file"),
    "another shape": (with_other_shapes, "up_proj.weight' has shape [64, 160]: config.json"),
    "a missing tensor": (without_a_tensor, "has no tensor 'model.layers.2.self_attn.k_proj.weight'"),
    "an unknown architecture": (
        lambda folder: change_config(folder, model_type="rwkv6", architectures=["Rwkv6ForCausalLM"]),
        "model_type 'rwkv6' is not supported: it needs the recurrence of RWKV in a form of its own",
    ),
    "no tokenizer": (unlink("tokenizer.model"), "has neither tokenizer.model nor tokenizer.json"),
    "no weights": (unlink("model.safetensors"), "has neither model.safetensors nor pytorch_model.bin"),
    "no config": (unlink("config.json"), "has no config.json"),
}  # fmt: skip


LONGROPE = {"rope_type": "longrope", "long_factor": [1] * 8, "short_factor": [1] * 8}
UNIGRAM = {
    "model": {"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": 0},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"},
}
ENDLESS = "[" * 500 + "]" * 500


def with_config(**changes: object) -> tuple[Callable[[Path], object], str]:
    """The message names the first key."""
    return lambda folder: change_config(folder, **changes), next(iter(changes))


def with_tokenizer(values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "tokenizer.model").unlink()
        text = values if isinstance(values, str) else json.dumps(values)
        (folder / "tokenizer.json").write_text(text)
        (folder / "tokenizer_config.json").write_text('{"bos_token": "a"}')

    return change


GEMMA = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
#: Files that no publisher writes: each was a traceback, or memory in any amount.
CASES |= {
    "2^30 layers": with_config(num_hidden_layers=1 << 30),
    "2^30 layers of a text": (
        lambda folder: change_config(folder, **GEMMA, text_config={"num_hidden_layers": 1 << 30}),
        "num_hidden_layers is 1073741824: at most 1024",
    ),
    "2^30 experts": with_config(num_local_experts=1 << 30),
    "2^30 experts of Qwen": with_config(num_experts=1 << 30),
    "2^30 experts of SmallThinker": with_config(moe_num_primary_experts=1 << 30),
    "2^30 tokens": with_config(vocab_size=1 << 30),
    "more tokens than rows": (
        lambda folder: change_config(folder, vocab_size=1 << 24), "config.json implies [16777216, 64]",
    ),
    "a number beyond floats": with_config(rms_norm_eps=10**400),
    "a number beyond float32": with_config(rope_theta=1e39),
    "longrope of one position": (
        lambda folder: change_config(
            folder, rope_scaling=LONGROPE | {"original_max_position_embeddings": 1}
        ),
        "original_max_position_embeddings is 1: an integer above 1",
    ),
    "longrope's factors beyond floats": (
        lambda folder: change_config(folder, rope_scaling=LONGROPE | {"long_factor": [10**400] * 8}),
        "a list of 8 numbers",
    ),
    "processors that are none": (
        with_tokenizer(UNIGRAM | {"post_processor": {"processors": 5}}), "processors is 5: a list is needed",
    ),
    "a score beyond floats": (
        with_tokenizer(UNIGRAM | {"model": {**UNIGRAM["model"], "vocab": [["a", 10**400]]}}),
        "token 0 is ['a', 1000",
    ),
    "lists in lists": (with_tokenizer(f'{{"model": {ENDLESS}}}'), "the JSON is nested too deeply"),
    "steps in steps": (
        with_tokenizer(
            json.dumps(UNIGRAM)[:-1] + ', "normalizer": '
            + '{"type": "Sequence", "normalizers": [' * 400 + "]}" * 400 + "}"
        ),
        "the JSON is nested too deeply",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_left(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_checkpoint(tmp_path)
    change, message = CASES[case]
    change(folder)
    code = cli.main(["convert", str(folder), "-o", str(tmp_path / "out.gguf")])
    errors = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and message in errors[-1] and len(errors) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
