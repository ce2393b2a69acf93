"""Pictures of the page, for docs/: starts a server with the built-in model, lets it write, and takes them
with Chromium (Debian: chromium, chromium-driver; pip install selenium pillow).

    python tools/screenshots.py --output docs
    python tools/screenshots.py --output docs -m SmolLM2-135M-Instruct.Q4_1.gguf --name page-chat
    python tools/screenshots.py --output docs --experts --name page-experts

With another name there is one picture, of the first size; `--experts` takes a made-up model of experts, whose
words mean nothing. A picture is taken while the model writes, so the machine should have nothing else to do;
an answer that ends too early is asked for again.

The last line is one JSON object: the files, their sizes, and what the page showed."""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.browsing import browser

from lib.models import Recipe, Shape, write
from lib.server import serving

MOST_BYTES = 150_000  # of a picture in a repository
OPENING = "Once upon a time there was a little fox who"
QUESTION = "Write three tips for better sleep."
_TRIES = 10  # answers, until one is long enough
#: name, width, height, colours
SHOTS = [
    ("page", 1440, 900, "dark"),
    ("page-400", 400, 860, "light"),
    ("page-1000", 1000, 760, "light"),
    ("page-2000", 2000, 1200, "dark"),
]


def shoot(
    driver: webdriver.Chrome, url: str, shot: tuple[str, int, int, str], stage: str, folder: Path
) -> Path:
    name, width, height, colours = shot
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.get(url)
    wait = WebDriverWait(driver, 60)
    wait.until(lambda d: d.find_element(By.CSS_SELECTOR, "#dot.ready"))
    if driver.execute_script("return document.body.classList.contains('folded')"):
        driver.find_element(By.ID, "fold").click()  # the picture of a model without zeros, and on a phone
    driver.find_element(By.ID, "new").click()  # what was written last is kept
    if stage != "welcome":
        write_some(driver)
    taken: Any = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    path = folder / f"{name}{'-welcome' if stage == 'welcome' else ''}.png"
    image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    image.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:  # with fewer colours, rare ones (a legend's) among them
        few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return path


def write_some(driver: webdriver.Chrome) -> None:
    """Lets the model write, and returns in the middle of it. SystemExit: its answers are too short."""
    story = driver.execute_script("return document.body.classList.contains('story')")
    words = "return document.querySelectorAll('.turn.assistant [data-t]').length"
    ended = "return !!document.querySelector('.turn.assistant .told')"
    enough = 70 if story else 110
    for _ in range(_TRIES):
        driver.find_element(By.ID, "prompt").send_keys((OPENING if story else QUESTION) + Keys.ENTER)
        WebDriverWait(driver, 120, 0.05).until(
            lambda d: d.execute_script(words) > enough or d.execute_script(ended)
        )
        if not driver.execute_script(ended):
            return
        driver.find_element(By.ID, "new").click()
    raise SystemExit(f"none of {_TRIES} answers was long enough")


def experts(folder: Path) -> Path:
    """A made-up model with 64 experts in each of 12 layers; a token chooses 8."""
    shape = Shape(512, 64, 12, 8, 4, 4096, 2048, "qwen3moe", 64, 8, 64, qk_norm=True)
    path = folder / "made-up-experts.gguf"
    write(path, Recipe(shape))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a GGUF file (the built-in model)")
    parser.add_argument("--experts", action="store_true", help="a made-up model of experts")
    parser.add_argument("--name", default="page", help="what the files' names begin with (page)")
    parser.add_argument("--url", help="of a server that runs already, without a key")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", help="names that begin so")
    parser.add_argument("--welcome", action="store_true", help="before anything was written, too")
    args = parser.parse_args()
    sizes: dict[str, int] = {}
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory())
        url = args.url
        if url is None:
            model = experts(Path(profile)) if args.experts else args.model
            options = ["-m", str(model)] if model else []
            url = stack.enter_context(serving(options, Path(profile) / "log")).url
        driver = stack.enter_context(browser(Path(profile) / "browser", "--hide-scrollbars"))
        for shot in SHOTS if args.name == "page" else [(args.name, *SHOTS[0][1:])]:
            if args.only and not shot[0].startswith(args.only):
                continue
            for stage in ("welcome", "writing") if args.welcome else ("writing",):
                path = shoot(driver, url, shot, stage, args.output)
                sizes[path.name] = path.stat().st_size
                print(f"{path}: {sizes[path.name]} bytes", file=sys.stderr)
    print(json.dumps({"files": sizes, "largest": max(sizes.values()), "limit": MOST_BYTES}))
    return 0 if max(sizes.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
