"""The installed package has one extension and nothing else, for the right Python and machine."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hotcold

SOURCE = Path(__file__).resolve().parent.parent / "src"
#: what running and building leave behind in the source
LEFT = {".pyc", ".so", ".pyd"}


@pytest.fixture(scope="module")
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("hotcold")
    except metadata.PackageNotFoundError:
        pytest.skip("hotcold runs from its source: pip install . shows what a wheel holds")


@pytest.fixture(scope="module")
def files(distribution: metadata.Distribution) -> set[str]:
    return {file.as_posix() for file in distribution.files or () if "__pycache__" not in file.parts}


def test_a_wheel_holds_the_package_and_one_extension(files: set[str]) -> None:
    installed = {file for file in files if file.startswith("hotcold/")}
    sources = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "hotcold").rglob("*")
        if path.is_file() and path.suffix not in LEFT
    }
    assert sources <= installed
    (extension,) = installed - sources
    assert re.fullmatch(r"hotcold/kernels/_native\.([\w-]+\.)?(so|pyd)", extension)


def test_a_wheel_holds_nothing_besides(files: set[str]) -> None:
    others = {file for file in files if not file.startswith("hotcold/")}
    about = f"hotcold-{hotcold.__version__}.dist-info"
    scripts = {file for file in others if re.fullmatch(r"(\.\./)+(bin|Scripts)/hotcold(\.exe)?", file)}
    assert len(scripts) == 1
    besides = {file for file in others - scripts if not file.startswith(f"{about}/")}
    pages = {file for file in besides if re.fullmatch(r"(\.\./)+share/man/man1/hotcold\.1", file)}
    assert besides == pages and len(pages) == (sys.platform != "win32")
    assert f"{about}/licenses/LICENSE" in others


def test_a_wheel_is_for_one_kind_of_machine(distribution: metadata.Distribution) -> None:
    """From Python 3.12 on for every later one, through the stable ABI."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    assert "Root-Is-Purelib: false" in lines
    tags = [line.removeprefix("Tag: ").split("-") for line in lines if line.startswith("Tag: ")]
    abi = ["cp312", "abi3"] if sys.version_info >= (3, 12) else ["cp311", "cp311"]
    assert tags and all(tag[:2] == abi and tag[2] != "any" for tag in tags)
