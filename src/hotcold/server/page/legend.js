// What the picture shows of a model, in words.

import { sum } from "./beside.js";
import { percent } from "./figures.js";

const $ = (id) => document.getElementById(id);

/** What may be shown. `share`: what the part of all is called that a word takes; empty where it never changes. */
const NEURONS = {
  units: "neurons", one: "a neuron", did: "chose it", now: "firing now", share: "of neurons fire", told: (n) => `${n} fired`,
};
const EXPERTS = {
  units: "experts", one: "an expert", did: "chose it", now: "chosen now", share: "of experts chosen", told: (n) => `${n} experts`,
};
const STRONGEST = {
  units: "neurons", one: "a neuron", did: "worked hardest for it", now: "works hardest now: a tenth of each layer", share: "",
  told: (n) => `${n} worked hardest`,
};

/** One of them, or null where there is nothing to look at. */
export function shownOf(layout) {
  if (!layout) return null;
  if (layout.zeros) return NEURONS;
  return { expert: EXPERTS, strongest: STRONGEST }[layout.unit] ?? null;
}

/** The words around the picture. */
export function showLegend(layout, shows) {
  const all = sum(layout.neurons), layers = layout.neurons.length;
  const placed = layout.hot_by === "placement", known = layout.hot_by !== "";
  $("hot-words").textContent = placed ? `hot: on the GPU, ${percent(sum(layout.hot) / all)}` : "hot: the fifth that fires most";
  $("cold-words").textContent = placed ? "cold: on the CPU" : known ? "cold: the rest" : shows.units;
  $("firing-words").textContent = shows.now;
  $("active-words").textContent = shows.share;
  $("active").parentElement.hidden = !shows.share;
  $("legend").firstElementChild.hidden = !known;
  $("axis-hot").hidden = $("axis-cold").hidden = !known;
  const each = layout.bits === 1 ? `each dot is ${shows.one}`
    : `each cell stands for about ${Math.round(all / sum(layout.cells))} ${shows.units}`;
  $("map-words").textContent = `A map of ${all.toLocaleString("en")} ${shows.units} in ${layers} layers, which stand beside each other; ` +
    `${each}${known ? ", the most active at the top" : ""}.`;
  $("watch-title").textContent = `${all.toLocaleString("en")} ${shows.units}, ${layers} layers`;
}
