"""The things that people do with the page, from its first screen to conversations that they keep, at
several sizes and with keys alone; and Markdown that grows. The model is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("selenium")
pytest.importorskip("starlette")
pytest.importorskip("llguidance")

import support.made_up_llm as made_up
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from support.browsing import CHROMIUM, DRIVER, Page
from support.made_up_llm import MadeUpLLM

from tests.server.conftest import Live

pytestmark = pytest.mark.skipif(not (DRIVER and CHROMIUM), reason="needs chromium and chromium-driver")

MARKDOWN = """Here is **bold**, *italic*, `code` and a [link](https://example.org/a?b=1).

# First

- one
- **two**: more
  1. inner

### Third

| name | value |
|:-----|------:|
| a | 1 |
| b | 2 |

```python
x = [1, 2]
print(x)
```

> quoted

---

Last: 2 * 3 = 6 \U0001f469\u200d\U0001f4bb e\u0301."""
NAMES = ["p", "h3", "ul", "h4", "div.table", "div.code", "blockquote", "hr", "p"]
EVIL = """<img src=x onerror=alert(1)> **bold<b>** `<i>`

<script>alert(1)</script>

[js](javascript:alert(1)) [data](data:text/html,x) ![image](https://example.org/i.png)

<a href="javascript:alert(1)" onclick="x()">text</a> &lt;b&gt;

```js"onload=alert(1)
<script>1</script>
```
"""
#: Draws a text letter by letter, each a token, and once whole.
DRAW = """const [text, back] = arguments;
Promise.all([import('/page/markdown.js'), import('/page/spans.js')]).then(([{Markdown}, {Spans}]) => {
  const box = document.createElement('div'), spans = new Spans(), writing = new Markdown(box);
  const name = (e) => e.localName + (e.className ? '.' + e.className : '');
  const steps = [];
  for (let end = 1; end <= text.length; end++) {
    spans.add(end, end);
    const before = [...box.children];
    writing.draw(text, end, spans, end === text.length);
    const kept = before.slice(0, -1).every((node, i) => box.children[i] === node);
    steps.push([[...box.children].map(name), kept, box.textContent]);
  }
  const whole = document.createElement('div');
  new Markdown(whole).draw(text, text.length, spans, true);
  back({steps, same: box.isEqualNode(whole), text: box.textContent, html: box.innerHTML,
        names: [...new Set([...box.querySelectorAll('*')].map(e => e.localName))],
        attributes: [...new Set([...box.querySelectorAll('*')].flatMap(e => e.getAttributeNames()))],
        links: [...box.querySelectorAll('a')].map(e => e.getAttribute('href')),
        tokens: [...box.querySelectorAll('[data-t]')].map(e => [e.textContent, Number(e.dataset.t)])});
}).catch((error) => back({error: String(error)}));"""


@pytest.fixture
def chat(
    driver: webdriver.Chrome, live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Page, Live]]:
    """The page of a model with a chat template, and its server."""
    bare = MadeUpLLM.info.fget
    assert bare is not None
    monkeypatch.setattr(made_up, "CONTEXT", 4096)
    facts = {"template": "a template", "params": 135_000_000, "size_bytes": 98 << 20}
    monkeypatch.setattr(MadeUpLLM, "info", property(lambda llm: replace(bare(llm), **facts)))
    server = live()
    page = Page(driver, f"http://127.0.0.1:{server.port}")
    page.size(1000, 760)
    page.open(key="", settings={"paced": False})
    yield page, server
    assert [each["message"] for each in driver.get_log("browser")] == []


def test_markdown_grows_in_its_place(chat: tuple[Page, Live]) -> None:
    page, _ = chat
    found = page.driver.execute_async_script(DRAW, MARKDOWN)
    assert "error" not in found and found["same"]
    for names, kept, shown in found["steps"]:
        assert kept and NAMES[: len(names)] == names  # nothing was taken for something else
        assert not {"*", "#", "|", "`"} & set(shown.replace("2 * 3", "").replace("2 *", ""))
        assert not shown.endswith(("\u200d", "\ud83d"))  # no half characters
    assert found["steps"][-1][0] == NAMES
    assert found["links"] == ["https://example.org/a?b=1"]
    where = [each.encode("utf-16-le", "surrogatepass") for each in MARKDOWN]
    units = b"".join(where)
    for text, token in found["tokens"]:  # each letter is where the Markdown has it
        own = text.encode("utf-16-le", "surrogatepass")
        assert units[2 * token : 2 * token + 2] == own[:2]
    assert "x = [1, 2]\nprint(x)" in found["text"] and "☑" not in found["text"]

    evil = page.driver.execute_async_script(DRAW, EVIL)
    assert "error" not in evil and evil["same"]
    assert not {"img", "script", "b", "i"} & set(evil["names"])
    assert not [
        each for each in evil["attributes"] if each.startswith("on") or each in ("src", "style", "id")
    ]
    assert [each for each in evil["links"] if each] == ["https://example.org/i.png"]
    for shown in (
        "<img src=x onerror=alert(1)>",
        "bold<b>",
        "<script>alert(1)</script>",
        "<script>1</script>",
    ):
        assert shown in evil["text"]


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1000, False), (2000, True)])
def test_a_conversation_from_its_beginning_to_its_end(
    chat: tuple[Page, Live], width: int, dark: bool, tmp_path: Path
) -> None:
    """With keys alone, but for the file dialogs, which are the system's."""
    page, server = chat
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    page.size(width, 800, dark=dark)
    page.open(key="", settings={"paced": False})
    seen = page.findings()
    assert page.js("return document.body.classList.contains('folded')")  # there is no picture
    if width > 860:
        assert page["kind"].text == "135 M parameters · Q8_0"

    # A file goes with the message; the answer is cut, goes on, and is cut once more.
    notes = tmp_path / "notes.txt"
    notes.write_text("what ``` was\nnoted", encoding="utf-8")
    page["file"].send_keys(str(notes))
    page.wait(lambda: "notes.txt" in page["files"].text, "the file is attached")
    server.llm.words = (*MARKDOWN.partition("### Third")[:2], "\ufffd")
    server.llm.reason = "length"
    page.send("What do they say?")
    page.done()
    prompt = server.llm.tokenizer.decode(server.llm.jobs[-1].prompt)
    assert "File notes.txt:\n````\nwhat ``` was\nnoted\n````\n\nWhat do they say?" in prompt
    assert "cut at the limit" in page.all(".told")[0].text and "\ufffd" not in page.story
    assert "tokens" in page["context-words"].text
    server.llm.words, server.llm.reason = (MARKDOWN.partition("### Third")[2],), "stop"
    page.enter(page.button("Continue"))
    page.wait(lambda: len(server.llm.jobs) == 2, "it goes on")
    page.done()
    prompt = server.llm.tokenizer.decode(server.llm.jobs[-1].prompt)
    assert prompt.rstrip().endswith("### Third")
    shown = page.js("return document.querySelector('.turn.assistant .said').textContent")
    assert (
        len(page.all(".turn")) == 2 and len(page.all(".said table")) == 1 and len(page.all(".said pre")) == 1
    )
    assert not [each for each in page.all("button") if each.text == "Continue"]
    seen += page.findings()
    page.media("prefers-color-scheme", "light" if dark else "dark")
    seen += page.findings("color-contrast")
    assert page.js("return document.documentElement.scrollWidth") <= width

    # It is there again after a reload, and in the list.
    page.driver.refresh()
    page.ready()
    page.wait(lambda: len(page.all(".turn")) == 2, "the conversation is there")
    assert page.js("return document.querySelector('.turn.assistant .said').textContent") == shown
    assert "notes.txt" in page.all(".turn.user .file")[0].text
    page.enter(page["open-talks"])
    assert "What do they say?" in page["talks-list"].text
    seen += page.findings()
    page.enter(page["talks-export"])
    files = lambda: list(tmp_path.glob("*.json"))  # noqa: E731
    page.wait(files, "the file is written")
    page.wait(lambda: files()[0].stat().st_size > 100, "all of it")
    [talk] = json.loads(files()[0].read_text(encoding="utf-8"))["conversations"]
    assert [each["role"] for each in talk["turns"]] == ["user", "assistant"]
    assert talk["turns"][0]["files"] == [{"name": "notes.txt", "text": "what ``` was\nnoted"}]

    _delete_and_import(page, files()[0])
    page.enter(page["open-settings"])
    seen += page.findings()
    page.press(Keys.ESCAPE)
    page.enter(page["new"])
    assert page["welcome"].is_displayed() and not page.all(".turn")
    assert seen == []


def _delete_and_import(page: Page, file: Path) -> None:
    """Deleted, all are gone; imported, they are back; damaged, they are refused."""
    page.enter(page["talks-delete"])
    assert page["talks-delete"].text == "Really?"
    page.press(Keys.ENTER)
    page.wait(lambda: "deleted" in page["talks-said"].text, "it is deleted")
    assert page.js("return Object.keys(localStorage).filter(e => e.includes('talk')).length") == 0
    damaged = file.with_name("damaged.txt")
    damaged.write_text(file.read_text(encoding="utf-8").replace('"role": "user"', '"role": "x"'))
    page["talks-file"].send_keys(str(damaged))
    page.wait(lambda: "damaged" in page["talks-said"].text, "what is damaged is refused")
    page["talks-file"].send_keys(str(file))
    page.wait(lambda: "One conversation" in page["talks-said"].text, "it is taken")
    page.enter(page.all("#talks-list .kept")[0])
    page.wait(lambda: len(page.all(".turn")) == 2, "the conversation is back")
    assert not page["talks"].is_displayed() and page.focused == "prompt"
