// Attention of one head for one token, in six steps with the model's own numbers.

import { barList, card, el, note, percent } from "./dom.js";
import { attentionTable, hiddenReason, keyGroups } from "./attention_table.js";
import { formula, shownNumber } from "./formula.js";
import { attentionSteps, headAddition, vectorLength } from "./inside_values.js";
import { numberGrid } from "./number_grid.js";
import { largestIndices } from "./maths.js";
import { signedBars } from "./signed_bars.js";
import { stepper } from "./stepper.js";

const STEP_TITLES = ["Query and keys", "Scores", "Mask", "Softmax", "Weighted sum of the values", "Output of the head"];

/** Returns {element, update}: the card with the six steps and the table of all keys. */
export function attentionCard(store) {
  const part = { feature: null, steps: stepper(STEP_TITLES, "Steps of attention") };
  const title = el("h2", {});
  const table = el("div", { class: "scroll key-table", tabindex: 0, role: "region", "aria-label": "All numbers of the keys" });
  const pick = (feature) => { part.feature = feature; update(); };
  const grids = attentionGrids(pick);
  part.element = card(null, [title, part.steps.element, el("h3", { text: "All numbers in one table" }), table], { id: "inside-attention" });

  function update() {
    const found = readHead(store, part.feature);
    part.feature = found.feature;
    title.textContent = `Attention of layer ${found.layer}, head ${found.head}, for ${found.name(found.position)}`;
    const show = (i, ...nodes) => part.steps.bodies[i].replaceChildren(...nodes.filter(Boolean));
    show(0, ...queryStep(found, grids));
    show(1, ...scoreStep(found));
    show(2, ...maskStep(found));
    show(3, ...softmaxStep(found));
    show(4, ...sumStep(found, grids));
    show(5, ...outputStep(found, grids));
    table.replaceChildren(attentionTable(found));
  }
  return { element: part.element, update };
}

/** Returns the numbers of the selected head, and the names and settings that the texts show. */
function readHead(store, feature) {
  const { values: { model, run }, selection } = store;
  const { layer, position } = selection;
  const head = insideHead(store);
  const steps = attentionSteps(model, run, layer, head, position);
  const strength = run.strengths[layer * model.config.num_heads + head];
  const last = model.config.head_dim - 1;
  const chosen = feature ?? largestIndices(steps.output.map(Math.abs), 1)[0];
  return {
    ...steps, layer, head, position, strength, config: model.config, group: model.group, length: run.length,
    feature: Math.min(chosen, last), groups: keyGroups(steps.keys),
    added: headAddition(model, run, layer, head, position),
    name: (i) => `token ${i} ‘${store.name(run.tokens[i])}’`, short: (i) => store.name(run.tokens[i]),
    rotary: model.config.layers[layer].rotary, window: model.config.layers[layer].window,
  };
}

/** Returns the selected head; head 0 if the mean of all heads is selected. */
export const insideHead = ({ selection: { head } }) => (typeof head === "number" ? head : 0);

function attentionGrids(pick) {
  const number = (sign) => (_, i, x) => `${sign}, number ${i}: ${shownNumber(x)}`;
  const found = { rows: [] };
  const keyed = (sign) => (row, i, x) => `${sign} of ${found.rows[row]}, number ${i}: ${shownNumber(x)}`;
  return Object.assign(found, {
    query: numberGrid({ label: "Query of the selected token", describe: number("q") }),
    keys: numberGrid({ label: "Keys of the visible tokens", describe: keyed("k") }),
    parts: numberGrid({ label: "Weight times value of each token", describe: keyed("weight · v"), pick }),
    output: numberGrid({ label: "Sum: the head's output", describe: number("output"), pick }),
    added: numberGrid({ label: "What the head adds to the residual stream", describe: number("added") }),
  });
}

function queryStep(found, grids) {
  const { query, groups, config, rotary, group, keyHead, head } = found;
  grids.rows = groups.shown.map(({ position }) => found.name(position));
  grids.query.draw([{ values: query }]);
  grids.keys.draw(groups.shown.map(({ key, position }) => ({ name: found.short(position), values: key })));
  const changes = [
    config.query_key_norm === "none" ? "" : "Both are normalised.",
    rotary ? "Both are rotated by their positions (see Positions below)." : "",
    group > 1 ? `Head ${head} shares key head ${keyHead} with ${group - 1} other ${group === 2 ? "head" : "heads"}.` : "",
  ].filter(Boolean).join(" ");
  return [
    formula(["sub", "q", "i"], "=", ["sub", "W", "Q"], ["sub", "x", "i"], ",", ["sub", "k", "j"], "=", ["sub", "W", "K"], ["sub", "x", "j"]),
    el("p", { text: `Each token has a query, which says what it looks for, and a key, which says what it offers: ${query.length} numbers each. ${changes}` }),
    el("h4", { text: `Query of ${found.name(found.position)}` }), grids.query.element,
    el("h4", { text: groups.rest.length ? `Keys with the ${groups.shown.length} largest weights` : "Keys that it can see" }), grids.keys.element,
  ];
}

