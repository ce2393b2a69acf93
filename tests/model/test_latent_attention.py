"""Models with latent attention (MLA) against transformers, and what their files may say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.file_sizes import file_sizes
from support.golden import LATENT, Golden, golden
from support.golden_logits import check_logits, close
from support.runner import ROWS, Runner, assert_same_bits_in_parts

from hotcold import LLM
from hotcold.convert import ConvertOptions, convert
from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PAGE, Backend, BatchLimits, ExpertGroups
from hotcold.model.config import ModelError
from hotcold.model.kv_cache import SequenceState
from hotcold.model.mixers.latent_attention import LatentShape
from hotcold.model.transformer import Transformer
from hotcold.model.weights import made_bytes
from hotcold.runtime.options import LoadError
from hotcold.tasks.planning import plan


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


@pytest.fixture(scope="module", params=LATENT)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden(str(request.param), tmp_path_factory.mktemp("golden"))


def test_logits_are_those_of_transformers(tiny: Golden, backend: Backend) -> None:
    check_logits(tiny, backend)


@pytest.mark.one_driver
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "tiny-deepseek3" else [pytest.mark.full]) for name in LATENT],
)
def test_logits_on_a_gpu(name: str, vulkan: Any, tmp_path: Path) -> None:
    check_logits(golden(name, tmp_path), vulkan)


def test_a_batch_of_sequences_gives_what_each_gives_alone(tiny: Golden, backend: Backend) -> None:
    """Three sequences at different places; one reads a prompt beside rows that decode; the third
    begins with a page of the first."""
    runner = Runner(tiny.path, backend, cache_type="f32")
    state = SequenceState(backend, runner.config, 6, "f32")
    transformer = Transformer(
        runner.config, runner.weights, backend, runner.ffns, BatchLimits(ROWS, 3, 2, ROWS), state
    )
    tokens = np.concatenate([tiny.prompt, tiny.steps[:-1], tiny.prompt])[: PAGE + 4]
    alone = Runner(tiny.path, backend, cache_type="f32").run(tokens)
    close(alone[: len(tiny.prompt)], tiny.prompt_logits)
    first = state.pages.allocate(0, 2)
    pages = [first, state.pages.allocate(1, 2), state.pages.allocate(2, 1, shared=first[:1])]
    batch = transformer.batch
    for ranges, decoding in (
        (((0, 13), (0, 5), (0, 0)), 0),
        (((13, 31), (5, 6), (0, 0)), 0),
        (((31, 33), (6, 20), (0, 0)), 0),
        (((33, 34), (20, 21), (32, 36)), 2),
    ):
        row, positions = 0, []
        for i, (start, stop) in enumerate(ranges):
            if start < stop:
                row = batch.put(row, i, start, tokens[start:stop], pages[i])
                positions += range(start, stop)
        batch.logits_rows[:row] = np.arange(row)
        batch.counts[:] = (row, decoding, row, 3)
        transformer.run()
        close(transformer.read_logits(0, row), alone[positions])


def test_rows_have_the_same_bits_in_prompts_and_in_decoding(tiny: Golden, tmp_path: Path) -> None:
    for path in (tiny.path, golden(tiny.path.name.partition("-F32")[0], tmp_path, type="F16").path):
        runner = Runner(path, open_backend("cpu"))
        expected = runner.run(tiny.prompt)
        assert_same_bits_in_parts(runner, tiny.prompt, expected)


def test_the_cache_holds_one_latent_and_one_key_of_a_position(tiny: Golden) -> None:
    config = config_of(tiny.path)
    shape = config.mixers[0]
    assert isinstance(shape, LatentShape)
    assert (shape.heads, shape.latent, shape.rotated) == (4, 16, 8)
    assert config.page_bytes("f16") == config.layers * PAGE * (16 + 8) * 2


def of_old_form(path: Path, to: Path, type: str = "F32") -> Path:
    """The model as llama.cpp's files had it before their caches were latent."""
    other: dict[str, Tensor | None] = {}
    with open_gguf(path) as file:
        arch = file.metadata["general.architecture"]
        for i in range(3):
            blk = f"blk.{i}.attn_"
            keys, values = (file.load(f"{blk}{part}.weight").dequantise() for part in ("k_b", "v_b"))
            joined = np.concatenate([keys.transpose(0, 2, 1), values], 1).reshape(-1, keys.shape[1])
            other |= {f"{blk}k_b.weight": None, f"{blk}v_b.weight": None}
            other[f"{blk}kv_b.weight"] = quantise(joined, type)
    keys = {
        f"{arch}.attention.{key}": value
        for key, value in {
            "key_length": 20, "value_length": 10, "head_count_kv": 4, "key_length_mla": None,
            "value_length_mla": None,
        }.items()
    }  # fmt: skip
    return changed(path, to, keys, other)


