"""Models whose layers keep a state, on a GPU: the checks that test_hybrids.py makes of the other backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.golden import HYBRIDS, golden

from tests.model import test_hybrids


@pytest.mark.one_driver
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_each(vulkan: Any, name: str, tmp_path: Path) -> None:
    tiny = golden(name, tmp_path)
    test_hybrids.test_logits_are_those_of_transformers(tiny, vulkan)
    test_hybrids.test_a_batch_of_sequences_gives_what_each_gives_alone(tiny, vulkan)
