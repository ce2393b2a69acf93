"""Vectors of texts, against hidden states of transformers; their bits, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.changed_models import changed
from support.golden import DATA, golden
from support.placed import on_two

from hotcold import LLM
from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.errors import UserError

#: of the golden vocabulary, which has 288
TEXTS = [[1, 5, 9, 33, 7], [1, 200], [*range(1, 70)], [1, 5, 9, 33, 7, 8, 100, 101, 102], [*range(1, 40), 3]]
POOLINGS = {"mean": 1, "last": 3}
CHOSEN = ("mean", "last", "cls")  #: by the user, of a file that names none


def file_of(folder: Path, name: str, pooling: object) -> Path:
    model = golden(name, folder).path
    with_key = folder / f"{name}-{pooling}.gguf"
    return changed(model, with_key, {f"{architecture(name)}.pooling_type": pooling})


def architecture(name: str) -> str:
    return {"tiny-llama": "llama", "tiny-qwen3": "qwen3", "tiny-lfm2": "lfm2"}[name]


def of_transformers(name: str, ids: list[int], pooling: str) -> npt.NDArray[np.float32]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(DATA / name, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    vector: Any = hidden.mean(0) if pooling == "mean" else hidden[0 if pooling == "cls" else -1]
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("embeddings")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_vectors_are_those_of_transformers(folder: Path, name: str, pooling: str, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "cache_type": "f32", "sequences": 3}
    with LLM(file_of(folder, name, POOLINGS[pooling]), **options) as llm:
        assert llm.model.pooling == pooling
        found = llm.embed(TEXTS)
    expected = np.array([of_transformers(name, ids, pooling) for ids in TEXTS])
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 2e-5
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-lfm2"])
def test_neither_batch_nor_chunk_nor_cache_changes_a_bit(folder: Path, name: str, pooling: str) -> None:
    path = file_of(folder, name, POOLINGS[pooling])
    with LLM(path) as llm:
        alone = np.array([llm.embed(ids) for ids in TEXTS])
        assert np.array_equal(llm.embed(TEXTS), alone)  # with what is cached
        text = llm.generate([1, 5], max_tokens=5, seed=1).ids
    for sequences, chunk in ((1, 3), (2, 16), (8, 64), (20, 5)):
        with LLM(path, sequences=sequences, chunk=chunk) as llm:
            assert np.array_equal(llm.embed(TEXTS), alone), (sequences, chunk)
            assert np.array_equal(llm.embed(TEXTS * 3), np.concatenate([alone] * 3))
            assert llm.generate([1, 5], max_tokens=5, seed=1).ids == text


@pytest.mark.parametrize("pooling", CHOSEN)
def test_a_file_that_names_no_pooling(folder: Path, pooling: str) -> None:
    """The user names it; neither batch, chunk nor cache changes a bit."""
    path = golden("tiny-qwen3", folder).path
    expected = np.array([of_transformers("tiny-qwen3", ids, pooling) for ids in TEXTS])
    with LLM(path, cache_type="f32", pooling=pooling) as llm:  # type: ignore[arg-type]
        alone = np.array([llm.embed(ids) for ids in TEXTS])
        assert np.abs(alone - expected).max() < 2e-5
        llm.generate(TEXTS[2], max_tokens=3)
        assert np.array_equal(llm.embed(TEXTS), alone)
    with LLM(path, cache_type="f32", pooling=pooling, sequences=8, chunk=5) as llm:  # type: ignore[arg-type]
        assert np.array_equal(llm.embed(TEXTS * 3), np.concatenate([alone] * 3))


def test_the_users_pooling_is_taken_before_the_files(folder: Path) -> None:
    path = file_of(folder, "tiny-llama", 1)
    expected = of_transformers("tiny-llama", TEXTS[0], "last")
    with LLM(path, cache_type="f32", pooling="last") as llm:
        assert np.abs(llm.embed(TEXTS[0]) - expected).max() < 2e-5
    with pytest.raises(UserError, match="pooling 'max': choose from mean, last, cls"):
        LLM(path, pooling="max")  # type: ignore[arg-type]


def test_beside_texts_that_are_generated(folder: Path) -> None:
    path = file_of(folder, "tiny-llama", 1)
    with LLM(path, sequences=4) as llm:
        alone = llm.embed(TEXTS[2])
        text = llm.generate([1, 5, 6], max_tokens=30, seed=1).ids
        pieces = llm.stream([1, 5, 6], max_tokens=30, seed=1)
        ids = next(pieces).ids
        assert np.array_equal(llm.embed(TEXTS[2]), alone)
        assert (*ids, *(id for piece in pieces for id in piece.ids)) == text


def test_too_few_pages_for_all(folder: Path) -> None:
    """Requests whose pages are taken away begin their sums anew."""
    path = file_of(folder, "tiny-llama", 1)
    texts = [[*range(1 + i, 91 + i)] for i in range(6)]
    with LLM(path, context=128) as llm:
        alone = np.array([llm.embed(ids) for ids in texts])
    with LLM(path, context=128, sequences=6, cache_positions=256, chunk=16) as llm:
        assert np.array_equal(llm.embed(texts), alone)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (None, "its file has no pooling type (llama.pooling_type)"),
        (0, "llama.pooling_type is 0"),
        (2, "llama.pooling_type is 2, cls"),
        (4, "llama.pooling_type is 4, rank): allowed are 1 (mean) and 3 (last)"),
        (7, "llama.pooling_type is 7: allowed are 1 (mean) and 3 (last)"),
        ("last", "llama.pooling_type is 'last': allowed are"),
    ],
)
def test_other_poolings_are_refused(folder: Path, kind: object, error: str) -> None:
    with LLM(file_of(folder, "tiny-llama", kind)) as llm:
        with pytest.raises(UserError) as raised:
            llm.embed([1, 2])
        assert error in str(raised.value)


def test_texts_that_cannot_be(folder: Path) -> None:
    with LLM(file_of(folder, "tiny-llama", 3), context=32) as llm:
        for prompt, error in (([], "there are no texts"), ([[1], [999]], "999"), ([[1] * 40], "40 tokens")):
            with pytest.raises(UserError, match=error):
                llm.embed(prompt)


@pytest.mark.one_driver
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_on_a_gpu(vulkan: Any, share: float, folder: Path) -> None:
    """Rows after the last norm are read from where the head lies."""
    path = file_of(folder, "tiny-llama", 1)
    found = []
    for options in ({"chunk": 96}, {"chunk": 7, "sequences": 3}):
        session = on_two(vulkan, share, path, context=96, **options)
        requests = [Request(Job(ids, max_tokens=1, pooling="mean")) for ids in TEXTS]
        Engine(session).run(requests)
        found.append([request.vector for request in requests])
        session.close()
    assert found[0] == found[1]
    with LLM(path) as llm:
        assert np.abs(np.array(found[0]) - llm.embed(TEXTS)).max() < 1e-3
