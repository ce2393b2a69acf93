// The page: what is written, by whom, and the picture of what fires meanwhile.

import { Answer } from "./answer.js";
import { health, isKey, keepKey, pictureInfo, Refused, stream } from "./api.js";
import { element, percent, showActive, showLayers, showMemory, showRates, showShares } from "./figures.js";
import { Picture } from "./picture.js";
import { Settings } from "./settings.js";

const $ = (id) => document.getElementById(id);
const NO_KEY = "This server answers nobody without its key.";
const STORY_CHARS = 3.4; // a token has about so many, where the beginning of a story has to be left out
const STORY_TOKENS = 160; // at a time, where nobody says how many
const OPENINGS = {
  story: ["Once upon a time there was a little fox who", "The old man sat down by the fire and said,", "One morning Lily found a small door in the garden wall."],
  chat: ["Explain why the sky is blue, to a child.", "Write a short poem about winter and fire.", "What is a good way to learn to draw?"],
};
const still = matchMedia("(prefers-reduced-motion: reduce)");

const picture = new Picture($("stage"), $("map"), $("bloom"));
const settings = new Settings($("settings"), $("settings-form"));
const page = { info: null, turns: [], running: null, answer: null, last: 0, story: true };

// -- the model ---------------------------------------------------------------------------------------------------

async function connect() {
  for (;;) {
    let told = null;
    try { told = await health(); } catch { state("gone", "the server does not answer"); }
    if (told?.ready) {
      try { return begin(await pictureInfo()); } catch (error) {
        if (error.status === 401) {
          if (await askKey(error)) continue;
          return problem(NO_KEY, true);
        }
        state("gone", error.message);
      }
    } else if (told) {
      const part = typeof told.loaded === "number" && told.loaded < 1 ? ` ${Math.floor(100 * told.loaded)} %` : "";
      state("busy", told.status === "failed" ? "the model could not be loaded" : `loading the model${part}`);
    }
    await new Promise((go) => setTimeout(go, 700));
  }
}

function begin(info) {
  page.info = info;
  page.story = !info.chat;
  document.body.classList.toggle("story", page.story);
  state("ready", info.model);
  document.title = `Hotcold · ${info.model}`;
  $("prompt-label").textContent = page.story ? "How the story begins, or goes on" : "Your message";
  showPicture(info.picture);
  welcome();
  labels();
  $("prompt").focus({ preventScroll: true });
}

function state(kind, words) {
  $("dot").className = `dot ${kind}`;
  $("model-name").textContent = words;
}

function showPicture(told) {
  if (!told) {
    showNote("This server gives no picture.");
    return;
  }
  const { layout, memory, gpu } = told;
  picture.setLayout(layout);
  showLayers(layout.cells.length);
  showMemory(memory, gpu);
  const all = sum(layout.neurons), hot = sum(layout.hot);
  const placed = layout.hot_by === "placement", known = layout.hot_by !== "";
  $("hot-words").textContent = placed ? `hot: on the GPU, ${percent(hot / all)}` : "hot: the fifth that fires most";
  $("cold-words").textContent = placed ? "cold: on the CPU" : known ? "cold: the rest" : "neurons";
  $("legend").firstElementChild.hidden = !known;
  $("axis-hot").hidden = $("axis-cold").hidden = !known;
  const each = layout.bits === 1 ? "each dot is a neuron" : `each cell stands for about ${Math.round(all / sum(layout.cells))} neurons`;
  $("map-words").textContent = `A map of ${all.toLocaleString("en")} neurons in ${layout.neurons.length} layers, which stand beside each other; ` +
    `${each}, the most active at the top.`;
  $("watch-title").textContent = `${all.toLocaleString("en")} neurons, ${layout.neurons.length} layers`;
  if (!layout.zeros) showNote("This model's activation gives no zeros: every neuron works for every token.");
}

function showNote(words) {
  $("map-note").hidden = false;
  $("map-note").textContent = words;
}

// -- turns -------------------------------------------------------------------------------------------------------

function welcome() {
  const empty = page.turns.length === 0;
  $("welcome").hidden = !empty || !page.info;
  if (!empty || !page.info) return;
  $("welcome-title").textContent = page.story ? "Begin a story." : "Ask away.";
  $("welcome-words").textContent = page.story
    ? `Write how it starts, and ${page.info.model} writes on. Point at any word of its answer to see which neurons chose it.`
    : `${page.info.model} answers, on this machine. Point at any word of an answer to see which neurons chose it.`;
  $("openings").replaceChildren(...OPENINGS[page.story ? "story" : "chat"].map((text) => {
    const button = element("button", { type: "button", text });
    button.addEventListener("click", () => send(text));
    return element("li", {}, button);
  }));
}

