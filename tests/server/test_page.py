"""The page in headless Chromium, on a server with the built-in model and a key."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("selenium")
pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support.browsing import CHROMIUM, DRIVER, KEY, Page, serving
from support.made_up_llm import MadeUpLLM
from support.stories260k import write_stories260k

from hotcold.watch.live import Frame
from tests.server.conftest import Live

#: Looks at the text and the picture whenever the page has drawn: a test that asks from outside sees what it
#: is fast enough to see.
LOOK = """window.seen = {lengths: [], pictures: []};
window.looking = true;
const look = () => {
  const length = [...document.querySelectorAll('.said')].map((each) => each.textContent).join('').length;
  const picture = document.getElementById('map').toDataURL();
  if (length !== window.seen.lengths.at(-1)) window.seen.lengths.push(length);
  if (picture !== window.seen.pictures.at(-1)) window.seen.pictures.push(picture);
  if (window.looking) requestAnimationFrame(look);
};
look();"""
OPENING = "Once upon a time there was a little fox who"
pytestmark = pytest.mark.skipif(not (DRIVER and CHROMIUM), reason="needs chromium and chromium-driver")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def page(driver: webdriver.Chrome, url: str) -> Iterator[Page]:
    page = Page(driver, url)
    page.size(1000, 760)
    yield page
    if page.running:
        driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    messages = [each["message"] for each in driver.get_log("browser")]
    assert [each for each in messages if page.provoked not in each] == []


def test_it_asks_for_the_key_and_keeps_it_for_this_tab_alone(page: Page) -> None:
    page.provoked = "401 (Unauthorized)"
    page.open(key=None)
    page.wait(lambda: page["key"].is_displayed(), "the key is asked for")
    assert page.focused == "key-field"
    page["key-field"].send_keys("wrong" + Keys.ENTER)
    page.wait(lambda: "is wrong" in page["key-words"].text, "the key was wrong")
    assert page["key-field"].get_attribute("value") == ""
    page["key-field"].send_keys(KEY + Keys.ENTER)
    page.ready()
    assert not page["key"].is_displayed() and page.focused == "prompt"
    assert page.js("return sessionStorage.getItem('hotcold.key')") == KEY
    assert KEY not in page.js("return JSON.stringify(localStorage)")
    page.driver.refresh()
    page.ready()


def test_a_key_behind_the_address_is_taken_out_of_it(page: Page) -> None:
    """At once and later, also where no header can carry it."""
    page.open()
    page.js("sessionStorage.clear()")
    page.driver.get(f"{page.url}/page/icon.svg")
    page.driver.get(f"{page.url}/#key={KEY}")
    page.ready()
    assert page.driver.current_url == f"{page.url}/"
    page.js("sessionStorage.clear()")
    for handed, kept in (("two%20words", None), (KEY.replace("-", "%2D"), KEY)):
        page.js("location.hash = arguments[0]", f"key={handed}")
        page.wait(lambda: page.driver.current_url == f"{page.url}/", "the address has no key")
        assert page.js("return sessionStorage.getItem('hotcold.key')") == kept


def test_what_is_no_key_is_told_and_not_kept(page: Page) -> None:
    """No header can carry it, so that the server would not even be asked."""
    page.provoked = "401 (Unauthorized)"
    page.open(key=None)
    page.wait(lambda: page["key"].is_displayed(), "the key is asked for")
    for wrong in ("ключ", "two words", "é"):
        page["key-field"].clear()
        page["key-field"].send_keys(wrong + Keys.ENTER)
        page.wait(lambda: "not a key" in page["key-words"].text, "it is said that this is none")
        assert page["key"].is_displayed()
    assert page.js("return sessionStorage.getItem('hotcold.key')") is None
    page["key-field"].clear()
    page["key-field"].send_keys(KEY + Keys.ENTER)
    page.ready()


def test_one_that_was_kept_and_is_no_key_is_asked_for_again(page: Page) -> None:
    page.provoked = "401 (Unauthorized)"
    page.open(key=None)
    page.js("sessionStorage.setItem('hotcold.key', 'ключ')")
    page.driver.refresh()
    page.wait(lambda: page["key"].is_displayed(), "the key is asked for")


@pytest.mark.parametrize("leave", ["Cancel", "Esc"])
def test_the_dialog_for_the_key_can_be_left(page: Page, leave: str) -> None:
    page.provoked = "401 (Unauthorized)"
    page.open(key=None)
    page.wait(lambda: page["key"].is_displayed(), "the key is asked for")
    if leave == "Cancel":
        page["key-cancel"].click()
    else:
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: "key" in page["problem"].text, "what is missing is told")
    assert not page["key"].is_displayed()
    page["problem"].find_element(By.TAG_NAME, "button").click()
    page.wait(lambda: page["key"].is_displayed(), "it is asked for again")
    page["key-field"].send_keys(KEY + Keys.ENTER)
    page.ready()
    assert not page["problem"].is_displayed()


def test_text_streams_in_and_the_picture_shows_active_neurons(page: Page) -> None:
    page.open(settings={"temperature": 0, "max_tokens": 100})
    resting = page.pixels
    assert page["tok-s"].text == page["active"].text == "–"
    page.js(LOOK)
    page.send(OPENING)
    page.done()
    changes = page.js("window.looking = false; return window.seen")
    # At reading pace a frame has at most four tokens more than the one before, however long it took.
    assert changes["lengths"] == sorted(changes["lengths"]) and len(set(changes["lengths"])) > 3  # it grows
    assert len({*changes["pictures"]} - {resting}) > 3  # and the picture changes
    body = {"prompt": OPENING, "max_tokens": 100, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{page.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as reply:
        assert page.story == OPENING + json.load(reply)["choices"][0]["text"]
    assert float(page["tok-s"].text.replace(",", "")) > 0
    assert 0 < float(page["active"].text.rstrip("% ")) < 50
    assert "CPU 100 %" in page["work-words"].text.replace("\n", " ")
    assert re.match(r"Done, 100 tokens in .* tokens a second", page["announce"].get_attribute("textContent"))
    page.wait(lambda: page.pixels == resting, "the afterglow fades")


def test_pointing_at_a_word_shows_what_chose_it(page: Page) -> None:
    page.open(settings={"temperature": 0, "max_tokens": 30, "paced": False})
    page["new"].click()  # the pointer is away from the text
    page.send(OPENING)
    page.done()
    said = page.all(".turn.assistant .said")[0]
    page.js("arguments[0].focus()", said)
    shown = []
    for _ in range(4):
        page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        word = page.all(".said .at")[0]
        shown.append((word.text, page["moment"].text, page.pixels))
    assert len({pixels for *_, pixels in shown[1:]}) == 3
    assert "reading the prompt" in shown[0][1]
    for word, moment, _ in shown[1:]:
        assert word.strip() in moment and re.search(r"\d+ active", moment)
    assert shown[-1][0].strip() in page["announce"].get_attribute("textContent")


def test_without_zeros_the_most_active_neurons_are_shown(driver: webdriver.Chrome, tmp_path: Path) -> None:
    """A SiLU model has a map, too: each word's tenth, in words that say so; and no share that never
    changes."""
    write_stories260k(tmp_path / "stories.gguf")
    with serving(tmp_path, "-m", str(tmp_path / "stories.gguf")) as url:
        page = Page(driver, url)
        page.size(1000, 760)
        page.open(settings={"temperature": 0, "max_tokens": 30, "paced": False})
        assert not page["map"].is_displayed()  # folded, as it is no share of neurons
        page["fold"].click()
        assert page["map"].is_displayed() and not page["map-note"].is_displayed()
        assert "the most active tenth now" in page["legend"].text
        assert page["watch-title"].text == "860 neurons" and not page["active"].is_displayed()
        page["new"].click()
        page.send("Once")
        page.done()
        page.js("arguments[0].focus()", page.all(".turn.assistant .said")[0])
        shown = []
        for _ in range(4):
            page.press(Keys.ARROW_RIGHT)
            shown.append((page["moment"].text, page.pixels))
        assert all("90 most active" in moment for moment, _ in shown[1:])  # ceil(172 / 10) of each of 5
        assert len({pixels for _, pixels in shown[1:]}) == 3
        assert page.findings() == [] and page.js(CONTRAST) == []


def test_stop_ends_the_request(page: Page) -> None:
    page.open(settings={"temperature": 0, "max_tokens": 200})
    page.send(OPENING)
    page.wait(lambda: len(page.story) > len(OPENING) + 10, "some text")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.done()
    text = page.story
    assert len(OPENING) < len(text) and page["send"].is_displayed()
    assert page.js("return document.querySelectorAll('.waits').length") == 0
    page["prompt"].send_keys(Keys.ENTER)  # the story continues
    page.wait(lambda: len(page.story) > len(text) and not page.running, "more text")
    assert page.story.startswith(text)


def test_a_story_may_be_longer_than_the_context(page: Page) -> None:
    page.open(settings={"temperature": 0.8, "seed": 1, "max_tokens": 120, "paced": False})
    page.send(OPENING)
    page.done()
    for _ in range(4):
        before = page.story
        page["prompt"].send_keys(Keys.ENTER)
        page.wait(lambda before=before: len(page.story) > len(before) and not page.running, "it goes on")
        assert page.story.startswith(before) and not page["problem"].is_displayed()
    assert len(page.story) > 1300  # characters: the context has 256 positions


def test_a_key_that_is_taken_away_is_asked_for_again(page: Page) -> None:
    page.provoked = "401 (Unauthorized)"
    page.open(settings={"temperature": 0, "max_tokens": 20, "paced": False})
    page.js("sessionStorage.setItem('hotcold.key', 'old')")
    page.send(OPENING)
    page.wait(lambda: page["key"].is_displayed(), "the key is asked for")
    page["key-field"].send_keys(KEY + Keys.ENTER)
    page.done()
    assert page.story.startswith(OPENING) and len(page.story) > len(OPENING) + 10


def test_another_way_undo_and_new(page: Page) -> None:
    page.open(settings={"temperature": 1.5, "max_tokens": 30, "paced": False})
    page.send(OPENING)
    page.done()
    first = page.story

    def press(text: str) -> None:
        next(each for each in page.all(".after button") if each.is_displayed() and each.text == text).click()

    press("Regenerate")
    page.wait(lambda: page.story not in (first, OPENING) and not page.running, "another text")
    assert page.story.startswith(OPENING)
    press("Undo")
    assert page.story == "" and page["prompt"].get_attribute("value") == OPENING
    assert page["welcome"].is_displayed()
    page["new"].click()
    assert page.focused == "prompt"


def test_everything_can_be_done_with_keys(page: Page) -> None:
    page.open(settings={"temperature": 0, "max_tokens": 20, "paced": False})
    page["prompt"].send_keys("One", Keys.SHIFT + Keys.ENTER, Keys.NULL, "two")
    assert page["prompt"].get_attribute("value") == "One\ntwo"
    page.driver.get(page.url)
    page.ready()
    page.js("document.querySelector('.skip').focus()")  # the first thing of the document
    order = []
    while "prompt" not in order and len(order) < 30:
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        order.append(page.focused)
    expected = ["new", "open-settings", "theme", "prompt"]
    assert [each for each in order if each in expected] == expected
    page.js("document.getElementById('open-settings').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page["settings"].is_displayed() and page.js("return document.activeElement.closest('dialog').id")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page["settings"].is_displayed(), "the dialog closes")
    assert page.focused == "open-settings"
    page.js("document.querySelector('.skip').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.focused == "prompt"


def test_settings_and_colours_are_kept(page: Page) -> None:
    page.open()
    page["open-settings"].click()
    for name, value in (("temperature", "0.3"), ("seed", "7"), ("max_tokens", "12")):
        field = page.driver.find_element(By.NAME, name)
        field.clear()
        field.send_keys(value)
    page.driver.find_element(By.NAME, "paced").click()
    page.all("#settings .send")[0].click()
    page["theme"].click()
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    ground = page.js("return getComputedStyle(document.body).backgroundColor")
    page.driver.get(page.url)
    page.ready()
    assert page.js("return getComputedStyle(document.body).backgroundColor") == ground
    page["open-settings"].click()
    values = {n: page.driver.find_element(By.NAME, n).get_attribute("value") for n in ("temperature", "seed")}
    assert values == {"temperature": "0.3", "seed": "7"}
    page.all("#settings .send")[0].click()
    texts = set()
    for _ in range(2):
        page.send(OPENING)
        page.done()
        texts.add(page.story)
        assert re.search(r"\b12 tokens", page.all(".told")[0].text)
        page["new"].click()
    assert len(texts) == 1  # the seed is used


@pytest.fixture
def chat(
    driver: webdriver.Chrome, live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Page, Live]]:
    """The page of a model with a chat template, which is made up, and its server."""
    bare = MadeUpLLM.info.fget
    assert bare is not None
    monkeypatch.setattr(MadeUpLLM, "info", property(lambda llm: replace(bare(llm), template="a template")))
    server = live()
    page = Page(driver, f"http://127.0.0.1:{server.port}")
    page.size(1000, 760)
    page.open(key="", settings={"system": "Be brief.", "paced": False})
    yield page, server
    assert [
        each["message"] for each in driver.get_log("browser") if page.provoked not in each["message"]
    ] == []


def test_a_chat(chat: tuple[Page, Live]) -> None:
    page, server = chat
    assert "no picture" in page["map-note"].text and "made-up" in page["welcome-words"].text
    server.llm.frame = Frame(1, note="the GPU is full")

    def turns() -> list[str]:
        return [each.text for each in page.all(".said")]

    def prompts() -> list[str]:
        return [server.llm.tokenizer.decode(job.prompt) for job in server.llm.jobs]

    page.send("Hello")
    page.done()
    assert turns() == ["Hello", "a b c"] and not page["welcome"].is_displayed()
    assert page["map-note"].text == "the GPU is full"
    server.llm.words = ("**d**", " `e`", "\n\n", "f")
    page.send("More")
    page.wait(lambda: len(turns()) == 4 and not page.running, "the second answer")
    assert (
        turns()[2:] == ["More", "d e\nf"]
        and len(page.all(".said strong")) == len(page.all(".said code")) == 1
    )
    last_prompt = prompts()[-1]  # what came before is part of it, markup as it was
    assert (
        last_prompt.index("Be brief.")
        < last_prompt.index("Hello")
        < last_prompt.index("a b c")
        < last_prompt.index("More")
    )
    buttons = page.all(".turn.assistant .after button")
    assert [each.text for each in buttons] == ["Copy", "Regenerate", "Copy"]  # the last answer's alone
    page.button("Regenerate").click()
    page.wait(lambda: len(server.llm.jobs) == 3 and not page.running, "the answer once more")
    assert prompts()[-1] == last_prompt and len(turns()) == 4
    edits = page.all(".turn.user .after button")
    assert [each.text for each in edits] == ["Edit", "Edit"]
    page.js("arguments[0].click()", edits[0])
    page.press(Keys.END, " again", Keys.ENTER)
    page.wait(lambda: len(server.llm.jobs) == 4 and not page.running, "the answer to the new text")
    assert turns()[0] == "Hello again" and len(turns()) == 2 and "More" not in prompts()[-1]


def test_an_answer_that_breaks_off_is_told(chat: tuple[Page, Live]) -> None:
    page, server = chat
    server.llm.fail_at = 2
    page.send("Hello")
    page.wait(lambda: page["problem"].is_displayed() and not page.running, "the problem is told")
    assert "it broke" in page["problem"].text and page.story == "Helloa b"
    assert page["problem"].get_attribute("role") == "alert"
    server.llm.fail_at = None
    page.send("Once more")
    page.wait(lambda: len(page.all(".said")) == 4 and not page.running, "the next answer")
    assert not page["problem"].is_displayed()


def test_a_model_that_is_still_loaded(driver: webdriver.Chrome, live: Callable[..., Live]) -> None:
    server = live()
    server.llm.status, server.llm.loaded = "loading", 0.25
    service = server.service
    facts, service._facts = service._facts, None
    page = Page(driver, f"http://127.0.0.1:{server.port}")
    page.open(key=None)
    page.wait(lambda: page["model-name"].text == "loading the model 25 %", "it says how far it is")
    assert not page["send"].is_enabled()
    server.llm.status, service._facts = "ready", facts
    page.ready()
    assert page["model-name"].text == "made-up"
    assert all("503" in each["message"] for each in driver.get_log("browser"))


def test_a_server_that_does_not_answer_is_told(page: Page) -> None:
    page.provoked = "ERR_BLOCKED_BY_CLIENT"
    page.open()
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/completions"]})
    try:
        page.send(OPENING)
        page.wait(lambda: page["problem"].is_displayed(), "the problem is told")
    finally:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    assert "does not answer" in page["problem"].text and not page.running
    assert page.story == OPENING
    page.all("#problem button")[0].click()  # try again
    page.done()
    assert page.story.startswith(OPENING) and len(page.story) > len(OPENING) + 10
    assert not page["problem"].is_displayed()


@pytest.mark.parametrize("width", [400, 1000, 2000])
def test_it_fits_the_screen(page: Page, width: int) -> None:
    page.size(width, 800)
    page.open(settings={"temperature": 0, "max_tokens": 60, "paced": False})
    for has_story in (False, True):
        if has_story:
            page.send(OPENING)
            page.done()
        assert page.js("return document.documentElement.scrollWidth") <= width
        assert page["map"].is_displayed() == (width > 400)  # folded on phones
        for id in ("prompt", "new", "open-settings", "theme", *(("map", "tok-s") if width > 400 else ())):
            box = page[id].rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 800, id
            assert box["width"] > 20 and box["height"] > 15, id


def test_without_motion_nothing_moves(page: Page) -> None:
    page.media("prefers-reduced-motion", "reduce")
    page.open(settings={"temperature": 0, "max_tokens": 40})
    page.send(OPENING)
    page.done()
    assert page.js("return document.getAnimations().length") == 0
    before = page.pixels
    page.js("return new Promise((go) => setTimeout(go, 600))")
    assert page.pixels == before


CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read(page: Page, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1, and 3 to 1 for large text; of everything that is visible."""
    page.size(1400, 900, dark=dark)
    page.open(settings={"temperature": 0, "max_tokens": 20, "paced": False})
    assert page.js(CONTRAST) == []
    page.send(OPENING)
    page.done()
    assert page.js(CONTRAST) == []
    page["open-settings"].click()
    assert page.js(CONTRAST) == []


