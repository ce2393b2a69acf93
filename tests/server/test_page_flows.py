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
    """With keys only, except in the file dialogs, which are the system's."""
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

    # A file goes with the message; the answer is cut, continues, and is cut once more.
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
    beside = page.js("return matchMedia('(min-width: 1500px)').matches")
    assert page["talks"].is_displayed() == beside and page.focused == "prompt"


def said(page: Page) -> list[str]:
    return [each.text for each in page.all(".said") if each.is_displayed()]


def test_an_edit_can_be_cancelled_and_cuts_only_when_it_is_sent(chat: tuple[Page, Live]) -> None:
    page, server = chat
    for text in ("First", "Second"):
        page.send(text)
        page.wait(lambda text=text: said(page)[-2:] == [text, "a b c"] and not page.running, "its answer")
    page.enter(page.all(".turn.user .after button")[0])
    page.press(" changed")
    assert page.all(".edit textarea")[0].get_attribute("value") == "First changed"
    assert said(page) == ["a b c", "Second", "a b c"]  # all that follows is there
    assert page.findings() == []
    page.press(Keys.ESCAPE)
    assert said(page) == ["First", "a b c", "Second", "a b c"] and not page.all(".edit")
    page.enter(page.all(".turn.user .after button")[0])
    page.press(" anew", Keys.SHIFT + Keys.ENTER, Keys.NULL, "line")
    page.driver.refresh()
    page.ready()
    page.wait(lambda: said(page) == ["First", "a b c", "Second", "a b c"], "nothing was cut")
    page.enter(page.all(".turn.user .after button")[1])
    page.press(" and third", Keys.ENTER)
    page.wait(lambda: len(server.llm.jobs) == 3 and not page.running, "the new answer")
    assert said(page) == ["First", "a b c", "Second and third", "a b c"]


def test_versions_of_an_answer_outlive_a_reload(chat: tuple[Page, Live]) -> None:
    page, server = chat
    page.send("Say a letter")
    page.done()
    for i, word in enumerate(("d", "e"), 2):
        server.llm.words = (word,)
        page.enter(page.button("Regenerate"))
        page.wait(lambda i=i: said(page)[-1] != "a b c" and len(server.llm.jobs) == i, "another version")
        page.done()
    assert said(page) == ["Say a letter", "e"] and page.button("3/3")
    prompts = [server.llm.tokenizer.decode(job.prompt) for job in server.llm.jobs]
    assert prompts[0] == prompts[1] == prompts[2]  # no version is part of another one's prompt
    earlier = page.driver.find_element("css selector", "[aria-label='Earlier version']")
    page.enter(earlier)
    assert said(page)[-1] == "d" and page.button("2/3")
    page.driver.refresh()
    page.ready()
    page.wait(lambda: said(page) == ["Say a letter", "d"], "the version that was shown")
    page.enter(page.driver.find_element("css selector", "[aria-label='Earlier version']"))
    assert said(page)[-1] == "a b c" and page.button("1/3") and page.findings() == []
    server.llm.words = ("f",)
    page.send("More")  # the version that is shown is what the next message follows
    page.wait(lambda: len(server.llm.jobs) == 4 and not page.running, "the next answer")
    prompt = server.llm.tokenizer.decode(server.llm.jobs[-1].prompt)
    assert "a b c" in prompt and not [each for each in page.all("button") if each.text == "1/3"]


def test_a_version_that_fails_leaves_those_before(chat: tuple[Page, Live]) -> None:
    page, server = chat
    page.send("Say")
    page.done()
    server.llm.words = ()
    page.enter(page.button("Regenerate"))
    page.wait(lambda: page["problem"].is_displayed() and not page.running, "it is told")
    assert "try again" in page["problem"].text and said(page) == ["Say", "a b c"]
    server.llm.words = ("d",)
    page.enter(page.button("Try again"))
    page.wait(lambda: said(page) == ["Say", "d"] and not page.running, "the next version")
    assert page.button("2/2") and len(page.driver.get_log("browser")) == 1  # the status of the failure


