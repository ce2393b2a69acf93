// Conversations, kept in this browser: one entry of its storage for each.

const PREFIX = "hotcold.talk.";
const MOST_TURNS = 1e5, MOST_CHARACTERS = 16e6; // more than the browser has room for, in one conversation
const FORMAT = "hotcold-conversations-1";

/** Those that are kept, the newest first. */
export function talks() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) found.push(readTalk(name.slice(PREFIX.length)));
  } catch { /* not allowed here */ }
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** One of them, or null. */
export function readTalk(id) {
  try { return checked(JSON.parse(localStorage.getItem(PREFIX + id) ?? "null"), id); } catch { return null; }
}

/** Whether there was room for it. */
export function keepTalk(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch { return false; }
}

export function dropTalk(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* nothing was kept */ }
}

export function newTalk(model, story) {
  return { id: newId(), title: "", model, story, created: Date.now(), changed: Date.now(), used: 0, turns: [] };
}

const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((n) => n.toString(36).padStart(2, "0")).join("");

/** What a conversation is called in lists: how it begins. */
export function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user");
  const text = (first?.text || first?.files?.[0]?.name || "Without words").trim().replace(/\s+/g, " ");
  return [...text].slice(0, 80).join("");
}

export const asFile = (list) => JSON.stringify({ format: FORMAT, conversations: list }, null, 1);

/** Keeps the conversations of a file; how many there were. Throws an Error that says what is wrong with it. */
export function takeFile(text) {
  let found = null;
  try { found = JSON.parse(text); } catch { throw new Error("The file is no JSON: export conversations on this page to get one."); }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) throw new Error("The file has no conversations of this page.");
  const list = found.conversations.map((each) => checked(each, each?.id));
  if (list.includes(null)) throw new Error("The file is damaged: nothing was taken from it.");
  for (const talk of list) {
    const own = readTalk(talk.id);
    if (own && JSON.stringify(own) !== JSON.stringify(talk)) talk.id = newId(); // both are kept
    if (!keepTalk(talk)) throw new Error("The browser's storage is full: delete some conversations first.");
  }
  return list.length;
}

/** A conversation with the fields that the page reads, or null: it may come from any file. */
function checked(value, id) {
  if (!value || typeof value !== "object" || !/^[0-9a-z]{8,40}$/.test(id ?? "")) return null;
  if (!Array.isArray(value.turns) || value.turns.length > MOST_TURNS) return null;
  const turns = value.turns.map(checkedTurn);
  if (turns.includes(null) || turns.reduce((sum, turn) => sum + characters(turn), 0) > MOST_CHARACTERS) return null;
  return {
    id, title: text(value.title).slice(0, 200), model: text(value.model).slice(0, 200), story: value.story === true,
    named: value.named === true, created: number(value.created), changed: number(value.changed), used: number(value.used), turns,
  };
}

function checkedTurn(turn) {
  if (!turn || !["user", "assistant"].includes(turn.role) || typeof turn.text !== "string") return null;
  const files = Array.isArray(turn.files) ? turn.files.filter((each) => each && typeof each.text === "string") : [];
  return {
    role: turn.role, ...checkedVersion(turn), ...checkedVersions(turn),
    files: files.map((each) => ({ name: text(each.name).slice(0, 200), text: each.text })),
  };
}

const checkedVersion = (version) => (
  { text: version.text, thought: text(version.thought), told: text(version.told), cut: version.cut === true }
);

/** The versions of an answer; none where they do not fit its text. */
function checkedVersions(turn) {
  const list = Array.isArray(turn.versions) ? turn.versions : [];
  const fits = list.length > 1 && list.every((each) => typeof each?.text === "string") && list[turn.version]?.text === turn.text;
  return fits ? { versions: list.map(checkedVersion), version: turn.version } : { versions: [], version: 0 };
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
/** What a turn takes, with its thoughts and files. */
const characters = ({ text, thought, files, versions }) =>
  [...files, ...versions].reduce((sum, each) => sum + each.text.length, text.length + thought.length);

/** A conversation as a Markdown document. */
export function asMarkdown(talk) {
  const parts = talk.turns.map(({ role, text, files }) => {
    const withFiles = files.map((file) => `*${file.name}*`).concat(text.trim()).filter(Boolean).join("\n\n");
    return talk.story ? text : `## ${role === "user" ? "You" : talk.model}\n\n${withFiles}`;
  });
  return `# ${talk.title}\n\n${parts.join(talk.story ? "" : "\n\n")}\n`;
}

/** Whether all words of a search are in a conversation. */
export function isFound(talk, search) {
  const whole = [talk.title, ...talk.turns.map((turn) => turn.text)].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => whole.includes(word));
}
