"""Changes the code in one place at a time and asks whether a test notices.

``python tools/mutants.py engine placement.solver --count 200 -- --deselect tests/...::test_slow``

takes packages, modules or single mutants (``engine.sampler#17``) of hotcold, draws ``--count`` mutants of
each, and prints the survivors: the place, the mutant's name, the lines before and after. What follows
``--`` goes to pytest. The last line is one JSON object.

No file is changed: each mutant is compiled from its syntax tree in a forked child, which has NumPy, pytest
and the layers below already imported. All tests run once without any mutant, to see which functions each
enters; a mutant then meets the tests that enter its function, first those of the module's own file. It is
killed when one of them fails, or takes far longer than before. Tests that start processes see the module as
it is. Texts (messages of errors, help), annotations, decorators and assertions are left alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = ("tests/engine", "tests/runtime", "tests/sparse", "tests/placement", "tests/tasks", "tests/commands")
#: Imported before any fork, with all their modules, and the layers that each imports.
BELOW = {"formats": (), "kernels": ("formats",), "model": ("formats", "kernels")}
LIBRARIES = ("numpy", "hypothesis", "scipy.optimize", "rich.progress", "tokenizers", "gguf")
PYTEST = ("-q", "-p", "no:cacheprovider")
MOST_MEMORY = 8 << 30  # address space of a child: a wrong size must not take the machine down

#: Arguments that are text, or checks of one's own programming.
_LEFT_ALONE = {"help", "metavar", "description", "epilog", "encoding", "strict", "stacklevel"}
_NOT_RUN = {"annotation", "returns", "decorator_list", "bases", "type_params"}
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # by swapping


@dataclass(frozen=True)
class Place:
    """Where a node hangs: in a field of its parent, at an index where that is a list."""

    parent: ast.AST
    field: str
    index: int | None
    line: int
    function: int | None  #: first line of the innermost function around it, with decorators

    def put(self, node: ast.AST) -> ast.AST:
        """Returns what was there."""
        holder = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, node)
            return holder
        old, holder[self.index] = holder[self.index], node
        return old


@dataclass(frozen=True)
class Mutant:
    name: str  #: such as ``engine.sampler#17``
    tree: ast.Module  #: of the whole module, unchanged
    place: Place
    node: ast.AST  #: what is put there

    @property
    def module(self) -> str:
        return self.name.split("#")[0]

    def source(self) -> str:
        old = self.place.put(self.node)
        text = ast.unparse(self.tree)
        self.place.put(old)
        return text

    def difference(self) -> str:
        lines = ast.unparse(self.tree).splitlines(), self.source().splitlines()
        changed_lines = difflib.unified_diff(*lines, n=0, lineterm="")
        return "\n".join(f"    {line}" for line in changed_lines if not line.startswith(("---", "+++", "@@")))


def mutants(source: str, module: str) -> list[Mutant]:
    """All of a module, in order of their places."""
    tree = ast.parse(source)
    changes = [(place, new) for place, node in _places(tree, 1, None) for new in _replacements(node)]
    return [Mutant(f"{module}#{i}", tree, place, new) for i, (place, new) in enumerate(changes)]


def _places(parent: ast.AST, line: int, function: int | None) -> Iterator[tuple[Place, ast.AST]]:
    """All nodes that run and are not text."""
    if isinstance(parent, ast.Raise | ast.Assert):
        return
    if isinstance(parent, ast.FunctionDef):
        function = min([parent, *parent.decorator_list], key=lambda node: node.lineno).lineno
    for field, value in ast.iter_fields(parent):
        if field in _NOT_RUN or (isinstance(parent, ast.ClassDef) and field == "keywords"):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            text = ast.unparse(node) if isinstance(node, ast.If | ast.Assign) else ""
            if not isinstance(node, ast.AST) or text.startswith(("if TYPE_CHECKING", "__all__")):
                continue
            if isinstance(node, ast.keyword) and node.arg in _LEFT_ALONE:
                continue
            here = getattr(node, "lineno", line)
            yield Place(parent, field, index, here, function), node
            yield from _places(node, here, function)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    def changed(**fields: Any) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Break() | ast.Continue():
            yield _SWAPPED[type(node)]()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Slice():
            for end in ("lower", "upper", "step"):
                if getattr(node, end) is not None:
                    yield changed(**{end: None})
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                swapped = _SWAPPED[type(operator)]()
                yield changed(ops=[*node.ops[:i], swapped, *node.ops[i + 1 :]])
        case ast.Call():
            if isinstance(node.func, ast.Name) and node.func.id in _OTHER_NAME:
                yield changed(func=ast.Name(_OTHER_NAME[node.func.id]))
            for i, keyword in enumerate(node.keywords):
                if keyword.arg not in _LEFT_ALONE:
                    yield changed(keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
        case ast.comprehension():
            for i in range(len(node.ifs)):
                yield changed(ifs=[*node.ifs[:i], *node.ifs[i + 1 :]])
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPPED:
        yield changed(op=_SWAPPED[type(node.op)]())
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        swapped = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], _NEGATED)
        if not swapped and not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
            yield changed(test=ast.UnaryOp(ast.Not(), node.test))


class Loader(importlib.machinery.SourceFileLoader):
    """Finds one module and gives it the mutant's source."""

    def __init__(self, mutant: Mutant, path: Path) -> None:
        super().__init__(f"hotcold.{mutant.module}", str(path))
        self._source = mutant.source()

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, name: str) -> Any:
        return compile(self._source, self.path, "exec")


