"""Agents on models that keep states: of what a prompt has in common with earlier ones, whole pages are not
computed again, also where a template drops earlier thoughts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_sessions import AgentSession, Reuse, run_sessions
from support.drafting import Reckless
from support.history_model import VOCAB, follow, history_model
from support.hybrid_models import CPU_KINDS, KINDS, write_hybrid
from support.page_count import assert_no_page_is_lost

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.kernels.backend import PAGE
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)


def sessions_of(n: int, seed: int, vocab: int, *, hinted: bool, shared: bool = False) -> list[AgentSession]:
    """Sessions with system messages of random lengths, or the same one."""
    random = np.random.default_rng(seed)
    systems = [random.integers(8, vocab, random.integers(40, 700)).tolist() for _ in range(n)]
    return [
        AgentSession(systems[0 if shared else i], seed + i, vocab, hinted=hinted, longest=(40, 30))
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [*((kind, False) for kind in (*KINDS, *CPU_KINDS)), ("qwen35", True), ("lfm2", True)],
)
def test_reuse_by_default(kind: str, drafting: bool, tmp_path: Path) -> None:
    """14 tool steps of two agents, then new user messages, with the default number of copies; tokens are as
    without reuse. No message border is named."""
    path = write_hybrid(tmp_path / "model.gguf", kind, context=4096)
    options = LoadOptions(threads=2, sparsity="off", context=4096, sequences=2, gpu="off", draft_max=4)
    session = load(path, options).session()
    alone = Engine(load(path, options).session(), reuse=False)
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(request: Request) -> list[int]:
        key = tuple(request.job.prompt)
        if len(known.get(key, ())) < request.job.max_tokens:
            alone.run([same := Request(request.job)])
            known[key] = same.output
        return known[key]

    vocab = session.model.config.vocab
    speculation = Reckless(answer, 0.7, vocab) if drafting else None
    engine = Engine(session, speculation=speculation)
    agents = sessions_of(2, 3, vocab, hinted=False)
    reuse, after_messages, requests = run_sessions(engine, agents, turns=2, steps=14, together=drafting)
    assert min(after_messages) >= 0.95 and reuse.share >= 0.95
    assert all(request.output == answer(request) for request in requests[::3])
    stats, slots = engine.stats(), session.slots
    assert stats.states == slots.slots == 2 + session.model.plan.pages
    assert stats.free_states + stats.shared_states == stats.states
    assert_no_page_is_lost(slots)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sessions=st.integers(1, 3),
    shared=st.booleans(),
    turns=st.integers(2, 4),
    steps=st.integers(0, 14),
    more=st.integers(0, 6),
)
def test_few_copies_do_where_message_borders_are_known(
    seed: int, sessions: int, shared: bool, turns: int, steps: int, more: int
) -> None:
    """For each agent three copies and one more."""
    model = history_model(context=6000, sequences=1, chunk=128, copies=4 * sessions + more)
    agents = sessions_of(sessions, seed, VOCAB, hinted=True, shared=shared)
    reuse, after_messages, requests = run_sessions(Engine(model), agents, turns, steps)
    assert min(after_messages) >= 0.95 and reuse.share >= 0.95
    last = requests[-1]
    assert last.output == follow(list(last.job.prompt), last.job.max_tokens, ignore_eos=True)
    assert_no_page_is_lost(model.slots)


def test_copies_near_an_agents_turn_do_where_borders_are_unknown() -> None:
    model = history_model(context=6000, chunk=128, copies=12)
    reuse, after_messages, _ = run_sessions(Engine(model), sessions_of(1, 8, VOCAB, hinted=False), 3, 14)
    assert min(after_messages) >= 0.95 and reuse.share >= 0.95


def test_a_prompt_that_was_not_seen_before_keeps_states_at_its_borders() -> None:
    """An agent continues in the middle of a turn, for example on a server that has just started."""
    (agent,) = sessions_of(1, 5, VOCAB, hinted=True)
    run_sessions(Engine(history_model(context=6000, chunk=128, copies=8)), [agent], turns=2, steps=6)
    model = history_model(context=6000, chunk=128, copies=3)
    engine = Engine(model)
    engine.run([first := agent.request()])
    agent.take(first.output)
    agent.says()
    engine.run([second := agent.request()])
    reuse = Reuse()
    reuse.add(first)
    assert reuse.add(second) == 1 and reuse.equal_pages > 10
    border = second.job.borders[0] // PAGE
    engine.run([other := Request(Job([*second.job.prompt[: (border + 1) * PAGE - 1], 7, 7], GREEDY, 1))])
    assert other.reused == border * PAGE
