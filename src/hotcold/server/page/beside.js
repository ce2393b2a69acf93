// The parts of the page around the text, and the browser's storage.

import { element } from "./figures.js";
import { scroll } from "./scrolling.js";

const $ = (id) => document.getElementById(id);

export function stored(place, name) {
  try { return window[place].getItem(name) ?? ""; } catch { return ""; }
}
export function store(place, name, value) {
  try { window[place].setItem(name, value); } catch { /* not stored */ }
}

export function showNote(words) {
  $("map-note").hidden = false;
  $("map-note").textContent = words;
}

export function figuresAsText() {
  const parts = [["tok-s", "tokens a second"], ["active", $("active-words").textContent]];
  return parts.filter(([id]) => $(id).textContent !== "–").map(([id, words]) => `${$(id).textContent} ${words}.`).join(" ");
}

export function announce(words) {
  $("announce").textContent = words.slice(0, 1200);
}

/** Shows an error. `again()` is the action of a button next to it; without it there is no button. */
export function problem(words, again = null) {
  $("problem").hidden = !words;
  $("problem").replaceChildren(words);
  if (again) {
    const button = element("button", { type: "button", kind: "quiet", text: "Try again" });
    button.addEventListener("click", again);
    $("problem").append(" ", button);
  }
  if (words) scroll(true);
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text.trim());
    button.textContent = "Copied";
  } catch { button.textContent = "Not allowed here"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

export function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

export const sum = (values) => values.reduce((all, value) => all + value, 0);
