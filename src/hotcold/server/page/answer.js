// One answer: its received text, its shown text, and the active neurons of its tokens.

import { element } from "./figures.js";
import { Markdown } from "./markdown.js";
import { bytes } from "./picture.js";
import { Plain, Spans } from "./spans.js";

const PACE = 30; // tokens a second at reading pace; more if many wait
const WAITING_PART = 0.35; // share of the waiting tokens to show each second
const LIT_MS = 60; // minimum time between two tokens whose neurons are shown: less would be invisible

export class Answer {
  /** `text`, `thought`: its beginning, if there is one. */
  constructor(element_, picture, { plain, text = "", thought = "" }) {
    this.element = element_;
    this.said = element_.querySelector(".said");
    this.picture = picture;
    this.text = "";
    this.thought = "";
    this.spans = new Spans();
    this.writing = plain ? new Plain(this.said) : new Markdown(this.said);
    this.tokens = 0; // received tokens
    this.before = 0; // tokens before the current request
    this.frames = new Map(); // token -> cells
    this.active = new Map(); // token -> numbers of active neurons, [hot, cold]
    this.reached = 0; // number of shown entries of spans; a fraction between two of them
    this.lit = -1; // the last token whose cells were shown
    this.litAt = 0;
    this.done = false; // whether it is complete
    if (thought) this.think(thought, false);
    if (text) {
      this.text = text;
      this.spans.ends.push([text.length, 0]); // its tokens are unknown
      this.done = true;
      this.advance(0, false);
    }
  }

  /** Prepares the continuation of the answer. */
  resume() {
    this.before = this.tokens;
    this.done = false;
  }

  /** Adds an event of the stream. */
  add(text, thought, frame) {
    this.text += text;
    this.tokens = frame?.tokens === undefined ? this.tokens + 1 : this.before + frame.tokens;
    if (text) this.spans.add(this.text.length, this.tokens);
    if (thought) this.think(thought);
    if (frame?.cells) this.take(frame);
  }

  take(frame) {
    const all = bytes(frame.cells), n = this.picture.tokenBytes;
    frame.of.forEach((token, i) => {
      this.frames.set(this.before + token, all.slice(i * n, (i + 1) * n));
      this.active.set(this.before + token, frame.fired[i]);
    });
  }

  think(words, open = true) {
    if (!this.thought) {
      this.thoughts = element("div");
      this.said.before(element("details", { kind: "thought", open }, element("summary", { text: "Thinking" }), this.thoughts));
    }
    this.thought += words;
    this.thoughts.append(words);
  }

  get shownAll() { return this.done && this.reached >= this.spans.ends.length; }

  /** Shows the text that is due after `seconds`. Returns the token whose cells it lit, or -1. */
  advance(seconds, paced) {
    const came = this.spans.ends.length;
    if (!paced) this.reached = came;
    else this.reached = Math.min(came, this.reached + seconds * Math.max(PACE, WAITING_PART * (came - this.reached)));
    const entry = Math.floor(this.reached);
    if (entry === 0) return -1;
    const [end, tokens] = this.spans.ends[entry - 1], whole = this.shownAll;
    if (end !== this.end || whole !== this.whole) {
      this.end = end;
      this.whole = whole;
      this.writing.draw(this.text, end, this.spans, whole);
    }
    return this.light(tokens);
  }

  light(shown) {
    const now = performance.now();
    if (now - this.litAt < LIT_MS && !this.shownAll) return -1;
    for (let token = shown - 1; token > this.lit; token--) {
      const frame = this.frames.get(token);
      if (!frame) continue;
      this.lit = token;
      this.litAt = now;
      this.picture.light(frame);
      return token;
    }
    return -1;
  }

  /** Drops the text that is not shown yet. */
  cut() {
    const entry = Math.floor(this.reached);
    this.spans.ends.length = entry;
    const [end, tokens] = entry ? this.spans.ends[entry - 1] : [0, 0];
    this.text = this.text.slice(0, end);
    this.tokens = tokens;
  }

  /** Removes an incomplete character at the end, which the limit has cut. */
  trimHalf() {
    const text = this.text.replace(/[\uFFFD\uD800-\uDBFF]+$/, "");
    if (text === this.text) return;
    this.text = text;
    for (const span of this.spans.ends) span[0] = Math.min(span[0], text.length);
  }

  /** Returns the text of one token. */
  word(token) {
    let from = 0;
    for (const [end, tokens] of this.spans.ends) {
      if (tokens > token) return this.text.slice(from, end);
      from = end;
    }
    return "";
  }
}
