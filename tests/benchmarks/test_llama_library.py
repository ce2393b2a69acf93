"""Benchmarks beside llama.cpp: memory that the library points to outlives its creator."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.stories260k import write_stories260k

pytestmark = pytest.mark.usefixtures("benchmarks")

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class StandIn(ModuleType):
    """As much of llama_cpp as opening a model and quantising take. It keeps its log by address alone, as C
    does, and writes to it whenever it is asked for something."""

    llama_log_callback = LogCallback
    LLAMA_FTYPE_MOSTLY_Q4_K_M = 15

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.given: list[weakref.ref[Any]] = []
        self._address: int | None = None

    def llama_log_set(self, callback: Any, data: Any) -> None:
        self.given.append(weakref.ref(callback))
        self._address = ctypes.cast(callback, ctypes.c_void_p).value

    def log(self) -> None:
        assert self.given, "nobody silenced the library"
        # In C this would be the end of the process.
        assert self.given[-1]() is not None, "the log was collected, and the library calls it"
        assert self._address is not None
        LogCallback(self._address)(2, b"a line", None)

    def llama_backend_init(self) -> None:
        self.log()

    def llama_model_load_from_file(self, path: bytes, params: Any) -> object:
        self.log()
        return object()

    def llama_model_free(self, model: object) -> None:
        self.log()

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_model_quantize_default_params(self) -> Any:
        return ctypes.create_string_buffer(1)

    def llama_model_quantize(self, source: bytes, path: bytes, params: Any) -> int:
        self.log()
        return 0


def contestant(path: Path) -> None:
    plan = importlib.import_module("lib.contestants").Plan()
    importlib.import_module("lib.llama").LlamaCpp(path, 1, plan).close()


def loader(path: Path) -> None:
    importlib.import_module("cpu.loading").LlamaCpp(use_mmap=True)(path)


def quantiser(path: Path) -> None:
    importlib.import_module("lib.llama").quantise(path, path, "Q4_K_M", 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "stories.gguf"
    write_stories260k(path)
    return path


@pytest.mark.parametrize(
    ("first", "last"), [(contestant, quantiser), (contestant, contestant), (loader, loader)]
)
def test_the_log_of_llama_cpp_outlives_who_gave_it(
    first: Callable[[Path], None], last: Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandIn()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    llama_cpp = importlib.import_module("lib.llama").LlamaCpp
    monkeypatch.setattr(llama_cpp, "_make_contexts", lambda self: None)
    first(path)
    gc.collect()
    library.log()  # between the two, as when llama.cpp quantises the next type
    last(path)
    gc.collect()
    library.log()


def test_llama_cpp_logs_after_its_contestant_is_gone(path: Path, tmp_path: Path) -> None:
    """The real library, which has something to say of a file that is none."""
    library = pytest.importorskip("llama_cpp")
    for _ in range(2):
        contestant(path)
        gc.collect()
        missing = str(tmp_path / "missing.gguf").encode()
        assert not library.llama_model_load_from_file(missing, library.llama_model_default_params())


def test_the_quick_comparison_gets_past_its_second_type(repository: Path) -> None:
    """The whole script with llama.cpp and its quantiser, in a process of its own: it is C that fails."""
    pytest.importorskip("llama_cpp")
    options = "--quick --only Q4_0 Q4_K_M --shape 512 1024 8 4 600 --layers 1 --rounds 1 --prompts 40"
    options += " --depths 0 --sequences 2 --generate 3 --minutes 0.01 --threads 1 --no-sparse"
    command = [sys.executable, str(repository / "benchmarks/cpu/compare.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [*json.loads(done.stdout.splitlines()[-1])["types"]] == ["Q4_0", "Q4_K_M"]
