// A model's text as Markdown. Marked parses it, and DOMPurify removes all markup that is not listed here. Drawn
// blocks keep their place while text is added.

import { formulas, MATH_ATTRIBUTES, MATH_TAGS } from "./formulas.js";
import { mend } from "./mending.js";
import { complete, run } from "./spans.js";
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "strong", "em", "del", "code", "pre", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr",
    "table", "thead", "tbody", "tr", "th", "td", "a", "div", "span", ...MATH_TAGS,
  ],
  ALLOWED_ATTR: ["href", "start", "align", "data-language", "class", ...MATH_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: ["start", "align", "data-language", ...MATH_ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
// Only classes of syntax colours are allowed, so that no text can use a class of the page.
DOMPurify.addHook("uponSanitizeAttribute", (node, attribute) => {
  if (attribute.attrName === "class") attribute.keepAttr = node.localName === "span" && /^hljs-[\w -]+$/.test(attribute.attrValue);
});
const MOST_COLOURED = 50000; // limit of characters in a coloured block of code
const TOP = 3; // the level of an answer's first heading: the page uses the levels above

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const marked = new Marked({
  extensions: formulas,
  gfm: true,
  breaks: true,
  tokenizer: { lheading() {} }, // a line under a text is never a heading mark: while it arrives, both are possible
  renderer: {
    html({ text, block }) { return block ? `<p>${escaped(text.trimEnd())}</p>` : escaped(text); }, // shown as text
    heading({ tokens, level }) { return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`; },
    code({ text, lang }) {
      const language = /^[\w+#.-]{1,30}/.exec(lang ?? "")?.[0] ?? "";
      return `<pre data-language="${escaped(language)}"><code>${coloured(text, language)}</code></pre>`;
    },
    image({ href, text }) { return `<a href="${escaped(href)}">${escaped(text || href)}</a>`; }, // the page loads no images
    checkbox({ checked }) { return checked ? "☑ " : "☐ "; },
  },
});

/** Returns code as HTML; for a known language with coloured spans. */
function coloured(text, language) {
  if (!language || text.length > MOST_COLOURED || !hljs.getLanguage(language)) return escaped(text);
  return hljs.highlight(text, { language, ignoreIllegals: true }).value;
}

export class Markdown {
  constructor(element) {
    this.element = element;
    this.drawn = []; // [key, node] of each block
  }

  /** Draws the text up to `end`, the end of a token; it never becomes shorter. `whole`: the text is complete. */
  draw(text, end, spans, whole) {
    text = text.slice(0, whole ? end : complete(text, end)).replace(/\r\n?/g, (ends) => "\n".padStart(ends.length));
    const tokens = marked.lexer(whole ? text : mend(text));
    setLevels(tokens);
    const defined = Object.keys(tokens.links).length;
    let at = 0, i = 0;
    for (const token of tokens) {
      const from = at;
      at += token.raw.length;
      if (token.type === "space" || token.type === "def") continue;
      const key = `${defined} ${token.level ?? ""} ${from} ${token.raw}`;
      if (this.drawn[i]?.[0] !== key) this.put(i, key, block(token, text, from, spans));
      i += 1;
    }
    for (const [, node] of this.drawn.splice(i)) node.remove();
  }

  put(i, key, node) {
    const old = this.drawn[i]?.[1];
    if (!old) this.element.append(node);
    else if (old.nodeName === node.nodeName && old.className === node.className) {
      morph(old, node);
      node = old;
    } else old.replaceWith(node);
    this.drawn[i] = [key, node];
  }
}

/** Sets the levels of headings, so that they begin at one level and skip none. */
function setLevels(tokens) {
  const open = [];
  marked.walkTokens(tokens, (token) => {
    if (token.type !== "heading") return;
    while (open.length && open.at(-1) >= token.depth) open.pop();
    open.push(token.depth);
    token.level = Math.min(6, TOP - 1 + open.length);
  });
}

/** Returns the element of a block of the text, with a span for each token. */
function block(token, text, from, spans) {
  const made = DOMPurify.sanitize(marked.parser([token]), ALLOWED);
  const nodes = [...made.childNodes].filter((each) => each.nodeType !== Node.TEXT_NODE || each.data.trim());
  let [node] = nodes;
  if (nodes.length !== 1 || node.nodeType !== Node.ELEMENT_NODE) {
    node = document.createElement("p");
    node.append(made);
  }
  const box = document.createElement("div");
  box.append(node);
  note(box, text, from, spans);
  for (const link of box.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    if (link.getAttribute("href")) link.title = link.getAttribute("href");
  }
  for (const pre of box.querySelectorAll("pre")) frameCode(pre);
  for (const math of box.querySelectorAll('math[display="block"]')) frame(math, "formula", "Formula");
  for (const table of box.querySelectorAll("table")) frame(table, "table", "Table");
  return box.firstElementChild;
}

/** Wraps an element that may be wider than the text, so that it can be scrolled, also with keys. */
function frame(node, kind, name) {
  const box = document.createElement("div");
  box.className = kind;
  node.replaceWith(box);
  box.append(node);
  const scrolls = kind === "code" ? node : box;
  scrolls.tabIndex = 0;
  scrolls.setAttribute("role", "group");
  scrolls.setAttribute("aria-label", name);
  return box;
}

function frameCode(pre) {
  const language = pre.dataset.language, head = document.createElement("div"), name = document.createElement("span");
  const button = document.createElement("button");
  pre.removeAttribute("data-language");
  head.className = "code-head";
  name.textContent = language || "text";
  button.type = "button";
  button.className = "quiet copy-code";
  button.textContent = "Copy";
  button.setAttribute("aria-label", language ? `Copy this ${language}` : "Copy this code");
  head.append(name, button);
  frame(pre, "code", language ? `Code, ${language}` : "Code").prepend(head);
}

/** Divides text nodes by token. Their characters are in the Markdown, in the same order, between its marks. */
function note(box, text, from, spans) {
  const notMath = (node) => (node.localName === "math" ? NodeFilter.FILTER_REJECT : node.data === undefined ? NodeFilter.FILTER_SKIP : NodeFilter.FILTER_ACCEPT);
  const nodes = [], walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, notMath);
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = from;
  for (const node of nodes.filter((each) => each.data.trim())) {
    const found = document.createDocumentFragment();
    for (const part of parts(node.data, text, at)) {
      const place = text.indexOf(part, at);
      if (place >= 0) {
        run(found, text, place, place + part.length, spans);
        at = place + part.length;
      } else found.append(part);
    }
    node.replaceWith(found);
  }
}

/** Returns a text whole if the Markdown contains it, otherwise its words: lines may be indented, signs escaped. */
function parts(data, text, at) {
  return text.indexOf(data, at) >= 0 ? [data] : data.split(/(?<=\s)(?=\S)|(?<=\S)(?=\s)/);
}

/** Makes a node equal to another one, and keeps its equal children. */
function morph(node, wanted) {
  for (const { name, value } of wanted.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  for (const { name } of [...node.attributes]) if (!wanted.hasAttribute(name)) node.removeAttribute(name);
  const now = [...node.childNodes], next = [...wanted.childNodes];
  next.forEach((child, i) => {
    const old = now[i];
    if (!old) node.append(child);
    else if (old.nodeName !== child.nodeName || old.className !== child.className) old.replaceWith(child);
    else if (child.nodeType === Node.ELEMENT_NODE) morph(old, child);
    else if (old.data !== child.data) old.data = child.data;
  });
  for (const old of now.slice(next.length)) old.remove();
}
