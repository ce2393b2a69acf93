// The conversation that is shown: what was said, by whom.

import { Answer } from "./answer.js";
import { named } from "./attach.js";
import { element } from "./figures.js";

const $ = (id) => document.getElementById(id);
const ANSWER_NAME = "Text of the model. Left and right arrow keys go from word to word and show what fired for each";

export class Turns {
  constructor(picture) {
    this.picture = picture;
    this.all = [];
    this.story = true;
  }

  get length() { return this.all.length; }
  get last() { return this.all.at(-1); }
  get text() { return this.all.map((turn) => turn.text).join(""); }

  /** One more, with what a kept one says. */
  add(role, { text = "", thought = "", files = [], told = "", cut = false } = {}) {
    const said = element("div", { kind: "said" });
    const who = role === "user" ? "You" : "The model";
    const node = element("article", { kind: `turn ${role}` }, ...(this.story ? [] : [element("h2", { kind: "words", text: who })]), said,
      element("div", { kind: "after" }));
    node.setAttribute("aria-label", who);
    const turn = { role, text, thought, files, told, cut, node, said, answer: null };
    if (role === "user") {
      said.textContent = text;
      if (files.length) said.before(element("ul", { kind: "files" }, ...files.map((file) => element("li", { kind: "file" }, ...named(file)))));
      said.hidden = !text && files.length > 0;
    } else {
      turn.answer = new Answer(node, this.picture, { plain: this.story, text, thought });
      if (text || thought) this.end(turn);
    }
    $("turns").append(node);
    this.all.push(turn);
    return turn;
  }

  cut(from) {
    for (const turn of this.all.splice(from)) turn.node.remove();
  }

  /** The buttons below one, after what is told of it. */
  buttons(turn, buttons) {
    const after = turn.node.querySelector(".after");
    after.replaceChildren();
    if (turn.told) after.append(element("p", { kind: "told", text: turn.told }));
    for (const [text, action, kind = "quiet"] of buttons) {
      const button = element("button", { type: "button", kind, text });
      button.addEventListener("click", action);
      after.append(button);
    }
  }

  /** Its words can be pointed at. */
  end(turn) {
    turn.said.tabIndex = 0;
    turn.said.setAttribute("role", "group");
    turn.said.setAttribute("aria-label", ANSWER_NAME);
  }

  of(target) {
    const node = target.closest?.(".turn.assistant");
    return node && this.all.find((turn) => turn.node === node);
  }

  /** As the browser's storage has them. */
  get kept() {
    return this.all.map(({ role, text, thought, files, told, cut, answer, node }) => ({
      role, text: answer?.text || text, thought: answer?.thought || thought, told, cut: cut || node.classList.contains("waits"), files,
    })).filter((turn) => turn.text || turn.thought || turn.files.length);
  }
}
