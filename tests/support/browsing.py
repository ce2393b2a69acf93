"""The page in headless Chromium."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

KEY = "a-key-of-the-test"
DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
AXE = Path(__file__).parents[1] / "data" / "axe" / "axe.min.js.gz"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def browser(profile: Path, *flags: str) -> Iterator[webdriver.Chrome]:
    """Chromium, with a fresh profile in this folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Starts a server as a user does, with a key in this folder, and gives the page's address."""
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    options = ["--port", "0", "--api-key-file", str(keys), "--log-disable", "--threads", "1", *arguments]
    process = subprocess.Popen(
        [sys.executable, "-m", "hotcold", "serve", *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[\w.:]+", line)
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@dataclass
class Page:
    driver: webdriver.Chrome
    url: str
    provoked: str = "nothing"  #: a part of what the console may say
    servers: ClassVar[set[str]] = set()  #: that any page was of

    def __getitem__(self, id: str) -> WebElement:
        return self.driver.find_element(By.ID, id)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def js(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait(self, condition: Any, what: str) -> Any:
        return WebDriverWait(self.driver, 60, 0.05).until(lambda _: condition(), f"waited in vain: {what}")

    @property
    def focused(self) -> str:
        return str(self.js("return document.activeElement.id || document.activeElement.className"))

    @property
    def story(self) -> str:
        return str(self.js("return [...document.querySelectorAll('.said')].map(e => e.textContent).join('')"))

    @property
    def running(self) -> bool:
        return self["stop"].is_displayed()

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.media("prefers-color-scheme", "dark" if dark else "light")

    def media(self, name: str, value: str) -> None:
        features = {"features": [{"name": name, "value": value}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def open(self, *, key: str | None = KEY, settings: dict[str, Any] | None = None) -> None:
        """As for the first time, except for the key and these settings."""
        self.servers.add(self.url)
        self.driver.get(f"{self.url}/page/icon.svg")  # a document of the same origin, without scripts
        self.js("localStorage.clear(); sessionStorage.clear()")
        if key is not None:
            self.js("sessionStorage.setItem('hotcold.key', arguments[0])", key)
        if settings is not None:
            self.js("localStorage.setItem('hotcold.settings', arguments[0])", json.dumps(settings))
        self.driver.get(self.url)
        if key is not None:
            self.ready()

    def ready(self) -> None:
        self.wait(lambda: self.all("#dot.ready"), "the page is ready")

    def send(self, text: str) -> None:
        self["prompt"].send_keys(text + Keys.ENTER)

    def done(self) -> None:
        self.wait(
            lambda: self.all(".turn.assistant .after button") and not self.running, "the answer is done"
        )

    @property
    def pixels(self) -> str:
        return str(self.js("return document.getElementById('map').toDataURL()"))

    def press(self, *keys: str) -> None:
        """Keys for what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def button(self, text: str) -> WebElement:
        """The last one that is visible and reads so."""
        found = [each for each in self.all("button") if each.text == text and each.is_displayed()]
        assert found, f"no button {text!r}"
        return found[-1]

    def enter(self, button: WebElement) -> None:
        """Presses it without a pointer."""
        self.js("arguments[0].focus()", button)
        self.press(Keys.ENTER)

    def findings(self, *rules: str) -> list[str]:
        """Returns what axe-core finds, with where; of all its rules, or of these."""
        self.js(gzip.decompress(AXE.read_bytes()).decode() if not self.js("return 'axe' in window") else "")
        found = self.driver.execute_async_script(
            """const [rules, back] = arguments;
            axe.run(document, {resultTypes: ['violations'], ...(rules.length && {runOnly: rules})})
              .then((told) => back(told.violations.flatMap(({id, nodes}) =>
                nodes.map((node) => id + ': ' + node.target + ': ' + node.failureSummary))))
              .catch((error) => back(['axe: ' + error]));""",
            list(rules),
        )
        return [str(each) for each in found]
