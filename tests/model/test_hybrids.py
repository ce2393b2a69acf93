"""Models whose layers keep a state against transformers, and what their files may say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.golden import CPU_HYBRIDS, HYBRIDS, LATENT_HYBRIDS, Golden, golden
from support.golden_logits import check_logits, close
from support.runner import ROWS, Runner, assert_same_bits_in_parts, exact

from hotcold.formats.blocks import Tensor, quantise
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import SPARSE_ACTIVATIONS, Backend, BatchLimits
from hotcold.kernels.gpus import unsupported
from hotcold.model.config import ModelError
from hotcold.model.ffn.normed import NormedShape
from hotcold.model.kv_cache import SequenceState
from hotcold.model.transformer import Transformer


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


@pytest.fixture(scope="module", params=(*HYBRIDS, *LATENT_HYBRIDS, *CPU_HYBRIDS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden(str(request.param), tmp_path_factory.mktemp("golden"))


def test_logits_are_those_of_transformers(tiny: Golden, backend: Backend) -> None:
    check_logits(tiny, backend)


def test_a_batch_of_sequences_gives_what_each_gives_alone(tiny: Golden, backend: Backend) -> None:
    """Three sequences at different places; one reads a prompt beside rows that decode. Each step
    writes another slot than it read; the second sequence goes back once."""
    runner = Runner(tiny.path, backend, cache_type="f32")
    state = SequenceState(backend, runner.config, 6, "f32", slots=6)
    limits = BatchLimits(ROWS, 3, 2, ROWS)
    transformer = Transformer(runner.config, runner.weights, backend, runner.ffns, limits, state)
    pages = [state.pages.allocate(i, 2) for i in range(3)]
    tokens = np.concatenate([tiny.prompt, tiny.steps])
    logits = np.vstack([tiny.prompt_logits, tiny.step_logits])
    batch = transformer.batch
    steps: Sequence[tuple[Sequence[tuple[int, int]], int]] = (
        (((0, 13), (0, 5), (0, 0)), 0),
        (((13, 14), (5, 6), (0, 9)), 2),
        (((14, 15), (5, 6), (9, 20)), 2),
        (((15, 16), (6, 7), (20, 21)), 3),
    )
    slots = [-1, -1, -1]  # that each reads; it has two
    for step, (ranges, decoding) in enumerate(steps):
        row, positions = 0, []
        for i, (start, stop) in enumerate(ranges):
            if start == stop:
                continue
            write = 2 * i if slots[i] % 2 else 2 * i + 1
            facts = {"state_from": slots[i], "state_to": write}
            row = batch.put(row, i, start, tokens[start:stop], pages[i], **facts)
            positions += range(start, stop)
            if (step, i) != (1, 1):  # that is done again from the same state
                slots[i] = write
        batch.logits_rows[:row] = np.arange(row)
        batch.counts[:] = (row, decoding, row, 3)
        transformer.run()
        close(transformer.read_logits(0, row), logits[positions])


def test_rows_have_the_same_bits_in_prompts_and_in_decoding(tiny: Golden) -> None:
    """At once, in chunks of any size, after other text; and where zeros are left out."""
    zeros = config_of(tiny.path).activation in SPARSE_ACTIVATIONS
    runners = [Runner(tiny.path, open_backend("cpu"), *how) for how in ((), (exact,))[: 1 + zeros]]
    expected = runners[0].run(tiny.prompt)
    for runner in runners:
        assert_same_bits_in_parts(runner, tiny.prompt, expected)


def test_the_first_files_of_qwen3_next(tmp_path: Path, backend: Backend) -> None:
    """They have q, k, v and z of each k head in one matrix, as the checkpoint has."""
    tiny = golden("tiny-qwen3next", tmp_path)
    with open_gguf(tiny.path) as file:
        other: dict[str, Tensor | None] = {}
        for i in range(3):
            blk = f"blk.{i}."
            qkv, z = (file.load(f"{blk}{name}.weight").dequantise() for name in ("attn_qkv", "attn_gate"))
            q, k, v = qkv[:16].reshape(2, 8, -1), qkv[16:32].reshape(2, 8, -1), qkv[32:].reshape(2, 24, -1)
            joined = np.concatenate([q, k, v, z.reshape(2, 24, -1)], 1).reshape(-1, qkv.shape[1])
            other |= {f"{blk}ssm_in.weight": quantise(joined, "F32")}
            other |= {f"{blk}attn_qkv.weight": None, f"{blk}attn_gate.weight": None}
    path = changed(tiny.path, tmp_path / "first.gguf", {}, other)
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_gate_and_up_of_experts_may_be_one(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-lfm2moe", tmp_path)
    with open_gguf(tiny.path) as file:
        other: dict[str, Tensor | None] = {}
        for i in range(1, 4):
            names = [f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up")]
            joined = np.concatenate([file.load(name).dequantise() for name in names], 1)
            other |= dict.fromkeys(names) | {f"blk.{i}.ffn_gate_up_exps.weight": quantise(joined, "F32")}
    path = changed(tiny.path, tmp_path / "joined.gguf", {}, other)
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_other_forms_of_kimi_linear(tmp_path: Path, backend: Backend) -> None:
    """q, k and v in one matrix, keys and values of latents in one; dimensions of 1, more or fewer."""
    tiny = golden("tiny-kimi-linear", tmp_path)
    with open_gguf(tiny.path) as file:
        other: dict[str, Tensor | None] = {}
        for i in (0, 1, 3):
            names = [f"blk.{i}.attn_{part}.weight" for part in "qkv"]
            joined = np.concatenate([file.load(name).dequantise() for name in names])
            other |= dict.fromkeys(names) | {f"blk.{i}.attn_qkv.weight": quantise(joined, "F32")}
            for part, shape in (("q", (24, 4)), ("k", (24, 1, 4))):
                name = f"blk.{i}.ssm_conv1d_{part}.weight"
                assert file.tensors[name].shape == (1, 24, 1, 4)
                other[name] = quantise(file.load(name).dequantise().reshape(shape), "F32")
            decay = file.load(f"blk.{i}.ssm_a").dequantise()
            other[f"blk.{i}.ssm_a"] = quantise(decay.reshape(1, 1, 3, 1), "F32")
        keys, values = (file.load(f"blk.2.attn_{part}.weight").dequantise() for part in ("k_b", "v_b"))
        other |= {f"blk.2.attn_{part}.weight": None for part in ("k_b", "v_b")}
        joined = np.concatenate([keys.transpose(0, 2, 1), values], 1).reshape(-1, keys.shape[1])
        other["blk.2.attn_kv_b.weight"] = quantise(joined, "F32")
    path = changed(tiny.path, tmp_path / "other.gguf", {}, other)
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_a_norm_may_lack_its_suffix_or_have_one(tmp_path: Path, backend: Backend) -> None:
    """llama.cpp's files of Falcon-H1 have none, and so have ours."""
    tiny = golden("tiny-falcon-h1", tmp_path)
    with open_gguf(tiny.path) as file:
        names = [f"blk.{i}.ffn_norm" for i in range(2)]
        usual = {f"{name}.weight": file.load(name) for name in names}
    path = changed(tiny.path, tmp_path / "usual.gguf", {}, usual | dict.fromkeys(names))
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_layers_that_differ_in_their_experts(tmp_path: Path, backend: Backend) -> None:
    """As in Nemotron's Puzzle: fewer and smaller experts in the last layer equal more and larger ones. One
    of these is always chosen and adds nothing, and some of their neurons are 0."""
    tiny = golden("tiny-nemotron-h-moe", tmp_path)
    up, down, bias = "blk.4.ffn_up_exps.weight", "blk.4.ffn_down_exps.weight", "blk.4.exp_probs_b.bias"
    with open_gguf(tiny.path) as file:
        ups, downs, biases = (file.load(name).dequantise() for name in (up, down, bias))
    assert ups.shape == downs.shape == (6, 20, 24)
    ups[:, 14:], downs[5] = 0, 0
    keys: dict[str, Any] = {"nemotron_h_moe.expert_weights_norm": False}
    paths = []
    for more, small in ((1e9, False), (-1e9, True)):
        biases[5] = more
        rows = slice(0, 14 if small else 20)
        matrices = {up: np.ascontiguousarray(ups[:, rows]), down: np.ascontiguousarray(downs[:, rows])}
        tensors: dict[str, Tensor | None] = {name: quantise(each, "F32") for name, each in matrices.items()}
        tensors[bias] = quantise(biases, "F32")
        lengths = np.array([0, 20, 0, 0, 14], np.int32)
        own = {
            "nemotron_h_moe.expert_used_count": np.array([0, 3, 0, 0, 2], np.int32),
            "nemotron_h_moe.expert_feed_forward_length": lengths,
            "nemotron_h_moe.feed_forward_length": lengths,
        }
        path = tmp_path / f"{small}.gguf"
        paths.append(changed(tiny.path, path, keys | (own if small else {}), tensors))
    config = config_of(paths[1])
    assert config.neurons == (0, 120, 0, 0, 84)
    assert [config.chosen_of(i) for i in (1, 4)] == [3, 2] and config.experts_of(4).neurons == 14
    logits = [Runner(path, backend, cache_type="f32").run(tiny.prompt) for path in paths]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5, rtol=0)
    assert np.abs(logits[0] - tiny.prompt_logits).max() > 0.1


