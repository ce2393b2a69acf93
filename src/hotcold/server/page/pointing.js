// Shows the active neurons of a word's token, when a pointer or the arrow keys select the word.

import { announce, sum } from "./beside.js";
import { element, showActive, showShares } from "./figures.js";

const $ = (id) => document.getElementById(id);

export class Pointing {
  /** `page` has the model's `info`, the picture's texts (`shows`), and the `running` answer. */
  constructor(turns, picture, page) {
    Object.assign(this, { turns, picture, page });
    const box = $("turns");
    box.addEventListener("pointerover", (event) => {
      const turn = turns.of(event.target), token = event.target.dataset?.t;
      if (turn && token !== undefined && !page.running) this.point(turn, Number(token));
    });
    box.addEventListener("pointerout", (event) => {
      const turn = turns.of(event.target);
      if (turn && event.target.dataset?.t !== undefined && !page.running) this.leave(turn);
    });
    box.addEventListener("focusout", (event) => {
      const turn = turns.of(event.target);
      if (turn) this.leave(turn);
    });
    box.addEventListener("keydown", (event) => this.step(event));
  }

  /** Shows the number of a token's active neurons. */
  moment(answer, token) {
    const active = answer.active.get(token), { info, shows } = this.page;
    if (!active || !shows) return;
    const all = sum(info.picture.layout.neurons), n = active[0] + active[1];
    const word = answer.word(token).trim();
    const quoted = word ? [element("q", { text: word })] : [];
    $("moment").replaceChildren(...quoted, ` ${shows.count(n.toLocaleString("en"))}`);
    if (!shows.share) return; // the share is constant
    showActive(n / all);
    showShares(this.picture.shares(answer.frames.get(token)));
  }

  point(turn, token) {
    const { answer } = turn;
    const frame = answer?.frames.get(token);
    for (const node of turn.said.querySelectorAll(".at")) node.classList.remove("at");
    for (const node of turn.said.querySelectorAll(`[data-t="${token}"]`)) node.classList.add("at");
    if (frame) {
      this.picture.hold(frame);
      this.moment(answer, token);
    } else if (answer && this.page.shows) {
      this.picture.dark();
      $("moment").replaceChildren(element("q", { text: answer.word(token).trim() }), token ? " not recorded" : " came from reading the prompt");
    }
  }

  leave(turn) {
    for (const node of turn.said.querySelectorAll(".at")) node.classList.remove("at");
    this.picture.hold(null);
  }

  /** Moves to the next or previous word. */
  step(event) {
    const turn = this.turns.of(event.target);
    if (!turn || event.target !== turn.said || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const words = [...turn.said.querySelectorAll("[data-t]")];
    if (!words.length) return;
    const at = words.findIndex((node) => node.classList.contains("at"));
    const next = Math.max(0, Math.min(words.length - 1, at + (event.key === "ArrowRight" ? 1 : -1)));
    this.point(turn, Number(words[next].dataset.t));
    announce(`${words[next].textContent.trim()}: ${$("moment").textContent.trim()}`);
  }
}
