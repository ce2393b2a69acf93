"""The predicted memory of a step is what the cpu backend takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.buffers import allocations, cache_bytes
from support.golden import FAMILIES, golden

from hotcold.kernels.backend import DECODE_ROWS, PAGE, BatchLimits
from hotcold.model.mixers.attention import AttentionShape
from hotcold.placement.step_memory import buffer_bytes, scratch_bytes
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session

MODELS = ["", "tiny-llama", "tiny-falcon", "tiny-drelu", "tiny-qwen3"]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Session]:
    def make(name: str, **options: Any) -> Session:
        path = golden(name, tmp_path, type="F32" if name in FAMILIES else "Q8_0").path if name else None
        return load(path, LoadOptions(threads=1, **options)).session()

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"chunk": 16}, {"context": 40, "sequences": 20}], ids=str)
def test_scratch_of_programs(made: Callable[..., Session], name: str, options: dict[str, int]) -> None:
    session = made(name, **options)
    truth = max(
        getattr(part, "inner", part).native.scratch_bytes
        for parts in session.transformer._programs.values()
        for part in parts
    )
    counted = scratch_bytes(session.model.config, session.transformer.batch.limits)
    assert truth <= counted <= 1.25 * truth + 4096


@pytest.mark.parametrize("name", [*MODELS, "tiny-minicpm", "tiny-gemma3"])
@pytest.mark.parametrize("options", [{}, {"chunk": 16}, {"context": 40, "sequences": 20}], ids=str)
def test_buffers(
    made: Callable[..., Session], name: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made(name, **options)
    found = allocations(monkeypatch)
    again = session.model.session(session.sparsity)
    total, cache = sum(found), cache_bytes(again)
    counted = buffer_bytes(session.model.config, session.transformer.batch.limits)
    assert total - cache <= counted <= 1.5 * (total - cache)


def test_long_contexts_and_many_heads() -> None:
    """16 decode rows, 64 heads of 128 and 512 splits of 256 positions, each with a maximum and a sum."""
    dims = SimpleNamespace(
        dim=8192,
        mixers=(AttentionShape(64, 8, 128),),
        buffers=(("q", (64, 128)),),
        vocab=32000,
        neurons=(16,),
        gated=True,
        experts=None,
        normed=(),
        down_layout="by_neuron",
        activation="relu",
    )
    limits = BatchLimits(DECODE_ROWS + 128, 1, 131072 // PAGE, DECODE_ROWS)
    assert scratch_bytes(dims, limits) == pytest.approx(16 * 64 * 512 * 130 * 4, rel=1e-5)  # 273 MB
