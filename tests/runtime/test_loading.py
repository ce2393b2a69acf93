"""Loading refuses what it should, auto chooses, and a step says what it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.buffers import cache_bytes
from support.golden import golden
from support.pwri import built_in_pwri, write_pwri
from support.random_blocks import random_blocks
from support.sidecars import PASSING, with_sidecar

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.formats.blocks import quantise
from hotcold.formats.gguf import GGUFError, open_gguf, write_gguf
from hotcold.kernels.reference import ReferenceBackend
from hotcold.placement.memory_plan import MemoryPlan
from hotcold.placement.step_memory import buffer_bytes, scratch_bytes
from hotcold.runtime import loading, memory
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadError, LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.sparse.predictor import PredictorError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def reference(path: Path | None = None, **options: object) -> Session:
    return load(path, LoadOptions(backend="reference", **options)).session()  # type: ignore[arg-type]


def test_the_built_in_model_runs_exact_without_a_word() -> None:
    session = reference()
    assert (session.sparsity, session.notes, session.model.context) == ("exact", [], 256)


def test_what_is_guessed_or_passed_over_in_a_file_is_said(folder: Path) -> None:
    path = folder / "guessed.gguf"
    with open_gguf(model_path()) as file:
        architecture, layers = file.metadata["general.architecture"], file.metadata
        metadata = dict(file.metadata)
        for key in ("attention.head_count", "attention.head_count_kv"):
            name = f"{architecture}.{key}"
            metadata[name] = np.full(layers[f"{architecture}.block_count"], layers[name], np.int32)
        metadata[f"{architecture}.rope.scaling.factor"] = np.float32(2)
        metadata["tokenizer.ggml.eos_token_id"] = np.uint32(2**32 - 1)
        tensors = {name: file.load(name) for name in file.tensors}
        norm = tensors["output_norm.weight"]
        tensors["output_norm.weight"] = quantise(norm.dequantise()[:, None], "F32")
        write_gguf(path, {**metadata, "general.name": "xxxx"}, tensors)
    path.write_bytes(path.read_bytes().replace(b"xxxx", b"a\xff\xfeb", 1))
    model = load(path, LoadOptions(backend="reference"))
    rope, *ids = model.notes
    assert "rope.scaling.factor 2 and no" in rope
    assert "eos_token_id is 4294967295" in ids[0] and "token 2, </s>, does" in ids[1] and len(ids) == 2
    assert [rope.linear_factor for rope in model.config.ropes] == [2]
    assert model.tokenizer.stop_ids == {2}
    with open_gguf(path) as file:
        assert file.metadata["general.name"] == "a\ufffd\ufffdb"


def test_an_activation_without_zeros_runs_dense_and_says_so(folder: Path) -> None:
    session = reference(golden("tiny-llama", folder).path)
    assert session.sparsity == "off"
    assert session.notes == ["sparsity auto chooses off: activation silu gives no zeros"]
    for mode in ("exact", "predicted"):
        with pytest.raises(LoadError, match=rf"`sparsity={mode}`: activation silu .* use off or auto"):
            reference(golden("tiny-llama", folder).path, sparsity=mode)


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_down_by_output_runs_sparse(folder: Path, type: str) -> None:
    assert reference(golden("tiny-drelu", folder, type=type, down="by_output").path).sparsity == "exact"


@pytest.mark.parametrize("layers", [2, 6])
def test_blocks_of_which_no_neuron_can_be_taken_are_said(tmp_path: Path, layers: int) -> None:
    """Down of Q3_K by output is added whole, whatever is active; where that is so in all layers, auto is
    off."""
    path = tmp_path / "m.gguf"
    with open_gguf(model_path()) as file:
        metadata = {**file.metadata, "hotcold.ffn.down_layout": "by_output"}
        tensors = {name: file.load(name) for name in file.tensors}
    for i in range(6):
        by_neuron = tensors[f"blk.{i}.ffn_down.weight"]
        by_output = quantise(by_neuron.dequantise().T, "Q8_0")
        odd = random_blocks(np.random.default_rng(i), "Q3_K", *by_output.shape)
        tensors[f"blk.{i}.ffn_down.weight"] = odd if i < layers else by_output
    write_gguf(path, metadata, tensors)
    note = f"in {layers} of 6 layers down is Q3_K by_output, so its zeros are not skipped"
    exact, off = reference(path, sparsity="exact"), reference(path, sparsity="off")
    assert (exact.sparsity, exact.notes, off.notes) == ("exact", [note], [])
    auto = reference(path)
    assert auto.sparsity == ("off" if layers == 6 else "exact")
    assert auto.notes == [f"sparsity auto chooses off: {note}" if layers == 6 else note]
    decode_once(exact, [0])
    decode_once(off, [0])
    whole = (exact.counters.rows == off.counters.rows)[:, :3].all(axis=1)
    assert whole.tolist() == [i < layers for i in range(6)]


def test_predicted_without_a_predictor_is_refused() -> None:
    with pytest.raises(LoadError, match=r"no predictor .*: use exact, which is lossless"):
        reference(sparsity="predicted")


def test_auto_does_not_use_a_predictor_that_nobody_measured(folder: Path) -> None:
    """PowerInfer's own, and a sidecar as older versions and other programs write it."""
    session = reference(built_in_pwri(folder / "predictor.gguf", 0.0))
    assert session.sparsity == "exact"
    assert session.notes == [
        "sparsity auto chooses exact: predictor.gguf has no measurement of its predictors; this measures "
        "them: hotcold fit-predictor -m predictor.gguf `method=trained` -f TEXT -o NEW.predictor.gguf"
    ]
    session = reference(with_sidecar(folder, measured=None))
    assert session.sparsity == "exact"
    assert session.notes == [
        "sparsity auto chooses exact: model.predictor.gguf has no measurement of its predictors; this "
        "measures them: hotcold fit-predictor -m model.gguf `measure=model.predictor.gguf` -f TEXT "
        "-o NEW.predictor.gguf"
    ]


