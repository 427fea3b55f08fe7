// Cross-attention: the queries of the target read keys and values of the encoded source.

import { softCap } from "./maths.js";

/** Writes the weights with which a query attends to the source to `out`. */
export function sourceRow(model, run, layer, head, query, out) {
  const { config } = model;
  const dim = config.head_dim, width = config.num_kv_heads * dim;
  const queries = run.layers[layer].crossQuery, keys = run.memory.keys[layer];
  const q = (query * config.num_heads + head) * dim;
  const k = Math.floor(head / model.group) * dim;
  const scale = config.attention_scale ?? 1 / Math.sqrt(dim);
  const { length } = run.memory;
  let largest = -Infinity, total = 0;
  for (let j = 0; j < length; j++) {
    let sum = 0;
    for (let i = 0; i < dim; i++) sum += queries[q + i] * keys[j * width + k + i];
    out[j] = softCap(scale * sum, config.attention_softcap);
    largest = Math.max(largest, out[j]);
  }
  for (let j = 0; j < length; j++) total += out[j] = Math.exp(out[j] - largest);
  for (let j = 0; j < length; j++) out[j] /= total;
}

/** Computes the outputs of all cross-attention heads for some rows, times their strengths. */
export function attendSource(model, run, layer, first, num) {
  const { num_layers, num_heads, num_kv_heads, head_dim } = model.config;
  const { crossHeads } = run.layers[layer];
  const values = run.memory.values[layer], { length } = run.memory;
  const weights = new Float64Array(length), sums = new Float64Array(head_dim);
  for (let query = first; query < first + num; query++) {
    for (let head = 0; head < num_heads; head++) {
      sourceRow(model, run, layer, head, query, weights);
      const column = Math.floor(head / model.group) * head_dim;
      sums.fill(0);
      for (let j = 0; j < length; j++) {
        const at = j * num_kv_heads * head_dim + column;
        for (let i = 0; i < head_dim; i++) sums[i] += weights[j] * values[at + i];
      }
      // The strengths of self-attention come first.
      const strength = run.strengths[(num_layers + layer) * num_heads + head];
      const to = (query * num_heads + head) * head_dim;
      for (let i = 0; i < head_dim; i++) crossHeads[to + i] = strength * sums[i];
    }
  }
}

/** Returns the cross-attention weights of a head as {rows, columns, values}. */
export function sourceWeights(model, run, layer, head) {
  const rows = run.length, columns = run.memory.length;
  const values = new Float32Array(rows * columns);
  const row = new Float64Array(columns);
  for (let query = 0; query < rows; query++) {
    sourceRow(model, run, layer, head, query, row);
    values.set(row, query * columns);
  }
  return { rows, columns, values };
}
