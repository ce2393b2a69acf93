"""Requests that begin like others: the same tokens, fewer rows, no shared page written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history_model import VOCAB, follow, history_model
from support.sidecars import with_sidecar

from hotcold.engine.engine import Engine
from hotcold.engine.prefix_cache import PrefixCache
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.kernels.instruction_sets import LOOPS, supported_isas
from hotcold.model.kv_cache import PagePool
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)


def greedy(prompt: list[int], n: int, **more: Any) -> Request:
    return Request(Job(prompt, GREEDY, max_tokens=n, ignore_eos=True, **more))


def watch(session: Any) -> None:
    """From now on a row that is written to a page with several owners, or to one that may be found, is a
    failure."""
    inner = session.run

    def run() -> None:
        batch, pool = session.transformer.batch, session.cache
        rows = int(batch.counts[0])
        for page in set((batch.slots[:rows] // PAGE).tolist()):
            assert sum(page in pages for pages in pool._owned.values()) == 1, "a shared page was written"
            assert page not in pool._keys, "a page that may be found was written"
        inner()

    session.run = run


def ran(engine: Engine, prompt: list[int], n: int, **more: Any) -> tuple[Request, int]:
    """A request that ran by itself, and how many rows of its prompt were computed."""
    before = len(engine.session.transformer.row_counts)
    engine.run([request := greedy(prompt, n, **more)])
    counts = engine.session.transformer.row_counts[before:]
    return request, sum(prompts for _, prompts in counts)


def some_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


# --- what is found ------------------------------------------------------------------------------------


@pytest.mark.long  # no backend computes here
@pytest.mark.parametrize("prefill_equals_decode", [True, False])
@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 60)), min_size=1, max_size=12),
    n=st.integers(1, 40),
    sequences=st.integers(1, 4),
    spare_pages=st.integers(0, 20),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_with_and_without_a_shared_prefix(
    prefill_equals_decode: bool,
    lengths: list[tuple[int, int]],
    n: int,
    sequences: int,
    spare_pages: int,
    chunk: int,
    seed: int,
) -> None:
    """Each position was computed or found, whatever is kept, given up, shared or waited for."""
    session = history_model(
        context=230,
        sequences=sequences,
        pages=8 + spare_pages,
        chunk=chunk,
        prefill_equals_decode=prefill_equals_decode,
    )
    watch(session)
    engine = Engine(session)
    rng, stem = np.random.default_rng(seed), some_prompt(400, seed)
    requests = [
        greedy([*stem[:common], *rng.integers(0, VOCAB, own).tolist()] or [0], n) for common, own in lengths
    ]
    engine.run(requests)
    for request in requests:
        assert request.output == follow(
            list(request.job.prompt), n, ignore_eos=True, prefill_equals_decode=prefill_equals_decode
        )
        assert request.reused < len(request.job.prompt)
    if engine.scheduler.preemptions == 0:
        prompt_rows = sum(rows for _, rows in session.transformer.row_counts)
        assert prompt_rows == sum(len(request.job.prompt) - request.reused for request in requests)
    assert session.cache.free_pages == session.cache.pages


@pytest.mark.parametrize(("tokens", "reused"), [(97, 96), (96, 64), (100, 96), (33, 32), (32, 0), (5, 0)])
def test_full_pages_are_found_and_one_row_is_left(tokens: int, reused: int) -> None:
    """The row after the last token is needed for the token that follows."""
    session = history_model(context=200, chunk=200)
    watch(session)
    engine = Engine(session)
    stem = some_prompt(96)
    ran(engine, [*stem, 1], 1)
    prompt = [*stem, 2, 3, 4, 5][:tokens]
    second, rows = ran(engine, prompt, 4)
    assert (second.reused, rows) == (reused, tokens - reused)
    assert second.output == follow(prompt, 4, ignore_eos=True)


@pytest.mark.parametrize("prefill_equals_decode", [True, False])
def test_a_chats_second_turn_reads_only_what_is_new(prefill_equals_decode: bool) -> None:
    """The answer's pages are found where its rows are like those of a prompt; else those of the prompt."""
    session = history_model(context=300, chunk=300, prefill_equals_decode=prefill_equals_decode)
    watch(session)
    engine = Engine(session)
    first, _ = ran(engine, some_prompt(50), 80)
    turn = [*first.job.prompt, *first.output, *some_prompt(20, 1)]
    second, rows = ran(engine, turn, 5)
    computed = (
        129 if prefill_equals_decode else 50
    )  # keys and values of the answer's last token were not needed
    assert second.reused == computed // PAGE * PAGE and rows == len(turn) - second.reused
    assert second.output == follow(turn, 5, ignore_eos=True, prefill_equals_decode=prefill_equals_decode)
    third, _ = ran(engine, turn, 5)
    assert third.reused == (len(turn) - 1) // PAGE * PAGE and third.output == second.output


