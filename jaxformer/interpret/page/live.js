// Values of a model that the page computes itself. `captured.js` has the same functions.

import { deviationOf } from "./maths.js";
import { headWeights, visibleKeys } from "./heads.js";
import { createModel, forward, runLogits, stateLogits } from "./model.js";
import { sortedLogits, topShares } from "./sampling.js";

const MOST_MATRICES = 64; // attention matrices in memory

/** Returns the values of the current run; `begin` computes another run in small steps. */
export function liveValues(data) {
  const { config } = data;
  const model = createModel(config, data.weights);
  const size = config.num_layers * config.num_heads;
  const values = { live: true, model, run: null, baseline: null, strengths: new Float64Array(size).fill(1) };
  const matrices = new Map(), lenses = new Map();
  const forget = () => { matrices.clear(); lenses.clear(); };
  const layers = [...Array(config.num_layers).keys()];
  const about = { label: "Self-attention", queries: "tokens", keys: "tokens", layers };
  values.kinds = [{ ...about, numLayers: config.num_layers, numHeads: config.num_heads }];
  values.numStates = config.num_layers + 1;

  /** Computes new tokens; `position` is the first one that differs from those of the last run. */
  values.begin = function* (tokens, position) {
    const ones = new Float64Array(size).fill(1);
    const old = values.baseline && { run: values.baseline, position };
    const baseline = yield* forward(model, tokens, ones, old);
    const run = yield* ablated(baseline);
    Object.assign(values, { baseline, run });
    forget();
  };
  /** Computes the same tokens with the current strengths of the heads. */
  values.beginAgain = function* () {
    values.run = yield* ablated(values.baseline);
    forget();
  };
  function* ablated(baseline) {
    const strengths = values.strengths.slice();
    const first = strengths.findIndex((strength) => strength !== 1);
    if (first < 0) return baseline;
    const layer = Math.floor(first / config.num_heads);
    return yield* forward(model, baseline.tokens, strengths, { run: baseline, layer });
  }

  values.attention = (kind, layer, head) => {
    const name = `${layer}/${head}`;
    if (!matrices.has(name)) {
      if (matrices.size >= MOST_MATRICES) matrices.delete(matrices.keys().next().value);
      const one = (h) => headWeights(model, values.run, layer, h);
      matrices.set(name, typeof head === "number" ? one(head) : combineHeads(config.num_heads, one, head));
    }
    return matrices.get(name);
  };
  /** Returns 1 for each pair of a query and a key that the layer masks. */
  values.hidden = (kind, layer) => {
    const { length } = values.run;
    const hidden = new Uint8Array(length * length).fill(1);
    for (let query = 0; query < length; query++) {
      const [first, end] = visibleKeys(config, layer, query, length);
      hidden.fill(0, query * length + first, query * length + end);
    }
    return hidden;
  };
  values.logits = (position) => runLogits(model, values.run, position);
  values.baselineLogits = (position) => runLogits(model, values.baseline, position);
  values.distribution = (position) => sortedLogits(values.logits(position));
  values.lens = (state, position) => {
    const name = `${state}/${position}`;
    if (!lenses.has(name)) lenses.set(name, topShares(stateLogits(model, values.run, state, position), 5));
    return lenses.get(name);
  };
  values.vectorPositions = () => null; // all
  values.vectors = (layer, position) => {
    const dim = config.embed_dim;
    const part = (rows) => rows.subarray(position * dim, (position + 1) * dim);
    return { input: part(values.run.states[layer]), added: part(values.run.layers[layer].attention) };
  };
  values.spreads = (position) => values.run.states.map((_, state) => {
    const dim = config.embed_dim;
    return deviationOf(values.run.states[state].subarray(position * dim, (position + 1) * dim));
  });
  values.norm = (layer) => model.layers[layer].attention_norm ?? null;
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
