"""Packs the app into one folder that needs no Python, and says what is in it.

    pip install . pyinstaller        # pywebview too, on macOS and Windows
    python examples/desktop_app/pack.py --out out   # out/Hotcold/Hotcold, and out/Hotcold.tar.xz

Where Hotcold is installed from source, HOTCOLD_ISAS=all must be in the environment of its installation.
A model of your own lies beside the program: give ``-m`` when it starts, or change ``app.py``."""

import argparse
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

from hotcold.kernels.instruction_sets import left_out_isas

NAME = "Hotcold"
#: Rooms of Hotcold that an app does not need: the command line, conversions, training. And what comes along
#: only because it is installed where this runs.
WITHOUT = (
    *(f"hotcold.{room}" for room in ("commands", "convert", "quantize", "tasks", "training")),
    *("huggingface_hub", "IPython", "matplotlib", "PIL", "pytest", "rich", "scipy", "tkinter"),
    *("torch", "transformers", "yaml"),
)


def command(out: Path) -> list[str]:
    """The command of PyInstaller. It does not find modules that are named in texts: all are taken. Nothing is
    stripped, which breaks NumPy's BLAS."""
    words = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--clean", "--onedir", "--name", NAME]
    words += ["--distpath", str(out), "--workpath", str(out / "work"), "--specpath", str(out / "work")]
    words += ["--collect-submodules", "hotcold", "--collect-data", "hotcold"]
    for module in WITHOUT:
        words += ["--exclude-module", module]
    if sys.platform in ("darwin", "win32"):
        words += ["--windowed", "--collect-all", "webview"]
    else:  # a web view would bring GTK or Qt, which are larger than all the rest
        words += ["--exclude-module", "webview"]
    return [*words, str(Path(__file__).with_name("app.py"))]


def packages(folder: Path) -> Counter[str]:
    """Bytes by package; libraries of a package (``numpy.libs``) are its own."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            inside = path.relative_to(folder).parts
            name = inside[1] if len(inside) > 2 else "Python and system libraries"
            sizes[name.removesuffix(".libs").removesuffix(".dylibs")] += path.stat().st_size
    return sizes


def compressed(folder: Path) -> int:
    """Bytes of the folder as one archive, which is made beside it."""
    archive = folder.with_suffix(".tar.xz")
    with tarfile.open(archive, "w:xz") as file:
        file.add(folder, folder.name)
    return archive.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    out: Path = parser.parse_args().out
    if left_out := left_out_isas():
        parser.error(
            f"Hotcold was built without {', '.join(left_out)}, so the app would be slow on other machines: "
            "run 'HOTCOLD_ISAS=all pip install .' in Hotcold's source folder"
        )
    subprocess.run(command(out), check=True)
    sizes = packages(out / NAME)
    print(f"| {'package':30} | MB     |\n|{'-' * 32}|--------|")
    for name, size in sizes.most_common():
        print(f"| {name:30} | {size / 1e6:6.1f} |")
    print(f"| {'all':30} | {sizes.total() / 1e6:6.1f} |")
    print(f"| {'compressed (tar.xz)':30} | {compressed(out / NAME) / 1e6:6.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
