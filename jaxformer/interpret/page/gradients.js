// Gradients through time: how much a loss depends on the states at earlier tokens.

import { headGradient } from "./head.js";
import { logSum, transposedProduct } from "./maths.js";
import { runLogits } from "./model.js";
import { stateRow, zeroState } from "./recurrent.js";

/**
 * Returns {hidden, cell}: for each layer, the norms of ∂loss/∂h_s and, for an LSTM, of ∂loss/∂c_s at
 * each token s ≤ `position`. The loss is −log p(`token`) for the prediction at `position`.
 *
 * This is the chain rule, backwards from `position` (backpropagation through time). ∂loss/∂h_s
 * does not include the path through c_s, and ∂loss/∂c_s includes the path through h_s.
 */
export function* timeGradients(model, run, position, token) {
  const { config } = model;
  const size = config.hidden_dim;
  const logits = runLogits(model, run, position);
  const total = logSum(logits);
  const error = Float64Array.from(logits, (y, i) => Math.exp(y - total) - (i === token ? 1 : 0));
  const later = model.layers.map(() => ({ hidden: new Float64Array(size), cell: new Float64Array(size) }));
  later.at(-1).hidden = headGradient(model, error);
  const rows = () => model.layers.map(() => new Float64Array(position + 1));
  const norms = { hidden: rows(), ...(config.cell === "lstm" && { cell: rows() }) };
  for (let t = position; t >= 0; t--) {
    for (let index = config.num_layers - 1; index >= 0; index--) {
      const { recurrent } = model.layers[index];
      const gradient = later[index];
      norms.hidden[index][t] = normOf(gradient.hidden);
      const { gates, cell, whole } = stepGradient(config, run, index, t, gradient);
      if (whole) norms.cell[index][t] = normOf(whole);
      later[index] = { hidden: transposedProduct(recurrent.state, gates), cell };
      if (index === 0) continue;
      const below = transposedProduct(recurrent.input, gates);
      for (let u = 0; u < size; u++) later[index - 1].hidden[u] += below[u];
    }
    yield;
  }
  return norms;
}

const normOf = (x) => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));

/** Returns the gradients at the gates of a step and at the cell before it. */
function stepGradient(config, run, index, t, { hidden, cell }) {
  const size = config.hidden_dim, layer = run.layers[index];
  const h = stateRow(layer.hidden, t, size);
  if (config.cell === "rnn") return { gates: hidden.map((d, u) => d * (1 - h[u] * h[u])), cell };
  const gates = new Float64Array(4 * size), before = new Float64Array(size), whole = new Float64Array(size);
  const old = t > 0 ? stateRow(layer.cell, t - 1, size) : (run.initial?.[index] ?? zeroState(size)).cell;
  for (let u = 0; u < size; u++) {
    const at = t * size + u;
    const i = layer.input[at], f = layer.forget[at], g = layer.candidate[at], o = layer.output[at];
    const c = Math.tanh(layer.cell[at]);
    const d = whole[u] = cell[u] + hidden[u] * o * (1 - c * c);
    gates[u] = d * g * i * (1 - i);
    gates[size + u] = d * old[u] * f * (1 - f);
    gates[2 * size + u] = d * i * (1 - g * g);
    gates[3 * size + u] = hidden[u] * c * o * (1 - o);
    before[u] = d * f;
  }
  return { gates, cell: before, whole };
}
