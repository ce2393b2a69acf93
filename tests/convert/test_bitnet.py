"""BitNet: ternary matrices of checkpoints, against the gguf package, and what a file says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from support.changed_models import changed, config_of
from support.checkpoints import change_config, copy_checkpoint, tensors_of, write_safetensors
from support.file_sizes import file_sizes
from support.golden import golden
from support.runner import Runner, exact

from hotcold.convert import ConvertError, ConvertOptions, convert
from hotcold.convert.bitnet import pack_tq2_0
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.model.config import ModelError
from hotcold.placement.sizes import placed_by
from hotcold.runtime.counters import Figures, bytes_of_rows
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.tasks.fitting import fit_predictor
from hotcold.watch.memory_use import memory_use

PACKED = {"quant_method": "bitnet", "quantization_mode": "offline", "linear_class": "autobitlinear"}


def rounded(weights: Any) -> tuple[Any, float]:
    """-1, 0 and 1 of a matrix, and its factor (arXiv 2402.17764, equations 1 to 3)."""
    factor = np.abs(weights).mean()
    return np.clip(np.round(weights / factor), -1, 1), float(factor)


def ternary_checkpoint(folder: Path, stored: dict[str, Any]) -> Path:
    """tiny-bitnet with matrices of -1, 0 and 1, as ``stored`` has it."""
    checkpoint, tensors = copy_checkpoint(folder, "tiny-bitnet"), {}
    for name, values in tensors_of(folder / "tiny-bitnet").items():
        tensors[name] = values
        if "_proj." not in name or stored["quantization_mode"] == "online":
            continue
        ternary, factor = rounded(values.astype(np.float32))
        rows = len(ternary) // 4
        packed = np.zeros((rows, ternary.shape[1]), np.uint8)
        for i in range(4 * rows):
            packed[i % rows] += (ternary[i] + 1).astype(np.uint8) << 2 * (i // rows)
        factor = factor if stored["linear_class"] == "autobitlinear" else 1 / factor
        tensors |= {name: packed, f"{name}_scale": np.array([factor], ml_dtypes.bfloat16)}
    write_safetensors(checkpoint / "model.safetensors", tensors)
    change_config(checkpoint, quantization_config=stored)
    return checkpoint


@pytest.mark.parametrize(
    "stored",
    [PACKED, PACKED | {"linear_class": "bitlinear"}, PACKED | {"quantization_mode": "online"}],
    ids=["factor", "inverse", "online"],
)
def test_ternary_matrices(stored: dict[str, Any], tmp_path: Path) -> None:
    plain = tensors_of(copy_checkpoint(tmp_path / "plain", "tiny-bitnet"))
    convert(ternary_checkpoint(tmp_path, stored), tmp_path / "out.gguf", ConvertOptions("F32"))
    with open_gguf(tmp_path / "out.gguf") as file:
        for gguf_name, name in (("attn_k", "self_attn.k_proj"), ("ffn_down", "mlp.down_proj")):
            ternary, factor = rounded(plain[f"model.layers.1.{name}.weight"].astype(np.float32))
            found = file.load(f"blk.1.{gguf_name}.weight").dequantise()
            np.testing.assert_allclose(found, ternary * factor, rtol=1e-2, atol=0)
            assert len(np.unique(found)) == 3
    logits = Runner(tmp_path / "out.gguf", open_backend("reference")).run(range(3, 9))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("factor", [np.inf, np.nan, 70000.0])
def test_factors_that_blocks_cannot_hold(factor: float, tmp_path: Path) -> None:
    folder = ternary_checkpoint(tmp_path, PACKED)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tensors_of(folder) | {f"{name}_scale": np.array([factor], np.float32)}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConvertError, match=rf"tensor '{name}' has the factor {factor:g}: .* up to 65504"):
        convert(folder, tmp_path / "out.gguf")


def test_whole_blocks_become_tq2_0(tmp_path: Path) -> None:
    codes = np.random.default_rng(1).integers(0, 3, (3, 512)).astype(np.uint8)
    packed = pack_tq2_0(codes, 0.37)
    values = gguf.dequantize(packed, gguf.GGMLQuantizationType.TQ2_0)
    np.testing.assert_array_equal(values, np.float32(np.float16(0.37)) * (codes.astype(np.float32) - 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq': bitnet is needed"),
        ({"linear_class": "x"}, "linear_class is 'x': bitlinear or autobitlinear"),
        ({"quantization_mode": "online", "linear_class": "bitlinear"}, "quantization_mode is 'online'"),
        ({"modules_to_not_convert": ["q_proj"]}, r"modules_to_not_convert is \['q_proj'\]: null"),
        ({"use_rms_norm": True}, "use_rms_norm is True: false"),
    ],
)
def test_other_ways_to_store_them(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-bitnet")
    change_config(folder, quantization_config=PACKED | changes)
    with pytest.raises(ConvertError, match=message):
        convert(folder, tmp_path / "out.gguf")


def test_down_needs_all_neurons(tmp_path: Path) -> None:
    folder = copy_checkpoint(tmp_path, "tiny-bitnet")
    with pytest.raises(ConvertError, match=r"the FFN of bitnet needs all neurons: use by_output"):
        convert(folder, tmp_path / "out.gguf", ConvertOptions(down="by_neuron"))
    path = golden("tiny-bitnet", tmp_path).path
    wrong = changed(path, tmp_path / "wrong.gguf", {"hotcold.ffn.down_layout": "by_neuron"})
    with pytest.raises(ModelError, match="down_layout is by_neuron: with a norm before down by_output"):
        config_of(wrong)


def test_activation_of_files_that_do_not_say_it(tmp_path: Path) -> None:
    """llama.cpp's files: Microsoft's models have the base 500000, those before them another."""
    path, own = golden("tiny-bitnet", tmp_path).path, "hotcold.ffn.activation"
    assert (config_of(path).activation, config_of(path).notes) == ("relu2", ())
    for keys, activation, guessed in (
        ({}, "relu2", True),
        ({"bitnet.rope.freq_base": 10000.0}, "silu", True),
        ({"bitnet.hidden_activation": "silu"}, "silu", False),
    ):
        config = config_of(changed(path, tmp_path / "other.gguf", {own: None} | keys))
        assert config.activation == activation
        assert [note.startswith("the file does not say its activation") for note in config.notes] == (
            [True] * guessed
        )


def test_skipped_rows_of_up_change_no_bit_and_are_not_read(tmp_path: Path) -> None:
    """In prompts they are read; of steps the counts are those of gates above 0."""
    tiny = golden("tiny-bitnet", tmp_path)
    runners = [
        Runner(tiny.path, open_backend(name, threads), *how)
        for name, threads, how in (
            ("cpu", 1, ()), ("cpu", 1, (exact,)), ("cpu", 3, (exact,)),
            ("reference", None, ()), ("reference", None, (exact,)),
        )
    ]  # fmt: skip
    off, one, three, plain, plainly = all_logits = [[runner.run(tiny.prompt)] for runner in runners]
    for token in tiny.steps[:6]:
        for logits, runner in zip(all_logits, runners, strict=True):
            logits.append(runner.run([int(token)], decode=True))
    for found, wanted in ((one, off), (three, off), (plainly, plain)):
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(wanted))
    for runner in (*runners[1:3], runners[4]):
        counts = np.array([ffn.counts() for ffn in runner.ffns])  # type: ignore[attr-defined]
        assert (counts[:, [0, 2, 4]] == 0).all() and (counts[:, 1] == counts[:, 3]).all()
        assert (counts[:, 1] > 0).all() and (counts[:, 1] < 6 * 52).all()


def test_a_step_reads_the_file_less_the_rows_that_are_skipped(tmp_path: Path) -> None:
    path = golden("tiny-bitnet", tmp_path).path
    with open_gguf(path) as file:
        tensors = sum(info.nbytes for info in file.tensors.values())
    for sparsity in ("off", "exact"):
        session = load(path, LoadOptions(threads=1, gpu="off", sparsity=sparsity)).session()
        batch = session.transformer.batch
        batch.pages[0, :1] = session.cache.allocate("test", 1)
        batch.tokens[0], batch.positions[0], batch.sequence[0], batch.lengths[0] = 200, 0, 0, 1
        batch.slots[0], batch.logits_rows[0], batch.counts[:] = batch.pages[0, 0] * 32, 0, (1, 1, 1, 1)
        session.run()
        footprint, counters = session.footprint, session.counters
        read = footprint.step_bytes + bytes_of_rows(counters.rows, footprint.row_bytes).sum()
        skipped = sum(52 - int(n) for n in counters.rows[:, 1]) * 40 * 4 * (sparsity == "exact")
        assert read == tensors - skipped and (skipped > 0) == (sparsity == "exact")
        shares = counters.rows[:, 3] / 52
        assert Figures.from_counters(counters, footprint).active_share == pytest.approx(shares.mean())


def test_rows_of_up_are_skipped_and_it_says_so(tmp_path: Path) -> None:
    path = golden("tiny-bitnet", tmp_path).path
    model = load(path, LoadOptions(threads=1, gpu="off"))
    session = model.session()
    why = "a norm before down needs all neurons of a token"
    assert session.sparsity == "exact"
    assert f"rows of up are skipped, only on CPUs: {why}" in session.notes
    assert load(path, LoadOptions(threads=1, gpu="off", sparsity="off")).session().sparsity == "off"
    with pytest.raises(LoadError, match=f"predicted`: {why}: use exact, off or auto"):
        load(path, LoadOptions(threads=1, gpu="off", sparsity="predicted")).session()
    with pytest.raises(UserError, match=f"{why}: no neuron can be predicted"):
        fit_predictor(path, "some text " * 40, threads=1)
    silu = changed(path, tmp_path / "silu.gguf", {"hotcold.ffn.activation": "silu"})
    assert load(silu, LoadOptions(threads=1, gpu="off")).session().sparsity == "off"
    assert placed_by(model.config) == "layers: a norm before down needs all neurons of a token"
    with open_gguf(path) as file:
        sizes = file_sizes(file, model.config, 128, "f16", gpu=False)
    use = {each.kind: each.cpu_bytes for each in memory_use(session)}
    norms = 2 * (3 * 40 + 52) * 4  # are counted by themselves
    assert use["attention"] == sizes.attention.sum() - norms