def test_a_long_answer_is_followed_until_the_user_scrolls(chat: tuple[Page, Live]) -> None:
    page, server = chat
    code = [f"line_{i} = {i}\n" for i in range(200)]
    server.llm.words = (
        "```python\n",
        *code,
        "```\n\n| a | b |\n|---|---|\n",
        *["| 1 | 2 |\n"] * 30,
        "\nEnd.",
    )
    at_end = (
        "const e = document.getElementById('scroll'); return e.scrollHeight - e.scrollTop - e.clientHeight"
    )
    page.send("Write")
    page.done()
    assert page.js(at_end) <= 4 and not page["to-end"].is_displayed()
    page.js("document.getElementById('scroll').scrollTop = 100")
    page.wait(lambda: page["to-end"].is_displayed(), "a button to the end")
    page.enter(page["to-end"])
    assert page.js(at_end) <= 4 and not page["to-end"].is_displayed()
    page.js(
        """const box = document.getElementById('scroll');
        new MutationObserver((_, me) => { me.disconnect(); box.scrollTop = 0; })
          .observe(document.getElementById('turns'), {childList: true});"""
    )
    page.send("Once more")  # and scrolls up at once
    page.wait(lambda: len(server.llm.jobs) == 2 and not page.running, "the second answer")
    assert page.js("return document.getElementById('scroll').scrollTop") < 2000
    assert page.js(at_end) > 1000 and page["to-end"].is_displayed()


def test_formulas_and_colours(chat: tuple[Page, Live]) -> None:
    page, _ = chat
    text = (
        "Roots: \\(x = \\frac{a}{2}\\), $y^2$, at $5 or $6.\n\n$$\n\\sum_{i=1}^n i\n$$\n\n"
        "\\[ \\unknown{x} \\]\n\n```python\ndef f(x):  # one\n    return 'a'\n```\n\n`$a$` "
        "\\(\\text{<img src=x>}\\)"
    )
    found = page.driver.execute_async_script(DRAW, text)
    assert "error" not in found and found["same"]
    assert {"math", "mfrac", "msup", "munderover"} <= {*found["names"]} and "img" not in found["names"]
    assert found["text"].count("$") == 4  # two prices, and code
    assert "\\unknown{x}" in found["text"] and "style" not in found["attributes"]
    for kind in ("keyword", "comment", "string"):
        assert f'class="hljs-{kind}"' in found["html"]
    for names, _, shown in found["steps"]:
        assert "\\(" not in shown and "frac" not in shown and "$$" not in shown, (names, shown)
    steal = '```python\n<span class="stop">x</span>\n```\n\n<span class="hljs-x">y</span>'
    classes = page.driver.execute_async_script(DRAW, steal)["html"]
    assert 'class="stop"' not in classes and 'class="hljs-x"' not in classes


def test_a_long_message_is_counted_before_it_is_sent(chat: tuple[Page, Live], tmp_path: Path) -> None:
    page, server = chat
    notes = tmp_path / "notes.txt"
    notes.write_text("word " * 200)
    page["file"].send_keys(str(notes))
    page.wait(lambda: "of 4,096 tokens" in page["count"].text, "it is counted")
    assert "much" not in page["count"].get_attribute("class")
    page.driver.find_element("css selector", "[aria-label='Leave out notes.txt']").click()
    page.wait(lambda: not page["count"].is_displayed(), "nothing is to be counted")
    notes.write_text("Some other text. " * 30_000)  # 500 kB
    page["file"].send_keys(str(notes))
    page.wait(lambda: "-c" in page["count"].text, "it is said that it is too long")
    assert "much" in page["count"].get_attribute("class") and server.llm.jobs == []
    assert page.findings() == []


