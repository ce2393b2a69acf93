// One answer: what came of it, what is shown of it, and what fired for its tokens.

import { element } from "./figures.js";
import { bytes } from "./picture.js";
import { Spans, Writing } from "./text.js";

const PACE = 30; // tokens a second at reading pace, and more where many wait
const WAITING_PART = 0.35; // of those that wait, each second
const LIT_MS = 60; // between two tokens whose neurons are shown: faster, nobody sees them

export class Answer {
  constructor(element_, picture, { plain }) {
    this.element = element_;
    this.said = element_.querySelector(".said");
    this.picture = picture;
    this.text = "";
    this.thought = "";
    this.spans = new Spans();
    this.writing = new Writing(this.said, { plain });
    this.tokens = 0; // that came
    this.frames = new Map(); // cells by token
    this.fired = new Map(); // [hot, cold] by token
    this.reached = 0; // entries of spans that are shown; between two of them on the way
    this.lit = -1; // the last token whose cells were shown
    this.litAt = 0;
    this.done = false; // nothing more comes
    this.hasFrames = false;
  }

  /** What one event of the stream says. */
  add(text, thought, told) {
    this.text += text;
    this.tokens = told?.tokens ?? this.tokens + 1;
    if (text) this.spans.add(this.text.length, this.tokens);
    if (thought) this.think(thought);
    if (told?.cells) this.take(told);
  }

  take(told) {
    const all = bytes(told.cells), n = this.picture.tokenBytes;
    told.of.forEach((token, i) => {
      this.frames.set(token, all.slice(i * n, (i + 1) * n));
      this.fired.set(token, told.fired[i]);
    });
    this.hasFrames = true;
  }

  think(words) {
    if (!this.thought) {
      this.thoughts = element("div");
      const box = element("details", { kind: "thought", open: true }, element("summary", { text: "Thinking" }), this.thoughts);
      this.said.before(box);
    }
    this.thought += words;
    this.thoughts.append(words);
  }

  get shownAll() { return this.done && this.reached >= this.spans.ends.length; }

  /** Shows what is due after so many seconds; the token whose cells were lit now, or -1. */
  advance(seconds, paced) {
    const came = this.spans.ends.length;
    if (!paced) this.reached = came;
    else this.reached = Math.min(came, this.reached + seconds * Math.max(PACE, WAITING_PART * (came - this.reached)));
    const entry = Math.floor(this.reached);
    if (entry > 0) {
      const [end, tokens] = this.spans.ends[entry - 1];
      if (end !== this.end) this.writing.draw(this.text, (this.end = end), this.spans);
      return this.light(tokens);
    }
    return -1;
  }

  light(shown) {
    const now = performance.now();
    if (now - this.litAt < LIT_MS && !this.shownAll) return -1;
    for (let token = shown - 1; token > this.lit; token--) {
      const frame = this.frames.get(token);
      if (!frame) continue;
      this.lit = token;
      this.litAt = now;
      this.picture.fire(frame);
      return token;
    }
    return -1;
  }

  /** Ends the text where it is seen to end. */
  cut() {
    const entry = Math.floor(this.reached);
    this.spans.ends.length = entry;
    const [end, tokens] = entry ? this.spans.ends[entry - 1] : [0, 0];
    this.text = this.text.slice(0, end);
    this.tokens = tokens;
  }

  /** The text of one token. */
  word(token) {
    let from = 0;
    for (const [end, tokens] of this.spans.ends) {
      if (tokens > token) return this.text.slice(from, end);
      from = end;
    }
    return "";
  }
}
