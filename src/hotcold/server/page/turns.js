// The shown conversation: its messages, and the versions of each answer.

import { Answer } from "./answer.js";
import { named } from "./attach.js";
import { element } from "./figures.js";

const $ = (id) => document.getElementById(id);
const ANSWER_NAME = "Text of the model. The left and right arrow keys go from word to word and show what was active for each";
const MOST_VERSIONS = 20; // of one answer; the oldest are dropped first

export class Turns {
  constructor(picture) {
    this.picture = picture;
    this.all = [];
    this.story = true;
  }

  get length() { return this.all.length; }
  get last() { return this.all.at(-1); }
  get text() { return textOf(this.all); }

  /** Adds a message, new or from a stored conversation. */
  add(role, { text = "", thought = "", files = [], told = "", cut = false, versions = [], version = 0 } = {}) {
    const turn = { role, text, thought, files, told, cut, versions, version };
    this.build(turn);
    $("turns").append(turn.node);
    this.all.push(turn);
    return turn;
  }

  /** Makes the nodes of a message from its fields. */
  build(turn) {
    const { role, text, thought, files } = turn;
    const said = element("div", { kind: "said" });
    const who = role === "user" ? "You" : "The model";
    const node = element("article", { kind: `turn ${role}` }, ...(this.story ? [] : [element("h2", { kind: "words", text: who })]), said,
      element("div", { kind: "after" }));
    node.setAttribute("aria-label", who);
    Object.assign(turn, { node, said, answer: null });
    if (role === "user") {
      said.textContent = text;
      if (files.length) said.before(element("ul", { kind: "files" }, ...files.map((file) => element("li", { kind: "file" }, ...named(file)))));
      said.hidden = !text && files.length > 0;
    } else {
      turn.answer = new Answer(node, this.picture, { plain: this.story, text, thought });
      if (text || thought) this.end(turn);
    }
  }

  rebuild(turn) {
    const old = turn.node;
    this.build(turn);
    old.replaceWith(turn.node);
  }

  /** Empties the last answer for a new version; earlier versions stay. */
  begin(turn) {
    if (!turn.versions.length) turn.versions.push(versionOf(turn));
    this.keepVersion(turn);
    turn.versions.splice(0, turn.versions.length + 1 - MOST_VERSIONS);
    turn.version = turn.versions.length;
    Object.assign(turn, { text: "", thought: "", told: "", cut: false });
    this.rebuild(turn);
  }

  /** Stores the shown text as a version, if there are several. */
  keepVersion(turn) {
    if (turn.versions.length) turn.versions[turn.version] = versionOf(turn);
  }

  /** Shows one version of an answer. */
  show(turn, version) {
    if (turn.text || turn.thought) this.keepVersion(turn);
    Object.assign(turn, turn.versions[version], { version });
    this.rebuild(turn);
  }

  cut(from) {
    for (const turn of this.all.splice(from)) turn.node.remove();
  }

  /** Draws the buttons below a message, after its figures. */
  buttons(turn, buttons) {
    const after = turn.node.querySelector(".after");
    after.replaceChildren();
    if (turn.told) after.append(element("p", { kind: "told", text: turn.told }));
    for (const [text, action, kind = "quiet", name = ""] of buttons) {
      const button = element("button", { type: "button", kind, text, disabled: !action });
      if (name) button.setAttribute("aria-label", name);
      if (action) button.addEventListener("click", action);
      after.append(button);
    }
  }

  /** Makes the words of an answer selectable by pointer and keys. */
  end(turn) {
    turn.said.tabIndex = 0;
    turn.said.setAttribute("role", "group");
    turn.said.setAttribute("aria-label", ANSWER_NAME);
  }

  of(target) {
    const node = target.closest?.(".turn.assistant");
    return node && this.all.find((turn) => turn.node === node);
  }

  /** The messages for the browser's storage. */
  get kept() {
    return this.all.map((turn) => {
      const { role, files, versions, version, node } = turn;
      const shown = { ...versionOf(turn), cut: turn.cut || node.classList.contains("waits") };
      const all = versions.length ? Object.assign([...versions], { [version]: shown }) : [];
      return { role, ...shown, files, versions: all, version };
    }).filter((turn) => turn.text || turn.thought || turn.files.length);
  }
}

export const textOf = (list) => list.map((turn) => turn.text).join("");

function versionOf({ text, thought, told, cut, answer }) {
  return { text: answer?.text || text, thought: answer?.thought || thought, told, cut };
}
