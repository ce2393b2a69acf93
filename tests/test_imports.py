"""The layers: who may import whom, what may be imported where, and how little `import hotcold` loads."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hotcold"
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: layer -> layers that it may import. The key "" is the package itself.
ALLOWED = {
    "errors": set(),
    "extras": set(),
    "version": set(),
    "values": {"errors"},
    "windows": set(),
    "formats": set(),
    "demo": set(),
    "hub": {"formats"},
    "processes": set(),
    "kernels": {"formats"},
    "tokenizer": set(),
    "model": {"formats", "kernels"},
    "sparse": {"formats", "kernels", "model"},
    "placement": {"formats", "kernels", "model", "sparse"},
    "quantize": {"formats", "kernels", "model", "sparse", "convert"},
    "runtime": {"formats", "demo", "hub", "kernels", "tokenizer", "model", "sparse", "placement"},
    "watch": {"formats", "kernels", "sparse", "placement", "runtime"},
    "engine": {"kernels", "tokenizer", "model", "runtime", "watch"},
    "grammar": {"formats", "processes", "tokenizer", "engine"},
    "chat": {"formats", "processes", "tokenizer", "engine", "grammar"},
    "hosting": {"formats", "processes", "kernels", "tokenizer", "runtime", "watch", "engine", "grammar"},
    "api": {"tokenizer", "runtime", "engine", "grammar", "chat", "hosting"},
    "training": {"formats", "kernels", "tokenizer", "model", "sparse", "convert"},
    "tasks": {
        "formats",
        "kernels",
        "tokenizer",
        "model",
        "sparse",
        "placement",
        "quantize",
        "runtime",
        "engine",
        "api",
        "training",
        "convert",
    },
    "convert": {"formats", "tokenizer", "model"},
    "server": {"formats", "tokenizer", "runtime", "engine", "grammar", "chat", "hosting", "api"},
    "commands": {
        "formats",
        "demo",
        "hub",
        "kernels",
        "tokenizer",
        "model",
        "sparse",
        "placement",
        "quantize",
        "runtime",
        "watch",
        "engine",
        "grammar",
        "chat",
        "hosting",
        "api",
        "training",
        "tasks",
        "convert",
        "server",
        "",
    },
    "": {"formats", "processes", "engine", "grammar", "chat", "hosting", "api", "tasks", "commands"},
}
#: Any layer may ask for the version, raise what is meant for the user, show and bound values (values.py), and
#: call Windows (windows.py).
FOR_ALL = ("hotcold.version.__version__", "hotcold.errors.UserError")

#: Modules of one backend: the layers above kernels/ ask the interface, whichever backend is behind it.
OF_A_BACKEND = re.compile(r"hotcold\.kernels\.(_native|cpu|vulkan|reference)(_\w+)?\b")

#: packages that only the named files, or the files of the named folders, may import
ONLY_IN = {
    # A copy of modeling_hotcold.py is in each sparse checkpoint: it imports nothing of this package.
    "torch": {"training/libraries.py", "training/modeling_hotcold.py"},
    "http": {"server", "hub"},
    "socketserver": {"server"},
    "asyncio": {"server", "api", "hosting", "commands/serve.py"},
    "starlette": {"server"},
    "h11": {"server/connections.py"},
    "msgspec": {"server/bodies.py"},
    "prometheus_client": {"server/metrics.py"},
    "jinja2": {"chat/renderer.py"},
    "markdown_it": {"commands/markdown.py"},  # of markdown-it-py
    "llguidance": {"grammar"},
    "huggingface_hub": {"hub"},
    "filelock": {"hub"},
    "ray": set(),
    "transformers": {"training/libraries.py"},
    "gguf": set(),
    "safetensors": {"convert", "training"},
    "ml_dtypes": {"convert"},
    "google": {"convert"},
    "sentencepiece": {"convert"},
    # Model files come from strangers: nothing in them is ever executed.
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
}


def imports(nodes: Iterable[ast.AST], module: str) -> Iterator[str]:
    """The dotted names that a module imports, at its top or in a function; relative ones made absolute."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    """``hotcold.model.config`` for model/config.py, ``hotcold.model.__init__`` for the folder itself."""
    return ".".join(["hotcold", *path.relative_to(PACKAGE).with_suffix("").parts])


def layer_of(dotted: str) -> str:
    """``model`` of ``hotcold.model.config``; ``""`` for files directly in the package."""
    second = dotted.split(".")[1] if "." in dotted else ""
    return second if second in ALLOWED else ""


def violations(module: str, imported: Iterable[str]) -> list[str]:
    """The imports in a module that break the direction of the layers."""
    layer = layer_of(module)
    found = []
    for name in imported:
        if name.split(".")[0] != "hotcold" or name in FOR_ALL:
            continue
        if name.startswith(("hotcold.values.", "hotcold.windows.", "hotcold.extras.")):
            continue
        if layer != "kernels" and OF_A_BACKEND.match(name):
            found.append(f"{module} imports {name}: a backend's own module, which only kernels/ may import")
        target = layer_of(name)
        if target != layer and target not in ALLOWED[layer]:
            found.append(
                f"{module} imports {name}: {layer or 'the package'} may import {sorted(ALLOWED[layer])}"
            )
    return found


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("hotcold.model.config", "from hotcold.sparse.predictor import read"),
        ("hotcold.formats.gguf", "import hotcold.kernels.backend"),
        ("hotcold.formats.gguf", "from ..kernels import backend"),
        ("hotcold.kernels.__init__", "from ..model import config"),
        ("hotcold.convert.llama", "from hotcold.kernels.backend import PAGE"),
        ("hotcold.api.llm", "def f():\n    from hotcold.commands import cli"),
        ("hotcold.model.config", "from hotcold import LLM"),
        ("hotcold.model.config", "from hotcold import sparse"),
        ("hotcold.placement.expert_cache", "from hotcold.kernels.cpu_disk import Disk"),
        ("hotcold.runtime.session", "def f():\n    from hotcold.kernels.cpu import CPUBackend"),
        ("hotcold.sparse.fitting", "from hotcold.kernels import reference"),
        ("hotcold.tasks.doctor", "import hotcold.kernels.vulkan.backend"),
    ],
)
def test_the_check_sees_a_wrong_import(module: str, line: str) -> None:
    assert violations(module, imports(ast.walk(ast.parse(line)), module))


def test_the_drawing_has_these_arrows() -> None:
    """Each row of docs/design.md: a room, its own mark, then a mark for each room below it."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = re.search(r"^```text\n.*\n(commands .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block
    rows = [line.split() for line in block[1].splitlines()]
    names = [row[0] for row in rows]
    drawn = {
        row[0]: {name for name, mark in zip(names[number:], row[1:], strict=True) if mark == "#"}
        for number, row in enumerate(rows)
    }
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert drawn == {room: ALLOWED[room] - {""} for room in rooms}


def test_every_folder_has_a_layer() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= ALLOWED.keys() - {""}
    files = {"__init__.py", "__main__.py", "errors.py", "extras.py", "values.py", "version.py", "windows.py"}
    assert {relative(path) for path in PACKAGE.glob("*.py")} == files


def misplaced(path: Path, imported: Iterable[str]) -> list[str]:
    """Heavy and dangerous packages that are imported where they do not belong."""
    name, folder = relative(path), path.relative_to(PACKAGE).parts[0]
    found = []
    for each in imported:
        places = ONLY_IN.get(each.split(".")[0], {name})
        if name not in places and folder not in places:
            found.append(f"{name} imports {each}, allowed in {sorted(places)}")
    return found


def executing(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that could execute what a file holds."""
    found = []
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile")):
                found.append(node.lineno)
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                found.append(value.lineno)
    return sorted(found)


def test_the_check_of_executing_works() -> None:
    source = "load(f, allow_pickle=False)\nload(f, allow_pickle=flag)\nre.compile(p)\neval(text)"
    assert executing(ast.walk(ast.parse(source))) == [2, 4]


def undeclared(path: Path, imported: Iterable[str], declared: set[str]) -> list[str]:
    """Packages that a plain installation lacks, imported outside the places of :data:`ONLY_IN`."""
    known = sys.stdlib_module_names | {"hotcold"} | ONLY_IN.keys() | declared
    return [
        f"{relative(path)} imports {each}, not in dependencies {sorted(declared)}"
        for each in imported
        if each.split(".")[0] not in known
    ]


def modules(imported: Iterable[str]) -> Iterator[str]:
    """The modules of the package that have these names, or define them."""
    known = {module_name(path) for path in SOURCES}
    for name in imported:
        found = (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__")
        yield from [each for each in found if each in known][:1]


def test_modules_keep_the_rules() -> None:
    """Imports go one way, packages stay where they belong, and the base installation has what is imported;
    nothing is executed. One test, as a file is parsed and walked through once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=~!; \[]", line, maxsplit=1)[0] for line in project["dependencies"]}
    found, graph = [], {}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [*ast.walk(tree)]
        imported = [*imports(nodes, module_name(path))]
        at_top = [*tree.body, *(each for node in tree.body if isinstance(node, ast.If) for each in node.body)]
        graph[module_name(path)] = {*modules(imports(at_top, module_name(path)))}
        found += violations(module_name(path), imported) + misplaced(path, imported)
        found += undeclared(path, imported, declared)
        found += [f"{relative(path)}:{line} executes" for line in executing(nodes)]
    assert found == []
    graphlib.TopologicalSorter(graph).prepare()  # CycleError: modules import each other


def test_the_check_of_packages_works() -> None:
    path = PACKAGE / "model" / "config.py"
    assert misplaced(path, ["torch.nn", "numpy"]) == [
        "model/config.py imports torch.nn, "
        "allowed in ['training/libraries.py', 'training/modeling_hotcold.py']"
    ]
    assert undeclared(path, ["yaml", "numpy", "os.path", "torch", "hotcold.model"], {"numpy"}) == [
        "model/config.py imports yaml, not in dependencies ['numpy']"
    ]


def test_binding_files_alone_know_nanobind() -> None:
    knowing = {
        path.parent.name
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and re.search(r"nanobind|Python\.h", path.read_text(encoding="utf-8"))
    }
    assert knowing == {"bind"}


def loaded_by(code: str) -> set[str]:
    """``sys.modules`` after ``code`` ran in a fresh interpreter."""
    report = "import sys; sys.stderr.write(' '.join(sys.modules))"
    command = [sys.executable, "-P", "-c", f"{code}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def packages_loaded_by(code: str) -> set[str]:
    """Top-level packages, except the standard library's and packages that the environment loads."""
    tops = {name.split(".")[0] for name in loaded_by(code) - loaded_by("")}
    return tops - sys.stdlib_module_names


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert packages_loaded_by("import hotcold") == {"hotcold"}
    assert packages_loaded_by("from hotcold import LLM") == {"hotcold", "numpy"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=" ".join)
def test_the_help_of_the_command_line_needs_no_numpy(arguments: list[str]) -> None:
    code = f"from hotcold.commands.cli import main\nassert main({arguments!r}) == 0"
    assert packages_loaded_by(code) == {"hotcold"}


def test_help_of_a_verb_imports_that_verb_alone() -> None:
    modules = loaded_by("from hotcold.commands.cli import main\nassert main(['tokenize', '--help']) == 0")
    assert "hotcold.commands.tokenize" in modules
    assert not modules & {"hotcold.commands.generate", "hotcold.commands.convert"}


def test_listing_gpus_imports_no_backend() -> None:
    modules = loaded_by("from hotcold.kernels.gpus import find_gpus\nfind_gpus()")
    vulkan = {name for name in modules if name.startswith("hotcold.kernels.vulkan")}
    assert vulkan == {"hotcold.kernels.vulkan", "hotcold.kernels.vulkan.devices"}