def test_files_of_rwkv_that_llama_cpp_wrote(tmp_path: Path, backend: Backend) -> None:
    """The first layer may lack the unused copies, and mixes may lack further dimensions of 1."""
    tiny = golden("tiny-rwkv7", tmp_path)
    with open_gguf(tiny.path) as file:
        other: dict[str, Tensor | None] = {f"blk.0.time_mix_v{i}.weight": None for i in range(3)}
        for i in range(3):
            names = {f"blk.{i}.time_mix_lerp_fused.weight": (6, 64)}
            names |= {f"blk.{i}.channel_mix_lerp_k.weight": (1, 1, 64)}
            other |= {
                name: quantise(file.load(name).dequantise().reshape(shape), "F32")
                for name, shape in names.items()
            }
    path = changed(tiny.path, tmp_path / "other.gguf", {"rwkv7.token_shift_count": 2}, other)
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path, backend: Backend) -> None:
    """``block_count`` counts them, and so do arrays."""
    tiny = golden("tiny-qwen35", tmp_path)
    with open_gguf(tiny.path) as file:
        block = {
            name.replace("blk.3.", "blk.4."): file.load(name) for name in file.tensors if "blk.3." in name
        }
    block["blk.4.nextn.eh_proj.weight"] = quantise(np.zeros((24, 48), np.float32), "F32")
    keys = {
        "qwen35.block_count": 5,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.feed_forward_length": np.array([28] * 5, np.int32),
        "qwen35.attention.recurrent_layers": [True, True, True, False, False],
    }
    path = changed(tiny.path, tmp_path / "nextn.gguf", keys, block)
    assert config_of(path).layers == 4
    close(Runner(path, backend, cache_type="f32").run(tiny.prompt), tiny.prompt_logits)
    keys["qwen35.nextn_predict_layers"] = 0
    with pytest.raises(ModelError, match=r"tensor blk\.4\.nextn\.eh_proj\.weight is unknown"):
        config_of(changed(tiny.path, tmp_path / "wrong.gguf", keys, block))
    alone = {name: None for name in config_of_tensors(tiny.path) if "blk." in name} | block
    with pytest.raises(ModelError, match="only draft tokens"):
        config_of(changed(path, tmp_path / "mtp.gguf", {}, alone))