function scoreStep(found) {
  const { config, scale, groups, position } = found;
  const best = groups.best;
  const hasBias = config.slopes || config.relative;
  const cap = config.attention_softcap;
  const product = config.attention_scale === null
    ? [["frac", [["sub", "q", "i"], "·", ["sub", "k", "j"]], ["sqrt", "d"]]]
    : [shownNumber(scale), "·", ["sub", "q", "i"], "·", ["sub", "k", "j"]];
  const capped = cap === null ? product : [String(cap), "·", "tanh", "(", ...product, "/", String(cap), ")"];
  const worked = [
    `${shownNumber(best.product)} × ${shownNumber(scale)} = ${shownNumber(best.scaled)}`,
    cap === null ? "" : `after the cap ${shownNumber(best.capped)}`,
    hasBias ? `plus the position bias ${shownNumber(best.bias)} = ${shownNumber(best.score)}` : "",
  ].filter(Boolean).join(", ");
  return [
    formula(["sub", "s", ["i", "j"]], "=", ...capped, ...(hasBias ? ["+", ["sub", "b", ["i", "j"]]] : [])),
    el("p", { text: `The score says how well a key fits the query. For ${found.name(best.position)}, q · k = ${shownNumber(best.product)}, and the score is ${worked}.` }),
    config.attention_scale === null ? note(`d = ${config.head_dim}, so 1/√d = ${shownNumber(scale)}.`) : null,
    signedBars(groups.shown.map(({ position: j, score }) => ({ text: found.short(j), value: score })), `Scores of the keys for token ${position}`),
  ];
}

function maskStep(found) {
  const { keys, length, window, config, position } = found;
  const later = keys.filter(({ hidden }) => hidden === "later").length;
  const outside = keys.filter(({ hidden }) => hidden === "window").length;
  const visible = length - later - outside;
  const sentences = [
    `${found.name(position)} can see ${visible} of ${length} tokens.`,
    later ? `${later} ${later === 1 ? "comes" : "come"} later: the model predicts the next token, so it must not read it.` : "",
    outside ? `${outside} ${outside === 1 ? "is" : "are"} outside the window of ${window} tokens.` : "",
    config.prefix && position < config.prefix ? `The first ${config.prefix} tokens are a prefix, in which each token sees all others.` : "",
    later + outside === 0 ? "No key is masked." : "A masked score becomes −∞, so its weight is 0.",
  ].filter(Boolean).join(" ");
  const strip = el("div", { class: "mask-strip", role: "img", "aria-label": sentences }, keys.map(({ position: j, hidden }) =>
    el("span", { class: hidden ? "token masked" : j === position ? "token here" : "token", text: found.short(j), title: `${j}: ${hiddenReason(hidden, window) ?? "visible"}` })));
  return [
    formula(["sub", "s", ["i", "j"]], "=", "−∞", "\u00a0if token\u00a0", "j", "\u00a0is masked"),
    el("p", { text: sentences[0].toUpperCase() + sentences.slice(1) }), strip,
  ];
}

function softmaxStep(found) {
  const { groups, total, largest } = found;
  const { best } = groups;
  const rows = groups.shown.map(({ position: j, weight }) => ({ text: found.short(j), share: weight }));
  if (groups.rest.length) rows.push({ text: `${groups.rest.length} others`, share: sumOf(groups.rest, "weight") });
  return [
    formula(["sub", "a", ["i", "j"]], "=", ["frac", ["sup", "e", ["sub", "s", ["i", "j"]]], [["under", "∑", "m"], ["sup", "e", ["sub", "s", ["i", "m"]]]]]),
    el("p", { text: `Softmax turns scores into weights that sum to 100%. The largest score is ${shownNumber(largest)}; subtracting it from every score changes no weight. Then e to the score of ${found.name(best.position)} is ${shownNumber(best.share)}, the sum is ${shownNumber(total)}, and the weight is ${percent(best.weight)}.` }),
    barList(rows, "Attention weights of the keys"),
  ];
}

const sumOf = (keys, name) => keys.reduce((sum, key) => sum + key[name], 0);

function sumStep(found, grids) {
  const { groups, output, feature, strength } = found;
  const rows = groups.shown.map(({ position: j, value, weight }) => ({ name: found.short(j), values: Array.from(value, (x) => weight * x) }));
  if (groups.rest.length) rows.push({ name: "others", values: Array.from(output, (_, i) => groups.rest.reduce((sum, { weight, value }) => sum + weight * value[i], 0)) });
  grids.rows = [...groups.shown.map(({ position: j }) => found.name(j)), "all other tokens"];
  const largest = rows.concat({ values: output }).reduce((most, { values }) => Math.max(most, ...values.map(Math.abs)), 0);
  grids.parts.draw(rows, { largest, column: feature });
  grids.output.draw([{ name: "sum", values: output }], { largest, column: feature });
  return [
    formula(["sub", "o", "i"], "=", ["under", "∑", "j"], ["sub", "a", ["i", "j"]], ["sub", "v", "j"]),
    el("p", { text: `Each token also has a value v. The head adds up the values, each times its weight. The table below shows number ${feature} of the sum, ${shownNumber(output[feature])}. Select another number in a row.` }),
    grids.parts.element, grids.output.element,
    strength === 1 ? null : note(`The strength of this head is ${strength.toFixed(2)}, so the sum is multiplied by it before the next step.`),
  ];
}

function outputStep(found, grids) {
  const { added, config, output, strength } = found;
  grids.added.draw([{ values: added }]);
  return [
    formula(["sup", "o", "′"], "=", ["sub", "W", "O"], ["sub", "o", "i"]),
    el("p", { text: `The output matrix turns these ${output.length} numbers (length ${shownNumber(vectorLength(output) * strength)}) into ${config.embed_dim} numbers (length ${shownNumber(vectorLength(added))}). The attention of this layer is the sum of its ${config.num_heads} heads and a bias if it has one.` }),
    grids.added.element,
  ];
}
