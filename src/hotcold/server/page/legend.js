// The texts around the picture, which depend on what it shows of a model.

import { sum } from "./beside.js";
import { percent } from "./figures.js";

const $ = (id) => document.getElementById(id);

/** Texts by what the picture shows. `share`: label of the active share; empty if that never changes. */
const NEURONS = {
  units: "neurons", one: "a neuron", did: "were active for it", now: "active now", share: "of neurons active", count: (n) => `${n} active`,
};
const EXPERTS = {
  units: "experts", one: "an expert", did: "were chosen for it", now: "chosen now", share: "of experts chosen", count: (n) => `${n} experts`,
};
const STRONGEST = {
  units: "neurons", one: "a neuron", did: "were most active for it", now: "the most active tenth now", share: "",
  count: (n) => `${n} most active`,
};

/** Returns the texts for a layout, or null if there is no picture. */
export function shownOf(layout) {
  if (!layout) return null;
  if (layout.zeros) return NEURONS;
  return { expert: EXPERTS, strongest: STRONGEST }[layout.unit] ?? null;
}

/** Shows the texts around the picture. */
export function showLegend(layout, shows) {
  const all = sum(layout.neurons), layers = layout.neurons.length;
  const placed = layout.hot_by === "placement", known = layout.hot_by !== "";
  $("hot-words").textContent = placed ? `hot: on the GPU, ${percent(sum(layout.hot) / all)}` : "hot: the most active fifth";
  $("cold-words").textContent = placed ? "cold: on the CPU" : known ? "cold: the others" : shows.units;
  $("firing-words").textContent = shows.now;
  $("active-words").textContent = shows.share;
  $("active").parentElement.hidden = !shows.share;
  $("legend").firstElementChild.hidden = !known;
  $("legend").classList.toggle("plain", !known);
  $("axis-hot").hidden = $("axis-cold").hidden = !known;
  const each = layout.bits === 1 ? `each dot is ${shows.one}`
    : `each cell stands for about ${Math.round(all / sum(layout.cells))} ${shows.units}`;
  $("map-words").textContent = `A map of ${all.toLocaleString("en")} ${shows.units} in ${layers} layers, one column for each; ` +
    `${each}${known ? ", the most active at the top" : ""}.`;
  // The title is short, since the facts of a word are shown next to it.
  $("watch-title").textContent = `${all.toLocaleString("en")} ${shows.units}${shows.share ? `, ${layers} layers` : ""}`;
}
