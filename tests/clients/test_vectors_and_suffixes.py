"""Clients' vectors and texts to fill in, on the built-in model with the keys that these need; the models that
they list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.changed_models import changed
from support.served import Served, served

from hotcold import LLM
from hotcold.demo import model_path

TEXTS = ["a fox", "a vixen in the snow"]
MARKS = {f"tokenizer.ggml.fim_{kind}_token_id": 400 + i for i, kind in enumerate(("pre", "suf", "mid"))}
PREFIX, SUFFIX = "Once upon a time there was a ", " who lived in a forest."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(model_path(), tmp_path_factory.mktemp("models") / "filling.gguf", MARKS)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served("-m", str(model), "-t", "1", "--pooling", "last", "--alias", "tiny") as found:
        yield found


@pytest.fixture(scope="module")
def vectors(model: Path) -> npt.NDArray[np.float32]:
    with LLM(model, pooling="last") as llm:
        return llm.embed(TEXTS)


@pytest.fixture(scope="module")
def middle(model: Path) -> str:
    """The answer to a prompt that has the model's own marks."""
    with LLM(model) as llm:
        before, after = (llm.tokenizer.encode(text, add_bos=False) for text in (PREFIX, SUFFIX))
        bos = [llm.tokenizer.bos_id] if llm.tokenizer.add_bos else []
        prompt = [*bos, 400, *before, 401, *after, 402]
        return llm.generate(prompt, max_tokens=12, temperature=0).text


def near(found: Any, expected: npt.NDArray[np.float32]) -> bool:
    return bool(np.abs(np.array(found, np.float32) - expected).max() < 1e-6)


def test_openais_client(server: Served, vectors: npt.NDArray[np.float32], middle: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        data = client.embeddings.create(model="tiny", input=TEXTS, dimensions=16).data
        first = vectors[:, :16] / np.linalg.norm(vectors[:, :16], axis=1, keepdims=True)
        assert near([each.embedding for each in data], first)
        options: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        reply = client.completions.create(prompt=PREFIX, suffix=SUFFIX, **options)
        assert reply.choices[0].text == middle
        stream = client.completions.create(prompt=PREFIX, suffix=SUFFIX, stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in stream) == middle
        (entry,) = client.models.list()
        assert entry.id == "tiny" and entry.max_model_len == client.models.retrieve("tiny").context_length


def test_ollamas_client(server: Served, vectors: npt.NDArray[np.float32], middle: str) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client:
        reply = client.embed("tiny", TEXTS)
        assert near(reply.embeddings, vectors) and reply.prompt_eval_count > 0
        assert near(client.embed("tiny", TEXTS[0], truncate=False).embeddings, vectors[:1])
        assert near(client.embeddings("tiny", TEXTS[0]).embedding, vectors[0])
        assert len(client.embed("tiny", TEXTS, dimensions=8).embeddings[0]) == 8
        options = {"temperature": 0, "num_predict": 12}
        assert client.generate("tiny", PREFIX, suffix=SUFFIX, options=options).response == middle
        assert client.pull("tiny").status == "success"
        assert [part.status for part in client.pull("tiny:latest", stream=True)][-1] == "success"
        with pytest.raises(ollama.ResponseError, match="'other' is not served here") as caught:
            client.pull("other")
        assert caught.value.status_code == 404
        assert {"insert", "embedding"} <= {*client.show("tiny").capabilities}


def test_langchains_client_of_ollama(server: Served, vectors: npt.NDArray[np.float32]) -> None:
    langchain_ollama = pytest.importorskip("langchain_ollama")
    model = langchain_ollama.OllamaEmbeddings(model="tiny", base_url=server.url, validate_model_on_init=True)
    assert near(model.embed_documents(TEXTS), vectors)
    assert near(model.embed_query(TEXTS[1]), vectors[1])
    model._client.close()


def test_anthropics_client(server: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        (entry,) = client.models.list(limit=5)
        assert (entry.type, entry.id, entry.display_name) == ("model", "tiny", "tiny")
        assert client.models.retrieve("tiny").created_at == entry.created_at
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("another")