def test_what_old_files_make_float32_is_counted(tmp_path: Path) -> None:
    """By the bytes of both forms in memory."""
    new = golden("tiny-deepseek3", tmp_path, type="F16").path
    old, found = of_old_form(new, tmp_path / "old.gguf", "F16"), []
    for path in (new, old):
        runner = Runner(path, open_backend("reference"))
        with open_gguf(path) as file:
            found.append((sum(each.dense_bytes for each in runner.weights.layers), file, runner.config))
    assert made_bytes(*found[0][1:]) == 0
    assert made_bytes(*found[1][1:]) == found[1][0] - found[0][0] == 3 * 4 * 12 * 16 * 2
    with open_gguf(new) as file, open_gguf(old) as other:
        sizes = [file_sizes(each, found[0][2], 64, "f16", gpu=False) for each in (file, other)]
    assert (sizes[1].attention - sizes[0].attention).tolist() == [4 * 12 * 16 * 2] * 3


def test_factors_of_rows_are_counted(tmp_path: Path) -> None:
    """4 bytes for each row of a matrix that has one for all."""
    path = golden("tiny-deepseek3", tmp_path).path
    with open_gguf(path) as file:
        scale = replace(file.tensors["blk.1.attn_output.weight"], shape=(1,), nbytes=4)
        scaled: Any = SimpleNamespace(tensors={**file.tensors, "blk.1.attn_output.scale": scale})
        assert made_bytes(scaled, config_of(path)) == 4 * file.tensors["blk.1.attn_output.weight"].shape[0]


@pytest.mark.parametrize("name", ["tiny-deepseek2-lite", "tiny-deepseek3"])
def test_files_of_the_old_form(name: str, tmp_path: Path, backend: Backend) -> None:
    tiny = golden(name, tmp_path)
    path = of_old_form(tiny.path, tmp_path / "old.gguf")
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_experts_come_from_the_best_groups(tmp_path: Path) -> None:
    """By the largest score of a group in DeepSeek-V2, by the two largest ranks in V3."""
    found = {}
    for name in LATENT:
        experts = config_of(golden(name, tmp_path).path).experts
        assert experts is not None
        found[name] = experts.groups
    assert found == {
        "tiny-deepseek2-lite": None,
        "tiny-deepseek2": ExpertGroups(4, 2, 1),
        "tiny-deepseek3": ExpertGroups(4, 2, 2),
        "tiny-glm4-flash": None,
        "tiny-deepseek32": ExpertGroups(4, 2, 2),
        "tiny-glm-dsa": None,
    }


def test_a_router_with_a_bias_is_a_sigmoid_where_the_file_says_nothing(tmp_path: Path) -> None:
    """GLM-4.7-Flash's first files."""
    tiny = golden("tiny-glm4-flash", tmp_path)
    path = changed(tiny.path, tmp_path / "silent.gguf", {"deepseek2.expert_gating_func": None}, {})
    experts = config_of(path).experts
    assert experts is not None
    assert experts.score == "sigmoid"


def test_the_context_ends_where_the_index_would_choose(tmp_path: Path) -> None:
    config = config_of(golden("tiny-deepseek32", tmp_path).path)
    assert config.context == 48
    assert "at most 48 positions" in config.notes[-1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.kv_lora_rank": 0}, "attention.kv_lora_rank is 0: a whole number from 1"),
        ({"attention.key_length_mla": 8}, "rope.dimension_count is 8: less than the keys' length 8"),
        ({"expert_group_count": 3}, "8 experts in 3 groups: a divisor"),
        ({"expert_group_used_count": 1}, "1 of 4 groups of experts: they must hold the 3"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, int], message: str, tmp_path: Path) -> None:
    tiny = golden("tiny-deepseek3", tmp_path)
    named = {f"deepseek2.{key}": value for key, value in keys.items()}
    with pytest.raises(ModelError, match=message):
        config_of(changed(tiny.path, tmp_path / "wrong.gguf", named, {}))