def test_another_text_or_another_place_is_not_found() -> None:
    session = history_model(context=200, chunk=200)
    engine = Engine(session)
    prompt = some_prompt(100)
    ran(engine, prompt, 1)
    for other in ([prompt[0] ^ 1, *prompt[1:]], prompt[PAGE:], [*prompt[:PAGE], 9, *prompt[PAGE:]]):
        request, _ = ran(engine, other, 3)
        assert request.reused == (PAGE if other[:PAGE] == prompt[:PAGE] else 0)
        assert request.output == follow(other, 3, ignore_eos=True)


def test_several_at_once_compute_their_common_beginning_once() -> None:
    """Like the choices of one prompt: later requests wait until the first one has read the prompt, and use
    it."""
    session = history_model(context=200, sequences=4, chunk=40)
    watch(session)
    engine = Engine(session)
    stem = some_prompt(100)
    requests = [greedy([*stem, i], 4) for i in range(4)]
    engine.run(requests)
    assert sum(rows for _, rows in session.transformer.row_counts) < 101 + 3 * 45
    assert requests[0].reused == 0
    for request in requests:
        assert request.output == follow(list(request.job.prompt), 4, ignore_eos=True)


# --- what is not shared -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"cache": False}, {"echo": True, "logprobs": 0}, {"echo": True}])
def test_some_requests_neither_read_nor_write_what_is_shared(option: dict[str, Any]) -> None:
    session = history_model(context=200, chunk=200)
    engine = Engine(session)
    prompt = some_prompt(100)
    own, _ = ran(engine, prompt, 40, **option)
    assert session.cache.kept_pages == 0
    other, _ = ran(engine, prompt, 40)
    assert other.reused == 0 and session.cache.kept_pages == 4
    again, _ = ran(engine, prompt, 40, **option)
    assert again.reused == 0 and own.output == other.output == again.output


def test_an_engine_may_share_nothing() -> None:
    session = history_model(context=200, chunk=200)
    engine = Engine(session, reuse=False)
    for _ in range(2):
        request, rows = ran(engine, some_prompt(100), 4)
        assert (request.reused, rows, session.cache.kept_pages) == (0, 100, 0)


def test_keys_depend_on_all_that_decides_about_bits() -> None:
    pool = PagePool(9)
    request = greedy(some_prompt(70), 1)
    request.pages, request.computed = pool.allocate(request, 3), 70
    identity = ("model", "exact", "f16", "cpu")
    PrefixCache(pool, identity, generated=True).keep(request)
    assert pool.find(request.page_keys[1]) == request.pages[1]

    def found(identity: tuple[str, ...], *, generated: bool = True) -> list[int]:
        other = greedy(some_prompt(70), 1)
        return [*PrefixCache(pool, identity, generated=generated).find(other).pages]

    assert found(identity) == request.pages[:2]
    assert not found(identity, generated=False)
    for i in range(len(identity)):
        assert not found((*identity[:i], "other", *identity[i + 1 :]))
    assert not found((*identity, "predictor"))


# --- pages that lack ----------------------------------------------------------------------------------


