"""Rows of a prompt and rows that decode give the same bits, under off and exact: logits, keys and values.

So what was generated may be read again like a prompt, and its pages be found by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden import FAMILIES, NAMES, golden
from support.placed import on_two
from support.sidecars import with_sidecar

from hotcold.kernels.backend import PAGE
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.instruction_sets import LOOPS, supported_isas
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session

CHUNK = 64  # rows of the largest steps; as many rows may have logits
Bits = tuple[np.ndarray, list[np.ndarray]]


def options(**more: Any) -> dict[str, Any]:
    """Logits follow the number of sequences; only one is used."""
    return {"threads": 1, "chunk": CHUNK, "sequences": CHUNK + 16, "cache_positions": 256, **more}


def computed(session: Session, tokens: list[int], rows: int, *, decode: bool) -> Bits:
    """Logits after every token, and all keys and values, from steps of some rows of one kind."""
    batch, cache, n_tokens = session.transformer.batch, session.cache, len(tokens)
    cache.clear()
    pages = np.array(cache.allocate("test", -(-n_tokens // PAGE)))
    logits = []
    for start in range(0, n_tokens, rows):
        n = batch.put(0, 0, start, tokens[start : start + rows], pages)
        batch.logits_rows[:n] = range(n)
        batch.counts[:] = (n, n if decode else 0, n, 1)
        session.run()
        logits.append(np.array(session.transformer.read_logits(0, n)))
    kept = []
    for backend, both in zip(session.model.devices.layers, session.state.layers, strict=True):
        for each in both:
            values = np.moveaxis(np.asarray(backend.read(each))[pages], 2, 1)  # [pages, PAGE, heads, row]
            kept.append(values.reshape(-1, *values.shape[2:])[:n_tokens].view(np.uint8))
    return np.concatenate(logits), kept


def assert_same(session: Session, length: int = 100, rows: tuple[int, ...] = (1, 7, 33)) -> None:
    """``rows``: around the sizes of tiles, pages and programs; the length crosses pages."""
    vocab = session.model.config.vocab
    tokens = np.random.default_rng(3).integers(3, vocab, min(length, session.model.context)).tolist()
    logits, kept = computed(session, tokens, 16, decode=True)
    assert len({row.tobytes() for row in logits}) == len(tokens)
    kinds = [(n, decode) for n in rows for decode in (True, False) if n <= 16 or not decode]
    for n, decode in kinds:
        other_logits, other_kept = computed(session, tokens, n, decode=decode)
        assert np.array_equal(other_logits, logits), (n, decode)
        for mine, other in zip(kept, other_kept, strict=True):
            assert np.array_equal(mine, other), (n, decode)


@pytest.mark.parametrize(
    ("isa", "sparsity", "cache_type"),
    [
        *((isa, "exact", "f16") for isa in supported_isas()),
        (supported_isas()[0], "off", "q8_0"),
        pytest.param(supported_isas()[-1], "off", "f16", marks=pytest.mark.full),
        (supported_isas()[-1], "exact", "q8_0"),
        (supported_isas()[-1] + LOOPS, "off", "f16"),
    ],
)
def test_with_each_instruction_set(
    isa: str, sparsity: str, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTCOLD_ISA", isa)
    session = load(None, LoadOptions(**options(sparsity=sparsity, cache_type=cache_type))).session()
    assert getattr(session.model.backend, "isa", None) == isa
    assert_same(session, length=34 if isa.startswith("scalar") else 130)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("type", "down"), [("F32", None), ("Q8_0", "by_neuron"), ("Q4_0", "by_output")])
def test_of_each_family(name: str, type: str, down: str | None, tmp_path: Path) -> None:
    """Norms, gates, activations with zeros and without, and down in each layout, as far as shapes allow."""
    try:
        path = golden(name, tmp_path, type=type, down=down).path
    except ValueError as error:
        pytest.skip(f"no such file of this model: {error}")
    assert_same(load(path, LoadOptions(**options())).session())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-drelu", "tiny-granitemoe"])
def test_of_bf16_weights_by_tiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense FFN, an FFN whose sparse rows are gathered, and experts: in each, products have one math for
    prompt rows and decode rows."""
    path, least = golden(name, tmp_path, type="BF16").path, supported_isas()[-1]
    logits = []
    for isa in (least, least + LOOPS):
        monkeypatch.setenv("HOTCOLD_ISA", isa)
        session = load(path, LoadOptions(**options(cache_type="f32"))).session()
        assert_same(session, length=24, rows=(1, 17))
        logits.append(computed(session, list(range(3, 27)), 16, decode=True)[0])
    assert (logits[0] != logits[1]).any(), "no product used tiles"
    assert np.abs(logits[1] - logits[0]).max() <= 1e-4 * np.abs(logits[0]).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_of_each_smaller_family(name: str, tmp_path: Path) -> None:
    """Windows, layers without positions, norms of what is added, scales, learned positions."""
    path = golden(name, tmp_path).path
    assert_same(load(path, LoadOptions(**options())).session(), length=48, rows=(7, 33))


@pytest.mark.parametrize("name", ["tiny-minicpm", "tiny-opt", "tiny-arcee"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_split_families_are_transformers(name: str, share: float, tmp_path: Path) -> None:
    """MiniCPM scales what the two halves of an FFN add up to."""
    tiny = golden(name, tmp_path)
    session = on_two(CPUBackend(1), share, tiny.path, **_without_threads(options(cache_type="f32")))
    for decode in (True, False):
        logits, _ = computed(session, tiny.prompt.tolist(), 16, decode=decode)
        np.testing.assert_allclose(logits, tiny.prompt_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_on_two_processors(share: float) -> None:
    assert_same(on_two(CPUBackend(2), share, **_without_threads(options())))


@pytest.mark.one_driver
def test_on_a_gpu(vulkan: Any) -> None:
    """With half of the neurons there, and all."""
    more = _without_threads(options(chunk=24, sequences=24))
    for share in (0.5, 1.0):
        assert_same(on_two(vulkan, share, **more), length=40, rows=(5, 24))


def test_that_rows_can_differ(tmp_path: Path) -> None:
    """Under predicted they do, where predictors leave neurons out: else nothing would be shown here."""
    path = with_sidecar(tmp_path, 1e30)
    with pytest.raises(AssertionError):
        assert_same(load(path, LoadOptions(**options(sparsity="predicted"))).session())


def _without_threads(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "threads"}
