// Formulas of an answer as MathML: between \( \), \[ \], $$ $$ or $ $.

const { temml } = globalThis; // a separate script, which runs before the modules
const INLINE = [
  [/^\\\(([\s\S]+?)\\\)/, false],
  [/^\\\[([\s\S]+?)\\\]/, true],
  [/^\$\$([\s\S]+?)\$\$/, true],
  [/^\$(?![\s$])((?:\\.|[^$\\\n])*?[^\s\\$])\$(?![\d$])/, false], // as in pandoc: "$5 and $6" is not a formula
];
const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/;
const MOST = 10000; // limit of characters in one formula

/** Extensions of marked. */
export const formulas = [
  {
    name: "formulaBlock",
    level: "block",
    start: (text) => /^ {0,3}(?:\$\$|\\\[)/m.exec(text)?.index,
    tokenizer(text) {
      const found = BLOCK.exec(text);
      if (found) return { type: "formulaBlock", raw: found[0], text: found[1] ?? found[2] };
    },
    renderer: ({ text }) => `<p>${drawn(text, true)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => /\$|\\[([]/.exec(text)?.index,
    tokenizer(text) {
      for (const [pattern, display] of INLINE) {
        const found = pattern.exec(text);
        if (found) return { type: "formula", raw: found[0], text: found[1], display };
      }
    },
    renderer: ({ text, display }) => drawn(text, display),
  },
];

/** The elements and attributes of MathML that DOMPurify keeps. */
export const MATH_TAGS = (
  "math mrow mi mn mo ms mtext mspace msup msub msubsup mfrac msqrt mroot munder mover munderover mtable mtr mtd " +
  "mstyle mpadded mphantom menclose mmultiscripts mprescripts"
).split(" ");
export const MATH_ATTRIBUTES = (
  "display mathvariant stretchy fence separator form lspace rspace width height depth voffset accent accentunder " +
  "displaystyle scriptlevel linethickness minsize maxsize symmetric largeop movablelimits notation columnspan"
).split(" ");

function drawn(text, display) {
  try {
    if (text.length > MOST) throw new RangeError("too long");
    const shown = temml.renderToString(text.trim(), { displayMode: display, throwOnError: true, maxExpand: 200 });
    return shown.replace(/ style="[^"]*"/g, ""); // the page's policy forbids inline styles
  } catch {
    const signs = text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
    return `<code>${signs}</code>`; // temml cannot parse it: shown as written
  }
}
