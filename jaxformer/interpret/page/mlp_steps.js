// The feed-forward layer for one token: its most active features, and what they promote.

import { card, el, note } from "./dom.js";
import { formula, shownNumber } from "./formula.js";
import { featureTokens, mlpSteps, vectorLength } from "./inside_values.js";
import { largestIndices } from "./maths.js";
import { GATED_ACTIVATIONS } from "./maths.js";
import { numberGrid } from "./number_grid.js";
import { createWorker } from "./store.js";

const NUM_FEATURES = 8;

/** Returns {element, update}: the card with the hidden features and the three vectors of the sum. */
export function mlpCard(store) {
  const { config } = store.values.model;
  const work = createWorker(store);
  const title = el("h2", {});
  const about = el("p", {});
  const table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The most active features" });
  const number = (name) => (row, i, x) => `${name[row]}, number ${i}: ${shownNumber(x)}`;
  const sum = numberGrid({ label: "Residual stream before, output, and residual stream after", describe: number(["before", "output", "after"]) });
  const sumNote = note("");
  const element = card(null, [
    title, el("div", { class: "formulas" }, mlpFormulas(config)), about,
    el("div", { class: "split wide" }, [
      el("div", {}, [el("h3", { text: "The most active features" }), table, note(promotionText(config))]),
      el("div", {}, [el("h3", { text: "The output joins the residual stream" }), sum.element, sumNote]),
    ]),
  ], { id: "inside-mlp" });

  function update() {
    const { values: { model, run }, selection: { layer, position } } = store;
    const steps = mlpSteps(model, run, layer, position);
    title.textContent = `Feed-forward (MLP) of layer ${layer}, for token ${position} ‘${store.name(store.tokens[position])}’`;
    about.textContent = activityText(steps, config);
    const features = largestIndices(steps.hidden.map(Math.abs), NUM_FEATURES);
    const rows = features.map((index) => featureRow(index, steps.hidden[index], steps.hidden[features[0]]));
    table.replaceChildren(featureTable(rows));
    if (!config.output_activation) work(promotions(store, layer, rows));
    sum.draw([{ name: "before", values: steps.before }, { name: "output", values: steps.output }, { name: "after", values: steps.after }]);
    sumNote.textContent = sumOfStream(config, steps);
  }
  return { element, update };
}

/** Fills in the promoted tokens, one feature in each step. */
function* promotions(store, layer, rows) {
  const { model } = store.values;
  for (const { index, value, tokens } of rows) {
    const ids = featureTokens(model, layer, index, Math.sign(value) || 1);
    tokens.replaceChildren(...ids.flatMap((id) => [el("span", { class: "token chip", text: store.name(id) }), " "]));
    yield;
  }
}

function featureRow(index, value, largest) {
  const share = Math.abs(value) / (Math.abs(largest) || 1);
  const tokens = el("td", { class: "promoted" });
  const row = el("tr", { "data-feature": index }, [
    el("th", { scope: "row", text: index }), el("td", { class: "weight", style: { "--weight": share.toFixed(3) }, text: shownNumber(value) }), tokens,
  ]);
  return { index, value, tokens, row };
}

function featureTable(rows) {
  const heads = ["feature", "value", "tokens that it makes more likely"].map((text) => el("th", { scope: "col", text }));
  return el("table", { class: "keys" }, [el("thead", {}, [el("tr", {}, heads)]), el("tbody", {}, rows.map(({ row }) => row))]);
}

function mlpFormulas(config) {
  const name = config.activation.replaceAll("_", " ");
  const up = [["sub", "W", "up"], "x"];
  const hidden = config.activation in GATED_ACTIVATIONS
    ? ["h", "=", { swiglu: "silu", geglu: "gelu", geglu_tanh: "gelu" }[config.activation], "(", ["sub", "W", "gate"], "x", ")", "⊙", ...up]
    : ["h", "=", name, "(", ...up, ")"];
  const outer = config.output_activation ? [name, "("] : [];
  return [formula(...hidden), formula("y", "=", ...outer, ["sub", "W", "down"], "h", ...(outer.length ? [")"] : []))];
}

function activityText({ hidden, input }, config) {
  const most = hidden.reduce((m, x) => Math.max(m, Math.abs(x)), 0);
  const active = hidden.reduce((num, x) => num + (most > 0 && Math.abs(x) > most / 10 ? 1 : 0), 0);
  return `The layer turns the token's ${input.length} numbers into ${hidden.length.toLocaleString("en")} hidden features, and these into ${config.embed_dim} numbers again. ` +
    `${active.toLocaleString("en")} features are active here: larger than a tenth of the largest, which is ${shownNumber(most)}.`;
}

function promotionText(config) {
  if (config.output_activation) {
    return "This model applies the activation to the output as well, so a feature has no fixed output direction and promotes no fixed tokens.";
  }
  return "Tokens: the feature's output vector, with the sign of its value, passed through the final norm's scale and the output head. Later layers can change this.";
}

function sumOfStream(config, { before, output, after }) {
  const [a, b, c] = [before, output, after].map((x) => shownNumber(vectorLength(x), 2));
  const lengths = `Lengths: ${a} before, ${b} of the output, ${c} after.`;
  if (!config.residual) return `${lengths} This model does not add the output to the input: the output replaces it.`;
  const how = {
    pre: "After is before plus the output.",
    post: "After is the norm of before plus the output.",
    post_sublayer: "After is before plus the norm of the output.",
    sandwich: "After is before plus the norm of the output.",
  }[config.norm_position];
  return `${lengths} ${config.norm === "none" ? "After is before plus the output." : how}`;
}
