"""Names that documentation gave before they moved still work, and say where they went."""

from __future__ import annotations

from importlib import import_module

import pytest

import hotcold


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [
        ("grammar", "Grammars", "Grammars"),
        ("grammar", "schema_grammar", "schema_grammar"),
        ("job", "Grammar", "Grammar"),
        ("job", "Job", "Job"),
        ("job", "JobError", "RequestError"),
    ],
)
def test_an_old_name_is_the_new_one_with_a_warning(module: str, name: str, now: str) -> None:
    old = import_module(f"hotcold.engine.{module}")
    with pytest.warns(DeprecationWarning, match=f"take hotcold.{now}"):
        found = getattr(old, name)
    assert found is getattr(hotcold, now)


@pytest.mark.parametrize("module", ["grammar", "job"])
def test_other_names_are_unknown(module: str) -> None:
    old = import_module(f"hotcold.engine.{module}")
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = old.anything
