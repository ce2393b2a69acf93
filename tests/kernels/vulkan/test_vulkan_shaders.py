"""csrc/shaders/compile.py: what is committed is what the shaders compile to, and it all rounds as written."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from support.vulkan.devices import absent

HEAD = "#version 450\nlayout(local_size_x = 64) in;\nlayout(std430, binding = 0) buffer X { float x[]; };\n"


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    for tool in ("glslangValidator", "spirv-val"):
        if not shutil.which(tool):
            absent(f"no {tool}: install glslang-tools and spirv-tools")
    spec = importlib.util.spec_from_file_location("compile", repository / "csrc/shaders/compile.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.compiler()
    except module.ShaderError as error:
        absent(str(error))
    return module


@pytest.fixture
def folders(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(script, "SHADERS", tmp_path)
    monkeypatch.setattr(script, "COMPILED", tmp_path / "spirv")
    return tmp_path


def shader(folders: Path, name: str, body: str) -> None:
    (folders / f"{name}.comp").write_text(f"{HEAD}void main() {{ {body} }}\n")


def test_committed_modules_are_those_of_the_shaders(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_what_is_not_up_to_date_is_named(
    script: ModuleType, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shader(folders, "one", "x[0] = 1;")
    shader(folders, "two", "x[0] = 2;")
    assert script.main([]) == 0 and script.main(["--check"]) == 0
    shader(folders, "two", "x[0] = 3;")
    (folders / "one.comp").rename(folders / "three.comp")
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "compile.py: one.spv has no shader of that name: remove it",
        "compile.py: three.spv is not what three.comp compiles to: run compile.py",
        "compile.py: two.spv is not what two.comp compiles to: run compile.py",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x[0] = x[1] * x[2] + x[3];", "float arithmetic"),
        ("x[0] = x[1] / x[2];", "float arithmetic"),
        ("vec2 v = x[1] * vec2(x[2], 1); x[0] = v.x;", "float arithmetic"),
        ("precise float y = fma(x[1], x[2], x[3]); x[0] = y;", "fma: write a product and a sum"),
        ("x[0] = y;", "'y' : undeclared identifier"),
    ],
)
def test_what_a_device_may_round_otherwise_is_refused(
    script: ModuleType, folders: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    shader(folders, "bad", body)
    assert script.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("compile.py: bad.comp: ") and message in error
    shader(folders, "bad", "precise float y = x[1] * x[2] + x[3]; x[0] = y;")
    assert script.main([]) == 0
