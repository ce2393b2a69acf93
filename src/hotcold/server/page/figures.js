// The figures next to the picture, as text.

const NAMES = {
  neurons: "neurons", attention: "attention", predictor: "predictors", head: "head", embedding: "embedding",
  kv: "keys and values", states: "states", draft: "draft block", buffers: "buffers",
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
  // The element is always there: otherwise the picture would change its size.
  if (rates.guessed) $("guesses").textContent = `${rates.accepted} of ${rates.guessed}`;
  if (rates.gb_s) $("gb-s").textContent = rates.gb_s >= 0.05 ? rate(rates.gb_s) : rates.gb_s.toFixed(3);
  if (rates.gpu_share !== null && rates.gpu_share !== undefined) showWork(rates.gpu_share, gpu);
  if (rates.expert_hit_share !== null && rates.expert_hit_share !== undefined) showDisk(rates);
}

/** Shows the reads of experts that are not in memory. */
function showDisk(rates) {
  const part = (words, text) => element("span", {}, words, element("b", { text }));
  $("disk").hidden = false;
  $("disk").replaceChildren(
    part("experts in memory", percent(rates.expert_hit_share)),
    part("read from disk per token", size(rates.disk_bytes_per_token)),
    part("waits per token", `${rates.stalls_per_token.toFixed(1)}, ${(1000 * rates.stall_s_per_token).toFixed(1)} ms`),
  );
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

/** Shows the memory in use as bars, one for each device. */
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

/** Shows numbers of layers below their columns, as many as fit, at even distances. */
export function showLayers(count) {
  const box = $("layers");
  box.replaceChildren(...Array.from({ length: count }, () => element("span", {}, element("b"), element("i"))));
  box.hidden = false;
  const number = () => {
    const words = count <= 8 && box.clientWidth / count > 62, room = 7.5 * (words ? 8 : String(count).length) + 6;
    const every = [1, 2, 4, 5, 8, 10, 16, 20, 25, 50, 100].find((n) => (n * box.clientWidth) / count >= room) ?? count;
    [...box.children].forEach((span, i) => {
      const named = i === 0 || (i + 1) % every === 0 && (every === 1 || i + 1 > every / 2);
      span.lastChild.textContent = !named ? "" : words ? `layer ${i + 1}` : String(i + 1);
    });
  };
  new ResizeObserver(number).observe(box);
  number();
}

export function showShares(shares) {
  const spans = $("layers").children, few = shares.length <= 12;
  shares.forEach((share, i) => { if (few && spans[i]) spans[i].firstChild.textContent = percent(share); });
}

const round = (n) => (n >= 100 ? Math.round(n) : Number(n.toPrecision(2)));
/** Returns a number of parameters in common form: 135 M, 1.7 B. */
export function count(n) {
  const [unit, name] = n >= 1e9 ? [1e9, "B"] : n >= 1e6 ? [1e6, "M"] : n >= 1e3 ? [1e3, "K"] : [1, ""];
  return `${round(n / unit)} ${name}`.trim();
}

/** Shows facts of the model. */
export function showFacts(info) {
  const facts = [
    ["Model", info.title || info.model], ["Parameters", info.params ? count(info.params) : ""],
    ["Quantisation", info.quantisation], ["File", info.size_bytes ? size(info.size_bytes) : ""],
    ["Context", `${info.context.toLocaleString("en")} tokens`], ["Family", info.family],
    ["Neurons", { exact: "the active ones", predicted: "the ones predicted to be active", off: "all, for every token" }[info.sparsity]],
    ["Threads", info.threads],
  ];
  $("facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", { text: name }), element("dd", { text: String(value) }))));
  $("kind").textContent = [info.params ? `${count(info.params)} parameters` : "", info.quantisation].filter(Boolean).join(" · ");
}

/** Shows how much of the context a conversation uses. */
export function showContext(used, context) {
  $("context").hidden = !used || !context;
  if ($("context").hidden) return;
  const part = Math.min(1, used / context);
  $("context-part").style.width = `${100 * part}%`;
  $("context").classList.toggle("much", part > 0.85);
  $("context-words").textContent = `${used.toLocaleString("en")} of ${context.toLocaleString("en")} tokens`;
}
