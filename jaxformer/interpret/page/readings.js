// Adds functions with which views read the current run of a live model of any kind.

import { deviationOf } from "./maths.js";
import { runLogits, stateLogits } from "./model.js";
import { sortedLogits, topShares } from "./sampling.js";

/** Adds the functions that read logits to `values`. */
export function addLogits(values, model) {
  values.logits = (position) => runLogits(model, values.run, position);
  values.baselineLogits = (position) => runLogits(model, values.baseline, position);
  values.distribution = (position) => sortedLogits(values.logits(position));
}

/**
 * Adds the functions that read the residual stream. `added` is the name of the sub-layer output that
 * is shown beside the stream, and `norm` the name of the norm before this sub-layer. Returns a
 * function that clears the cached results of the last run.
 */
export function addStream(values, model, { added, norm }) {
  const lenses = new Map();
  values.numStates = model.config.num_layers + 1;
  values.lens = (state, position) => {
    const name = `${state}/${position}`;
    if (!lenses.has(name)) lenses.set(name, topShares(stateLogits(model, values.run, state, position), 5));
    return lenses.get(name);
  };
  const part = (rows, position) => {
    const dim = model.config.embed_dim;
    return rows.subarray(position * dim, (position + 1) * dim);
  };
  values.vectorPositions = () => null; // all
  values.vectors = (layer, position) => ({
    input: part(values.run.states[layer], position),
    added: part(values.run.layers[layer][added], position),
  });
  values.spreads = (position) => values.run.states.map((rows) => deviationOf(part(rows, position)));
  values.norm = (layer) => model.layers[layer][norm] ?? null;
  return () => lenses.clear();
}

/** Adds the same functions for a model without a residual stream; they return no values. */
export function addNoStream(values) {
  values.numStates = 0;
  values.vectorPositions = () => [];
  values.norm = () => null;
}

/** Returns {read, forget}: `read` computes each attention matrix once; `forget` clears them. */
export function matrixCache(compute, most = 64) {
  const matrices = new Map();
  const read = (kind, layer, head) => {
    const name = `${kind}/${layer}/${head}`;
    if (!matrices.has(name)) {
      if (matrices.size >= most) matrices.delete(matrices.keys().next().value);
      matrices.set(name, compute(kind, layer, head));
    }
    return matrices.get(name);
  };
  return { read, forget: () => matrices.clear() };
}
