"""Every key of a file is read, has no effect, or is refused or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.golden import CPU_HYBRIDS, FAMILIES, HYBRIDS, LATENT, LATENT_HYBRIDS, NAMES, golden

from hotcold.formats.gguf import open_gguf
from hotcold.model.config import Config, ModelError
from hotcold.model.families import Family
from hotcold.model.known_keys import EFFECTIVE, WITHOUT_EFFECT, ReadKeys

#: Of architectures that are refused, or of files that hold no language model.
ELSEWHERE = {
    "features_length", "use_parallel_residual", "decoder_start_token_id", "decoder_block_count", "swin_norm",
    "time_mix_extra_dim", "time_decay_extra_dim", "attention.group_norm_epsilon",
    "attention.group_norm_groups", "{dense}_feat_in", "{dense}_feat_out",
}  # fmt: skip


KEYS = [("temperature_scale", 0.5), ("clamp_kqv", 2.0), ("causal", False)]


@pytest.mark.parametrize("name", ["tiny-deepseek3", "tiny-deepseek2-lite", "tiny-kimi-linear"])
@pytest.mark.parametrize(("key", "value"), KEYS)
def test_what_latent_attention_does_not_compute_is_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    model = golden(name, tmp_path).path
    with open_gguf(model) as file:
        full = f"{file.metadata['general.architecture']}.attention.{key}"
    with pytest.raises(ModelError, match=f"{full} is {value}: this is not supported yet"):
        config_of(changed(model, tmp_path / "changed.gguf", {full: np.float32(value) if value else value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.temperature_scale", 0.0), ("attention.causal", True), ("expert_used_count", 2),
        ("rope.scaling.yarn_beta_fast", 8.0), ("expert_group_scale", 1.0), ("vocab_size", 288),
        ("attention.recurrent_layers", [False] * 3), ("swiglu_clamp_exp", np.zeros(3, np.float32)),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_neither_refused_nor_noted(key: str, value: Any, tmp_path: Path) -> None:
    model = golden("tiny-llama", tmp_path).path
    assert config_of(changed(model, tmp_path / "changed.gguf", {f"llama.{key}": value})).notes == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_clamp_exp", np.ones(3, np.float32)), ("ssm.state_size", 16), ("moe_every_n_layers", 2),
        ("attention.kv_lora_rank", 8),
        ("attention.key_length_swa", 8), ("rope.scaling.alpha", 2.0), ("router_logit_softcapping", 2.0),
    ],
)  # fmt: skip
def test_what_other_families_compute_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    model = golden("tiny-llama", tmp_path).path
    with pytest.raises(ModelError, match=rf"llama\.{key} is .*: this is not supported yet in files of llama"):
        config_of(changed(model, tmp_path / "changed.gguf", {f"llama.{key}": value}))


def test_unknown_keys_are_noted_under_the_architecture_alone(tmp_path: Path) -> None:
    model = golden("tiny-llama", tmp_path).path
    keys = {"llama.gate_of_tomorrow": 2.0, "general.foo": 1, "other.bar": 2, "hotcold.baz": 3, "llamas.x": 4}
    (note,) = config_of(changed(model, tmp_path / "changed.gguf", keys)).notes
    assert note.startswith("the file has keys that are not read: llama.gate_of_tomorrow;")


@pytest.mark.parametrize(
    ("key", "stated", "expected"),
    [
        ("expert_gating_func", None, 2), ("expert_gating_func", 1, 1), ("expert_gating_func", 0, 2),
        ("final_logit_softcapping", np.float32(0), 30.0), ("attention.sliding_window", 0, 0),
        ("expert_weights_norm", False, False), ("attention.sliding_window", "wide", "wide"),
    ],
)  # fmt: skip
def test_a_family_implies_keys_that_a_file_leaves_out(key: str, stated: Any, expected: Any) -> None:
    """A file's own value comes first; where 0 says as much as no key, 0 is none."""
    implied = {
        "expert_gating_func": 2, "final_logit_softcapping": 30.0, "attention.sliding_window": 8,
        "expert_weights_norm": True,
    }  # fmt: skip
    keys = ReadKeys({} if stated is None else {f"any.{key}": stated}, Family("any", implied=implied))
    assert keys[f"any.{key}"] == keys.get(f"any.{key}") == expected
    assert f"any.{key}" in keys and f"other.{key}" not in keys
    assert len(keys) == (stated is not None)


def test_all_keys_of_the_format_are_accounted_for(tmp_path: Path) -> None:
    """Each key of the gguf package is read for a family, or has its place in a table."""
    read: set[str] = set()
    for name in (*NAMES, *FAMILIES, *HYBRIDS, *LATENT, *LATENT_HYBRIDS, *CPU_HYBRIDS, "tiny-gpt-oss"):
        path = golden(name, tmp_path).path
        with open_gguf(path) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            assert not [note for note in config.notes if "not read" in note], name
            recorded = ReadKeys(file.metadata, config.family)
            Config.from_metadata(recorded, file.magic, file.tensors)
        read |= {key.partition(".")[2] for key in recorded.names if key.startswith(f"{config.architecture}.")}
        path.unlink()
    keys = gguf.Keys
    groups = (keys.LLM, keys.Attention, keys.Rope, keys.SSM, keys.WKV, keys.ShortConv, keys.KDA)
    names = {
        value.removeprefix("{arch}.")
        for group in groups
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.")
    }
    assert names - read - EFFECTIVE.keys() - WITHOUT_EFFECT == ELSEWHERE
    assert not EFFECTIVE.keys() & WITHOUT_EFFECT
