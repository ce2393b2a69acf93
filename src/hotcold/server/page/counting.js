// A long message is counted before it is sent: how much of the context its prompt takes, and whether it fits.

import { promptTokens, Refused } from "./api.js";

const WAIT_MS = 400; // without a change
const SHORT = 2000; // characters: shorter messages without files are not counted
export const SHORTER = "Leave out a file or a part of the text, begin a new conversation, or start the server with a larger context (-c).";
const place = document.getElementById("count");

export class Count {
  /** `asked()` returns `{ context, body }` for the message as it is, or null where nothing is to be counted. */
  constructor(asked) {
    this.asked = asked;
    this.number = 0;
  }

  /** Counts when nothing has changed for a while. */
  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.now(), WAIT_MS);
  }

  async now() {
    const number = ++this.number, asked = this.asked();
    if (!asked) return this.show("");
    const { context, body } = asked;
    let words = "", fits = true;
    try {
      const tokens = await promptTokens(body);
      fits = tokens < context;
      words = `With this message the prompt has ${tokens.toLocaleString("en")} of ${context.toLocaleString("en")} tokens.`;
    } catch (error) {
      fits = !(error instanceof Refused && error.code === "context_length_exceeded");
      if (!fits) words = error.message;
    }
    if (number === this.number) this.show(fits ? words : `${words} ${SHORTER}`, !fits);
  }

  show(words, tooLong = false) {
    clearTimeout(this.timer);
    this.number += 1; // what is being counted comes too late
    place.hidden = !words;
    place.textContent = words;
    place.classList.toggle("much", tooLong);
  }
}

/** Whether a message is so long that it is counted. */
export const isLong = (text, files) => files.length > 0 || text.length > SHORT;