def config_of_tensors(path: Path) -> list[str]:
    with open_gguf(path) as file:
        return [*file.tensors]


def test_kinds_of_layers(tmp_path: Path) -> None:
    """Each layer is what the keys of its file make it."""
    of = {name: config_of(golden(name, tmp_path).path) for name in (*HYBRIDS, *LATENT_HYBRIDS, *CPU_HYBRIDS)}
    kinds = {
        name: "".join(
            ("*" if mixer.page_bytes("f32") else "") + ("s" if mixer.slot_bytes else "") + ("f" if n else "")
            + ("E" if config.experts_of(i) else "") + " "
            for i, (mixer, n) in enumerate(zip(config.mixers, config.neurons, strict=True))
        ).rstrip()
        for name, config in of.items()
    }  # fmt: skip
    assert kinds == {
        "tiny-lfm2": "sf sf *f sf",
        "tiny-lfm2moe": "sf sfE *fE sfE",
        "tiny-qwen35": "sf sf sf *f",
        "tiny-qwen35moe": "sfE sfE sfE *fE",
        "tiny-qwen3next": "sfE sfE sfE *fE",
        "tiny-nemotron-h": "s f s * f",
        "tiny-nemotron-h-moe": "s fE s * fE",
        "tiny-nemotron-latent": "s fE * fE",
        "tiny-granite-h": "sf *f sf sf",
        "tiny-granite-h-moe": "sfE *fE sfE sfE",
        "tiny-falcon-h1": "*sf *sf",
        "tiny-mamba2": "s s",
        "tiny-kimi-linear": "sf sfE *fE sfE",
        "tiny-rwkv7": "sf sf sf",
    }
    # A convolution's columns, and the states of heads, in float32.
    assert of["tiny-lfm2"].slot_bytes == 3 * 4 * 2 * 24
    assert of["tiny-qwen35"].slot_bytes == 3 * 4 * (3 * (2 * 2 * 8 + 48) + 6 * 8 * 8)
    assert of["tiny-mamba2"].slot_bytes == 2 * 4 * (3 * (48 + 2 * 2 * 16) + 6 * 8 * 16)
    assert of["tiny-kimi-linear"].slot_bytes == 3 * 4 * (3 * 3 * 24 + 3 * 8 * 8)
    assert of["tiny-rwkv7"].slot_bytes == 3 * 4 * (2 * 64 + 4 * 16 * 16)
    assert {
        name: unsupported(each.state_ops) for name, each in of.items() if unsupported(each.state_ops)
    } == {"tiny-rwkv7": "GPUs do not compute RWKV yet"}
    assert {mixer.rope for mixer in of["tiny-kimi-linear"].mixers} == {None}
    assert {mixer.rope for mixer in of["tiny-nemotron-h"].mixers} == {None}
    assert {mixer.rope for mixer in of["tiny-granite-h"].mixers} == {None}
    assert of["tiny-nemotron-latent"].experts.latent == 16


