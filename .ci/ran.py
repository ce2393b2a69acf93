"""Pytest plugin: notes passed tests, and leaves out tests that passed in an earlier run.

Tests that do more in the later run are run again: with --full (the fixture ``full``), and with more
instruction sets (``open_every``).

HOTCOLD_RAN names a file that gets their names, HOTCOLD_RAN_BEFORE one that an earlier run has written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_NOTES = os.environ.get("HOTCOLD_RAN")
_BEFORE = os.environ.get("HOTCOLD_RAN_BEFORE")
_DO_MORE = {"full", "open_every"}  # fixtures of tests that do more in the later run


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects the reports of all others, too."""
    if _NOTES and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(_NOTES).open("a", encoding="utf-8") as notes:
            notes.write(f"{report.nodeid!r}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _BEFORE:
        return
    passed = {*Path(_BEFORE).read_text(encoding="utf-8").splitlines()}
    longer = [item for item in items if _DO_MORE & {*getattr(item, "fixturenames", ())}]
    again = {item for item in items if repr(item.nodeid) in passed}.difference(longer)
    items[:] = [item for item in items if item not in again]
    config.hook.pytest_deselected(items=[*again])