class Reach:
    """A pytest plugin that notes which functions of a folder each test enters, and how long it takes."""

    def __init__(self, folder: Path, output: Path) -> None:
        self._folder, self._output = str(folder), output
        self.seconds: dict[str, float] = {}
        self.entered: dict[str, set[tuple[str, int]]] = {}  # file and first line, by test
        self._shared: dict[str, set[tuple[str, int]]] = defaultdict(set)  # by file: in fixtures of many tests
        self._now: set[tuple[str, int]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Iterator[Any]:
        self._file, self._now, start = str(item.path), set(), time.monotonic()
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        result = yield
        sys.settrace(None)
        self.seconds[item.nodeid] = time.monotonic() - start
        self.entered[item.nodeid] = self._now | self._shared[self._file]
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        outside, self._now = self._now, set()
        result = yield
        if fixturedef.scope != "function":
            self._shared[self._file] |= self._now
        self._now |= outside
        return result

    def pytest_sessionfinish(self) -> None:
        self._output.write_bytes(pickle.dumps((self.seconds, self.entered)))

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        """A dataclass's own functions have no file, but their module's globals."""
        file = str(frame.f_globals.get("__file__"))
        if file.startswith(self._folder):
            self._now.add((file, frame.f_code.co_firstlineno if frame.f_code.co_filename == file else 0))


class Chosen:
    """A pytest plugin that runs given tests, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: i for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])


def fork_pytest(
    arguments: Sequence[str], plugin: object, seconds: float, loader: Loader | None = None
) -> str | None:
    """Runs the tests in a forked child. None: all passed in that time. Else the end of what was printed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        child = os.fork()
        if child == 0:
            _be_child([*arguments, *PYTEST, f"--basetemp={folder}/tests"], plugin, loader, output)
        deadline, pid, status = time.monotonic() + seconds, 0, 1
        while not pid and time.monotonic() < deadline:
            time.sleep(0.005)
            pid, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the processes that it started
        if not pid:
            os.waitpid(child, 0)
        printed = output.read_text(errors="replace") if output.exists() else ""
    return None if pid and status == 0 else printed[-3000:]


def _be_child(arguments: list[str], plugin: object, loader: Loader | None, output: Path) -> None:
    code = 1
    try:
        os.setsid()
        for stream, path in enumerate((os.devnull, output, output)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if loader is not None:
            sys.meta_path.insert(0, loader)
        code = int(pytest.main(arguments, [plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Suite:
    """The tests, and which of them a mutant has to meet."""

    def __init__(self, paths: Sequence[str], options: Sequence[str], most: float, reach: Path) -> None:
        self._options, self._most = options, most
        if not reach.exists():
            failed = fork_pytest([*options, *paths], Reach(hotcold_folder(), reach), 3600)
            if failed is not None:
                raise ValueError(f"a test fails without any mutant:\n{failed}")
        self._seconds, self._entered = pickle.loads(reach.read_bytes())

    def kills(self, mutant: Mutant, path: Path) -> bool:
        loader = Loader(mutant, path)
        for stage in self._stages(mutant, path):
            files = dict.fromkeys(test.split("::")[0] for test in stage)
            seconds = 10 + 5 * sum(self._seconds[test] for test in stage)
            arguments = ["-x", *self._options, *files]
            if fork_pytest(arguments, Chosen(stage), seconds, loader) is not None:
                return True
        return False

    def _stages(self, mutant: Mutant, path: Path) -> list[list[str]]:
        """Returns the tests of the module's own file, then the others; the fastest first. Code that runs when
        the module is imported concerns all tests that enter the module, or all, where it has no function."""
        function = mutant.place.function
        tests = [t for t, entered in self._entered.items() if (str(path), function) in entered]
        if function is None:
            tests = [t for t, entered in self._entered.items() if str(path) in {file for file, _ in entered}]
        tests = sorted(tests or self._seconds if function is None else tests, key=self._seconds.__getitem__)
        tests_of_module = [test for test in tests if f"test_{path.stem}.py::" in test]
        others = [test for test in tests if test not in set(tests_of_module)]
        total = itertools.accumulate(self._seconds[test] for test in others)
        others = [test for test, seconds in zip(others, total, strict=True) if seconds <= self._most]
        return [stage for stage in (tests_of_module, others) if stage]


def source_files(names: Sequence[str]) -> dict[str, Path]:
    """The modules of packages, or modules themselves, by their names below hotcold."""
    files = {}
    for name in names:
        path = hotcold_folder() / name.replace(".", "/")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            if file.stem != "__init__":
                files[".".join(file.relative_to(hotcold_folder()).with_suffix("").parts)] = file
    return files


def hotcold_folder() -> Path:
    spec = importlib.util.find_spec("hotcold")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("hotcold is not installed")
    return Path(spec.submodule_search_locations[0])


def import_below(packages: set[str]) -> None:
    """Imports what every child needs and no mutant changes."""
    layers = [layer for layer, more in BELOW.items() if not packages & {layer, *more}]
    for name in (*LIBRARIES, *(f"hotcold.{name}" for name in source_files(layers))):
        with contextlib.suppress(ImportError):  # a library that only some tests need
            importlib.import_module(name)
    gc.freeze()  # a child's collections pass over it


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, options = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="package, module or mutant")
    parser.add_argument("--count", type=int, default=100, help="mutants drawn of each NAME (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help=f"({' '.join(TESTS)})")
    most = "the fastest tests beside the module's own, up to this sum (30)"
    parser.add_argument("--seconds", type=float, default=30.0, help=most)
    reach = "which test enters what: written, or read if it exists"
    parser.add_argument("--reach", type=Path, metavar="FILE", help=reach)
    args = parser.parse_args(arguments)
    paths = source_files([name.split("#")[0] for name in args.names])
    import_below({module.split(".")[0] for module in paths})
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(args.tests, options, args.seconds, args.reach or Path(folder) / "reach")
    tried = survived = 0
    everything = [m for module, path in paths.items() for m in mutants(path.read_text(), module)]
    for name in args.names:
        chosen = [m for m in everything if name in (m.name, m.module, m.module.rpartition(".")[0])]
        drawn = sorted(random.Random(args.seed).sample(range(len(chosen)), min(args.count, len(chosen))))
        before = survived
        for mutant in (chosen[i] for i in drawn):
            path = paths[mutant.module]
            if not suite.kills(mutant, path):
                survived += 1
                print(f"{path}:{mutant.place.line}: {mutant.name}\n{mutant.difference()}", flush=True)
        tried += len(drawn)
        print(f"{name}: {survived - before} of {len(drawn)} survived, drawn of {len(chosen)}", flush=True)
    share = round(survived / tried, 4) if tried else None
    print(json.dumps({"mutants": tried, "killed": tried - survived, "survived": survived, "share": share}))
    return int(survived > 0)


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a pool of threads does not survive a fork
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other people's plugins take longer than a test
    os.environ.pop("PYTEST_ADDOPTS", None)  # which may be for those plugins
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"mutants: {error}")