function labels() {
  const begun = page.turns.length > 0, typed = $("prompt").value.trim() !== "";
  $("prompt").placeholder = !page.story ? "Write a message"
    : begun ? "Write the next sentence, or go on" : "Once upon a time";
  $("send").textContent = !page.story ? "Send" : begun && !typed ? "Go on" : "Write on";
  $("send").disabled = !page.info || (!typed && !(page.story && begun));
  $("send").hidden = page.running !== null;
  $("stop").hidden = page.running === null;
}

function addTurn(role, text) {
  const said = element("div", { kind: "said" });
  const node = element("article", { kind: `turn ${role}` }, said, element("div", { kind: "after" }));
  node.setAttribute("aria-label", role === "user" ? "You" : "The model");
  const turn = { role, text, node, said, answer: null };
  if (role === "user") {
    said.textContent = text;
    if (!page.story) turnButtons(turn, [["Edit", () => edit(turn)]]);
  }
  $("turns").append(node);
  page.turns.push(turn);
  return turn;
}

function cutTurns(from) {
  for (const turn of page.turns.splice(from)) turn.node.remove();
}

function turnButtons(turn, buttons, told = "") {
  const after = turn.node.querySelector(".after");
  after.replaceChildren();
  if (told) after.append(element("p", { kind: "told", text: told }));
  for (const [text, action] of buttons) {
    const button = element("button", { type: "button", kind: "quiet", text });
    button.addEventListener("click", action);
    after.append(button);
  }
}

function edit(turn) {
  stop();
  const at = page.turns.indexOf(turn);
  if (at < 0) return;
  $("prompt").value = turn.text.trim();
  cutTurns(at);
  grow();
  welcome();
  labels();
  $("prompt").focus();
}

function undo() {
  stop();
  cutTurns(page.turns.length - 1);
  const user = page.turns.at(-1);
  if (user?.role === "user") {
    $("prompt").value = user.text.trim();
    cutTurns(page.turns.length - 1);
  }
  picture.dark();
  grow();
  welcome();
  labels();
  $("prompt").focus();
}

function again(turn) {
  const at = page.turns.indexOf(turn);
  if (page.running || at < 0) return;
  cutTurns(at);
  generate();
}

// -- generating --------------------------------------------------------------------------------------------------

