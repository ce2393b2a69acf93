// The token of each character of a text, so that pointing at a word can show its active neurons.

const JOINS = /^[\uDC00-\uDFFF\u200D\uFE0E\uFE0F\u{1F3FB}-\u{1F3FF}\p{M}]/u; // belongs to the character before
const UNFINISHED = /[\uD800-\uDBFF\u200D\uFFFD]+$/; // the rest of this character is still missing

/** The ends of the tokens' texts: `ends[i]` is a length of the text, and the number of tokens up to there. */
export class Spans {
  constructor() { this.ends = []; }
  add(length, tokens) { if (tokens > 0) this.ends.push([length, tokens]); }
  /** Yields the pieces [from, to, token] of a range of the text; none ends within a character. */
  *cut(text, from, to) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle][0] <= from) low = middle + 1; else high = middle;
    }
    while (from < to) {
      let end = low < this.ends.length ? Math.min(this.ends[low][0], to) : to;
      while (end < to && isWithin(text, end)) end += 1;
      if (end > from) yield [from, end, low < this.ends.length ? this.ends[low][1] - 1 : -1];
      from = Math.max(from, end);
      low += 1;
    }
  }
}

function isWithin(text, at) {
  return text[at - 1] === "\u200D" || JOINS.test(text.slice(at, at + 2));
}

/** Returns the end of the last complete character. */
export function complete(text, end) {
  return end - (UNFINISHED.exec(text.slice(Math.max(0, end - 8), end))?.[0].length ?? 0);
}

/** Appends a range of the text to a node, with a span for each token. */
export function run(parent, text, from, to, spans) {
  for (const [start, end, token] of spans.cut(text, from, to)) {
    const node = document.createElement("span");
    if (token >= 0) node.dataset.t = token;
    node.textContent = text.slice(start, end);
    parent.append(node);
  }
}

/** Draws a growing text without Markdown. */
export class Plain {
  constructor(element) {
    this.element = element;
    this.end = 0;
  }

  /** Draws the text up to `end`, the end of a token; it never becomes shorter. */
  draw(text, end, spans) {
    run(this.element, text, this.end, end, spans);
    this.end = Math.max(this.end, end);
  }
}