def test_a_predictor_that_nobody_uses_may_be_damaged(tmp_path: Path) -> None:
    """PowerInfer's files have one that ``auto`` never uses; ``predicted`` reads it and refuses."""
    factors = {i: (np.zeros((32, 7), np.float32), np.zeros((9, 32), np.float32)) for i in range(6)}
    write_pwri(tmp_path / "m.gguf", model_path(), factors, 0.0)
    assert reference(tmp_path / "m.gguf").sparsity == "exact"
    with pytest.raises(UserError, match="fc1"):
        reference(tmp_path / "m.gguf", sparsity="predicted")


def test_predicted_reads_the_predictor_too(folder: Path) -> None:
    path = built_in_pwri(folder / "predictor.gguf", 0.0)
    with open_gguf(path) as file:
        factors = [info for name, info in file.tensors.items() if ".fc" in name]
    exact, predicted = reference(path).footprint, reference(path, sparsity="predicted").footprint
    thresholds = 6 * 1024 * 4
    assert predicted.step_bytes - exact.step_bytes == sum(info.nbytes for info in factors) + thresholds
    assert predicted.step_params - exact.step_params == 6 * 32 * (256 + 1024)


def test_auto_uses_a_sidecar_whose_measurement_speaks_for_it(tmp_path: Path) -> None:
    path = with_sidecar(tmp_path, bound=1.0)
    session, exact = reference(path), reference(path, sparsity="exact")
    assert session.sparsity == "predicted" and exact.notes == []
    assert session.notes == [
        "sparsity auto chooses predicted, by model.predictor.gguf: perplexity 1.00020 [0.99960, 1.00080] "
        "times that of exact over 4096 tokens, 1.30 [1.20, 1.40] times as fast"
    ]
    decode_once(session, [0])
    assert not session.counters.rows[:, 0].any()
    extra = 6 * (34 * (32 * 256 + 1024 * 32) // 32 + 4 * 1024)
    assert session.footprint.step_bytes - exact.footprint.step_bytes == extra
    assert session.footprint.step_params - exact.footprint.step_params == 6 * 32 * (256 + 1024)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ppl_ratio": 1.002, "ppl_ratio_low": 1.0015, "ppl_ratio_high": 1.0025}, "perplexity is more than"),
        ({"ppl_ratio_high": 1.0011}, "about 1 more held-out tokens decide"),
        ({"speed_low": 0.99}, "generation was not faster than exact in every round"),
    ],
)
def test_auto_is_exact_where_the_measurement_speaks_against(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    session = reference(with_sidecar(tmp_path, measured=replace(PASSING, **changes)))
    (note,) = session.notes
    assert session.sparsity == "exact" and reason in note
    assert note.startswith("sparsity auto does not use model.predictor.gguf: ")
    predicted = session.model.session("predicted")
    decode_once(session, [0])
    decode_once(predicted, [0])
    logits = [each.transformer.read_logits(0, 1) for each in (session, predicted)]
    assert np.array_equal(*logits)  # it names all


def test_a_sidecar_that_is_named(tmp_path: Path) -> None:
    with_sidecar(tmp_path)
    named = tmp_path / "model.predictor.gguf"
    assert reference(predictor=named).sparsity == "predicted"  # of the built-in model, the same
    assert reference().model.session("predicted", named).sparsity == "predicted"
    with pytest.raises(PredictorError, match="belongs to the model with fingerprint"):
        reference(built_in_pwri(tmp_path / "predictor.gguf", 0.5), predictor=named)
    with pytest.raises(GGUFError, match="No such file"):
        reference(predictor=tmp_path / "missing.gguf", sparsity="predicted")


@pytest.mark.parametrize("mode", ["auto", "predicted"])
def test_a_sidecar_of_another_model_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    path = with_sidecar(tmp_path)
    with open_gguf(path) as file:
        tensors = {name: file.load(name) for name in file.tensors}
        up = tensors["blk.0.ffn_up.weight"]
        tensors["blk.0.ffn_up.weight"] = quantise(up.dequantise() * 2, "Q8_0")
        write_gguf(path, file.metadata, tensors)
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        PredictorError, match=r"model.predictor.gguf: belongs to the model with .* run hotcold"
    ):
        reference(path, sparsity=mode)
    monkeypatch.undo()
    assert reference(path, sparsity="exact").sparsity == "exact"  # which does not look at it


