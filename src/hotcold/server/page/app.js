// The page: the conversation, and the picture of the neurons that are active meanwhile.

import { health, pictureInfo, Refused, stream } from "./api.js";
import { Attached, withFiles } from "./attach.js";
import { announce, copy, figuresAsText, grow, problem, showNote, store, stored } from "./beside.js";
import { Count, isLong, SHORTER } from "./counting.js";
import { editInPlace } from "./editing.js";
import { element, showContext, showFacts, showLayers, showMemory, showRates } from "./figures.js";
import { askKey, nextTheme } from "./key.js";
import { showLegend, shownOf } from "./legend.js";
import { Picture } from "./picture.js";
import { Pointing } from "./pointing.js";
import { scroll } from "./scrolling.js";
import { Settings } from "./settings.js";
import { TalkList } from "./talk_list.js";
import { dropTalk, keepTalk, newTalk, readTalk, titleOf } from "./talks.js";
import { textOf, Turns } from "./turns.js";

const $ = (id) => document.getElementById(id);
const NO_KEY = "This server requires an API key.";
const NOW = "hotcold.now", FOLDED = "hotcold.folded"; // this tab's conversation; whether the picture is folded
const HEALTH_MS = 5000; // between two checks whether the server answers
const KEEP_MS = 2000; // between two times that a growing answer is stored
const STORY_CHARS = 3.4; // estimated characters of a token, to shorten a story that is too long
const STORY_TOKENS = 160; // default limit of one answer
const OPENINGS = {
  story: ["Once upon a time there was a little fox who", "The old man sat down by the fire and said,", "One morning Lily found a small door in the garden wall."],
  chat: ["Explain why the sky is blue, to a child.", "Write a short poem about winter and fire.", "What is a good way to learn to draw?"],
};
const still = matchMedia("(prefers-reduced-motion: reduce)"), narrow = matchMedia("(max-width: 860px)");

const picture = new Picture($("stage"), $("map"), $("bloom"));
const settings = new Settings($("settings"), $("settings-form"));
const turns = new Turns(picture);
const count = new Count(wouldSend);
const attached = new Attached({ changed: () => { labels(); count.later(); }, problem: (words) => problem(words) });
const page = { info: null, shows: null, running: null, last: 0, story: true, talk: null, keptAt: 0, gone: false, connecting: false };
const pointing = new Pointing(turns, picture, page);
const talkList = new TalkList({
  open: openTalk,
  gone: (id) => { if (page.talk?.id === id) begun(); },
  renamed: (id, title) => { if (page.talk?.id === id) Object.assign(page.talk, { title, named: true }); },
  now: () => page.talk?.id,
  fits: (talk) => page.info !== null && talk.story === page.story,
});

// -- the model ---------------------------------------------------------------------------------------------------

async function connect() {
  if (page.connecting) return;
  page.connecting = true;
  try { await answered(); } finally { page.connecting = false; }
}

/** Waits until the server is ready, and reads the facts of its model. */
async function answered() {
  for (;;) {
    let reply = null;
    try { reply = await health(); } catch { state("gone", "the server does not answer"); }
    if (reply?.ready) {
      try { return begin(await pictureInfo()); } catch (error) {
        if (error.status === 401) {
          state("gone", "a key is needed");
          if (await askKey(error)) continue;
          return problem(NO_KEY, tryAgain);
        }
        state("gone", error.message);
      }
    } else if (reply) {
      const part = typeof reply.loaded === "number" && reply.loaded < 1 ? ` ${Math.floor(100 * reply.loaded)} %` : "";
      state("busy", reply.status === "failed" ? "the model could not be loaded" : `loading the model${part}`);
    }
    await new Promise((go) => setTimeout(go, 700));
  }
}

/** Checks whether the server answers, while no answer runs that would show it. */
async function watch() {
  if (page.info && !page.running && !page.connecting && !document.hidden) {
    try {
      if (!(await health()).ready) throw new Error("not ready");
    } catch {
      if (!page.running) lost();
    }
  }
  setTimeout(watch, HEALTH_MS);
}

/** Shows that the server or its model has gone, and waits for it. */
function lost() {
  page.gone = true;
  state("gone", "the server does not answer");
  connect();
}

function begin(info) {
  const same = page.info !== null && page.story === !info.chat;
  page.gone = false;
  page.info = info;
  page.story = turns.story = !info.chat;
  document.body.classList.toggle("story", page.story);
  state("ready", info.model);
  document.title = `Hotcold · ${info.model}`;
  $("prompt-label").textContent = page.story ? "The next part of the story" : "Your message";
  showFacts(info);
  showPicture(info.picture);
  if (same) return labels();
  talkList.restore();
  const kept = readTalk(stored("sessionStorage", NOW));
  if (kept && kept.story === page.story && !turns.length) openTalk(kept);
  else begun();
}

