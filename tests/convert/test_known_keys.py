"""Keys of config.json: what a missing one stands for, which head counts, and what no part of convert reads.

benchmarks/quality/convert_keys.py compares all families with transformers, one key at a time."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import change_config, change_tensors, copy_checkpoint, tensors_of

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.known_keys import DEFAULTS
from hotcold.formats.gguf import open_gguf


def converted(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Metadata, tensors and notes of the file that a checkpoint gives, exactly."""
    out = folder.parent / "out.gguf"
    notes = convert(folder, out, ConvertOptions("F32", force=True)).notes
    with open_gguf(out) as file:
        return dict(file.metadata), {name: file.load(name).dequantise() for name in file.tensors}, notes


#: Defaults of the classes in transformers 5.23, where they are not those of Llama.
@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("tiny-falcon-h1", "rope_theta", {"falcon-h1.rope.freq_base": 10000.0}),
        ("tiny-deepseek3", "routed_scaling_factor", {"deepseek2.expert_weights_scale": 2.5}),
        ("tiny-glm4-flash", "routed_scaling_factor", {"deepseek2.expert_weights_scale": 1.8}),
        ("tiny-kimi-linear", "routed_scaling_factor", {"kimi-linear.expert_weights_scale": 2.446}),
        ("tiny-mistral", "sliding_window", {"llama.attention.sliding_window": 4096}),
        ("tiny-exaone4", "sliding_window", {"exaone4.attention.sliding_window": 4096}),
        ("tiny-olmo3", "sliding_window", {"olmo2.attention.sliding_window": 4096}),
        ("tiny-llama", "rms_norm_eps", {"llama.attention.layer_norm_rms_epsilon": 1e-6}),
        ("tiny-granite", "logits_scaling", {"granite.logit_scale": 1.0}),
        ("tiny-lfm2", "rope_theta", {"lfm2.rope.freq_base": 1e6}),
    ],
)
def test_a_missing_key_has_its_class_default(
    name: str, keys: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **{keys: ...})
    metadata, _, _ = converted(folder)
    assert {key: pytest.approx(metadata[key]) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("tiny-llama", "hidden_size", "config.json lacks hidden_size, for which"),
        ("tiny-llama", "num_hidden_layers", "config.json lacks num_hidden_layers, for which"),
        ("tiny-qwen3moe", "num_experts", "num_local_experts"),
        ("tiny-gemma4", "global_head_dim", "has shape"),
        ("tiny-smallthinker", "moe_num_primary_experts", "moe_num_primary_experts is missing"),
    ],
)
def test_a_missing_size_is_named(name: str, key: str, message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **{key: ...})
    with pytest.raises(ConvertError, match=message):
        converted(folder)


@pytest.mark.full
def test_defaults_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the defaults are those of transformers")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    made = importlib.import_module("class_defaults").rows()
    assert json.loads(DEFAULTS.read_text()) == json.loads(json.dumps(made))


TIES = [(outer, inner) for outer in (True, False, ...) for inner in (True, False, ...)]


@pytest.mark.parametrize(("outer", "inner"), TIES)
def test_a_stored_head_that_differs_is_kept(outer: object, inner: object, tmp_path: Path) -> None:
    """A wrapper and its text model may disagree about it."""
    folder = copy_checkpoint(tmp_path, "tiny-qwen3vl")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    text |= {} if inner is ... else {"tie_word_embeddings": inner}
    change_config(folder, tie_word_embeddings=outer, text_config=text)
    head = tensors_of(folder)["lm_head.weight"].astype(np.float32)
    _, tensors, notes = converted(folder)
    np.testing.assert_array_equal(tensors["output.weight"], head)
    tied = True in (outer, inner)
    assert any("lm_head.weight differs: lm_head.weight is kept" in note for note in notes) == tied


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, ...), (..., True)])
def test_a_wrapper_without_a_head_is_tied_if_a_part_says_so(
    outer: object, inner: object, tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-qwen3vl")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
    text |= {} if inner is ... else {"tie_word_embeddings": inner}
    change_config(folder, tie_word_embeddings=outer, text_config=text)
    change_tensors(folder, lm_head__weight=...)
    assert "output.weight" not in converted(folder)[1]


@pytest.mark.parametrize("name", ["tiny-llama3", "tiny-gemma3", "tiny-starcoder2", "tiny-opt", "tiny-falcon"])
def test_heads_of_tied_models(name: str, tmp_path: Path) -> None:
    """A copy of the embedding is left out; another head is kept, also where only the class ties them."""
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, tie_word_embeddings=True if name == "tiny-llama3" else ...)
    table = next(
        values for key, values in tensors_of(folder).items() if "embed" in key and len(values) == 288
    )
    change_tensors(folder, lm_head__weight=table)
    assert "output.weight" not in converted(folder)[1]
    change_tensors(folder, lm_head__weight=table[::-1])
    np.testing.assert_array_equal(converted(folder)[1]["output.weight"], table[::-1].astype(np.float32))