def test_what_was_unused_longest_is_given_up_first() -> None:
    """The last pages of a text before its first ones, which more texts may share."""
    session = history_model(context=160, pages=10, chunk=200)
    engine = Engine(session)
    texts = [some_prompt(100, seed) for seed in range(3)]  # three pages each
    for text in texts:
        ran(engine, text, 1)
    assert session.cache.kept_pages == 9
    ran(engine, texts[0], 1)
    ran(engine, some_prompt(90, 9), 1)  # three pages: the one that is blank, and two of the second text
    assert ran(engine, texts[1], 1)[0].reused == PAGE
    assert ran(engine, texts[0], 1)[0].reused == 3 * PAGE


def test_a_cache_full_of_prefixes_holds_up_nobody() -> None:
    session = history_model(context=128, sequences=2, pages=8, chunk=50)
    watch(session)
    engine = Engine(session)
    for seed in range(8):
        requests = [greedy(some_prompt(70, 2 * seed + i), 40) for i in range(2)]
        engine.run(requests)
        for request in requests:
            assert request.output == follow(list(request.job.prompt), 40, ignore_eos=True)
            assert request.preempted == 0
    assert session.cache.kept_pages > 4 and session.cache.free_pages == 8


def test_pages_that_a_running_request_shares_outlive_the_others() -> None:
    session = history_model(context=200, sequences=3, chunk=200)
    watch(session)
    engine = Engine(session)
    prompt = some_prompt(70)
    engine.add(first := greedy(prompt, 40))
    engine.step()
    engine.add(second := greedy(prompt, 40))
    engine.step()
    assert second.reused == 64
    assert session.cache.free_pages == session.cache.pages - 4
    engine.abort(first)
    engine.run([other := greedy([9] * 150, 40)])
    assert second.output == follow(prompt, 40, ignore_eos=True)
    assert other.output == follow([9] * 150, 40, ignore_eos=True)
    assert session.cache.free_pages == session.cache.pages


def test_another_user_of_the_session_leaves_nothing_to_be_found() -> None:
    """Its rows are in the same pages."""
    model = load(None, LoadOptions(threads=2))
    session = model.session()
    prompt = model.tokenizer.encode("Heidi ran down the path to the hut, and the wind sang. " * 8)
    Engine(session).run([first := greedy(prompt, 4)])
    assert session.cache.kept_pages
    Engine(session).run([second := greedy(prompt, 4)])
    assert second.reused == 0 and second.output == first.output


@pytest.mark.parametrize(
    ("sparsity", "cache_type", "math"),
    [
        *((sparsity, type, "same") for sparsity in ("exact", "off", "predicted") for type in ("f16", "q8_0")),
        ("off", "f16", "fast"),
    ],
)
def test_the_built_in_model_gives_the_same_bits(
    sparsity: str, cache_type: str, math: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn has the probabilities of the same tokens alone, and computes only new tokens. The
    predictors select no neuron, so prompt rows differ from decode rows, as with `prompt_math` fast."""
    if math != "same":
        monkeypatch.setenv("HOTCOLD_ISA", supported_isas()[-1] + LOOPS)
    path = with_sidecar(tmp_path, 1e30) if sparsity == "predicted" else None
    options = LoadOptions(sparsity=sparsity, sequences=2, chunk=40, threads=2, cache_type=cache_type)
    model = load(path, LoadOptions(**options, prompt_math=math))
    text = "Heidi ran down the path to the hut, and the wind sang in the fir trees. " * 8
    stem = model.tokenizer.encode(text)[: 2 * PAGE + 5]

    session = model.session()
    watch(session)
    engine = Engine(session)
    engine.run([first := greedy([*stem, 300], 40, logprobs=3)])
    turn = [*first.job.prompt, *first.output, 301, 302]
    before = session.counters.prompt_tokens
    engine.run([second := greedy(turn, 12, logprobs=3)])
    pages = 2 if sparsity == "predicted" or math == "fast" else 3
    assert second.reused == pages * PAGE
    assert session.counters.prompt_tokens - before == len(turn) - pages * PAGE

    for request in (first, second):
        alone = greedy(list(request.job.prompt), request.job.max_tokens, logprobs=3)
        Engine(model.session(), reuse=False).run([alone])
        assert request.output_logprobs == alone.output_logprobs and request.output == alone.output