function state(kind, words) {
  $("dot").className = `dot ${kind}`;
  $("model-name").textContent = words;
}

function showPicture(facts) {
  const layout = facts?.layout;
  page.shows = shownOf(layout);
  fold();
  if (!facts) return showNote("This server sends no picture of the neurons.");
  showMemory(facts.memory, facts.gpu);
  if (!page.shows) return showNote("This model's activation gives no zeros: every neuron is active for every token, so there is no picture.");
  picture.setLayout(layout);
  showLayers(layout.cells.length);
  showLegend(layout, page.shows);
}

/** Folds the picture if it is empty; by default also on phones and for models without zeros. */
function fold() {
  const chosen = stored("localStorage", FOLDED);
  const wanted = chosen ? chosen === "0" : Boolean(page.shows?.share) && !narrow.matches;
  document.body.classList.toggle("folded", !page.shows || !wanted);
  if (document.body.classList.contains("folded")) $("more").open = false;
  $("fold").hidden = !page.shows;
  $("fold").setAttribute("aria-pressed", String(wanted));
}

// -- conversations -----------------------------------------------------------------------------------------------

function welcome() {
  const empty = turns.length === 0;
  $("welcome").hidden = !empty || !page.info;
  if (!empty || !page.info) return;
  const look = page.shows ? ` Point at any word of ${page.story ? "its" : "an"} answer to see which ${page.shows.units} ${page.shows.did}.` : "";
  $("welcome-title").textContent = page.story ? "Begin a story." : "Ask away.";
  $("welcome-words").textContent = page.story
    ? `Write the beginning, and ${page.info.model} continues it.${look}`
    : `${page.info.model} answers on this machine.${look}`;
  $("openings").replaceChildren(...OPENINGS[page.story ? "story" : "chat"].map((text) => {
    const button = element("button", { type: "button", text });
    button.addEventListener("click", () => send(text));
    return element("li", {}, button);
  }));
}

function labels() {
  const any = turns.length > 0, typed = $("prompt").value.trim() !== "" || attached.files.length > 0;
  $("prompt").placeholder = !page.story ? "Write a message"
    : any ? "Write a sentence, or continue" : "Once upon a time";
  $("send").textContent = !page.story ? "Send" : "Continue";
  $("send").disabled = !page.info || (!typed && !(page.story && any));
  $("send").hidden = page.running !== null;
  $("stop").hidden = page.running === null;
}

/** Begins an empty conversation. */
function begun() {
  stop();
  page.talk = null;
  store("sessionStorage", NOW, "");
  turns.cut(0);
  refresh();
}

/** Updates all parts of the page around the text. */
function refresh() {
  problem("");
  $("moment").replaceChildren();
  picture.dark();
  showContext(page.talk?.used ?? 0, page.info?.context);
  grow();
  welcome();
  buttonsOfAll();
  labels();
  if (!document.querySelector("dialog:modal")) $("prompt").focus({ preventScroll: true });
}

function openTalk(talk) {
  stop();
  page.talk = talk;
  store("sessionStorage", NOW, talk.id);
  turns.cut(0);
  for (const each of talk.turns) turns.add(each.role, each);
  refresh();
  scroll(true);
}

/** Stores the conversation in the browser. */
function keep() {
  if (!page.info) return;
  page.keptAt = performance.now();
  const list = turns.kept;
  if (!list.length) {
    if (page.talk) dropTalk(page.talk.id);
    return;
  }
  page.talk ??= newTalk(page.info.model, page.story);
  if (!page.talk.named) page.talk.title = titleOf(list);
  Object.assign(page.talk, { changed: Date.now(), model: page.info.model, turns: list });
  store("sessionStorage", NOW, page.talk.id);
  if (!keepTalk(page.talk)) problem("The browser's storage is full: export conversations and delete some.");
  if (!page.running) talkList.refresh();
}

/** Draws the buttons of each turn. */
function buttonsOfAll() {
  for (const turn of turns.all) {
    if (turn === page.running?.turn) continue;
    if (turn.node.classList.contains("edited")) continue;
    if (turn.role === "user") turns.buttons(turn, page.story ? [] : [["Edit", () => editInPlace(turn, (text) => resend(turn, text))]]);
    else turns.buttons(turn, buttonsOf(turn));
  }
}

function buttonsOf(turn) {
  const last = turn === turns.last;
  const buttons = last ? [["Regenerate", () => again(turn)], ...versionsOf(turn)] : [];
  if (page.story) return [...buttons, ["Undo", undo], ["Copy", (event) => copy(turns.text, event.target)]];
  if (turn.cut && last && turn.text.trim()) buttons.unshift(["Continue", () => goOn(turn), "go-on"]);
  return [...buttons, ["Copy", (event) => copy(turn.text, event.target)]];
}

