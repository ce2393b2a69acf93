"""Models that keep states on a GPU, whole layers or with cold neurons on the CPU: a sequence has the bits
that it has alone, in chunks, in a batch, and from a copy of a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.drafting import Reckless
from support.hybrid_models import KINDS, write_hybrid
from support.placed import on_two

from hotcold.engine.engine import Engine
from hotcold.engine.request import Request
from tests.engine.test_hybrid_models import greedy, tokens

LENGTHS = (70, 5, 33)


@pytest.mark.one_driver
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_have_the_bits_that_each_has_alone(
    vulkan: Any, kind: str, share: float, tmp_path: Path
) -> None:
    path = write_hybrid(tmp_path / "model.gguf", kind)
    prompts = [tokens(n, n) for n in LENGTHS]
    prompts.append([*prompts[0][:66], *tokens(4)])  # shares 64 positions, and their state

    def found(request: Request) -> tuple[Any, ...]:
        return request.output, request.output_logprobs

    session = on_two(vulkan, share, path, context=224, chunk=224)
    alone = []
    for prompt in prompts:
        Engine(session, reuse=False).run([request := greedy(prompt, 6)])
        alone.append(found(request))
    session.close()
    session = on_two(vulkan, share, path, context=224, chunk=7, sequences=3)
    engine = Engine(session)
    engine.run(requests := [greedy(prompt, 6) for prompt in prompts[:3]])
    engine.run(last := [greedy(prompts[3], 6)])
    known = {tuple(prompt): output for prompt, (output, _) in zip(prompts, alone, strict=True)}
    speculation = Reckless(lambda request: known[tuple(request.job.prompt)], 0.7, session.model.config.vocab)
    engine = Engine(session, reuse=False, speculation=speculation)
    engine.run(guessed := [greedy(prompt, 6) for prompt in prompts[:3]])
    session.close()
    assert [found(each) for each in guessed] == alone[:3] and speculation.accepted > 0
    assert [found(each) for each in [*requests, *last]] == alone
    assert last[0].reused == 64
