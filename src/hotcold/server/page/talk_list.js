// The list of conversations: open, export, import, delete.

import { element } from "./figures.js";
import { asFile, dropTalk, takeFile, talks } from "./talks.js";

const $ = (id) => document.getElementById(id);
const MOST_BYTES = 64 << 20; // of a file with conversations

export class TalkList {
  /** `open(talk)` shows one, `gone(id)` is told which was deleted; `now()` is the id of the one that is shown. */
  constructor({ open, gone, now, fits }) {
    Object.assign(this, { open, gone, now, fits });
    $("open-talks").addEventListener("click", () => this.show());
    $("talks-close").addEventListener("click", () => $("talks").close());
    $("talks-export").addEventListener("click", () => save(asFile(talks()), "conversations"));
    $("talks-import").addEventListener("click", () => $("talks-file").click());
    $("talks-file").addEventListener("change", () => this.take());
    $("talks-delete").addEventListener("click", (event) => really(event.target, () => {
      for (const talk of talks()) this.drop(talk.id);
      this.draw("All conversations were deleted.");
    }));
  }

  show() {
    this.draw("");
    $("talks").showModal();
  }

  async take() {
    const [file] = $("talks-file").files;
    $("talks-file").value = "";
    if (!file) return;
    try {
      if (file.size > MOST_BYTES) throw new Error("The file is too large.");
      const n = takeFile(await file.text());
      this.draw(n === 1 ? "One conversation was taken from the file." : `${n} conversations were taken from the file.`);
    } catch (error) { this.draw(error.message); }
  }

  drop(id) {
    dropTalk(id);
    this.gone(id);
  }

  draw(said) {
    const list = talks();
    $("talks-said").textContent = said || (list.length ? "" : "What you write is kept here, in this browser alone.");
    $("talks-export").disabled = $("talks-delete").disabled = !list.length;
    $("talks-list").replaceChildren(...list.map((talk) => this.entry(talk)));
  }

  entry(talk) {
    const when = new Date(talk.changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const open = element("button", { type: "button", kind: "kept" },
      element("span", { kind: "title", text: talk.title }), element("span", { kind: "when", text: `${when} · ${talk.model}` }));
    if (talk.id === this.now()) open.setAttribute("aria-current", "true");
    open.disabled = !this.fits(talk);
    if (open.disabled) open.title = talk.story ? "A story: this model answers messages" : "Messages: this model writes stories";
    open.addEventListener("click", () => { $("talks").close(); this.open(talk); });
    const out = element("button", { type: "button", kind: "quiet", text: "Export" });
    out.setAttribute("aria-label", `Export ${talk.title}`);
    out.addEventListener("click", () => save(asFile([talk]), talk.title));
    const away = element("button", { type: "button", kind: "quiet", text: "Delete" });
    away.setAttribute("aria-label", `Delete ${talk.title}`);
    away.addEventListener("click", () => really(away, () => {
      const next = away.closest("li").nextElementSibling ?? away.closest("li").previousElementSibling;
      const at = [...$("talks-list").children].indexOf(next ?? null);
      this.drop(talk.id);
      this.draw(`“${talk.title}” was deleted.`);
      ($("talks-list").children[Math.max(0, at - 1)]?.querySelector(".kept") ?? $("talks-close")).focus();
    }));
    return element("li", {}, open, out, away);
  }
}

/** Does it when the button is pressed twice. */
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

/** Offers a text as a file to keep. */
function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const plain = name.normalize("NFKD").replace(/[^\w-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "conversation";
  element("a", { href: url, download: `${plain}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