NAMED = [
    "button",
    "textbox",
    "spinbutton",
    "checkbox",
    "link",
    "image",
    "dialog",
    "log",
    "group",
    "region",
    "complementary",
]


def test_everything_has_a_name(page: Page) -> None:
    """In the tree that a screen reader is given."""
    page.open(settings={"temperature": 0, "max_tokens": 20, "paced": False})
    page.send(OPENING)
    page.done()
    for dialog in (False, True):
        if dialog:
            page["open-settings"].click()
        tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        shown = [node for node in tree if not node["ignored"]]
        roles = [(node["role"]["value"], node.get("name", {}).get("value")) for node in shown]
        assert [role for role, name in roles if role in NAMED and not name] == []
        assert sum(role == "button" for role, _ in roles) >= (2 if dialog else 5)
        if not dialog:
            assert {"banner", "main", "complementary", "heading", "log"} <= {role for role, _ in roles}


def test_nothing_is_asked_of_others(page: Page) -> None:
    """In any of the tests before this one."""
    page.open()
    asked = set()
    for entry in page.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
    web = {each for each in asked if not each.startswith(("chrome:", "data:", "about:"))}
    assert f"{page.url}/page/app.js" in web
    own = tuple(f"{server}/" for server in page.servers)
    assert [each for each in web if not each.startswith(own)] == []
