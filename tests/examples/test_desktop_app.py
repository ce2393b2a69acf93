"""The app: its server answers clients with the key, and a packed program is its own child process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

import hotcold

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"desktop_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def app(repository: Path) -> ModuleType:
    return loaded(repository / "examples" / "desktop_app" / "app.py")


def test_who_has_the_key_gets_the_page_and_a_story(app: ModuleType) -> None:
    with app.Server() as server:
        address, key = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#key=([\w-]{32})", server.page).groups()
        with httpx.Client(base_url=address, timeout=90) as client:
            assert "<title>Hotcold</title>" in client.get("/").text
            server.ready()
            story = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
            assert client.post("/v1/completions", json=story).status_code == 401
            reply = client.post("/v1/completions", json=story, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
    assert server.ended
    with hotcold.LLM() as llm:
        assert reply.json()["choices"][0]["text"] == llm.generate(**story).text


def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(
    app: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model")
    assert app.main(["-m", str(path), "--show", "none"]) == 2
    assert re.fullmatch(r"Hotcold: .*model\.gguf.*\n", capfd.readouterr().err)


def test_a_window_that_is_closed_while_the_model_loads_ends_it(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(self: hotcold.AsyncLLM) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(hotcold.AsyncLLM, "ready", for_ever)
    with app.Server() as server:
        assert not server.ended
    assert server.ended and server.error is None


@pytest.mark.skipif(sys.platform == "win32", reason="a script is no program there")
def test_the_end_of_the_browser_ends_it(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Chromium's does with its last window, which was seen by hand (docs/embedding.md)."""

    async def for_ever(self: hotcold.AsyncLLM) -> None:
        await asyncio.Event().wait()

    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/words\n", encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setattr(hotcold.AsyncLLM, "ready", for_ever)
    monkeypatch.setattr(app.shutil, "which", lambda name: str(browser))
    assert app.main(["--show", "browser"]) == 0
    assert (tmp_path / "words").read_text().startswith("--app=file:///")


def test_the_browser_is_told_the_key_by_a_file_and_not_by_a_command_line(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings: list[tuple[str, str]] = []

    def opened(address: str) -> None:
        with urllib.request.urlopen(address) as file:
            openings.append((address, file.read().decode()))

    monkeypatch.setattr(app.shutil, "which", lambda name: None)
    monkeypatch.setattr(app.webbrowser, "open", opened)
    monkeypatch.setattr(app.tempfile, "tempdir", str(tmp_path))
    server = app.Server()
    server.url = "http://127.0.0.1:1"
    app.show_browser(server, 0)
    ((address, text),) = openings
    assert server.key not in address and server.page in text
    assert list(tmp_path.iterdir()) == []


def test_other_programs_do_not_get_the_libraries_of_a_packed_one(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/packed")
    monkeypatch.setenv("LD_LIBRARY_PATH_ORIG", "/system")
    with app.system_libraries():
        assert os.environ["LD_LIBRARY_PATH"] == "/packed"
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with app.system_libraries():
        assert os.environ["LD_LIBRARY_PATH"] == "/system"
    assert os.environ["LD_LIBRARY_PATH"] == "/packed"


def test_what_is_packed_is_listed_by_package(repository: Path, tmp_path: Path) -> None:
    pack = loaded(repository / "examples" / "desktop_app" / "pack.py")
    for name, size in {"Hotcold": 1, "_internal/numpy/a.so": 20, "_internal/numpy.libs/b.so": 3}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    assert pack.packages(tmp_path) == {"Python and system libraries": 1, "numpy": 23}
    words = pack.command(tmp_path)
    assert Path(words[-1]).is_file() and "hotcold.training" in words


def test_a_build_for_one_processor_is_not_packed(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = loaded(repository / "examples" / "desktop_app" / "pack.py")
    monkeypatch.setattr(pack, "left_out_isas", lambda: ("avx2",))
    monkeypatch.setattr(sys, "argv", ["pack.py"])
    with pytest.raises(SystemExit):
        pack.main()
    assert "error: Hotcold was built without avx2" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a script is no program there")
def test_a_packed_program_is_its_own_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says that it is packed, in the place of the interpreter: text from the engine's process,
    held to a grammar that another process checked."""
    program = tmp_path / "program"
    path = [str(Path(hotcold.__file__).resolve().parents[1]), *sys.path]
    lines = [f"#!{sys.executable}", f"import sys; sys.path[:] = {path!r}; sys.frozen = True"]
    lines += ["import hotcold; hotcold.freeze_support(); sys.exit(3)", ""]
    program.write_text("\n".join(lines), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def written() -> str:
        async with hotcold.AsyncLLM(sequences=1) as llm:
            grammar = hotcold.Grammar("gbnf", 'root ::= "once"')
            return (await llm.generate("A", max_tokens=8, grammar=grammar)).text

    assert asyncio.run(written()) == "once"


@pytest.mark.parametrize(
    "words", [[], ["-P", "-m", "os"], ["-P", "-c", "print(1)"], ["-m", "hotcold.hosting"], ["-P", "-m"]]
)
def test_nothing_but_hotcold_runs_so(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "argv", ["program", *words])
    hotcold.freeze_support()  # returns
