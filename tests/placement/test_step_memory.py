"""The predicted memory of a step is what the cpu backend takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.buffers import allocations, cache_bytes
from support.golden import FAMILIES, golden

from hotcold.kernels.backend import DECODE_ROWS, PAGE, BatchLimits
from hotcold.kernels.instruction_sets import ISA_VARIABLE, LOOPS, supported_isas
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


def taken(session: Session) -> int:
    """Returns the scratch bytes of a session's largest program."""
    programs = [part for parts in session.transformer._programs.values() for part in parts]
    return max(getattr(part, "inner", part).native.scratch_bytes for part in programs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"chunk": 16}, {"context": 40, "sequences": 20}], ids=str)
def test_scratch_of_programs(made: Callable[..., Session], name: str, options: dict[str, int]) -> None:
    session = made(name, **options)
    truth, counted = taken(session), scratch_bytes(session.model.config, session.transformer.batch.limits)
    assert truth <= counted <= 1.25 * truth + 4096


@pytest.mark.parametrize(
    ("name", "math"), [*itertools.product(MODELS, ("same", "fast")), ("tiny-minicpm", "split")]
)
def test_scratch_of_prompts_by_tiles(
    made: Callable[..., Session], name: str, math: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, supported_isas()[-1] + LOOPS)
    session = made(name, prompt_math=math)
    plan, limits = session.model.plan, session.transformer.batch.limits
    truth, counted = taken(session), plan.step_bytes - buffer_bytes(plan.config, limits)
    assert truth <= counted <= 1.25 * truth + 4096


def test_quantised_models_take_no_memory_for_halves(
    made: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, supported_isas()[-1] + LOOPS)
    same, split, fast = (taken(made("", prompt_math=math)) for math in ("same", "split", "fast"))
    assert same == split < fast


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
