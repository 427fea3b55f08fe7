// How the model knows where a token stands: added vectors, rotations, or biases of the scores.

import { card, el, note, svg } from "./dom.js";
import { formula, shownNumber } from "./formula.js";
import { insideHead } from "./attention_steps.js";
import { positionSteps } from "./inside_values.js";
import { numberGrid } from "./number_grid.js";
import { signedBars } from "./signed_bars.js";

const MOST_DIALS = 32;
const MOST_DISTANCES = 16;

/** Returns {element, update}, or null for a model without positions. */
export function positionCard(store) {
  const { config } = store.values.model;
  if (config.positions === "none") return null;
  const title = el("h2", {});
  const body = el("div", {});
  const vector = numberGrid({ label: "Position vector", describe: (_, i, x) => `position vector, number ${i}: ${shownNumber(x)}` });
  const element = card(null, [title, body], { id: "inside-positions" });
  function update() {
    const { selection: { layer, position } } = store;
    const head = insideHead(store);
    const steps = positionSteps(store.values.model, layer, head, position);
    title.textContent = `Position ${position}: ${positionTitle(config)}`;
    body.replaceChildren(...positionBody({ steps, config, layer, head, position, vector, length: store.tokens.length }));
  }
  return { element, update };
}

export function positionTitle({ positions }) {
  return {
    learned: "a learned vector is added", sinusoidal: "sines and cosines are added", sinusoidal_halves: "sines and cosines are added",
    rotary: "queries and keys are rotated", alibi: "scores shrink with the distance", relative: "scores depend on the distance",
  }[positions];
}

function positionBody(about) {
  const { steps, layer } = about;
  if (!steps) return [note(`Layer ${layer} does not use positions. Other layers of this model do.`)];
  return { added: addedBody, rotary: rotaryBody, alibi: alibiBody, relative: relativeBody }[steps.kind](about);
}

function addedBody({ steps, config, position, vector }) {
  vector.draw([{ values: steps.values }]);
  const isLearned = config.positions === "learned";
  const text = isLearned
    ? `Position ${position} has a vector of ${config.embed_dim} numbers, which training found. It is added to the token's vector before layer 0.`
    : `Position ${position} has a vector of ${config.embed_dim} sines and cosines of different wavelengths. It is added to the token's vector before layer 0.`;
  const angle = [["frac", "i", ["sup", "10000", ["frac", ["2", "m"], "d"]]]];
  return [
    isLearned ? formula("x", "=", ["sub", "E", "token"], "+", ["sub", "P", "i"]) : formula(["sub", "P", ["i", ",", "m"]], "=", "sin", "(", ...angle, ")", "or", "cos", "(", ...angle, ")"),
    el("p", { text }), vector.element,
  ];
}

function rotaryBody({ steps, config, layer, position }) {
  const { pairs, factor, interleaved } = steps;
  const which = interleaved ? "neighbouring numbers" : `numbers m and m + ${pairs.length}`;
  const text = `Layer ${layer} rotates each pair of numbers of a query or key (${which}) by an angle that grows with the position. ` +
    `The product of a query and a key then depends on their distance. ${2 * pairs.length} of ${config.head_dim} numbers are rotated.`;
  const shown = pairs.slice(0, MOST_DIALS);
  return [
    formula(["sub", "θ", "m"], "=", "i", "·", ["sub", "ω", "m"]),
    el("p", { text }), el("div", { class: "dials" }, shown.map(rotaryDial)),
    pairs.length > shown.length ? note(`The first ${shown.length} of ${pairs.length} pairs.`) : null,
    factor === 1 ? null : note(`Queries and keys are also multiplied by ${shownNumber(factor)}.`),
    position === 0 ? note("At position 0 every angle is 0.") : null,
  ].filter(Boolean);
}

function rotaryDial({ frequency, angle }, pair) {
  const degrees = (angle * 180) / Math.PI;
  const turned = ((degrees % 360) + 360) % 360;
  const label = `pair ${pair}: ${shownNumber(degrees, 1)}°, ${shownNumber(frequency, 4)} radians per position`;
  const hand = svg("path", { class: "dial-hand", d: `M 0 0 L ${18 * Math.cos(angle)} ${-18 * Math.sin(angle)}` });
  const dial = svg("svg", { viewBox: "-22 -22 44 44", role: "img", "aria-label": label }, [
    svg("title", { text: label }), svg("circle", { class: "dial-face", r: 20 }), svg("path", { class: "axis", d: "M 0 0 H 20" }), hand,
  ]);
  return el("div", { class: "dial" }, [dial, el("span", { text: `${pair}: ${turned.toFixed(0)}°` })]);
}

function alibiBody({ steps, head, position }) {
  const distances = Array.from({ length: Math.min(position + 1, MOST_DISTANCES) }, (_, distance) =>
    ({ text: distanceName(distance), value: -steps.slope * distance }));
  return [
    formula(["sub", "b", ["i", "j"]], "=", "−", shownNumber(steps.slope, 4), "·", "(", "i", "−", "j", ")"),
    el("p", { text: `Head ${head} subtracts ${shownNumber(steps.slope, 4)} from a score for each token of distance, so it prefers near tokens. Each head has another slope.` }),
    signedBars(distances, "Bias of the score by distance"),
  ];
}

function relativeBody({ steps, head, config }) {
  const rows = steps.biases.slice(0, MOST_DISTANCES).map(({ distance, bias }) => ({ text: distanceName(distance), value: bias }));
  return [
    formula(["sub", "b", ["i", "j"]], "=", "B", "(", "i", "−", "j", ")"),
    el("p", { text: `Head ${head} adds a learned number to each score. It depends on the distance of query and key, up to ${config.relative.distance} tokens.` }),
    signedBars(rows, "Bias of the score by distance"),
  ];
}

const distanceName = (distance) => (distance === 0 ? "itself" : `${distance} before`);