def wide(folder: Path, type: str) -> Path:
    """A random model whose every matrix has whole blocks of 32."""
    checkpoint = copy_checkpoint(folder, "tiny-deepseek3")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 96, "q_lora_rank": 64,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 32, "moe_intermediate_size": 32,
    }  # fmt: skip
    change_config(checkpoint, **sizes)
    d, heads = 64, 4
    shapes = {
        "q_a_proj": (64, d), "q_a_layernorm": (64,), "q_b_proj": (heads * 96, 64),
        "kv_a_proj_with_mqa": (128, d), "kv_a_layernorm": (96,), "kv_b_proj": (heads * 96, 96),
        "o_proj": (d, heads * 32),
    }  # fmt: skip
    random, made = np.random.default_rng(5), {}
    for name, each in tensors_of(checkpoint).items():
        part = name.split(".")[-2]
        n = 96 if ".layers.0.mlp" in name else 32
        known = shapes | {"gate_proj": (n, d), "up_proj": (n, d), "down_proj": (d, n)}
        old = (*each.shape[:-1], d) if each.shape[-1] == 40 else each.shape
        shape = known.get(part, old)
        scale = 0.25 if "embed" in name else 1.4 / shape[-1] ** 0.5
        values = 1 + 0.3 * random.standard_normal(shape) if "norm" in name else random.standard_normal(shape)
        made[name] = (values * (1 if "norm" in name else scale)).astype(np.float32)
    write_safetensors(checkpoint / "model.safetensors", made)
    convert(checkpoint, folder / f"{type}.gguf", ConvertOptions(type))
    return folder / f"{type}.gguf"


@pytest.mark.parametrize(("type", "cache"), [("Q8_0", "q8_0"), ("Q4_0", "f16")])
def test_quantised_matrices_of_heads(type: str, cache: str, tmp_path: Path) -> None:
    """Bits of rows in prompts and in decoding on the CPU, whose logits are near the reference's."""
    path = wide(tmp_path, type)
    with open_gguf(path) as file:
        kinds = {file.tensors[f"blk.1.attn_{part}.weight"].type.name for part in ("k_b", "v_b", "kv_a_mqa")}
    assert kinds == {type}
    tokens = np.random.default_rng(6).integers(3, 288, 45)
    runner = Runner(path, open_backend("cpu"), cache_type=cache)
    expected = runner.run(tokens)
    for size, decode in ((1, True), (16, True), (7, False), (40, False)):
        np.testing.assert_array_equal(runner.run_in_parts(tokens, size, decode=decode), expected)
    reference = Runner(path, open_backend("reference"), cache_type=cache).run(tokens)
    close(expected[0], reference[0])
    # Later ones differ where a value on an edge between two codes, or an expert, is another one.
    assert np.sqrt(((reference - expected) ** 2).mean()) < 0.1 * reference.std()


def test_texts_that_begin_alike_share_pages(tmp_path: Path) -> None:
    """The second request's pages are the first's; its tokens are those of an engine that kept none."""
    path = golden("tiny-glm4-flash", tmp_path).path
    prompt = [1, *np.random.default_rng(7).integers(3, 288, 69).tolist()]
    texts = []
    with LLM(path, gpu="off", threads=1) as llm:
        for ids in (prompt, [*prompt[:66], 9, 8], [*prompt[:66], 9, 8]):
            texts.append(llm.generate(ids, max_tokens=12, temperature=0).ids)
    with LLM(path, gpu="off", threads=1) as llm:
        assert llm.generate([*prompt[:66], 9, 8], max_tokens=12, temperature=0).ids == texts[1] == texts[2]


def test_a_context_beyond_the_index_is_refused(tmp_path: Path) -> None:
    path = golden("tiny-deepseek32", tmp_path).path
    with pytest.raises(LoadError, match="allows 2 to 48, and 0 for all: beyond this length layers choose"):
        LLM(path, gpu="off", context=60)


def test_layers_are_planned_for_gpus(tmp_path: Path) -> None:
    found = plan(golden("tiny-deepseek2-lite", tmp_path).path, vram_budget=64 << 20, context=64)
    assert found.layer_split_layers == 3
    assert found.all_gpu_bytes > sum(found.sizes.attention)
