"""`/v1/embeddings`, `hotcold embed` and `AsyncLLM.embed` on a model whose file names a pooling."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.changed_models import changed
from support.served import Served, served

from hotcold import LLM, AsyncLLM
from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.errors import UserError
from hotcold.runtime.pooling import pooling_of
from tests.server.conftest import Application

TEXTS = [f"Once upon a time there {'were' if i % 3 else 'was'} {i} foxes" for i in range(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "vectors.gguf"
    return changed(model_path(), out, {"bamboo.pooling_type": 3})


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served("-m", str(model), "-t", "1") as found:
        assert found.url
        yield found


@pytest.fixture(scope="module")
def vectors(model: Path) -> Iterator[np.ndarray]:
    with LLM(model) as llm:
        yield llm.embed(TEXTS)


def test_more_texts_than_may_wait(server: Served, vectors: np.ndarray) -> None:
    body = {"model": "any", "input": TEXTS, "user": "me"}
    with server.client() as client:
        reply = client.post("/v1/embeddings", json=body).json()
        coded = client.post("/embeddings", json={**body, "encoding_format": "base64"}).json()
    assert reply["object"] == "list" and reply["model"] == "vectors"
    assert [(each["object"], each["index"]) for each in reply["data"]] == [
        ("embedding", i) for i in range(90)
    ]
    assert np.array_equal(np.array([each["embedding"] for each in reply["data"]], np.float32), vectors)
    for each, vector in zip(coded["data"], vectors, strict=True):
        assert np.array_equal(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"), vector)
    with LLM() as llm:
        tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def cut(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """The first values of each vector, at length 1."""
    first = vectors[:, :dimensions].astype(np.float64)
    return first / np.linalg.norm(first, axis=1, keepdims=True)


def test_dimensions(server: Served, vectors: np.ndarray) -> None:
    width = vectors.shape[1]
    with server.client() as client:
        for path, key in (("/v1/embeddings", "data"), ("/api/embed", "embeddings")):
            for dimensions in (1, 7, 32, width - 1, width, None):
                body = {"input": TEXTS[:3], "dimensions": dimensions}
                found = client.post(path, json=body).json()[key]
                found = np.array([each["embedding"] for each in found] if key == "data" else found)
                assert np.abs(found - cut(vectors[:3], dimensions or width)).max() < 1e-6
                if dimensions in (width, None):
                    assert np.array_equal(found.astype(np.float32), vectors[:3])
            reply = client.post(path, json={"input": "a", "dimensions": width + 1})
            assert reply.status_code == 400 and f"allowed are 1 to {width}" in reply.text


def test_openais_client(server: Served, vectors: np.ndarray) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="any", input=TEXTS[:2])  # asks for base64
        assert np.array_equal(np.array([each.embedding for each in found.data], np.float32), vectors[:2])
        one = client.embeddings.create(model="any", input=TEXTS[1], encoding_format="float")
        assert np.array_equal(np.float32(one.data[0].embedding), vectors[1])
        short = client.embeddings.create(model="any", input=TEXTS[:2], dimensions=8)
        assert np.abs(np.array([each.embedding for each in short.data]) - cut(vectors[:2], 8)).max() < 1e-6
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="any", input="a", dimensions=100_000)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [1, -1]}, "input"),
        ({"input": [[1], ["a"]]}, "input[1][0]"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a " * 3000}, "input"),
        ({"input": [[5] * 300]}, "input"),
        ({"input": [[5], [99999999]]}, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
    ],
)
def test_bad_requests(server: Served, body: dict[str, object], param: str) -> None:
    with server.client() as client:
        reply = client.post("/v1/embeddings", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.json()


def test_a_model_without_a_pooling_says_so(app: Application) -> None:
    error = app.client.post("/v1/embeddings", json={"input": "a"}).json()["error"]
    assert (
        error["code"] == "unsupported_model"
        and error["message"].startswith("the model generates text and gives no embeddings: its file has no")
        and "no pooling type (bamboo.pooling_type)" in error["message"]
    )


@pytest.mark.parametrize("kind", [np.array([1, 3]), np.array([1]), ["mean"], "mean", 1.0, True, 5])
def test_a_pooling_that_is_none_is_refused(kind: object) -> None:
    with pytest.raises(UserError, match=r"x\.pooling_type is .*: allowed are 1 \(mean\) and 3 \(last\)"):
        pooling_of({"general.architecture": "x", "x.pooling_type": kind})


async def embedded(model: Path) -> tuple[np.ndarray, np.ndarray]:
    async with AsyncLLM(model, max_waiting=2) as llm:
        return await llm.embed(TEXTS[:20]), await llm.embed(TEXTS[0])


def test_in_another_process(model: Path, vectors: np.ndarray) -> None:
    import asyncio

    several, one = asyncio.run(embedded(model))
    assert np.array_equal(several, vectors[:20]) and np.array_equal(one, vectors[0])


def test_the_command(
    model: Path, vectors: np.ndarray, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["embed", "-m", str(model), "-p", TEXTS[0], "-p", TEXTS[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert np.array_equal(np.array([json.loads(line) for line in lines], np.float32), vectors[:2])
    lines_of_texts = tmp_path / "texts"
    lines_of_texts.write_text("".join(f"{text}\n" for text in TEXTS[:3]))
    assert main(["embed", "-m", str(model), "-f", str(lines_of_texts), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    one = tmp_path / "one"
    one.write_bytes("a\u2028b\x0cc\r\n".encode())  # one line, whatever str.splitlines takes for several
    assert main(["embed", "-m", str(model), "-f", str(one)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert np.array_equal(np.float32(report["embeddings"]), vectors[:3]) and report["pooling"] == "last"
    one.write_text(f"a\n{'b ' * 400}\n")
    assert main(["embed", "-m", str(model), "-p", "c", "-f", str(one)]) == 2
    assert "line 2: the prompt" in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "-p", "c", "-p", "b " * 400]) == 2
    assert "text 2 of `-p`: the prompt" in capsys.readouterr().err
    bare = changed(model, tmp_path / "bare.gguf", {"tokenizer.ggml.add_bos_token": False})
    one.write_text("a\n\nb\n")
    assert main(["embed", "-m", str(bare), "-f", str(one)]) == 2
    assert "line 2: the prompt has no tokens" in capsys.readouterr().err


@pytest.mark.parametrize("pooling", [None, "mean", "last", "cls"])
def test_the_command_of_a_file_that_names_no_pooling(
    vectors: np.ndarray, capsys: pytest.CaptureFixture[str], pooling: str | None
) -> None:
    """The last token's vector is taken, and a note says so."""
    option = [] if pooling is None else ["--pooling", pooling]
    assert main(["embed", "-p", TEXTS[0], *option]) == 0
    out, err = capsys.readouterr()
    assert ("does not say how to pool: the last token's vector is used" in err) == (pooling is None)
    found = np.array(json.loads(out), np.float32)
    if pooling in (None, "last"):
        assert np.array_equal(found, vectors[0])
    else:
        with LLM(pooling=pooling) as llm:  # type: ignore[arg-type]
            assert np.array_equal(found, llm.embed(TEXTS[0]))
        assert not np.allclose(found, vectors[0])


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_server_of_a_file_that_names_no_pooling(pooling: str) -> None:
    with LLM(pooling=pooling) as llm:  # type: ignore[arg-type]
        expected = llm.embed(TEXTS[:2])
    with served("-t", "1", "--pooling", pooling) as server, server.client() as client:
        for path in ("/v1/embeddings", "/api/embed"):
            reply = client.post(path, json={"input": TEXTS[:2]}).json()
            found = reply.get("embeddings") or [each["embedding"] for each in reply["data"]]
            assert np.array_equal(np.array(found, np.float32), expected)
        assert "embedding" in client.post("/api/show", json={}).json()["capabilities"]
