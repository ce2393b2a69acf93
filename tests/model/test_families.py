"""Families of models against transformers: a table of tiny ones, each on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import golden_checkpoint
from support.expert_models import expert_golden
from support.golden import FAMILIES, Golden, golden
from support.runner import ROWS, Runner, exact

from hotcold.convert import ConvertOptions, convert
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import open_gguf, write_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import PAGE, Backend, BatchLimits
from hotcold.model.config import Config
from hotcold.model.kv_cache import PagePool, SequenceState
from hotcold.model.transformer import Transformer
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden(str(request.param), tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(str(request.param))


def check(runner: Runner, tiny: Golden) -> None:
    """Prompt at once and in chunks, then a token a step."""
    np.testing.assert_allclose(runner.run(tiny.prompt), tiny.prompt_logits, atol=1e-4, rtol=0)
    steps = np.vstack([runner.run([int(token)], decode=True) for token in tiny.steps])
    np.testing.assert_allclose(steps, tiny.step_logits, atol=1e-4, rtol=0)
    chunks = runner.run_in_parts(tiny.prompt, 7)
    np.testing.assert_allclose(chunks, tiny.prompt_logits, atol=1e-4, rtol=0)


def test_logits_are_those_of_transformers(tiny: Golden, backend: Backend) -> None:
    check(Runner(tiny.path, backend, cache_type="f32"), tiny)


def test_a_batch_of_sequences_gives_what_each_gives_alone(tiny: Golden, backend: Backend) -> None:
    """Three sequences at different places; one reads a prompt beside rows that decode."""
    runner = Runner(tiny.path, backend, cache_type="f32")
    transformer, cache = three_sequences(runner, backend)
    batch, pages = transformer.batch, np.array([cache.allocate(i, 2) for i in range(3)], np.int32)
    tokens = np.concatenate([tiny.prompt, tiny.steps])
    logits = np.vstack([tiny.prompt_logits, tiny.step_logits])
    batch.pages[:, :2] = pages
    lengths, ends = [0, 0, 0], ([13, 5, 0], [14, 6, 9], [15, 7, 20], [16, 8, 21])
    for step, until in enumerate(ends):
        # Rows that decode come first; the third sequence reads a prompt in the second and third step.
        rows = [(s, p) for s in range(3) for p in range(lengths[s], until[s])]
        sequence, positions = np.array(rows).T
        n = len(rows)
        batch.tokens[:n], batch.positions[:n], batch.sequence[:n] = tokens[positions], positions, sequence
        batch.slots[:n] = pages[sequence, positions // PAGE] * PAGE + positions % PAGE
        batch.lengths[:], batch.logits_rows[:n] = until, np.arange(n)
        batch.counts[:] = (n, 0 if step == 0 else 3 if step == 3 else 2, n, 3)
        transformer.run()
        np.testing.assert_allclose(transformer.read_logits(0, n), logits[positions], atol=1e-4, rtol=0)
        lengths = until


def three_sequences(runner: Runner, backend: Backend) -> tuple[Transformer, PagePool]:
    state = SequenceState(backend, runner.config, 6, "f32")
    limits = BatchLimits(ROWS, 3, 2, ROWS)
    return Transformer(runner.config, runner.weights, backend, runner.ffns, limits, state), state.pages


@pytest.mark.parametrize(
    "name", ["tiny-gemma3", "tiny-gemma4-e", "tiny-olmo3", "tiny-smallthinker", "tiny-gpt-oss"]
)
def test_a_window_of_all_positions_leaves_layers_their_rotations(
    name: str, tmp_path: Path, backend: Backend
) -> None:
    """transformers goes by a layer's type: up to the window, its logits do not depend on the context."""
    made = (golden if name in FAMILIES else expert_golden)(name, tmp_path)
    with open_gguf(made.path) as file:
        arch = file.metadata["general.architecture"]
        window = file.metadata[f"{arch}.attention.sliding_window"]
        metadata = file.metadata | {f"{arch}.context_length": window}
        write_gguf(tmp_path / "short.gguf", metadata, {name: file.load(name) for name in file.tensors})
    runner = Runner(tmp_path / "short.gguf", backend, cache_type="f32")
    assert {mixer.window for mixer in runner.config.mixers} == {None}
    logits = runner.run(made.prompt[:window])
    np.testing.assert_allclose(logits, made.prompt_logits[:window], atol=1e-4, rtol=0)


