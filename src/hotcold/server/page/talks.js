// Conversations in this browser's storage: one entry for each.

const PREFIX = "hotcold.talk.";
const MOST_TURNS = 1e5, MOST_CHARACTERS = 16e6; // of one conversation: more than a browser stores
const FORMAT = "hotcold-conversations-1";

/** Returns the stored conversations, the newest first. */
export function talks() {
  const found = [];
  try {
    for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) found.push(readTalk(name.slice(PREFIX.length)));
  } catch { /* not allowed here */ }
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** Returns a stored conversation, or null. */
export function readTalk(id) {
  try { return checked(JSON.parse(localStorage.getItem(PREFIX + id) ?? "null"), id); } catch { return null; }
}

/** Stores a conversation; false: the storage is full. */
export function keepTalk(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch { return false; }
}

export function dropTalk(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* nothing was stored */ }
}

export function newTalk(model, story) {
  return { id: newId(), title: "", model, story, created: Date.now(), changed: Date.now(), used: 0, turns: [] };
}

const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((n) => n.toString(36).padStart(2, "0")).join("");

/** Returns a conversation's title in lists: its beginning. */
export function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user");
  const text = (first?.text || first?.files?.[0]?.name || "Untitled").trim().replace(/\s+/g, " ");
  return [...text].slice(0, 80).join("");
}

export const asFile = (list) => JSON.stringify({ format: FORMAT, conversations: list }, null, 1);

/** Stores the conversations of a file, and returns their number. Throws an Error for an invalid file. */
export function takeFile(text) {
  let found = null;
  try { found = JSON.parse(text); } catch { throw new Error("The file is not JSON: choose a file that this page exported."); }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) throw new Error("The file has no conversations of this page.");
  const list = found.conversations.map((each) => checked(each, each?.id));
  if (list.includes(null)) throw new Error("The file is damaged: no conversation was imported.");
  for (const talk of list) {
    const own = readTalk(talk.id);
    if (own && JSON.stringify(own) !== JSON.stringify(talk)) talk.id = newId(); // stores both
    if (!keepTalk(talk)) throw new Error("The browser's storage is full: delete some conversations first.");
  }
  return list.length;
}

/** Returns the fields of a conversation that the page reads, or null if it is invalid: files are not trusted. */
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

/** Returns the versions of an answer; none if they do not match its text. */
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

/** Returns whether a conversation contains all words of a search. */
export function isFound(talk, search) {
  const whole = [talk.title, ...talk.turns.map((turn) => turn.text)].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => whole.includes(word));
}
