"""Shares with every test where the test data are, and deterministic property tests and seeds."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from support.published import named_model
from support.skips import fold_skips
from support.vulkan.devices import DRIVERS, FULL, choose_drivers, open_vulkan

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = pytest.StashKey[bool]()
# The reference backend's small products lose most of their time in an oversubscribed pool.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported, after this
# What a power failure leaves of a file is not tested, and each file that is written would wait for the disk.
os.fsync = lambda fd: None
# Tests that want a GPU name it; the others mean the CPU, on machines with a GPU too.
os.environ["HOTCOLD_GPU"] = "off"
# A shell that starts the tests in the background has Ctrl-C ignored, and they would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run; and no deadline, because no test asserts a time.
settings.register_profile("hotcold", deadline=None, derandomize=True, database=None)
settings.load_profile("hotcold")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also run what takes minutes: long matrices, and builds of the kernels",
    )
    parser.addoption(
        "--backend",
        choices=["opaque"],
        help="opaque: open every backend as one whose buffers are no arrays",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports the function by its name, or Vulkan's loader looks for drivers."""
    choose_drivers()
    if config.getoption("--backend") == "opaque":
        from support.opaque_backend import OpaqueBackend

        import hotcold.kernels

        inner = hotcold.kernels.open_backend
        hotcold.kernels.open_backend = lambda *args, **more: OpaqueBackend(inner(*args, **more))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests use every core; those of a file that is named run in this process, and start at once."""
    everything = {ROOT, ROOT / "tests"}
    whole = all(config.invocation_params.dir.joinpath(arg).resolve() in everything for arg in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    started = any(name.startswith("PYTEST_XDIST_") for name in os.environ)  # by another
    has_numprocesses = getattr(config.option, "numprocesses", 0) is not None  # or there is no xdist
    if whole and cores > 1 and not started and not has_numprocesses:
        # One more than cores: a quarter of the time is spent waiting for processes that tests start.
        config.option.numprocesses, config.option.dist = min(cores + 1, 8), "worksteal"


def _on_another_driver(item: pytest.Item) -> bool:
    """True if the test has the mark "one_driver" and would not run on the first driver."""
    names = item.nodeid.partition("[")[2].rstrip("]").split("-")
    return item.get_closest_marker("one_driver") is not None and not {*DRIVERS[1:]}.isdisjoint(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if FULL else [item for item in items if _on_another_driver(item)]
    if config.getoption("--full"):
        # Builds take minutes, and should not begin when the other tests are over.
        items.sort(key=lambda item: item.path.name != "test_native.py")
    else:
        long = [item for item in items if item.get_closest_marker("full")]
        config.stash[LEFT_OUT] = bool(long)
        left_out += long
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=[*gone])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds that this process draws are the same in every run, and others in each test."""
    random = Random(item.nodeid)
    secrets.randbits = lambda k: random.getrandbits(k)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    fold_skips(terminalreporter.stats.get("skipped", []))
    distributed = config.getoption("numprocesses", None)  # then the others know what was left out
    if not config.getoption("--full") and (distributed or config.stash.get(LEFT_OUT, False)):
        terminalreporter.write_line(
            "Long matrices and builds of the kernels were left out: pytest --full runs them as well."
        )


@pytest.fixture(scope="module")
def benchmarks(repository: Path) -> Iterator[None]:
    """Scripts import each other by name, as they do when one of them is run."""
    folder = str(repository / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """True with --full: for tests that then take more examples of the same kind."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """gc.collect() looks at what was made since: all that a process holds takes it half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that these tests belong to."""
    return ROOT


@pytest.fixture(scope="session", params=DRIVERS)
def vulkan(request: pytest.FixtureRequest) -> Any:
    """A VulkanBackend on each driver in turn."""
    return open_vulkan(str(request.param))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, as published."""
    return named_model("HOTCOLD_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M in Q4_K_M, as published."""
    return named_model("HOTCOLD_GEMMA3")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The shared data (models, texts, golden files), which are too large for the repository."""
    folder = os.environ.get("HOTCOLD_TEST_DATA")
    if not folder:
        pytest.skip("HOTCOLD_TEST_DATA does not name the folder of the shared test data")
    path = Path(folder)
    if not (path / "golden").is_dir():
        pytest.fail(f"HOTCOLD_TEST_DATA={folder!r} is not the shared test data: it has no folder 'golden'")
    return path