/** Returns the buttons that select a version of the last answer. */
function versionsOf(turn) {
  const count = turn.versions.length, at = turn.version;
  if (count < 2) return [];
  const to = (version) => () => {
    if (page.running) return;
    turns.show(turn, version);
    keep();
    buttonsOfAll();
    turn.node.querySelector(".after .version:not(:disabled)")?.focus();
    announce(`Version ${version + 1} of ${count}`);
  };
  return [
    ["‹", at > 0 ? to(at - 1) : null, "quiet version", "Earlier version"],
    [`${at + 1}/${count}`, null, "quiet count"],
    ["›", at < count - 1 ? to(at + 1) : null, "quiet version", "Later version"],
  ];
}

/** Sends a changed message; it replaces the old one and all turns after it. */
function resend(turn, text) {
  stop();
  const at = turns.all.indexOf(turn);
  if (at < 0 || !page.info) return;
  const { files } = turn;
  turns.cut(at);
  turns.add("user", { text, files });
  refresh();
  generate();
}

function undo() {
  stop();
  turns.cut(turns.length - 1);
  const user = turns.last;
  if (user?.role === "user") {
    $("prompt").value = user.text.trim();
    turns.cut(turns.length - 1);
  }
  keep();
  refresh();
}

/** Generates another version of the last answer. */
function again(turn) {
  if (page.running || turn !== turns.last) return;
  turns.begin(turn);
  generate(turn, turns.all.slice(0, -1));
}

/** Continues an answer that was cut off. */
function goOn(turn) {
  if (page.running || turn !== turns.last) return;
  turn.cut = false;
  turn.answer.resume();
  generate(turn);
}

// -- generating --------------------------------------------------------------------------------------------------

