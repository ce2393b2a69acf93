"""The block of a file that guesses tokens gives the logits of its formula, in each family that has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.changed_models import changed
from support.draft_blocks import Truth, matrix, with_block
from support.golden import golden
from support.runner import ROWS, Runner

from hotcold.engine.draft_block import BlockDrafts
from hotcold.engine.request import Job, Request
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend
from hotcold.model.draft_block import DraftBlock, draft_bytes, load_draft, with_draft
from hotcold.sparse.ffn import make_ffns

#: The layer that the block is like, or attention and FFN, and what it has of its own.
FAMILIES: dict[str, tuple[int | tuple[int, int], Sequence[str]]] = {
    "tiny-qwen35": (3, ["shared_head_norm"]),
    "tiny-qwen35moe": (3, ["shared_head_norm"]),
    "tiny-qwen3next": (3, ["shared_head_norm"]),
    "tiny-glm4": (1, ["shared_head_norm"]),
    "tiny-glm4moe": (2, ["shared_head_norm", "embed_tokens", "shared_head_head"]),
    "tiny-deepseek3": (2, ["embed_tokens", "shared_head_norm"]),
    "tiny-glm4-flash": (1, []),
    "tiny-glm-dsa": (2, ["shared_head_norm"]),
    "tiny-nemotron-h-moe": ((3, 4), ["shared_head_norm"]),
    "tiny-nemotron-latent": ((2, 3), ["shared_head_norm", "shared_head_head"]),
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", threads=2)


class WithBlock(Runner):
    """A text of one sequence, which the block reads, too."""

    def __init__(self, path: Path, backend: Backend) -> None:
        super().__init__(path, backend, cache_type="f32")
        with open_gguf(path) as file:
            config, why = with_draft(self.config, file.tensors)
            assert config.draft is not None, why
            weights = replace(self.weights, draft=load_draft(file, config, backend, self.weights))
            assert draft_bytes(file, config) > 0
        ffns = make_ffns(
            backend, [layer.ffn for layer in weights.draft.layers], ROWS, mode="off", count=False
        )
        pages = len(self._pages) + 3
        self.block = DraftBlock(self.transformer, config, weights, ffns, pages, "f32")
        self.drafts = BlockDrafts(self.block, self.transformer.batch)
        self.hidden: list[np.ndarray] = []

    def read(self, request: Request, chunk: int, *, decode: bool = False) -> None:
        """Reads the request without its last token."""
        request.pages, request.row = self._pages, 0
        while request.computed < request.length - 1:
            end = min(request.computed + chunk, request.length - 1)
            self.run(request.tokens(request.computed, end), decode=decode)
            self.hidden.append(self.transformer.read_hidden(0, end - request.computed).copy())
            self.drafts.read([(request, end)])
            request.computed = end


@pytest.mark.parametrize("name", FAMILIES)
def test_guesses_are_those_of_the_formula(name: str, tmp_path: Path, backend: Backend) -> None:
    """After a prompt in chunks, and after tokens that differ from the block's guesses."""
    tiny = golden(name, tmp_path)
    source, own = FAMILIES[name]
    path = with_block(tiny.path, tmp_path / "block.gguf", source, own=own)
    runner, truth = WithBlock(path, backend), Truth(path, tmp_path, backend)
    request = Request(Job(tiny.prompt.tolist()[:12], max_tokens=20))
    for tokens in ([], [7], [9, 30, 31]):
        request.output += tokens
        runner.read(request, 4 if tokens else 5, decode=bool(tokens))
        runner.drafts.begin([request])
        first = runner.block.logits()[0].copy()
        draft = runner.drafts(request, 3)
        hidden = np.vstack(runner.hidden)
        found = truth.logits(hidden, request.tokens(1, request.length), more=2)
        np.testing.assert_allclose(first, found[0], atol=2e-4, rtol=1e-4)
        assert draft is not None and draft.tokens == found.argmax(-1).tolist()


def test_files_whose_block_is_not_computed_say_why(tmp_path: Path, backend: Backend) -> None:
    tiny = golden("tiny-qwen35", tmp_path)
    path = with_block(tiny.path, tmp_path / "block.gguf", 3)

    def why(keys: dict[str, Any], tensors: dict[str, Any]) -> str:
        with open_gguf(changed(path, tmp_path / "other.gguf", keys, tensors)) as file:
            config = Runner(file.path, backend).config
            found, reason = with_draft(config, file.tensors)
        assert found is config and config.layers == 4
        return reason

    assert "blk.4.nextn.hnorm.weight is missing" in why({}, {"blk.4.nextn.hnorm.weight": None})
    assert "blk.4.more.weight is unknown" in why({}, {"blk.4.more.weight": matrix(np.ones((2, 2)))})
    assert "shape (24, 24), not (24, 48)" in why(
        {}, {"blk.4.nextn.eh_proj.weight": matrix(np.ones((24, 24)))}
    )
    assert "no FFN" in why({}, {"blk.4.ffn_up.weight": None})
    with open_gguf(tiny.path) as file:
        config = Runner(tiny.path, backend).config
        assert with_draft(config, file.tensors) == (config, "")