def test_greedy_tokens_with_a_float16_cache(tiny: Golden) -> None:
    runner = Runner(tiny.path, open_backend("cpu"))
    assert runner.greedy(tiny.prompt, len(tiny.steps)) == tiny.steps.tolist()


def test_exact_is_the_bits_of_off(tiny: Golden) -> None:
    """Where the activation gives zeros; in blocks, too."""
    with open_gguf(tiny.path) as file:
        config = Config.from_metadata(file.metadata, file.magic, file.tensors)
    if config.whole:
        pytest.skip(config.whole)
    runners = [Runner(tiny.path, open_backend("cpu"), *how) for how in ((), (exact,))]
    prompts = [runner.run(tiny.prompt) for runner in runners]
    np.testing.assert_array_equal(*prompts)
    np.testing.assert_array_equal(*(runner.run(tiny.steps[:8], decode=True) for runner in runners))


@pytest.mark.one_driver
def test_logits_of_all_on_a_gpu(vulkan: Any, tmp_path: Path) -> None:
    for name in FAMILIES:
        tiny = golden(name, tmp_path)
        check(Runner(tiny.path, vulkan, cache_type="f32"), tiny)


def test_powerinfers_opt(tmp_path: Path, backend: Backend) -> None:
    """Its files have down by neuron, its bias under that name, no eps, and mean relu by their magic."""
    made = golden("tiny-opt", tmp_path)
    with open_gguf(made.path) as file:
        tensors = {name: file.load(name) for name in file.tensors}
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("hotcold.")}
    metadata.pop("opt.attention.layer_norm_epsilon")
    for blk in ("blk.0.", "blk.1."):
        rows = tensors.pop(f"{blk}ffn_down.weight").dequantise()
        if file.metadata.get("hotcold.ffn.down_layout") != "by_neuron":
            rows = rows.T
        tensors[f"{blk}ffn_down_t.weight"] = quantise(np.ascontiguousarray(rows), "F32")
        tensors[f"{blk}ffn_down_t.bias"] = tensors.pop(f"{blk}ffn_down.bias")
    write_gguf(tmp_path / "opt.powerinfer.gguf", metadata, tensors, magic="PWRI")
    runner = Runner(tmp_path / "opt.powerinfer.gguf", backend, cache_type="f32")
    np.testing.assert_allclose(runner.run(made.prompt), made.prompt_logits, atol=1e-4, rtol=0)


def test_longrope_goes_by_the_most_positions_of_a_sequence(tmp_path: Path) -> None:
    """Up to the original context the short factors hold, as in transformers for a short sequence."""
    convert(golden_checkpoint("tiny-phi3"), tmp_path / "phi.gguf", ConvertOptions("F32"))
    with open_gguf(tmp_path / "phi.gguf") as file:
        tensors = {name: file.load(name) for name in file.tensors}
        same = tensors | {"rope_factors_long.weight": tensors["rope_factors_short.weight"]}
        longer = file.metadata | {"phi3.rope.scaling.original_context_length": 64}
        write_gguf(tmp_path / "short.gguf", file.metadata, same)
        write_gguf(tmp_path / "longer.gguf", longer, tensors)
    names = ("phi", "short", "longer")
    long, short, longer_logits = (
        Runner(tmp_path / f"{name}.gguf", open_backend("cpu")).run(range(3, 13)) for name in names
    )
    np.testing.assert_array_equal(short, longer_logits)
    assert abs(long - short).max() > 0.01
    contexts = [load(tmp_path / f"{name}.gguf", LoadOptions()).context for name in names]
    assert contexts == [file.metadata["phi3.rope.scaling.original_context_length"]] * 2 + [64]
