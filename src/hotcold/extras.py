"""Optional packages: the extra that brings each, and one line for the user where one is missing."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from hotcold.errors import UserError


class Extra(NamedTuple):
    """An extra of ``pyproject.toml``."""

    modules: tuple[str, ...]  #: of all its packages
    purpose: str


_CONVERT = ("google.protobuf", "ml_dtypes", "safetensors", "sentencepiece")
_SERVE = (
    *("filelock", "h11", "huggingface_hub", "jinja2", "llguidance", "msgspec", "prometheus_client"),
    *("starlette", "uvicorn"),
)
_TEST = ("gguf", "httpx", "hypothesis", "pytest", "scipy", "xdist")
EXTRAS = {
    "serve": Extra(_SERVE, "hotcold serve, chat and pull"),
    "convert": Extra(_CONVERT, "hotcold convert"),
    "train": Extra((*_CONVERT, "torch", "transformers"), "training"),
    "test": Extra((*_CONVERT, *_SERVE, *_TEST), "the tests"),
    "bench": Extra(("llama_cpp",), "benchmarks beside llama.cpp"),
}


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra].modules if not _installed(name)]


def check(extra: str, purpose: str, *modules: str, kind: type[UserError] = UserError) -> None:
    """Raises ``kind`` if modules of an extra are not installed: those that are named, or any."""
    if lacking := [name for name in missing(extra) if name in (modules or EXTRAS[extra].modules)]:
        names = ", ".join(lacking)
        raise kind(f"{purpose} needs pip install 'hotcold[{extra}]' (not installed: {names})")


@contextlib.contextmanager
def importing(extra: str, purpose: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Raises ``kind`` if an import fails, also within a package of the extra."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{error}: {purpose} needs pip install 'hotcold[{extra}]'") from None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False
