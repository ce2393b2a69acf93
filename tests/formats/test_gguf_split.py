"""Split models: read as one, the same as whole; and parts missing, in another order or of another model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest
from support.split_models import split_model

from hotcold import LLM
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf, write_gguf

Refused: TypeAlias = Callable[[Path, str], AbstractContextManager[None]]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The built-in model in three files."""
    return split_model(model_path(), tmp_path / "fable.gguf", 3)


def rewritten(path: Path, **changes: Any) -> None:
    """The file with other numbers of its split; None leaves one out."""
    with open_gguf_part(path) as file:
        metadata = dict(file.metadata)
        tensors = {name: file.load(name) for name in file.tensors}
    for name, value in changes.items():
        key = f"split.{name.replace('_', '.')}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    write_gguf(path, metadata, tensors)


def open_gguf_part(path: Path) -> Any:
    """One file of several by itself, which the reader does not open."""
    from hotcold.formats import gguf as reader

    return reader.GGUFFile(reader._Part(path, 0))


def test_the_parts_are_what_the_gguf_package_reads(parts: list[Path]) -> None:
    """So that what is tested here is what other tools write: each part by itself, by another reader."""
    names: list[str] = []
    for number, path in enumerate(parts):
        reader = gguf.GGUFReader(path)
        assert int(reader.get_field("split.no").contents()) == number  # type: ignore[union-attr]
        assert int(reader.get_field("split.count").contents()) == 3  # type: ignore[union-attr]
        names += [tensor.name for tensor in reader.tensors]
    with open_gguf(model_path()) as whole:
        assert names == list(whole.tensors)


def test_a_split_model_is_the_whole_one(parts: list[Path]) -> None:
    with open_gguf(model_path()) as whole, open_gguf(parts[0]) as split:
        assert list(split.tensors) == list(whole.tensors)
        assert split.fingerprint() == whole.fingerprint()
        assert split.size == sum(path.stat().st_size for path in parts)
        assert {info.part for info in split.tensors.values()} == {0, 1, 2}
        for name in whole.tensors:
            np.testing.assert_array_equal(split.load(name).data, whole.load(name).data)
            np.testing.assert_array_equal(split.stored(name).load().data, whole.load(name).data)
        assert whole.metadata.keys() == split.metadata.keys() - {
            "split.no",
            "split.count",
            "split.tensors.count",
        }


def test_it_writes_the_same_text(parts: list[Path]) -> None:
    said = []
    for path in (model_path(), parts[0]):
        with LLM(path) as llm:
            said.append(llm.generate("Once upon a time", max_tokens=12, temperature=0).text)
    assert said[0] == said[1]


def test_one_part_of_one_is_a_model(tmp_path: Path) -> None:
    (path,) = split_model(model_path(), tmp_path / "one.gguf", 1)
    with open_gguf(path) as file, open_gguf(model_path()) as whole:
        assert file.fingerprint() == whole.fingerprint()


def test_missing_parts_are_named(parts: list[Path], refused: Refused) -> None:
    parts[2].unlink()
    with refused(parts[0], "part 1 of 3.*'fable-00003-of-00003.gguf' is not in its folder"):
        open_gguf(parts[0])
    parts[1].unlink()
    with refused(parts[0], "'fable-00002-of-00003.gguf' and 1 more is not in its folder: download all"):
        open_gguf(parts[0])


def test_another_part_than_the_first(parts: list[Path], refused: Refused) -> None:
    with refused(parts[1], "part 2 of 3 .*give the first one, 'fable-00001-of-00003.gguf'"):
        open_gguf(parts[1])


def test_a_name_that_says_nothing_or_something_else(parts: list[Path], refused: Refused) -> None:
    for name in ("model.gguf", "fable-00002-of-00003.gguf", "fable-00001-of-00004.gguf"):
        moved = parts[0].with_name(name)
        moved.unlink(missing_ok=True)
        os.link(parts[0], moved)
        with refused(moved, "part 1 of 3 .*rename this file to NAME-00001-of-00003.gguf"):
            open_gguf(moved)


def test_parts_in_another_order(parts: list[Path], refused: Refused) -> None:
    between = parts[1].with_name("between")
    parts[1].rename(between)
    parts[2].rename(parts[1])
    between.rename(parts[2])
    with refused(parts[1], "says that it is part 3 of 3 .*part 2 of 3 .* is needed"):
        open_gguf(parts[0])


def test_a_part_of_another_model(parts: list[Path], refused: Refused) -> None:
    rewritten(parts[1], tensors_count=7)
    with refused(parts[1], "of a model of 7 tensors: part 2 of 3 of a model of"):
        open_gguf(parts[0])
    rewritten(parts[1], count=None, no=None, tensors_count=None)
    with refused(parts[1], "is not part of a split model: part 2 of 3 is needed"):
        open_gguf(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path], refused: Refused) -> None:
    with open_gguf_part(parts[1]) as file:
        metadata, tensors = dict(file.metadata), {name: file.load(name) for name in file.tensors}
    with open_gguf_part(parts[0]) as file:
        name = min(file.tensors)
        write_gguf(parts[1], metadata, {**tensors, name: file.load(name)})
    with refused(parts[1], f"tensor {re.escape(name)} is in an earlier file"):
        open_gguf(parts[0])


def test_a_part_that_lacks_a_tensor_or_has_one_too_many(parts: list[Path], refused: Refused) -> None:
    with open_gguf_part(parts[2]) as file:
        metadata, tensors = dict(file.metadata), {name: file.load(name) for name in file.tensors}
    some = dict(list(tensors.items())[1:])
    write_gguf(parts[2], metadata, some)
    with refused(parts[0], "tensors together, but split.tensors.count is"):
        open_gguf(parts[0])
    write_gguf(parts[2], metadata, {**tensors, "one.more": next(iter(tensors.values()))})
    with refused(parts[2], "brings the tensors to .*: split.tensors.count is"):
        open_gguf(parts[0])


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"no": 3}, "split.no is 3: .*0 to 2"),
        ({"no": -1}, "split.no is -1"),
        ({"no": 1.0}, "split.no is 1.0"),
        ({"no": True}, "split.no is True"),
        ({"count": 513}, "split.count is 513: .*0 to 512"),
        ({"count": "3"}, "split.count is '3'"),
        ({"tensors_count": -1}, "split.tensors.count is -1"),
        ({"tensors_count": None}, "split.tensors.count is missing"),
    ],
)
def test_numbers_that_cannot_be(
    changes: dict[str, Any], pattern: str, parts: list[Path], refused: Refused
) -> None:
    rewritten(parts[0], **changes)
    with refused(parts[0], pattern):
        open_gguf(parts[0])


def test_a_later_part_that_is_cut_short(parts: list[Path], refused: Refused) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-1000])
    with refused(parts[1], "beyond the end of the file"):
        open_gguf(parts[0])


def test_a_later_part_that_changes_is_named(parts: list[Path], refused: Refused) -> None:
    with open_gguf(parts[0]) as file:
        name = next(name for name, info in file.tensors.items() if info.part == 2)
        with parts[2].open("ab") as more:
            more.write(b"!")
        for read in (file.load, file.stored(name).load):
            with refused(parts[2], "changed from"):
                read(name) if read == file.load else read()


def test_a_later_part_that_is_no_file(parts: list[Path], refused: Refused) -> None:
    parts[1].unlink()
    parts[1].mkdir()
    with refused(parts[1], "is a directory"):
        open_gguf(parts[0])
