"""Models larger than their budget of memory: experts are read of the file when they are named."""

from __future__ import annotations

import _thread
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.many_experts import budget, many_experts

from hotcold.commands import cli
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError
from hotcold.formats.files import FileError
from hotcold.placement import shelves
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session

COUNT = 20
#: Each way in which weights of experts lie in memory, and both ways to cut work.
MODELS = [
    ("tiny-qwen3moe", "Q4_0", "by_output"),  # down is a dot
    ("tiny-turbosparse", "Q4_0", "by_output"),  # panels
    ("tiny-turbosparse", "Q8_0", "by_neuron"),  # pairs of rows
    ("tiny-smallthinker", "F32", "by_output"),  # transposed; the router is early
    ("tiny-gpt-oss", "Q8_0", "by_output"),  # biases
]
OPTIONS: dict[str, Any] = {"sequences": 3, "context": 128, "chunk": 32}


@pytest.fixture(autouse=True)
def no_reading_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are smaller than the buffers that they would be read with."""
    monkeypatch.setattr(shelves, "reading_bytes", lambda row_bytes: 0)


def texts(session: Session, tokens: int = 12) -> list[list[int]]:
    """Three prompts at the same time, of which one is longer than a chunk."""
    random = np.random.default_rng(5)
    prompts = [[1, *random.integers(3, 288, length).tolist()] for length in (4, 50, 9)]
    params = SamplingParams(temperature=0)
    requests = [Request(Job(prompt, params, max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    Engine(session).run(requests)
    return [request.output for request in requests]


def last_logits(session: Session) -> np.ndarray:
    rows = session.transformer.read_logits(0, 1)
    return rows.copy()


def opened(path: Path, share: float | None, threads: int = 2, **more: Any) -> Session:
    given = OPTIONS | more
    ram = {} if share is None else {"ram_budget": budget(path, share, **given)}
    return load(path, LoadOptions(threads=threads, **given, **ram)).session()


@pytest.mark.parametrize(("name", "type", "down"), MODELS)
def test_text_and_bits_are_the_same_at_every_budget(name: str, type: str, down: str, tmp_path: Path) -> None:
    path = many_experts(name, tmp_path, type=type, down=down, count=COUNT)
    whole = opened(path, None)
    expected, logits, rows = texts(whole), last_logits(whole), whole.counters.rows.copy()
    assert len({*map(tuple, expected)}) == 3
    assert whole.model.disk_counts() is None
    for share, threads in ((1.0, 2), (0.5, 1), (0.3, 3), (0.0, 2)):
        session = opened(path, share, threads)
        own = session.model.shelves
        assert own is not None and own.all_fit == (share == 1)
        assert sum(own.bill.values()) + own.expert_bytes <= own.budget_bytes
        assert texts(session) == expected
        np.testing.assert_array_equal(last_logits(session), logits)
        np.testing.assert_array_equal(session.counters.rows, rows)
        counts = session.model.disk_counts()
        if share == 1:
            assert counts is None
            continue
        assert counts is not None and counts.misses > 0
        assert counts.nbytes >= counts.misses * min(own.unit_bytes)
        assert (counts.hits > 0) or share < 0.5


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    model: dict[str, Any] = {"type": "Q8_0", "down": "by_output", "count": COUNT, "fused": True}
    path = many_experts("tiny-qwen3moe", tmp_path, **model)
    assert texts(opened(path, 0.3)) == texts(opened(path, None))


def test_what_is_read_depends_on_tokens_alone(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    found = []
    for threads in (1, 3):
        session = opened(path, 0.3, threads)
        texts(session)
        counts = session.model.disk_counts()
        assert counts is not None
        found.append((counts.hits, counts.misses, counts.nbytes))
        counters = session.counters
        assert 0 < counters.expert_misses < counts.misses  # prompts are not counted there
    assert found[0] == found[1]


def test_a_file_that_is_cut_ends_the_request_alone(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
    expected = texts(session)
    data, times = path.read_bytes(), os.stat(path)
    os.truncate(path, len(data) // 3)
    needed = "layer [01]: expert [0-9]+ cannot be read: the file is shorter than it was"
    with pytest.raises(FileError, match=needed) as error:
        texts(session)
    assert path.name in str(error.value)
    path.write_bytes(data)
    with pytest.raises(FileError, match="the file has changed since it was opened"):
        texts(session)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert texts(session) == expected


def test_a_file_that_is_replaced_under_its_name_is_read_on(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
    other = tmp_path / "other"
    other.write_bytes(b"another file")
    os.replace(other, path)
    again = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    assert texts(session) == texts(opened(again, None))


def test_an_interrupt_ends_a_wait_for_the_disk(tmp_path: Path) -> None:
    path = many_experts("tiny-turbosparse", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    session = opened(path, 0.3)
    backend: Any = session.model.backend
    disk = backend._packer.disk
    assert disk is not None
    disk.native.hold(True)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        texts(session)
    timer.join()
    disk.native.hold(False)
    assert texts(session) == texts(opened(path, None))


def test_a_session_beside_another_shares_the_places(tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    first = opened(path, 0.3)
    second = first.model.session("off")
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda i=i, each=each: found.update({i: texts(each)}))
        for i, each in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == texts(opened(path, None))


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"gpu": "0"}, "leave out `gpu`"),
        ({"vram_budget": 1 << 30}, "leave out `vram_budget`"),
        ({"hot_backend": "cpu"}, "leave out `hot_backend`"),
        ({"backend": "reference"}, "needs the backend cpu"),
    ],
)
def test_a_budget_is_for_the_cpu_alone(options: dict[str, Any], needed: str, tmp_path: Path) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    with pytest.raises(UserError, match=needed):
        load(path, LoadOptions(ram_budget=1 << 40, **options))


def test_a_budget_is_for_experts() -> None:
    with pytest.raises(UserError, match="`ram_budget` is for models of experts: this model has none"):
        load(model_path(), LoadOptions(ram_budget=1 << 40))


def test_generate_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = many_experts("tiny-qwen3moe", tmp_path, type="Q4_0", down="by_output", count=COUNT)
    ram = budget(path, 0.3, context=128)
    size = f"{-(-ram // 1024)}KiB"
    args = ["generate", "-m", str(path), "-p", "the hen", "-n", "8", "-c", "128", "-t", "2"]
    args += ["--ram-budget", size]
    assert cli.main(args) == 0
    told = capsys.readouterr().err
    assert "6 of 20 experts of each layer (30% of their bytes) fit in" in told
    assert "of experts in memory" in told and "from disk per token" in told
    assert cli.main([*args[:-1], "64KiB"]) == 2
    assert "--ram-budget of 64.00 KiB: this model needs" in capsys.readouterr().err
