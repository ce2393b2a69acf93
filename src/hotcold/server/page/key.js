// The key that a server may require, and the page's colours.

import { isKey, keepKey } from "./api.js";

const $ = (id) => document.getElementById(id);

/** Asks for a key; the result is whether the user entered one. */
export function askKey(error) {
  const dialog = $("key"), field = $("key-field");
  $("key-words").textContent = error.message.includes("wrong")
    ? "The key is wrong. Try another one."
    : "This server requires a key. The page stores it until this tab is closed.";
  field.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((go) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use";
      if (given) keepKey(field.value.trim());
      dialog.returnValue = "";
      go(given);
    }, { once: true });
  });
}

$("key-form").addEventListener("submit", (event) => {
  if (isKey($("key-field").value.trim())) {
    $("key").returnValue = "use";
    return;
  }
  event.preventDefault();
  $("key-words").textContent = "This is not a key: a key has up to 512 printable ASCII characters, without spaces.";
  $("key-field").select();
});
$("key-cancel").addEventListener("click", () => $("key").close(""));

/** Switches between the light and the dark theme. */
export function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("hotcold.theme", root.dataset.theme); } catch { /* not stored */ }
}
