// Numbers beside the picture, as text.

const NAMES = {
  neurons: "neurons", attention: "attention", predictor: "predictors", head: "head", embedding: "embedding",
  kv: "keys and values", states: "states", buffers: "buffers",
};
const $ = (id) => document.getElementById(id);

export const percent = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)} %`;
export const rate = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1));
export function size(n) {
  const [unit, name] = n >= 2 ** 30 ? [2 ** 30, "GiB"] : n >= 2 ** 20 ? [2 ** 20, "MiB"] : [1024, "KiB"];
  return `${(n / unit).toFixed(n / unit < 9.95 ? 1 : 0)} ${name}`;
}

export function element(name, { text, kind, ...more } = {}, ...children) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  Object.assign(made, more);
  made.append(...children);
  return made;
}

export function showRates(rates, gpu) {
  if (!rates) return;
  if (rates.tok_s) $("tok-s").textContent = rate(rates.tok_s);
  // It has its place without guesses, too: the picture beside would change its size.
  if (rates.guessed) $("guesses").textContent = `${rates.accepted} of ${rates.guessed}`;
  if (rates.gb_s) $("gb-s").textContent = rates.gb_s >= 0.05 ? rate(rates.gb_s) : rates.gb_s.toFixed(3);
  if (rates.gpu_share !== null && rates.gpu_share !== undefined) showWork(rates.gpu_share, gpu);
}

export function showActive(share) {
  $("active").textContent = percent(share);
}

function showWork(share, gpu) {
  const stack = $("work"), parts = $("work-words");
  if (stack.children.length !== 2) {
    stack.replaceChildren(element("i", { kind: "gpu" }), element("i", { kind: "cpu" }));
  }
  stack.children[0].hidden = share === 0;
  stack.children[1].hidden = share === 1;
  stack.children[0].style.width = `${100 * share}%`;
  stack.children[1].style.width = `${100 * (1 - share)}%`;
  const part = (kind, value, words) => element("span", {}, element("i", { kind }), words, element("b", { text: percent(value) }));
  const cpu = part("m2", 1 - share, "CPU");
  parts.replaceChildren(...(gpu ? [part("m1", share, gpu), cpu] : [cpu, element("span", { text: "no GPU in use" })]));
}

/** Bars of what the model takes, one for each side that has some. */
export function showMemory(uses, gpu) {
  const total = uses.reduce((sum, use) => sum + use.gpu_bytes + use.cpu_bytes, 0);
  $("memory-sum").textContent = size(total);
  const sides = [["gpu_bytes", gpu || "GPU"], ["cpu_bytes", "CPU"]].filter(([side]) => uses.some((use) => use[side] > 0));
  $("memory").replaceChildren(...sides.flatMap(([side, name], i) => {
    const own = uses.map((use, index) => ({ ...use, index })).filter((use) => use[side] > 0);
    const sum = own.reduce((all, use) => all + use[side], 0);
    const bar = element("div", { kind: "stack", role: "img" });
    bar.setAttribute("aria-labelledby", `memory-title memory-words-${i}`);
    for (const use of own) {
      const part = element("i", { kind: `m${use.index + 1}` });
      part.style.width = `${(100 * use[side]) / sum}%`;
      bar.append(part);
    }
    const words = element("p", { kind: "parts", id: `memory-words-${i}` });
    if (sides.length > 1) words.append(element("span", {}, name, element("b", { text: size(sum) })));
    for (const use of own) {
      const part = element("span", {}, element("i", { kind: `m${use.index + 1}` }), NAMES[use.kind] || use.kind);
      part.append(element("b", { text: size(use[side]) }));
      words.append(part);
    }
    return [bar, words];
  }));
}

export function showLayers(count) {
  const every = Math.ceil(count / 16);
  $("layers").replaceChildren(...Array.from({ length: count }, (_, i) =>
    element("span", {}, element("b"), i % every ? "" : count <= 8 ? `layer ${i + 1}` : String(i + 1))));
  $("layers").hidden = false;
}

export function showShares(shares) {
  const spans = $("layers").children, few = shares.length <= 12;
  shares.forEach((share, i) => { if (few && spans[i]) spans[i].firstChild.textContent = percent(share); });
}