def test_the_dot_tells_whether_the_server_answers(
    driver: webdriver.Chrome, live: Callable[..., Live]
) -> None:
    server = live()
    page = Page(driver, f"http://127.0.0.1:{server.port}")
    page.open(key="", settings={"paced": False})
    page.send("Once")
    page.wait(lambda: not page.running and "a b c" in page.story, "an answer")
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*"]})
    try:
        page.wait(lambda: page.all("#dot.gone"), "the server has gone")
        assert "does not answer" in page["model-name"].text
    finally:
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.ready()
    assert "a b c" in page.story  # what was written is there
    driver.get_log("browser")


def test_conversations_are_searched_renamed_and_written_as_markdown(
    chat: tuple[Page, Live], tmp_path: Path
) -> None:
    page, _ = chat
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    for text in ("About foxes", "About owls"):
        page.enter(page["new"])
        page.send(text)
        page.done()
    page.enter(page["open-talks"])
    titles = lambda: [each.text for each in page.all("#talks-list .title")]  # noqa: E731
    assert titles() == ["About owls", "About foxes"]
    page["talks-search"].send_keys("FOX b")  # words of the title and of the answer
    assert titles() == ["About foxes"]
    page["talks-search"].send_keys(" lion")
    assert titles() == [] and "No conversation has these words" in page["talks-said"].text
    for _ in " lion":
        page["talks-search"].send_keys(Keys.BACKSPACE)
    page.enter(page.driver.find_element("css selector", "[aria-label='Rename: About foxes']"))
    page.press(Keys.CONTROL + "a", Keys.NULL, "Reynard", Keys.ENTER)
    page["talks-search"].clear()
    page["talks-search"].send_keys("rey")
    assert titles() == ["Reynard"] and page.findings() == []
    page.enter(page.driver.find_element("css selector", "[aria-label='Markdown: Reynard']"))
    page.wait((tmp_path / "Reynard.md").exists, "the file is written")
    expected = "# Reynard\n\n## You\n\nAbout foxes\n\n## made-up\n\na b c\n"
    page.wait(lambda: (tmp_path / "Reynard.md").read_text() == expected, "its text")
    page.enter(page.all("#talks-list .kept")[0])
    page.send("And more")
    page.wait(lambda: len(page.all(".turn")) == 4 and not page.running, "it goes on")
    page.enter(page["open-talks"])
    assert "Reynard" in titles()  # it keeps its name


@pytest.mark.parametrize("width", [250, 1500, 1733])
def test_cells_of_the_picture_have_whole_pixels(chat: tuple[Page, Live], width: int) -> None:
    page, _ = chat
    page.size(width, 900)
    sizes = page.driver.execute_async_script(
        """const [width, back] = arguments;
        import('/page/picture.js').then(({Picture}) => {
          const stage = document.createElement('div'), canvas = () => document.createElement('canvas');
          const maps = [canvas(), canvas()];
          for (const map of maps) map.style = `position: absolute; width: ${width / 3}px; height: 411px`;
          stage.append(...maps);
          document.body.append(stage);
          const picture = new Picture(stage, ...maps);
          picture.setLayout({cells: [500, 333, 1], hot_cells: [100, 0, 1], bits: 1, neurons: [500, 333, 1]});
          const boxes = [...picture.boxes], found = [];
          for (let i = 0; i < boxes.length; i += 4) found.push(boxes.slice(i, i + 4));
          stage.remove();
          back({found, size: [maps[0].width, maps[0].height]});
        });""",
        width,
    )
    boxes, (across, high) = sizes["found"], sizes["size"]
    assert len(boxes) == 834
    for layer in (boxes[:500], boxes[500:833]):
        assert len({(w, h) for _, _, w, h in layer}) == 1  # all cells alike
        assert len({(x, y) for x, y, _, _ in layer}) == len(layer)
        assert all(x >= 0 and x + w <= across and y >= 0 and y + h <= high for x, y, w, h in layer)
        columns, rows = max(x + w for x, _, w, _ in layer) - min(layer)[0], max(y + h for _, y, _, h in layer)
        assert columns * rows > 0.6 * across / 3 * high  # most of the layer's space is filled
        assert rows > 0.85 * high  # and its last row ends near the axis's end
