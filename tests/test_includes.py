"""The layers of csrc: which folder may include which, and that no files include each other in a circle."""

from __future__ import annotations

import graphlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "csrc"

#: folder -> folders that its files may include, lower ones first
ALLOWED: dict[str, set[str]] = {
    "os": set(),
    "pool": set(),
    "simd": {"os"},
    "quantise": {"pool"},
    "pack": {"os", "pool", "simd"},
    "ops": {"pool", "simd"},
    "isa": {"os", "ops", "simd"},
    "disk": {"os", "pool", "pack"},
    "program": {"pool", "pack", "ops", "isa", "disk"},
    "vulkan": {"pool", "program"},
    "bind": {"pool", "simd", "quantise", "pack", "ops", "isa", "disk", "program", "vulkan"},
}


def included(file: str, text: str) -> Iterator[str]:
    """The paths from csrc that an include may mean: names in quotes are also searched beside the file."""
    found = re.findall(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', text, re.MULTILINE)
    for mark, name in found:
        yield posixpath.normpath(name)
        if mark == '"':
            yield posixpath.normpath(posixpath.join(posixpath.dirname(file), name))


def arrows(files: Mapping[str, str]) -> dict[str, set[str]]:
    """For each file the files of csrc that it includes."""
    return {file: files.keys() & {*included(file, text)} for file, text in files.items()}


def violations(files: Mapping[str, str]) -> list[str]:
    """The includes that the table does not allow, and circles."""
    graph = arrows(files)
    wrong = []
    for file, targets in sorted(graph.items()):
        folder = file.split("/")[0]
        for target in sorted(targets):
            below = target.split("/")[0]
            if below != folder and below not in ALLOWED[folder]:
                wrong.append(f"{file} includes {target}: {folder} may include {sorted(ALLOWED[folder])}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"a circle: {' <- '.join(error.args[1])}")
    return wrong


def csrc() -> dict[str, str]:
    """All sources of C++ by their paths in csrc."""
    paths = [path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cpp")]
    return {path.relative_to(SOURCES).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_includes_go_down() -> None:
    assert violations(csrc()) == []


def test_the_table_has_each_folder_and_no_circle() -> None:
    assert ALLOWED.keys() == {file.split("/")[0] for file in csrc()}
    # Lower folders come first, so no folder reaches itself.
    order = [*ALLOWED]
    assert all(order.index(below) < order.index(folder) for folder in order for below in ALLOWED[folder])


def test_the_table_has_no_arrow_that_nothing_uses() -> None:
    used = {
        (file.split("/")[0], name.split("/")[0]) for file, names in arrows(csrc()).items() for name in names
    }
    assert {(folder, below) for folder in ALLOWED for below in ALLOWED[folder]} <= used


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/linear.h", '#include "program/program.h"'),
        ("ops/linear.h", "#include <program/program.h>"),
        ("ops/linear.h", '#include "./../program/program.h"'),
        ("ops/linear.h", '  #  include "../program/program.h"  // why'),
        ("simd/types.h", '#include "ops/arguments.h"'),
        ("pack/pack.cpp", '#include "disk/disk.h"'),
        ("pool/threads.cpp", '#include "simd/types.h"'),
        ("disk/disk.h", '#include "program/program.h"'),
        ("program/program.h", '#include "bind/bind.h"'),
        ("quantise/half.h", '#include "simd/vec.h"'),
        ("simd/types.h", '#include "simd/stream.h"'),  # a circle in one folder
        ("disk/load_batches.h", '#include "expert_cache.h"'),
    ],
)
def test_the_check_sees_a_wrong_include(file: str, line: str) -> None:
    files = csrc()
    assert violations({**files, file: f"{files[file]}\n{line}\n"})
