// Completes an incomplete Markdown text: closes open marks, and holds back characters whose meaning depends on the
// next ones. Thus drawn text never changes its place.

const MARKS_ALONE = /(^|\n)(?:[-+*_=#>|:~` \t]+|[ \t]*\d{1,9}[.)]?[ \t]*|[ \t]*[-+*>][ \t]+\d{1,9}[.)]?)$/;
const FENCE = /^[ \t]*(`{3,}|~{3,})/;

export function mend(text) {
  const open = openFence(text);
  if (open) return insideCode(text, open);
  const marks = MARKS_ALONE.exec(text);
  if (marks) text = text.slice(0, marks.index);
  const from = lastBlock(text);
  let block = text.slice(from).replace(/\\$/, "");
  const formula = openFormula(block);
  if (formula >= 0) block = block.slice(0, formula);
  const head = tableHead(block);
  return text.slice(0, from) + (head < 0 ? closeMarks(block) : block.slice(0, head));
}

/** Returns the fence that is open at the end of the text, and the position of its line; null: none is open. */
function openFence(text) {
  let open = null, at = 0;
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line)?.[1];
    if (open === null) {
      if (fence && !(fence[0] === "`" && line.slice(line.indexOf(fence) + fence.length).includes("`"))) open = { fence, at };
    } else if (fence && fence[0] === open.fence[0] && fence.length >= open.fence.length && line.trim() === fence) open = null;
    at += line.length + 1;
  }
  return open;
}

function insideCode(text, { fence, at }) {
  if (!text.slice(at).includes("\n")) return text.slice(0, at); // the name of the language is incomplete
  const last = text.slice(text.lastIndexOf("\n") + 1).trim();
  const ends = last !== "" && last.length < fence.length && last === fence[0].repeat(last.length);
  return ends ? text.slice(0, text.lastIndexOf("\n")) : text;
}

/** Returns the position of the last paragraph, list or table. */
function lastBlock(text) {
  const gap = /\n[ \t]*\n/g;
  let from = 0;
  for (let match; (match = gap.exec(text)); gap.lastIndex = match.index + 1) from = match.index + match[0].length;
  return from;
}

/** Returns the position of a table that has no row and no complete second line yet; -1: none. */
function tableHead(block) {
  const lines = block.split("\n"), isRow = (i) => /^[ \t]*\|/.test(lines[i] ?? "");
  const last = lines.length - 1, ruled = isRow(last - 1) && /^[ \t|:-]*$/.test(lines[last]);
  const head = ruled ? last - 1 : isRow(last) ? last : -1;
  if (head < 0 || isRow(head - 1)) return -1;
  return lines.slice(0, head).join("\n").length;
}

/** Returns the position of a formula without an end; -1: none. */
function openFormula(block) {
  const bare = block.replace(/`[^`]*`/g, (code) => "x".repeat(code.length));
  for (const [opening, closing] of [["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"]]) {
    let end = 0;
    for (let at; (at = bare.indexOf(opening, end)) >= 0; end += 2) {
      end = bare.indexOf(closing, at + 2);
      if (end < 0) return at;
    }
  }
  return -1;
}

/** Closes code, bold, italic and links that the last line leaves open. */
function closeMarks(block) {
  const from = block.lastIndexOf("\n") + 1;
  let line = block.slice(from);
  const codes = line.split("`");
  if (codes.length % 2 === 0) {
    const code = codes.at(-1);
    return block.slice(0, from) + (code.trim() ? `${line}\`` : line.slice(0, -1 - code.length));
  }
  line = line.replace(/(!?\[[^\][\n]*\])\([^)\s]*$/, "$1()"); // drops the incomplete address
  const bare = line.replace(/`[^`]*`/g, (code) => "x".repeat(code.length));
  for (const mark of ["~~", "**", "__"]) {
    const at = openMark(bare, mark);
    if (at >= 0) line = at + mark.length >= bare.trimEnd().length ? line.slice(0, at) : closed(line, mark);
  }
  const single = openMark(bare.replace(/\*\*|__/g, "xx"), "*");
  if (single >= 0) line = single + 1 >= bare.trimEnd().length ? line.slice(0, single) : closed(line, "*");
  return block.slice(0, from) + line;
}

/** Appends the closing mark to a line. */
function closed(line, mark) {
  const text = line.trimEnd();
  const half = text.endsWith(mark[0]) && !text.endsWith(mark) ? text.slice(0, -1) : text;
  return half + mark;
}

/** Returns the position of the last mark that is opened and not closed; -1: none. */
function openMark(line, mark) {
  const places = [];
  for (let at = line.indexOf(mark); at >= 0; at = line.indexOf(mark, at + mark.length)) places.push(at);
  if (places.length % 2 === 0) return -1;
  const at = places.at(-1), before = line[at - 1] ?? " ", after = line[at + mark.length] ?? "x";
  return /\S/.test(after) && !/\w/.test(before) ? at : -1;
}
