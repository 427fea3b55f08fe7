// Luong attention of a recurrent decoder: α = softmax_j(h · K e_j), then tanh(W [Σ α_j V e_j; h] + b).

import { linear } from "./maths.js";

/**
 * Returns a run with the output of attention as its last state, and with the attention weights
 * [target, source]. The output of the only head is multiplied by `strength`.
 */
export function* sourceAttention(model, run, strength) {
  const { config, layers } = model;
  const size = config.hidden_dim, { encoded } = run;
  const maps = layers.at(-1).cross_attention;
  const states = run.states.at(-1), source = encoded.states.at(-1);
  const keys = linear(source, 0, encoded.length, maps.key);
  const values = linear(source, 0, encoded.length, maps.value);
  const weights = new Float32Array(run.length * encoded.length);
  const output = new Float32Array(run.length * size);
  for (let t = 0; t < run.length; t++) {
    const h = states.subarray(t * size, (t + 1) * size);
    const row = weights.subarray(t * encoded.length, (t + 1) * encoded.length);
    weighSource(h, keys, row, size);
    const both = new Float32Array(2 * size);
    row.forEach((weight, j) => {
      for (let i = 0; i < size; i++) both[i] += strength * weight * values[j * size + i];
    });
    both.set(h, size);
    output.set(linear(both, 0, 1, maps.output).map(Math.tanh), t * size);
    yield;
  }
  return { ...run, weights, states: [...run.states, output], logits: new Map() };
}

/** Writes the softmax of the products of h with the keys. */
function weighSource(h, keys, row, size) {
  let largest = -Infinity, total = 0;
  for (let j = 0; j < row.length; j++) {
    let sum = 0;
    for (let i = 0; i < size; i++) sum += h[i] * keys[j * size + i];
    row[j] = sum;
    largest = Math.max(largest, sum);
  }
  for (let j = 0; j < row.length; j++) total += row[j] = Math.exp(row[j] - largest);
  for (let j = 0; j < row.length; j++) row[j] /= total;
}
