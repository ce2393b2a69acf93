// The user's settings, stored in this browser.

const NAME = "hotcold.settings";
export const DEFAULTS = {
  system: "", temperature: 0.8, top_p: 0.95, min_p: 0.05, max_tokens: null, seed: null, json: false, paced: true,
};

export class Settings {
  constructor(dialog, form) {
    this.dialog = dialog;
    this.form = form;
    this.values = { ...DEFAULTS };
    try {
      const kept = JSON.parse(localStorage.getItem(NAME) || "{}");
      for (const [name, value] of Object.entries(DEFAULTS)) {
        const fits = value === null ? Number.isInteger(kept[name]) : typeof kept[name] === typeof value;
        if (fits) this.values[name] = kept[name];
      }
    } catch { /* damaged, or no access to the storage */ }
    form.addEventListener("change", () => this.read());
    form.addEventListener("submit", (event) => { if (!form.reportValidity()) event.preventDefault(); else this.read(); });
    form.querySelector("#reset").addEventListener("click", () => { this.values = { ...DEFAULTS }; this.write(); this.keep(); });
  }

  open() {
    this.write();
    this.dialog.showModal();
  }

  write() {
    for (const [name, value] of Object.entries(this.values)) {
      const field = this.form.elements[name];
      if (field.type === "checkbox") field.checked = value; else field.value = value ?? "";
    }
  }

  read() {
    for (const name of Object.keys(DEFAULTS)) {
      const field = this.form.elements[name];
      if (field.type === "checkbox") this.values[name] = field.checked;
      else if (field.type === "number") {
        if (!field.validity.valid) continue;
        this.values[name] = field.value === "" ? DEFAULTS[name] : Number(field.value);
      } else this.values[name] = field.value;
    }
    this.keep();
  }

  keep() {
    try { localStorage.setItem(NAME, JSON.stringify(this.values)); } catch { /* not stored */ }
  }

  /** The settings as fields of a request. */
  get sampling() {
    const { temperature, top_p, min_p, max_tokens, seed } = this.values;
    const whole = { ...(seed !== null && { seed }), ...(max_tokens !== null && { max_tokens }) };
    return { temperature, top_p, min_p, ...whole };
  }
}
