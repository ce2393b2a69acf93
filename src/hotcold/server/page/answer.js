// One answer: what came of it, what is shown of it, and what fired for its tokens.

import { element } from "./figures.js";
import { Markdown } from "./markdown.js";
import { bytes } from "./picture.js";
import { Plain, Spans } from "./spans.js";

const PACE = 30; // tokens a second at reading pace, and more where many wait
const WAITING_PART = 0.35; // of those that wait, each second
const LIT_MS = 60; // between two tokens whose neurons are shown: faster, nobody sees them

export class Answer {
  /** `text`, `thought`: what there is of it already. */
  constructor(element_, picture, { plain, text = "", thought = "" }) {
    this.element = element_;
    this.said = element_.querySelector(".said");
    this.picture = picture;
    this.text = "";
    this.thought = "";
    this.spans = new Spans();
    this.writing = plain ? new Plain(this.said) : new Markdown(this.said);
    this.tokens = 0; // that came
    this.before = 0; // of them, before the request that runs
    this.frames = new Map(); // cells by token
    this.fired = new Map(); // [hot, cold] by token
    this.reached = 0; // entries of spans that are shown; between two of them on the way
    this.lit = -1; // the last token whose cells were shown
    this.litAt = 0;
    this.done = false; // nothing more comes
    if (thought) this.think(thought, false);
    if (text) {
      this.text = text;
      this.spans.ends.push([text.length, 0]); // of no token that is known
      this.done = true;
      this.advance(0, false);
    }
  }

  /** More of it will come. */
  resume() {
    this.before = this.tokens;
    this.done = false;
  }

  /** What one event of the stream says. */
  add(text, thought, told) {
    this.text += text;
    this.tokens = told?.tokens === undefined ? this.tokens + 1 : this.before + told.tokens;
    if (text) this.spans.add(this.text.length, this.tokens);
    if (thought) this.think(thought);
    if (told?.cells) this.take(told);
  }

  take(told) {
    const all = bytes(told.cells), n = this.picture.tokenBytes;
    told.of.forEach((token, i) => {
      this.frames.set(this.before + token, all.slice(i * n, (i + 1) * n));
      this.fired.set(this.before + token, told.fired[i]);
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

  /** Shows what is due after so many seconds; the token whose cells were lit now, or -1. */
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

  /** Leaves out a character of which the limit let only a half come. */
  trimHalf() {
    const text = this.text.replace(/[\uFFFD\uD800-\uDBFF]+$/, "");
    if (text === this.text) return;
    this.text = text;
    for (const span of this.spans.ends) span[0] = Math.min(span[0], text.length);
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
