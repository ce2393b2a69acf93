// The key that a server may ask for, and the page's colours.

import { isKey, keepKey } from "./api.js";

const $ = (id) => document.getElementById(id);

/** Whether somebody gave a key. */
export function askKey(error) {
  const dialog = $("key"), field = $("key-field");
  $("key-words").textContent = error.message.includes("wrong")
    ? "The server does not know that key. Try another one."
    : "This server asks for a key. The page keeps it until this tab is closed.";
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
  $("key-words").textContent = "That is no key: keys have letters, digits and signs of ASCII, without spaces.";
  $("key-field").select();
});
$("key-cancel").addEventListener("click", () => $("key").close(""));

/** Light where it was dark, and the other way round. */
export function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("hotcold.theme", root.dataset.theme); } catch { /* not kept */ }
}
