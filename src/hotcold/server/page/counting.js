// Counts the tokens of a long message's prompt before it is sent, and shows whether it fits into the context.

import { promptTokens, Refused } from "./api.js";

const WAIT_MS = 400; // time without a change
const SHORT = 2000; // limit of characters: messages up to it, without files, are not counted
export const SHORTER = "Remove a file or a part of the text, begin a new conversation, or start the server with a larger context (-c).";
const place = document.getElementById("count");

export class Count {
  /** `asked()` returns `{ context, body }` for the current message, or null if no count is needed. */
  constructor(asked) {
    this.asked = asked;
    this.number = 0;
  }

  /** Counts after a time without changes. */
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
    this.number += 1; // discards the result of a count that is running
    place.hidden = !words;
    place.textContent = words;
    place.classList.toggle("much", tooLong);
  }
}

/** Returns whether a message is long enough to count. */
export const isLong = (text, files) => files.length > 0 || text.length > SHORT;
