// Text files attached to a message.

import { element, size } from "./figures.js";

const MOST_BYTES = 1 << 20;
const $ = (id) => document.getElementById(id);

export class Attached {
  /** `changed()` is called after files were added or removed; `problem(words)` if a file cannot be read. */
  constructor({ changed, problem }) {
    this.files = [];
    Object.assign(this, { changed, problem });
    $("attach").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", async () => {
      await this.add([...$("file").files]);
      $("file").value = "";
      $("prompt").focus();
    });
    const form = $("composer");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); form.classList.add("drop"); } });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) form.classList.remove("drop"); });
    document.addEventListener("drop", (event) => {
      form.classList.remove("drop");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      try { this.files.push({ name: file.name.slice(0, 200), text: await read(file) }); } catch (error) { this.problem(error.message); }
    }
    this.draw();
  }

  /** Removes and returns the files, to send them. */
  take() {
    const files = this.files;
    this.set([]);
    return files;
  }

  set(files) {
    this.files = files;
    this.draw();
  }

  draw() {
    $("files").hidden = !this.files.length;
    $("files").replaceChildren(...this.files.map((file, i) => {
      const away = element("button", { type: "button", kind: "quiet", text: "×" });
      away.setAttribute("aria-label", `Leave out ${file.name}`);
      away.addEventListener("click", () => { this.set(this.files.filter((_, at) => at !== i)); $("attach").focus(); });
      return element("li", { kind: "file" }, ...named(file), away);
    }));
    this.changed();
  }
}

/** Returns a file's name and size, for a list. */
export function named(file) {
  return [element("b", { text: file.name }), element("span", { text: size(new Blob([file.text]).size) })];
}

/** Returns the text for the model: each file between fences, then the message. */
export function withFiles(text, files) {
  const parts = (files ?? []).map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([marks]) => marks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${file.name}:\n${fence}\n${file.text.trimEnd()}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

async function read(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${size(file.size)}: at most ${size(MOST_BYTES)} can be attached.`);
  const all = new Uint8Array(await file.arrayBuffer());
  const wide = all[0] === 0xff && all[1] === 0xfe ? "utf-16le" : all[0] === 0xfe && all[1] === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(wide, { fatal: true }).decode(all).replace(/\r\n?/g, "\n");
    if (!text.includes("\0")) return text;
  } catch { /* not text */ }
  throw new Error(`${file.name} is not text: only text files can be attached.`);
}