def test_factors_of_tensors_with_two_uses(tmp_path: Path) -> None:
    """Falcon-H1: a tied head has a factor of its own, and biases are not multiplied by factors of inputs."""
    folder = copy_checkpoint(tmp_path, "tiny-falcon-h1")
    config = json.loads((folder / "config.json").read_text())
    layers, dim = range(config["num_hidden_layers"]), config["hidden_size"]
    rng, rows = np.random.default_rng(3), {"q": "num_attention_heads", "k": "num_key_value_heads"}
    sizes = {part: config[rows.get(part, "num_key_value_heads")] * config["head_dim"] for part in "qkv"}
    biases = {f"self_attn__{part}_proj": size for part, size in sizes.items()} | {
        "self_attn__o_proj": dim,
        "mamba__out_proj": dim,
    }
    made = {
        f"model__layers__{i}__{name}__bias": rng.standard_normal(size).astype(np.float32)
        for i in layers
        for name, size in biases.items()
    }
    change_tensors(folder, lm_head__weight=..., **made)
    change_config(folder, tie_word_embeddings=True, attention_bias=True, projectors_bias=True)
    table = tensors_of(folder)["model.embed_tokens.weight"].astype(np.float32)
    _, tensors, _ = converted(folder)
    near = {"rtol": 1e-6, "atol": 0}
    np.testing.assert_allclose(tensors["token_embd.weight"], table * config["embedding_multiplier"], **near)
    np.testing.assert_allclose(tensors["output.weight"], table * config["lm_head_multiplier"], **near)
    factors = {
        ("self_attn__q_proj", "attn_q"): 1,
        ("self_attn__k_proj", "attn_k"): config["key_multiplier"],
        ("self_attn__v_proj", "attn_v"): 1,
        ("self_attn__o_proj", "attn_output"): config["attention_out_multiplier"],
        ("mamba__out_proj", "ssm_out"): config["ssm_out_multiplier"],
    }
    for (origin, target), factor in factors.items():
        bias = made[f"model__layers__1__{origin}__bias"]
        np.testing.assert_allclose(tensors[f"blk.1.{target}.bias"], bias * np.float32(factor), **near)


def test_keys_that_nothing_reads_are_noted(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path)
    change_config(folder, attention_dropout=0.1, foo_token_id=3, new_gate=2.0, old_gate=None)
    change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0, "curve": 3})
    notes = [note for note in converted(folder)[2] if "not read" in note]
    assert [note.partition(";")[0] for note in notes] == [
        "config.json has keys that are not read: new_gate, rope_scaling.curve"
    ]


def test_keys_of_parts_that_a_model_lacks_are_not_noted(tmp_path: Path) -> None:
    """Granite 4 states sizes of Mamba-2, experts and a rotation, whether it has them or not."""
    folder = copy_checkpoint(tmp_path, "tiny-granite4")
    rope = {"rope_type": "default", "rope_theta": 1e4}
    change_config(folder, time_step_limit=[0.0, 1.0], rope_parameters=rope, position_embedding_type=None)
    metadata, _, notes = converted(folder)
    assert not notes
    assert metadata["granite.rope.scaling.finetuned"] is False


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "tiny-llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5: 1,",
        ),
        (
            "tiny-olmo3",
            {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
            "full_attention and",
        ),
        ("tiny-olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0: 500000.0 is needed"),
        ("tiny-gemma3", {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, "full_attention and"),
        ("tiny-qwen35", {"hidden_act": "relu"}, "hidden_act is 'relu': one of silu, fatrelu, drelu"),
        ("tiny-granite-h", {"hidden_act": "relu"}, "hidden_act is 'relu': one of silu, fatrelu, drelu"),
        ("tiny-deepseek3", {"n_group": 3}, "expert_group_count is 3"),
    ],
)
def test_what_the_class_would_ignore_or_compute_otherwise(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copy_checkpoint(tmp_path, name)
    change_config(folder, **changes)
    with pytest.raises(ConvertError, match=message):
        converted(folder)


def test_yarn_of_latent_attention_without_mscale(tmp_path: Path) -> None:
    """``mscale_all_dim`` alone is a factor of scores, and leaves the rotation's own (section 3.4 of YaRN)."""
    folder = copy_checkpoint(tmp_path, "tiny-deepseek3")
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    factors = []
    for mscale in (1.0, ...):
        change_config(
            folder, rope_scaling={k: v for k, v in (scaling | {"mscale": mscale}).items() if v is not ...}
        )
        metadata, _, _ = converted(folder)
        assert metadata["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
        factors.append(metadata["deepseek2.rope.scaling.yarn_attn_factor"])
    assert factors == [1.0, pytest.approx(1 + 0.1 * np.log(scaling["factor"]))]
