// A model's text as DOM nodes: paragraphs, code and bold, and nothing that a text could smuggle in. Each node knows
// which token its characters came with, so that pointing at a word can show what fired for it.

/** Where each token's text begins and ends: `ends[i]` is the length of the text up to token `first + i`. */
export class Spans {
  constructor() { this.ends = []; }
  add(length, tokens) { if (tokens > 0) this.ends.push([length, tokens]); }
  /** Pieces [from, to, token] of a range of the text. */
  *cut(from, to) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle][0] <= from) low = middle + 1; else high = middle;
    }
    while (from < to) {
      const end = low < this.ends.length ? Math.min(this.ends[low][0], to) : to;
      yield [from, end, low < this.ends.length ? this.ends[low][1] - 1 : -1];
      from = end;
      low += 1;
    }
  }
}

/** Draws a growing text into an element; what is complete stays as it is. */
export class Writing {
  constructor(element, { plain = false } = {}) {
    this.element = element;
    this.plain = plain;
    this.drawn = []; // [key, node] by block
  }

  /** The text up to `end`, where a token ends; it never becomes shorter. */
  draw(text, end, spans) {
    if (this.plain) { // as it is
      run(this.element, text, this.end || 0, end, spans);
      this.end = end;
      return;
    }
    text = text.slice(0, end);
    const blocks = parse(text);
    blocks.forEach((block, i) => {
      const key = `${block.kind}:${block.from}:${block.to}`;
      if (this.drawn[i]?.[0] === key) return;
      const node = make(text, block, spans);
      if (this.drawn[i]) this.drawn[i][1].replaceWith(node); else this.element.append(node);
      this.drawn[i] = [key, node];
    });
    for (const [, node] of this.drawn.splice(blocks.length)) node.remove();
  }
}

/** Blocks divided by empty lines. */
function paragraphs(text, from = 0, to = text.length) {
  const found = [], gap = /\n[ \t]*\n\s*/g;
  let start = from, match;
  while (start < to && text[start] === "\n") start += 1;
  gap.lastIndex = start;
  while ((match = gap.exec(text)) && match.index < to) {
    if (match.index > start) found.push({ kind: "p", from: start, to: match.index });
    start = Math.min(match.index + match[0].length, to);
  }
  if (start < to) found.push({ kind: "p", from: start, to });
  return found;
}

/** Paragraphs and fenced code. */
function parse(text) {
  const found = [], fence = /^[ \t]*```[^\n`]*$/gm;
  let at = 0, open = null, match;
  while ((match = fence.exec(text))) {
    const next = Math.min(match.index + match[0].length + 1, text.length);
    if (open === null) {
      found.push(...paragraphs(text, at, match.index));
      open = next;
    } else {
      found.push({ kind: "pre", from: open, to: Math.max(open, match.index - 1) });
      open = null;
      at = next;
    }
  }
  if (open !== null) found.push({ kind: "pre", from: open, to: text.length });
  else found.push(...paragraphs(text, at));
  return found;
}

function make(text, block, spans) {
  if (block.kind === "pre") {
    const pre = document.createElement("pre"), code = document.createElement("code");
    pre.tabIndex = 0; // it may scroll
    pre.append(code);
    run(code, text, block.from, block.to, spans);
    return pre;
  }
  const p = document.createElement("p");
  inline(p, text, block.from, block.to, spans);
  return p;
}

/** Bold and code within a paragraph. */
function inline(parent, text, from, to, spans) {
  const marks = /\*\*(?=\S)([^*\n]+?)\*\*|`([^`\n]+)`/g;
  let at = from, match;
  marks.lastIndex = from;
  while ((match = marks.exec(text)) && match.index + match[0].length <= to) {
    run(parent, text, at, match.index, spans);
    const mark = match[2] === undefined ? 2 : 1;
    const node = document.createElement(match[2] === undefined ? "strong" : "code");
    at = match.index + match[0].length;
    run(node, text, match.index + mark, at - mark, spans);
    parent.append(node);
  }
  run(parent, text, at, to, spans);
}

function run(parent, text, from, to, spans) {
  for (const [start, end, token] of spans.cut(from, to)) {
    const node = document.createElement("span");
    if (token >= 0) node.dataset.t = token;
    node.textContent = text.slice(start, end);
    parent.append(node);
  }
}
