"""Optional packages: the extra that installs each, and one line for the user if one is missing."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from hotcold.errors import UserError


class Extra(NamedTuple):
    """An extra of ``pyproject.toml``."""

    modules: tuple[str, ...]  #: modules of all its packages
    purpose: str


_CONVERT = ("google.protobuf", "ml_dtypes", "safetensors", "sentencepiece")
_TEST = (*_CONVERT, "gguf", "httpx", "hypothesis", "pytest", "scipy", "xdist")
_TRAIN = (*_CONVERT, "torch", "transformers")
_RAY = ("ray",)
_TEST_FULL = (
    *("accelerate", "anthropic", "flask", "jsonschema_rs", "langchain_ollama", "langchain_openai"),
    *("litellm", "ollama", "openai", "peft", "pyarrow", "pydantic", "pydantic_ai"),
    *("schemathesis", "selenium", "yaml"),
)
EXTRAS = {
    "convert": Extra(_CONVERT, "hotcold convert"),
    "train": Extra(_TRAIN, "training"),
    "ray": Extra(_RAY, "examples/ray_serve.py"),
    "bench": Extra(("llama_cpp",), "benchmarks against llama.cpp"),
    "test": Extra(_TEST, "the tests"),
    "test-full": Extra(tuple(dict.fromkeys((*_TEST_FULL, *_RAY, *_TRAIN))), "all tests"),
    "test-instructor": Extra(("httpx", "hypothesis", "instructor", "pytest"), "the tests of a client"),
    "lint": Extra(("clang_format", "mypy", "nanobind", "ruff"), "checks of the source"),
    "fuzz": Extra(("atheris",), "fuzzing"),
}


def command(extra: str) -> str:
    """Returns the command that installs an extra. Hotcold is not on the package index."""
    return f"pip install '.[{extra}]' in Hotcold's source folder"


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra].modules if not _installed(name)]


def check(extra: str, purpose: str, *modules: str, kind: type[UserError] = UserError) -> None:
    """Raises ``kind`` if the named modules of an extra, by default any of its modules, are not installed."""
    if lacking := [name for name in missing(extra) if name in (modules or EXTRAS[extra].modules)]:
        names = ", ".join(lacking)
        raise kind(f"{purpose} needs {command(extra)} (not installed: {names})")


@contextlib.contextmanager
def importing(extra: str, purpose: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Raises ``kind`` if an import fails, also within a package of the extra."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{error}: {purpose} needs {command(extra)}") from None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False