@pytest.mark.parametrize(("asked", "given"), [(None, 256), (2, 2), (100, 100), (256, 256), (0, 256)])
def test_context(asked: int | None, given: int) -> None:
    session = reference(context=asked)
    assert session.model.context == given
    assert session.transformer.batch.limits.pages_per_sequence == -(-given // 32) == session.cache.pages


@pytest.mark.parametrize("asked", [257, 100_000, 1, -5])
def test_a_context_that_the_model_does_not_have_is_refused(asked: int) -> None:
    with pytest.raises(LoadError, match=rf"context of {asked} positions \(`context`\): this .* 2 to 256"):
        reference(context=asked)


def test_the_default_context_can_be_lowered() -> None:
    assert reference(default_context=64).model.context == 64


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", read)
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 20)
    with pytest.raises(LoadError, match=r"not enough memory: .* 0\.00 GiB are free: use a smaller .* model"):
        reference()
    monkeypatch.setattr(memory, "available_memory", lambda: 12 << 20)
    smaller = r"use a smaller KV cache \(`cache_positions`\) or context \(`context`\)"
    with pytest.raises(LoadError, match=smaller):
        reference(sequences=100, cache_positions=100 * 256)


def test_the_cache_is_what_the_sequences_need_or_what_was_asked_for() -> None:
    assert reference(sequences=3).cache.pages == 3 * 8
    session = reference(sequences=3, cache_positions=300)
    assert (session.cache.pages, session.model.context) == (10, 256)
    small = reference(sequences=3, cache_positions=100)
    assert (small.cache.pages, small.model.context, small.model.limits.pages_per_sequence) == (4, 100, 4)
    with pytest.raises(LoadError, match=r"KV cache of 100 .* less than one context of 128 \(`context`\)"):
        reference(context=128, cache_positions=100)


