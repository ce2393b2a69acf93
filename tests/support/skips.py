"""Writes the lines of pytest's summary on tests that were skipped."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def fold_skips(reports: Sequence[Any]) -> None:
    """Gives reports with one reason one place, their common file or folder: pytest writes a line for each."""
    places = defaultdict(set)
    for report in reports:
        file, line, reason = report.longrepr
        places[reason].add((os.path.abspath(file), line))
    for report in reports:
        reason = report.longrepr[2]
        if len(places[reason]) > 1:
            report.longrepr = (os.path.commonpath([file for file, _ in places[reason]]), None, reason)