function send(text) {
  if (page.running || !page.info) return;
  const typed = text.trim();
  if (typed) {
    const before = page.turns.at(-1)?.text ?? "";
    const joined = page.story && before && !/\s$/.test(before) && !/^[.,;:!?'’)]/.test(typed) ? ` ${typed}` : typed;
    addTurn("user", page.story ? joined : typed);
  } else if (!page.story || !page.turns.length) return;
  $("prompt").value = "";
  grow();
  welcome();
  generate();
}

function body(part) {
  const common = { model: page.info.model, ...settings.sampling, hotcold: { picture: true } };
  if (page.story) {
    const whole = page.turns.map((turn) => turn.text).join("").trimEnd();
    const most = Math.floor(part * STORY_CHARS * page.info.context);
    return ["/v1/completions", { max_tokens: STORY_TOKENS, ...common, prompt: whole.length > most ? whole.slice(-most).replace(/^\S*\s/, "") : whole }];
  }
  const messages = page.turns.map(({ role, text }) => ({ role, content: text }));
  if (settings.values.system.trim()) messages.unshift({ role: "system", content: settings.values.system });
  if (settings.values.json) common.response_format = { type: "json_object" };
  return ["/v1/chat/completions", { ...common, messages }];
}

async function generate() {
  problem("");
  const request = body(0.5);
  const turn = addTurn("assistant", "");
  turn.answer = new Answer(turn.node, picture, { plain: page.story });
  turn.node.classList.add("waits");
  const run = { control: new AbortController(), turn, start: performance.now(), stopped: false };
  page.running = run;
  state("busy", page.info.model);
  labels();
  scroll(true);
  page.last = performance.now();
  requestAnimationFrame((now) => reveal(run, now));
  try {
    await receive(run, request, 0.5);
  } catch (error) {
    if (!run.stopped) failed(error, run);
  }
  run.seconds ??= (performance.now() - run.start) / 1000;
  turn.answer.done = true;
}

async function receive(run, [path, request], part) {
  const answer = run.turn.answer;
  try {
    for await (const event of stream(path, request, run.control.signal)) {
      if (run.stopped) return;
      const choice = event.choices?.[0];
      const delta = choice?.delta ?? {};
      const text = (choice?.text ?? delta.content) || "", told = event.hotcold;
      if (text || told || delta.reasoning_content) answer.add(text, delta.reasoning_content || "", told);
      if (told?.note) showNote(told.note);
      if (told?.rates) showRates(told.rates, page.info.picture?.gpu);
      if (choice?.finish_reason) run.reason = choice.finish_reason;
    }
  } catch (error) {
    const tooLong = error instanceof Refused && error.code === "context_length_exceeded";
    if (!tooLong || !page.story || part < 0.1) throw error;
    page.turns.pop(); // the empty turn is no part of the story
    const shorter = body(part * 0.7);
    page.turns.push(run.turn);
    await receive(run, shorter, part * 0.7);
  }
}

/** Shows the text token by token, with what fired for each. */
function reveal(run, now) {
  if (run.over) return;
  const { turn } = run, { answer } = turn;
  const paced = settings.values.paced && !still.matches && !run.stopped;
  const lit = answer.advance(Math.min(0.1, Math.max(0, now - page.last) / 1000), paced);
  page.last = now;
  if (lit >= 0) moment(answer, lit);
  scroll();
  if (!answer.shownAll) return requestAnimationFrame((next) => reveal(run, next));
  finish(run);
}

function finish(run) {
  const { turn } = run, { answer } = turn;
  turn.text = answer.text;
  turn.node.classList.remove("waits");
  page.running = null;
  state("ready", page.info.model);
  if (!answer.text && !answer.thought) {
    cutTurns(page.turns.indexOf(turn));
    if (!run.failed) problem(run.stopped ? "" : "The model ended its answer at once. Try again, or write something else.");
  } else {
    const told = `${answer.tokens} tokens in ${run.seconds.toFixed(run.seconds < 1 ? 2 : 1)} s${run.stopped ? ", stopped" : ""}`;
    const buttons = [[page.story ? "Another way" : "Again", () => again(turn)]];
    if (page.story) buttons.push(["Undo", undo], ["Copy", (event) => copy(page.turns.map((each) => each.text).join(""), event.target)]);
    else buttons.push(["Copy", (event) => copy(turn.text, event.target)]);
    turnButtons(turn, buttons, told);
    turn.said.tabIndex = 0;
    turn.said.setAttribute("role", "group");
    turn.said.setAttribute("aria-label", "Text of the model. Left and right arrow keys go from word to word and show what fired for each");
    announce(`${run.stopped ? "Stopped" : "Done"}, ${told}. ${figuresAsText()} ${answer.text.trim()}`);
  }
  welcome();
  labels();
  scroll();
}

function stop() {
  const run = page.running;
  if (!run || run.stopped) return;
  run.stopped = !run.turn.answer.done; // else only what is shown was behind
  run.seconds ??= (performance.now() - run.start) / 1000;
  const { answer } = run.turn;
  if (run.stopped) { // what nobody has read is not said: the text ends where it is seen to end
    answer.cut();
    run.control.abort();
  }
  answer.done = true;
  answer.reached = answer.spans.ends.length;
  const lit = answer.advance(0, false);
  if (lit >= 0) moment(answer, lit);
  finish(run);
  run.over = true;
}

async function failed(error, run) {
  run.failed = true;
  if (error.status === 401) {
    if (await askKey(error)) tryAgain();
    else problem(NO_KEY, true);
    return;
  }
  const wait = error.wait ? ` Try again in ${error.wait} s.` : "";
  problem(error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message + wait, !run.turn.answer.text);
}

/** Connects, or answers the last turn, if nobody has. */
function tryAgain() {
  if (!page.info) {
    problem("");
    connect();
    return;
  }
  if (!page.running && page.turns.at(-1)?.role === "user") generate();
}

// -- what is shown beside it ---------------------------------------------------------------------------------------

function moment(answer, token) {
  const fired = answer.fired.get(token);
  if (!fired) return;
  const all = sum(page.info.picture.layout.neurons), n = fired[0] + fired[1];
  const word = answer.word(token).trim();
  const quoted = word ? [element("q", { text: word })] : [];
  $("moment").replaceChildren(...quoted, ` ${n.toLocaleString("en")} fired`);
  showActive(n / all);
  showShares(picture.shares(answer.frames.get(token)));
}

function point(turn, token) {
  const { answer } = turn;
  const frame = answer?.frames.get(token);
  for (const node of turn.said.querySelectorAll(".at")) node.classList.remove("at");
  for (const node of turn.said.querySelectorAll(`[data-t="${token}"]`)) node.classList.add("at");
  if (frame) {
    picture.hold(frame);
    moment(answer, token);
  } else if (answer) {
    picture.dark();
    $("moment").replaceChildren(element("q", { text: answer.word(token).trim() }), token ? " not watched" : " came of reading the prompt");
  }
}

function leave(turn) {
  for (const node of turn.said.querySelectorAll(".at")) node.classList.remove("at");
  picture.hold(null);
}

function turnOf(target) {
  const node = target.closest?.(".turn.assistant");
  return node && page.turns.find((turn) => turn.node === node);
}

function figuresAsText() {
  const parts = [["tok-s", "tokens a second"], ["active", "of the neurons fire"]];
  return parts.filter(([id]) => $(id).textContent !== "–").map(([id, words]) => `${$(id).textContent} ${words}.`).join(" ");
}

function announce(words) {
  $("announce").textContent = words.slice(0, 1200);
}

function problem(words, again = false) {
  $("problem").hidden = !words;
  $("problem").replaceChildren(words);
  if (again) {
    const button = element("button", { type: "button", kind: "quiet", text: "Try again" });
    button.addEventListener("click", tryAgain);
    $("problem").append(" ", button);
  }
  if (words) scroll(true);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text.trim());
    button.textContent = "Copied";
  } catch { button.textContent = "Not allowed here"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function scroll(always = false) {
  const box = $("scroll");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 90) box.scrollTop = box.scrollHeight;
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

const sum = (values) => values.reduce((all, value) => all + value, 0);

// -- key and colours -----------------------------------------------------------------------------------------------

function askKey(error) {
  const dialog = $("key"), field = $("key-field");
  $("key-words").textContent = error.message.includes("wrong")
    ? "The server does not know that key. Try another one."
    : "This server asks for a key. The page keeps it until this tab is closed.";
  field.value = "";
  if (!dialog.open) dialog.showModal();
  state("gone", "a key is needed");
  return new Promise((go) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use";
      if (given) keepKey(field.value.trim());
      dialog.returnValue = "";
      if (page.info) state("ready", page.info.model);
      go(given);
    }, { once: true });
  });
}