def test_a_cache_is_smaller_where_memory_is_short_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one context: less is an error. A requested size gives this size or an error."""
    monkeypatch.setattr(memory, "available_memory", lambda: 16 << 20)
    session = reference(sequences=100)
    assert 8 <= session.cache.pages < 800
    (note,) = [note for note in session.notes if "share a KV cache" in note]
    assert note.startswith(f"100 requests share a KV cache of {session.cache.pages * 32} positions")
    assert "25600" in note
    monkeypatch.undo()
    assert not any("share a KV cache" in note for note in reference(sequences=100).notes)


def test_enough_or_unknown_memory_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (None, 1 << 30):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert reference().sparsity == "exact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": "fast"}, "sparsity 'fast': choose from auto, exact, predicted, off"),
        ({"sequences": 0}, "sequences is 0: at least 1"),
        ({"chunk": -1}, "chunk is -1: at least 1"),
        ({"cache_type": "q4_0"}, "cache type 'q4_0': choose from f16, q8_0, f32"),
        ({"backend": "tpu"}, "backend 'tpu' does not exist"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, LoadOptions(**{"backend": "reference", **options})).session()  # type: ignore[arg-type]


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("Once upon a time")
    with pytest.raises(GGUFError):
        reference(path)


def test_progress_ends_at_the_total() -> None:
    reports: list[tuple[int, int]] = []
    load(None, LoadOptions(backend="reference"), lambda done, total: reports.append((done, total))).session()
    assert reports == sorted(reports) and reports[-1][0] == reports[-1][1] > 7_000_000
    assert len({total for _, total in reports}) == 1


def decode_once(session: Session, positions: list[int], token: int = 300) -> None:
    """One step of decode rows at these positions of sequence 0."""
    batch, n = session.transformer.batch, len(positions)
    pages = session.cache.allocate("test", session.cache.free_pages)
    batch.pages[0, : len(pages)] = pages
    batch.tokens[:n], batch.positions[:n], batch.sequence[:n] = token, positions, 0
    batch.slots[:n] = [pages[p // 32] * 32 + p % 32 for p in positions]
    batch.lengths[0] = max(positions) + 1
    batch.logits_rows[:n] = range(n)
    batch.counts[:] = (n, n, n, 1)
    session.run()
    session.cache.release("test")


def test_a_dense_step_reads_the_whole_file_once() -> None:
    session = reference(sparsity="off")
    with open_gguf(model_path()) as file:
        tensors = sum(info.nbytes for info in file.tensors.values())
        assert "output.weight" not in file.tensors, "the head is the embedding, so it is read whole"
        weights = sum(int(np.prod(info.shape)) for info in file.tensors.values())
    decode_once(session, [0])
    fp, counters = session.footprint, session.counters
    read = fp.step_bytes + int((counters.rows[:, [0, 1, 2, 4]] * np.array(fp.row_bytes)).sum())
    assert read == tensors
    assert fp.step_params + int(counters.rows[:, :3].sum()) * fp.dim == weights
    assert fp.kv_bytes == 6 * 2 * 256 * 2
    assert reference(sparsity="off", cache_type="q8_0").footprint.kv_bytes == 6 * 2 * 256 * 34 // 32
    assert (counters.rows == [1024, 1024, 1024, 1024, 0]).all()


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-olmo2"])
def test_norms_of_q_and_k_are_read_whole(name: str, folder: Path) -> None:
    """One head wide, or as wide as all of them."""
    path = golden(name, folder).path
    session = reference(path, sparsity="off")
    with open_gguf(path) as file:
        tensors = sum(info.nbytes for info in file.tensors.values())
        if "output.weight" in file.tensors:
            tensors -= file.tensors["token_embd.weight"].nbytes  # a step reads only a row of it
    decode_once(session, [0], token=200)
    computed = session.counters.rows[:, [0, 1, 2, 4]] * np.array(session.footprint.row_bytes)
    assert session.footprint.step_bytes + computed.sum() == tensors


def test_counts_of_several_decode_rows() -> None:
    session = reference(sparsity="off")
    decode_once(session, [0, 1, 2])
    assert (session.counters.decode_tokens, session.counters.decode_steps) == (3, 1)
    assert session.counters.kv_positions == 1 + 2 + 3
    assert (session.counters.rows == [1024, 1024, 1024, 3 * 1024, 0]).all()


def test_exact_counts_active_neurons() -> None:
    session = reference()
    decode_once(session, [0])
    gate, up, down, pairs, _ = session.counters.rows.T
    assert (gate == 1024).all() and (up < 600).all() and (down == pairs).all()
    assert (pairs > 0).all() and (pairs < up).all()


def test_another_mode_shares_the_weights() -> None:
    session = reference()
    off = session.model.session("off")
    assert off.sparsity == "off" and off.cache is not session.cache
    decode_once(session, [0])
    decode_once(off, [0])
    assert np.array_equal(session.transformer.read_logits(0, 1), off.transformer.read_logits(0, 1))
    with pytest.raises(LoadError, match="no predictor"):
        session.model.session("predicted")


def test_what_the_memory_check_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar in the modes that use it, the scratch of long contexts, and a table that is held twice."""
    monkeypatch.setattr(memory, "available_memory", lambda: 0)

    def needs(path: Path | None = None, **options: object) -> str:
        with pytest.raises(LoadError) as caught:
            reference(path, **options)
        return str(caught.value)

    weight_bytes: list[int] = []
    inner = memory.check_memory

    def check(plan: MemoryPlan) -> None:
        weight_bytes.append(plan.cpu_bytes()["weights"])
        inner(plan)

    monkeypatch.setattr(memory, "check_memory", check)
    path = with_sidecar(tmp_path)
    with open_gguf(tmp_path / "model.predictor.gguf") as file:
        sidecar = sum(info.nbytes for info in file.tensors.values())
    for mode in ("off", "exact", "auto", "predicted"):
        needs(path, sparsity=mode)
    assert [n - weight_bytes[0] for n in weight_bytes] == [0, 0, sidecar, sidecar]
    assert "not enough memory: the model needs 0.01 GiB" in needs(path)

    file_bytes = 0
    with open_gguf(model_path()) as file:
        tied = "output.weight" not in file.tensors
        table = file.tensors["token_embd.weight"].nbytes
        file_bytes = sum(info.nbytes for info in file.tensors.values())
    needs(None, vram_budget=1 << 30, hot_backend="reference")
    assert weight_bytes[-1] == file_bytes + tied * table
    needs(None)
    assert weight_bytes[-1] == file_bytes


