// Editing a message in its place. Nothing is removed before the new text is sent.

import { element } from "./figures.js";

/** Replaces a message by a text field; `send(text)` is called with the new text. */
export function editInPlace(turn, send) {
  if (turn.node.classList.contains("edited")) return;
  const field = element("textarea", { value: turn.text.trim() });
  field.setAttribute("aria-label", "Edit your message");
  const ok = element("button", { type: "submit", kind: "send", text: "Send" });
  const cancel = element("button", { type: "button", kind: "quiet", text: "Cancel" });
  const form = element("form", { kind: "edit" }, field, element("div", { kind: "edit-row" }, cancel, ok));
  const hidden = turn.said.hidden;
  const grow = () => {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight + 2}px`;
    ok.disabled = !field.value.trim() && !turn.files.length;
  };
  const close = () => {
    form.remove();
    turn.said.hidden = hidden;
    turn.node.classList.remove("edited");
    turn.node.querySelector(".after button")?.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!ok.disabled) send(field.value.trim());
  });
  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  cancel.addEventListener("click", close);
  turn.node.classList.add("edited");
  turn.said.hidden = true;
  turn.said.after(form);
  grow();
  field.focus();
}
