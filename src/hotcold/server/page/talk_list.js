// The list of conversations: open, export, import, delete.

import { element } from "./figures.js";
import { stored, store } from "./beside.js";
import { asFile, asMarkdown, dropTalk, isFound, keepTalk, readTalk, takeFile, talks } from "./talks.js";

const $ = (id) => document.getElementById(id);
const MOST_BYTES = 64 << 20; // limit of a file to import
const OPEN = "hotcold.list"; // "1": the list stays open next to the text
const wide = matchMedia("(min-width: 1500px)"); // the list fits next to the text

export class TalkList {
  /** `open(talk)` shows a conversation, `gone(id)` is called after a deletion; `now()` returns the shown one's id. */
  constructor({ open, gone, renamed, now, fits }) {
    Object.assign(this, { open, gone, renamed, now, fits });
    $("open-talks").addEventListener("click", () => this.show());
    $("talks-close").addEventListener("click", () => this.close());
    $("talks").addEventListener("close", () => document.body.classList.remove("with-list"));
    $("talks-search").addEventListener("input", () => this.draw(""));
    wide.addEventListener("change", () => { if ($("talks").open) $("talks").close(); });
    $("talks-export").addEventListener("click", () => save(asFile(talks()), "conversations"));
    $("talks-import").addEventListener("click", () => $("talks-file").click());
    $("talks-file").addEventListener("change", () => this.take());
    $("talks-delete").addEventListener("click", (event) => really(event.target, () => {
      for (const talk of talks()) this.drop(talk.id);
      this.draw("All conversations were deleted.");
    }));
  }

  /** Opens the list: next to the text if it fits, otherwise as a dialog. */
  show() {
    const dialog = $("talks");
    if (dialog.open) return this.close();
    $("talks-search").value = "";
    this.draw("");
    if (!wide.matches) return dialog.showModal();
    store("localStorage", OPEN, "1");
    document.body.classList.add("with-list");
    dialog.show();
  }

  close() {
    if (this.beside) store("localStorage", OPEN, "");
    $("talks").close();
    $("open-talks").focus();
  }

  get beside() { return document.body.classList.contains("with-list"); }

  /** Opens the list if it was last open next to the text. */
  restore() {
    if (wide.matches && stored("localStorage", OPEN) === "1" && !$("talks").open) this.show();
  }

  /** Redraws the list if it is open next to the text. */
  refresh() {
    if (this.beside && !$("talks-list").contains(document.activeElement)) this.draw($("talks-said").textContent);
  }

  async take() {
    const [file] = $("talks-file").files;
    $("talks-file").value = "";
    if (!file) return;
    try {
      if (file.size > MOST_BYTES) throw new Error("The file is too large.");
      const n = takeFile(await file.text());
      this.draw(n === 1 ? "One conversation was imported." : `${n} conversations were imported.`);
    } catch (error) { this.draw(error.message); }
  }

  drop(id) {
    dropTalk(id);
    this.gone(id);
  }

  draw(said) {
    const all = talks(), search = $("talks-search").value.trim();
    const list = search ? all.filter((talk) => isFound(talk, search)) : all;
    const empty = all.length ? (list.length ? "" : "No conversation has these words.") : "Conversations are stored here, in this browser only.";
    $("talks-said").textContent = said || empty;
    $("talks-search").hidden = !all.length;
    $("talks-export").disabled = $("talks-delete").disabled = !all.length;
    $("talks-list").replaceChildren(...list.map((talk) => this.entry(talk)));
  }

  entry(talk) {
    const when = new Date(talk.changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const open = element("button", { type: "button", kind: "kept" },
      element("span", { kind: "title", text: talk.title }), element("span", { kind: "when", text: `${when} · ${talk.model}` }));
    open.dataset.id = talk.id;
    if (talk.id === this.now()) open.setAttribute("aria-current", "true");
    open.disabled = !this.fits(talk);
    if (open.disabled) open.title = talk.story ? "A story: this model answers messages" : "Messages: this model writes stories";
    open.addEventListener("click", () => {
      if (!this.beside) $("talks").close();
      this.open(talk);
    });
    const button = (text, action) => {
      const made = element("button", { type: "button", kind: "quiet", text });
      made.setAttribute("aria-label", `${text}: ${talk.title}`);
      if (action) made.addEventListener("click", action);
      return made;
    };
    const rename = button("Rename", () => this.rename(talk, open, rename));
    const markdown = button("Markdown", () => save(asMarkdown(talk), talk.title, "md", "text/markdown"));
    const out = button("Export", () => save(asFile([talk]), talk.title));
    const away = button("Delete");
    away.addEventListener("click", () => really(away, () => {
      const next = away.closest("li").nextElementSibling ?? away.closest("li").previousElementSibling;
      const at = [...$("talks-list").children].indexOf(next ?? null);
      this.drop(talk.id);
      this.draw(`“${talk.title}” was deleted.`);
      ($("talks-list").children[Math.max(0, at - 1)]?.querySelector(".kept") ?? $("talks-close")).focus();
    }));
    return element("li", {}, open, element("span", { kind: "of-talk" }, rename, markdown, out, away));
  }

  /** Replaces a conversation's title by a text field. */
  rename(talk, open, button) {
    const field = element("input", { type: "text", kind: "rename", value: talk.title, maxLength: 200 });
    field.setAttribute("aria-label", "Title of the conversation");
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      const title = field.value.trim(), now = readTalk(talk.id);
      if (keep && title && now) {
        keepTalk({ ...now, title, named: true });
        this.renamed(talk.id, title);
      }
      this.draw("");
      [...$("talks-list").querySelectorAll(".kept")].find((each) => each.dataset.id === talk.id)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (!["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    open.replaceWith(field);
    button.disabled = true;
    field.select();
  }
}

/** Calls `action` when the button is pressed a second time. */
function really(button, action) {
  if (button.dataset.sure) return action();
  const words = button.textContent, name = button.getAttribute("aria-label");
  button.dataset.sure = "1";
  button.textContent = "Really?";
  if (name) button.setAttribute("aria-label", `${name}: really?`);
  button.addEventListener("blur", () => {
    delete button.dataset.sure;
    button.textContent = words;
    if (name) button.setAttribute("aria-label", name);
  }, { once: true });
}

/** Downloads a text as a file. */
function save(text, name, ending = "json", type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const plain = name.normalize("NFKD").replace(/[^\w-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "conversation";
  element("a", { href: url, download: `${plain}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