function send(text) {
  if (page.running || !page.info) return;
  const typed = text.trim(), files = attached.take();
  if (page.story && (typed || files.length)) {
    const whole = [...files.map((file) => file.text.trim()), typed].filter(Boolean).join("\n\n");
    const before = turns.last?.text ?? "";
    turns.add("user", { text: before && !/\s$/.test(before) && !/^[.,;:!?'’)]/.test(whole) ? ` ${whole}` : whole });
  } else if (typed || files.length) turns.add("user", { text: typed, files });
  else if (!page.story || !turns.length) return;
  $("prompt").value = "";
  count.show("");
  grow();
  welcome();
  buttonsOfAll();
  generate();
}

/** Returns a request's route and body. `list`: messages before the answer; `part`: share of the context for a story. */
function body(list, part) {
  const stats = { timings_per_token: true, hotcold: { picture: true } };
  const common = { model: page.info.model, ...settings.sampling, ...stats };
  if (page.story) {
    const whole = textOf(list).trimEnd();
    const most = Math.floor(part * STORY_CHARS * page.info.context);
    const shown = whole.length > most ? whole.slice(-most).replace(/^\S*\s/, "") : whole;
    return ["/v1/completions", { max_tokens: STORY_TOKENS, ...common, prompt: shown.replace(/^[\uDC00-\uDFFF]/, "") }];
  }
  const messages = messagesOf(list);
  if (settings.values.system.trim()) messages.unshift({ role: "system", content: settings.values.system });
  if (settings.values.json) common.response_format = { type: "json_object" };
  return ["/v1/chat/completions", { ...common, messages }];
}

/** Returns the prompt that the text field and its files would make; null: no count is needed. */
function wouldSend() {
  const text = $("prompt").value, { files } = attached;
  if (!page.info || page.story || page.running || !isLong(text, files)) return null;
  const messages = messagesOf([...turns.all, { role: "user", text, files }]);
  const system = settings.values.system.trim();
  return { context: page.info.context, body: { model: page.info.model, messages, ...(system && { system }) } };
}

const messagesOf = (list) => list.map(({ role, text, files }) => ({ role, content: withFiles(text, files) }));

/** Generates an answer to the messages of `list`. `into`: the turn to fill, which may have the answer's beginning. */
async function generate(into = null, list = [...turns.all]) {
  problem("");
  const request = body(list, 0.5);
  const turn = into ?? turns.add("assistant");
  turn.node.classList.add("waits");
  turn.told = "";
  turns.buttons(turn, []);
  const run = { control: new AbortController(), turn, list, start: performance.now(), stopped: false };
  page.running = run;
  state("busy", page.info.model);
  keep();
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
      const text = (choice?.text ?? delta.content) || "", frame = event.hotcold;
      if (text || frame || delta.reasoning_content) answer.add(text, delta.reasoning_content || "", frame);
      if (frame?.note) showNote(frame.note);
      if (frame?.rates) showRates(frame.rates, page.info.picture?.gpu);
      if (event.timings) run.used = event.timings.cache_n + event.timings.prompt_n + event.timings.predicted_n;
      if (choice?.finish_reason) run.reason = choice.finish_reason;
    }
    if (run.reason === "length") answer.trimHalf();
  } catch (error) {
    const tooLong = error instanceof Refused && error.code === "context_length_exceeded";
    if (!tooLong || !page.story || part < 0.1) throw error;
    await receive(run, body(run.list, part * 0.7), part * 0.7);
  }
}

/** Shows the text token by token, with the active neurons of each. */
function reveal(run, now) {
  if (run.over) return;
  const { turn } = run, { answer } = turn;
  const paced = settings.values.paced && !still.matches && !run.stopped;
  const lit = answer.advance(Math.min(0.1, Math.max(0, now - page.last) / 1000), paced);
  page.last = now;
  if (lit >= 0) pointing.moment(answer, lit);
  if (run.used) showContext(run.used, page.info.context);
  if (now - page.keptAt > KEEP_MS) keep();
  scroll();
  if (!answer.shownAll) return requestAnimationFrame((next) => reveal(run, next));
  finish(run);
}

function finish(run) {
  const { turn } = run, { answer } = turn;
  turn.text = answer.text;
  turn.thought = answer.thought;
  turn.node.classList.remove("waits");
  page.running = null;
  if (!page.gone) state("ready", page.info.model);
  if (!answer.text && !answer.thought) {
    if (turn.versions.length) turns.show(turn, turn.versions.length - 1);
    else turns.cut(turns.all.indexOf(turn));
    if (!run.failed) problem(run.stopped ? "" : "The model ended its answer at once. Try again, or write something else.");
  } else {
    const full = run.used >= page.info.context;
    turn.cut = (run.reason === "length" && !full) || run.stopped || run.failed === true;
    const end = run.stopped ? ", stopped" : run.reason !== "length" || page.story ? "" : full ? ", the context is full" : ", cut at the limit";
    const n = answer.tokens - answer.before;
    turn.told = `${n} token${n === 1 ? "" : "s"} in ${run.seconds.toFixed(run.seconds < 1 ? 2 : 1)} s${end}`;
    turns.end(turn);
    turns.keepVersion(turn);
    announce(`${run.stopped ? "Stopped" : "Done"}, ${turn.told}. ${figuresAsText()} ${answer.text.trim()}`);
  }
  if (page.talk && run.used) page.talk.used = run.used;
  keep();
  buttonsOfAll();
  welcome();
  labels();
  scroll();
}

function stop() {
  const run = page.running;
  if (!run || run.stopped) return;
  run.stopped = !run.turn.answer.done; // otherwise only the display was late
  run.seconds ??= (performance.now() - run.start) / 1000;
  const { answer } = run.turn;
  if (run.stopped) { // drops text that is not shown yet
    answer.cut();
    run.control.abort();
  }
  answer.done = true;
  answer.reached = answer.spans.ends.length;
  const lit = answer.advance(0, false);
  if (lit >= 0) pointing.moment(answer, lit);
  finish(run);
  run.over = true;
}

async function failed(error, run) {
  run.failed = true;
  if (error.status === 401) {
    state("gone", "a key is needed");
    const given = await askKey(error);
    state("ready", page.info.model);
    if (given) tryAgain();
    else problem(NO_KEY, tryAgain);
    return;
  }
  const wait = error.wait ? ` Try again in ${error.wait} s.` : "";
  if (error instanceof TypeError) lost();
  const words = error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message + wait;
  const tooLong = error.code === "context_length_exceeded";
  const retry = run.turn.versions.length ? () => again(run.turn) : tryAgain;
  problem(tooLong ? `${words} ${SHORTER}` : words, run.turn.answer.text || tooLong ? null : retry);
}

/** Connects, or generates the missing answer to the last turn. */
function tryAgain() {
  if (!page.info) {
    problem("");
    connect();
    return;
  }
  if (!page.running && turns.last?.role === "user") generate();
}

// -- events --------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("input", () => { grow(); labels(); count.later(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog:modal")) stop();
});
$("stop").addEventListener("click", () => { stop(); $("prompt").focus(); });
$("new").addEventListener("click", begun);
$("open-settings").addEventListener("click", () => settings.open());
$("theme").addEventListener("click", () => { nextTheme(); picture.colours(); });
$("fold").addEventListener("click", () => {
  store("localStorage", FOLDED, document.body.classList.contains("folded") ? "0" : "1");
  fold();
  picture.arrange();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture.colours());
addEventListener("pagehide", () => { if (page.running) keep(); });
$("turns").addEventListener("click", (event) => {
  const button = event.target.closest?.(".copy-code");
  if (button) copy(button.closest(".code").querySelector("pre").textContent, button);
});

narrow.addEventListener("change", fold);
if (narrow.matches) $("more").open = false;
labels();
connect();
watch();