def test_the_memory_check_counts_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def refused(free: int) -> bool:
        monkeypatch.setattr(memory, "available_memory", lambda: free)
        try:
            reference(sequences=4, cache_positions=1024)
        except LoadError:
            return True
        return False

    session = reference(sequences=4, cache_positions=1024)
    config, limits = session.model.config, session.transformer.batch.limits
    with open_gguf(model_path()) as file:
        sizes.append(sum(info.nbytes for info in file.tensors.values()))
    sizes.append(cache_bytes(session))
    sizes.append(buffer_bytes(config, limits) + scratch_bytes(config, limits))
    assert refused(sum(sizes) - 1) and not refused(sum(sizes))


def test_a_mixed_step_does_not_count_rows() -> None:
    """So that rows and time belong to the same steps: a prompt row beside a decode row."""
    session = reference(sequences=2, sparsity="exact")
    engine = Engine(session)
    first = Request(Job([300] * 3, SamplingParams(temperature=0), max_tokens=9, ignore_eos=True))
    engine.add(first)
    engine.step()
    engine.step()
    before = session.counters.copy()
    assert before.rows.any() and before.decode_steps == 1
    engine.add(Request(Job([301] * 5, SamplingParams(temperature=0), max_tokens=9, ignore_eos=True)))
    engine.step()
    after = session.counters
    assert len(first.output) == 3
    assert (after.rows == before.rows).all() and after.decode_steps == 1
    assert after.prompt_tokens - before.prompt_tokens == 5


def test_what_a_backend_refuses_is_told_as_a_limit_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ReferenceBackend, *_: object) -> None:
        raise ValueError("ffn: more neurons than a layer may have here")

    monkeypatch.setattr(ReferenceBackend, "ffn_weights", refuse)
    with pytest.raises(LoadError, match=r"fable.*\.gguf cannot run here: ffn: more neurons than"):
        reference()


def test_threads_that_cannot_start_are_a_mistake_that_can_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(threads: int) -> None:
        raise ValueError(f"threads {threads}: only 3 can run here (out of memory): choose fewer (-t)")

    monkeypatch.setattr("hotcold.kernels.cpu._native.Pool", fail)
    with pytest.raises(UserError, match=r"^threads 7: only 3 can run here"):
        load(None, LoadOptions(threads=7)).session()
