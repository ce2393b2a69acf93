"""Packages of extras: the lists are complete, and a missing one is named with the command that helps."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hotcold.commands import cli
from hotcold.extras import EXTRAS
from hotcold.extras import command as command_of
from tests.test_imports import PACKAGE, ROOT, SOURCES, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Packages whose module has another name.
MODULES = {"protobuf": "google.protobuf", "pytest_xdist": "xdist", "llama_cpp_python": "llama_cpp"}
MODULES |= {"markdown_it_py": "markdown_it", "pydantic_ai_slim": "pydantic_ai", "pyyaml": "yaml"}
#: The extra of each room that imports optional packages.
ROOMS = {"convert": "convert", "training": "train"}


def modules(requirements: list[str]) -> set[str]:
    found = set()
    for each in requirements:
        if inner := re.fullmatch(r"hotcold\[(.*)\]", each):
            for extra in inner[1].split(","):
                found |= modules(PROJECT["optional-dependencies"][extra])
        else:
            name = re.split(r"[^A-Za-z0-9-]", each)[0].replace("-", "_")
            found.add(MODULES.get(name, name))
    return found


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - {"serve"}))
def test_extras_have_all_their_packages(extra: str) -> None:
    listed = EXTRAS[extra].modules
    assert sorted(listed) == sorted(modules(PROJECT["optional-dependencies"][extra]))


def test_the_old_extra_of_the_server_brings_nothing() -> None:
    """Each installation has all packages of `chat` and `serve`. Older command lines name the extra."""
    assert PROJECT["optional-dependencies"]["serve"] == []
    needed = {"filelock", "h11", "huggingface_hub", "jinja2", "llguidance", "msgspec", "starlette"}
    assert needed < modules(PROJECT["dependencies"])


def test_the_command_is_for_the_source_folder() -> None:
    assert command_of("train") == "pip install '.[train]' in Hotcold's source folder"


def test_rooms_import_nothing_but_their_extras() -> None:
    base = modules(PROJECT["dependencies"]) | {"hotcold", "__future__"} | sys.stdlib_module_names
    for path in SOURCES:
        allowed = EXTRAS[ROOMS[room]].modules if (room := path.relative_to(PACKAGE).parts[0]) in ROOMS else ()
        for name in imports(ast.walk(ast.parse(path.read_text(encoding="utf-8"))), "hotcold"):
            known = name.partition(".")[0] in base or f"{name}.".startswith(
                tuple(f"{each}." for each in allowed)
            )
            assert known, f"{path.name} imports {name}"


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("ml_dtypes", "convert", ["convert", "CHECKPOINT", "out.gguf"]),
        ("safetensors", "convert", ["convert", "CHECKPOINT", "out.gguf"]),
    ],
)
def test_commands_name_a_missing_package(
    module: str,
    extra: str,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    monkeypatch.setenv("HOTCOLD_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(capsys, *(str(tmp_path) if word == "CHECKPOINT" else word for word in command))
    assert module in line and command_of(extra) in line


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("torch", "train", ["sparsify", "-f", "text", "-o", "out", "--tokens", "1", "folder"]),
    ],
)
def test_packages_that_modules_import_at_their_top(
    module: str, extra: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("Once upon a time", encoding="utf-8")
    code = (
        f"import sys; sys.modules[{module!r}] = None\nfrom hotcold.commands.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and module in line and command_of(extra) in line