def test_an_op_of_an_ffn_that_gpus_lack_is_known_at_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(golden("tiny-bitnet", tmp_path).path)
    assert unsupported(config.state_ops) is None
    monkeypatch.setattr(NormedShape, "ops", ("activate",))
    assert unsupported(config.state_ops) == "GPUs do not compute RWKV yet"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tiny-lfm2", {"lfm2.shortconv.l_cache": 9}, "l_cache is 9: a whole number from 2 to 8"),
    ("tiny-lfm2", {"lfm2.shortconv.l_cache": None}, "l_cache is missing"),
    ("tiny-lfm2", {"lfm2.attention.head_count_kv": np.array([0, 0, 2])}, "one number or 4 are needed"),
    ("tiny-lfm2", {"lfm2.attention.head_count_kv": np.array([0, 1, 2, 0])}, "layers that differ in it"),
    ("tiny-lfm2", {"lfm2.attention.head_count_kv": np.array([0, 2, 2, 0])}, "tensor blk.1.attn_q.weight"),
    ("tiny-qwen35", {"qwen35.ssm.group_count": 4}, "group_count is 4: it must divide 6 heads"),
    ("tiny-qwen35", {"qwen35.ssm.inner_size": 49}, "time_step_rank is 6: it must divide 49"),
    ("tiny-qwen35", {"qwen35.ssm.state_size": 0}, "state_size is 0"),
    ("tiny-qwen35", {"qwen35.full_attention_interval": 0}, "full_attention_interval is 0"),
    ("tiny-qwen35", {"qwen35.attention.recurrent_layers": [True]}, "4 truth values are needed"),
    ("tiny-nemotron-h", {"nemotron_h.ssm.group_count": 5}, "group_count is 5: it must divide 6 heads"),
    ("tiny-nemotron-h", {"nemotron_h.ssm.conv_kernel": 1}, "conv_kernel is 1"),
    (
        "tiny-nemotron-h",
        {"nemotron_h.feed_forward_length": np.array([0, 28, 0, 28, 0])},
        "blk.3.ffn_up.weight is",
    ),
    (
        "tiny-nemotron-h-moe",
        {
            "nemotron_h_moe.expert_used_count": np.array([0, 3, 0, 0, 2]),
            "nemotron_h_moe.expert_feed_forward_length": np.array([0, 20, 0, 20, 0]),
        },
        r"expert_used_count.3. is 0 and expert_feed_forward_length.3. 20: both or none may be 0",
    ),
    (
        "tiny-nemotron-h-moe",
        {"nemotron_h_moe.expert_feed_forward_length": np.array([0, 20, 0, 14, 0])},
        r"feed_forward_length.3. is 0, which differs from expert_feed_forward_length of the layer",
    ),
    ("tiny-kimi-linear", {"kimi-linear.kda.head_dim": None}, "kda.head_dim is missing"),
    ("tiny-kimi-linear", {"kimi-linear.kda.head_dim": 12}, "tensor blk.0.attn_q.weight has shape"),
    ("tiny-kimi-linear", {"kimi-linear.ssm.conv_kernel": 3}, "tensor blk.0.ssm_conv1d_q.weight has shape"),
    ("tiny-kimi-linear", {"kimi-linear.attention.head_count_kv": np.array([0, 1])}, "one number or 4"),
    ("tiny-granite-h", {"granitehybrid.rope.scaling.finetuned": 3}, "finetuned is 3: a truth value"),
    ("tiny-rwkv7", {"rwkv7.wkv.head_size": None}, "wkv.head_size is missing"),
    ("tiny-rwkv7", {"rwkv7.wkv.head_size": 24}, "head_size is 24: it must divide 64 dimensions"),
    ("tiny-rwkv7", {"rwkv7.token_shift_count": 1}, "token_shift_count is 1: this is not supported"),
    ("tiny-rwkv7", {"rwkv7.attention.gate_lora_rank": 8}, "tensor blk.0.time_mix_g1.weight has shape"),
    ("tiny-rwkv7", {"rwkv7.feed_forward_length": 48}, "tensor blk.0.channel_mix_key.weight has shape"),
    ("tiny-lfm2moe", {"lfm2moe.leading_dense_block_count": 5}, "leading_dense_block_count is 5"),
]


@pytest.mark.parametrize(("name", "keys", "message"), WRONG)
def test_files_that_are_wrong(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = changed(golden(name, tmp_path).path, tmp_path / "wrong.gguf", keys, {})
    with pytest.raises(ModelError, match=message) as caught:
        config_of(path)
    assert "\n" not in str(caught.value)
