// Values of a model that the page computes itself. `captured.js` has the same functions.

import { headWeights, hiddenKeys } from "./heads.js";
import { createModel, forward } from "./model.js";
import { addLogits, addStream, matrixCache } from "./readings.js";
import { addRuns, changedStrength } from "./runs.js";

/**
 * Returns the values of a decoder or an encoder; `begin` computes another run in small steps.
 *
 * `kinds.js` has the functions that return the values of the other kinds of model.
 */
export function liveValues(data) {
  const { config } = data;
  const model = createModel(config, data.weights);
  const size = config.num_layers * config.num_heads;
  const values = { live: true, model, run: null, baseline: null, strengths: new Float64Array(size).fill(1) };
  const layers = [...Array(config.num_layers).keys()];
  const about = { label: "Self-attention", queries: "tokens", keys: "tokens", layers };
  values.kinds = [{ ...about, numLayers: config.num_layers, numHeads: config.num_heads }];
  const matrices = matrixCache((_, layer, head) => {
    const one = (h) => headWeights(model, values.run, layer, h);
    return typeof head === "number" ? one(head) : combineHeads(config.num_heads, one, head);
  });
  values.attention = matrices.read;
  addLogits(values, model);
  const forgetLenses = addStream(values, model, { added: "attention", norm: "attention_norm" });
  const ones = new Float64Array(size).fill(1);
  addRuns(values, {
    compute: (tokens, known) => forward(model, tokens, ones, known),
    ablate: (baseline, strengths) => {
      const layer = Math.floor(changedStrength(strengths) / config.num_heads);
      return forward(model, baseline.tokens, strengths, { run: baseline, layer });
    },
    forget: () => { matrices.forget(); forgetLenses(); },
  });
  values.hidden = (kind, layer) => hiddenKeys(config, layer, values.run.length);
  return values;
}

/** Returns the mean or the largest weight of all heads of a layer. */
export function combineHeads(num, weightsOf, how) {
  const first = weightsOf(0);
  const values = first.values.slice();
  for (let head = 1; head < num; head++) {
    const other = weightsOf(head).values;
    for (let i = 0; i < values.length; i++) {
      values[i] = how === "max" ? Math.max(values[i], other[i]) : values[i] + other[i];
    }
  }
  if (how === "mean") for (let i = 0; i < values.length; i++) values[i] /= num;
  return { ...first, values };
}