function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("hotcold.theme", root.dataset.theme); } catch { /* not kept */ }
  picture.colours();
}

// -- events --------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("input", () => { grow(); labels(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
$("stop").addEventListener("click", () => { stop(); $("prompt").focus(); });
$("new").addEventListener("click", () => {
  stop();
  cutTurns(0);
  problem("");
  $("moment").replaceChildren();
  picture.dark();
  welcome();
  labels();
  $("prompt").focus();
});
$("open-settings").addEventListener("click", () => settings.open());
$("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture.colours());
$("key-form").addEventListener("submit", (event) => {
  if (isKey($("key-field").value.trim())) {
    $("key").returnValue = "use";
    return;
  }
  event.preventDefault();
  $("key-words").textContent = "That is no key: keys have letters, digits and signs of ASCII, without spaces.";
  $("key-field").select();
});
$("key-cancel").addEventListener("click", () => $("key").close(""));
$("turns").addEventListener("pointerover", (event) => {
  const turn = turnOf(event.target), token = event.target.dataset?.t;
  if (turn && token !== undefined && !page.running) point(turn, Number(token));
});
$("turns").addEventListener("pointerout", (event) => {
  const turn = turnOf(event.target);
  if (turn && event.target.dataset?.t !== undefined && !page.running) leave(turn);
});
$("turns").addEventListener("keydown", (event) => {
  const turn = turnOf(event.target);
  if (!turn || event.target !== turn.said || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault();
  const words = [...turn.said.querySelectorAll("[data-t]")];
  const at = words.findIndex((node) => node.classList.contains("at"));
  const next = Math.max(0, Math.min(words.length - 1, at + (event.key === "ArrowRight" ? 1 : -1)));
  point(turn, Number(words[next].dataset.t));
  announce(`${words[next].textContent.trim()}: ${$("moment").textContent.trim()}`);
});
$("turns").addEventListener("focusout", (event) => {
  const turn = turnOf(event.target);
  if (turn) leave(turn);
});

if (matchMedia("(max-width: 860px)").matches) $("more").open = false;
labels();
connect();
