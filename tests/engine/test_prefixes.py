"""Requests that begin with pages of a shared prefix: the same tokens, fewer rows, no page written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from history_model import VOCAB, follow, history_model
from hypothesis import given
from hypothesis import strategies as st
from sidecars import with_sidecar

from hotcold.engine.engine import Engine
from hotcold.engine.events import Token
from hotcold.engine.load_options import LoadOptions
from hotcold.engine.loading import load
from hotcold.engine.request import Request
from hotcold.engine.sampler import SamplingParams
from hotcold.kernels.backend import PAGE

GREEDY = SamplingParams(temperature=0)


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    return Request(prompt, GREEDY, max_tokens=n, ignore_eos=True, **more)


def watch(session: Any) -> None:
    """From now on a row that is written to a page with several owners is a failure."""
    inner = session.run

    def run() -> None:
        batch, pool = session.transformer.batch, session.cache
        rows = int(batch.counts[0])
        for page in set((batch.slots[:rows] // PAGE).tolist()):
            assert sum(page in pages for pages in pool._owned.values()) == 1, "a shared page was written"
        inner()

    session.run = run


class Store:
    """Keeps one page of a prompt under each key, as a chain does, and gives up the oldest first."""

    def __init__(self, engine: Engine) -> None:
        self.cache = engine.session.cache
        self.kept: list[tuple[int, ...]] = []
        engine.scheduler.reclaim = self.reclaim

    def chain(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)]

    def keep(self, request: Request) -> None:
        """To be called when the whole prompt is in the cache."""
        for i, key in enumerate(self.chain(list(request.prompt))):
            if not self.cache.owns(key):
                self.cache.allocate(key, 0, shared=request.pages[i : i + 1])
                self.kept.append(key)

    def reclaim(self, pages: int) -> None:
        before = self.cache.free_pages
        while self.kept and self.cache.free_pages < before + pages:
            self.cache.release(self.kept.pop(0))


def prompts_that_begin_alike(lengths: list[tuple[int, int]], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, VOCAB, 400).tolist()
    return [[*stem[:common], *rng.integers(0, VOCAB, own).tolist()] or [0] for common, own in lengths]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 60)), min_size=1, max_size=12),
    n=st.integers(1, 40),
    sequences=st.integers(1, 4),
    spare_pages=st.integers(0, 20),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_with_and_without_a_shared_prefix(
    lengths: list[tuple[int, int]], n: int, sequences: int, spare_pages: int, chunk: int, seed: int
) -> None:
    """Whatever is kept, given up, shared or waited for."""
    session = history_model(context=230, sequences=sequences, pages=8 + spare_pages, chunk=chunk)
    watch(session)
    engine = Engine(session)
    store = Store(engine)
    requests = [greedy(prompt, n) for prompt in prompts_that_begin_alike(lengths, seed)]
    for request in requests:
        request.prefix = store.chain(list(request.prompt))
        engine.add(request)
    for _ in range(5000):
        for event in engine.step():
            if isinstance(event, Token) and len(event.request.output) == 1 and not event.request.finished:
                store.keep(event.request)
        if all(request.finished for request in requests):
            break
    for request in requests:
        assert request.output == follow(list(request.prompt), n, ignore_eos=True)
        assert request.reused % PAGE == 0 and request.reused < len(request.prompt)
    prompt_rows = sum(rows for _, rows in session.transformer.row_counts)
    assert prompt_rows == sum(len(request.prompt) - request.reused for request in requests)
    store.reclaim(session.cache.pages)
    assert session.cache.free_pages == session.cache.pages


@pytest.mark.parametrize(
    ("tokens", "kept", "reused"),
    [(97, 3, 96), (96, 3, 64), (100, 2, 64), (33, 3, 32), (32, 3, 0), (5, 3, 0), (100, 0, 0)],
)
def test_full_pages_are_reused_and_one_row_is_left(tokens: int, kept: int, reused: int) -> None:
    """The row after the last token is needed for the token that follows."""
    session = history_model(context=200, sequences=1, chunk=200)
    engine = Engine(session)
    stem = [i % VOCAB for i in range(96)]
    engine.add(first := greedy([*stem, 1], 3))
    engine.step()
    session.cache.allocate("kept", 0, shared=first.pages[:kept])
    engine.run([])
    engine.abort(first)
    watch(session)
    prompt = [*stem, 2, 3, 4, 5][:tokens]
    second = greedy(prompt, 4, prefix=["kept"])
    engine.run([second])
    assert second.reused == reused and second.output == follow(prompt, 4, ignore_eos=True)
    assert session.transformer.row_counts[1] == (0, tokens - reused)
    assert session.cache.free_pages == session.cache.pages - kept


def test_what_was_given_up_before_the_request_starts_is_computed() -> None:
    """Also in the middle: what follows a page that is gone is of no use."""
    session = history_model(context=200, sequences=1, pages=14, chunk=200)
    engine = Engine(session)
    prompt = [i % VOCAB for i in range(130)]
    engine.add(first := greedy(prompt, 9))
    engine.step()
    for i in range(4):
        session.cache.allocate(i, 0, shared=first.pages[i : i + 1])
    second = greedy(prompt, 9, prefix=range(4))
    engine.add(second)
    session.cache.release(2)
    engine.run([third := greedy(prompt, 9, prefix=["nobody"])])
    assert (second.reused, third.reused) == (64, 0)
    assert first.output == second.output == third.output == follow(prompt, 9, ignore_eos=True)


def test_pages_that_a_running_request_shares_outlive_their_store() -> None:
    session = history_model(context=200, sequences=3, chunk=200)
    watch(session)
    engine = Engine(session)
    prompt = [i % VOCAB for i in range(70)]
    engine.add(first := greedy(prompt, 40))
    engine.step()
    session.cache.allocate("kept", 0, shared=first.pages[:2])
    engine.add(second := greedy(prompt, 40, prefix=["kept"]))
    engine.step()
    assert session.cache.free_pages == session.cache.pages - 4 - 2
    session.cache.release("kept")
    engine.abort(first)
    engine.run([other := greedy([9] * 150, 40)])
    assert second.reused == 64
    assert second.output == follow(prompt, 40, ignore_eos=True)
    assert other.output == follow([9] * 150, 40, ignore_eos=True)
    assert session.cache.free_pages == session.cache.pages


def test_a_store_gives_up_no_more_than_a_waiting_request_lacks() -> None:
    session = history_model(context=160, sequences=2, pages=7, chunk=200)
    engine = Engine(session)
    store = Store(engine)
    prompt = [i % VOCAB for i in range(100)]
    engine.add(first := greedy(prompt, 20))
    engine.step()
    store.keep(first)
    engine.abort(first)
    assert session.cache.free_pages == 4
    engine.run([fits := greedy([1] * 100, 20)])  # four pages
    assert len(store.kept) == 3
    longer = [*prompt, *[3] * 40]
    engine.run([shares := greedy(longer, 20, prefix=store.chain(prompt))])  # five, of which three are kept
    assert shares.reused == 96 and len(store.kept) == 3
    engine.run([larger := greedy([2] * 140, 20)])  # five
    assert len(store.kept) == 2
    for request in (fits, shares, larger):
        assert request.output == follow(list(request.prompt), 20, ignore_eos=True)


@pytest.mark.parametrize("sparsity", ["exact", "off", "predicted"])
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_built_in_model_gives_the_same_bits(sparsity: str, cache_type: str, tmp_path: Path) -> None:
    """Two requests share a prompt of several pages: probabilities too are those of each alone, and the second
    reads only what is new. The predictors name nothing, so decode rows are not what prompt rows are."""
    path = with_sidecar(tmp_path, [True] * 6, 1e30) if sparsity == "predicted" else None
    model = load(path, LoadOptions(sparsity, sequences=2, chunk=40, threads=2, cache_type=cache_type))
    text = "Heidi ran down the path to the hut, and the wind sang in the fir trees. " * 8
    stem = model.tokenizer.encode(text)[: 3 * PAGE + 5]
    prompts = [[*stem, 300], [*stem, 301, 302]]

    def made(prompt: list[int], **more: Any) -> Request:
        return greedy(prompt, 12, logprobs=3, **more)

    alone = [made(prompt) for prompt in prompts]
    for request in alone:
        Engine(model.session()).run([request])

    session = model.session()
    watch(session)
    engine = Engine(session)
    first, second = made(prompts[0]), made(prompts[1], prefix=["stem"])
    engine.add(first)
    while not first.output:
        engine.step()
    session.cache.allocate("stem", 0, shared=first.pages[: len(stem) // PAGE])
    before = session.counters.prompt_tokens
    assert before == len(prompts[0])
    engine.run([second])
    assert session.counters.prompt_tokens - before == len(prompts[1]) - 3 * PAGE == 7
    for request, expected in zip((first, second), alone, strict=True):
        assert request.output_logprobs == expected.output_logprobs[: len(request.output)]
        assert request.output == expected.output[: len(request.output)] != []
    assert second.finished and second.reused == 3 * PAGE
