// Values that JAX computed when the page was written. `live.js` has the same functions.

import { deviationOf } from "./maths.js";
import { combineHeads } from "./live.js";

export function capturedValues(data) {
  const { captured } = data;
  const values = { live: false, ...capturedAttention(captured.attention ?? []), numStates: captured.lens?.ids.shape[0] ?? 0 };
  values.distribution = (position) => {
    const { ids, values: logits, log_sum, vocab_size } = captured.logits;
    const num = ids.shape[1];
    const part = (array) => array.subarray(position * num, (position + 1) * num);
    const about = { logSum: log_sum.data[position], vocabSize: vocab_size };
    return { ids: part(ids.data), logits: part(logits.data), ...about };
  };
  values.lens = (state, position) => {
    const { ids, shares } = captured.lens;
    const [, length, num] = ids.shape;
    const start = (state * length + position) * num;
    return Array.from({ length: num }, (_, i) => ({ id: ids.data[start + i], share: shares.data[start + i] }));
  };
  Object.assign(values, capturedVectors(data));
  return values;
}

/** Returns {kinds, attention, hidden}: the attention weights and the masked keys. */
export function capturedAttention(entries) {
  const kinds = entries.map((entry) => {
    const [numLayers, stored] = entry.weights.shape;
    return { ...entry, numLayers, numHeads: entry.num_heads, onlyMean: stored < entry.num_heads };
  });
  const matrices = new Map();
  const attention = (kind, layer, head) => {
    const name = `${kind}/${layer}/${head}`;
    if (!matrices.has(name)) {
      const one = (h) => capturedHead(kinds[kind].weights, layer, h);
      const combine = typeof head !== "number" && !kinds[kind].onlyMean;
      matrices.set(name, combine ? combineHeads(kinds[kind].numHeads, one, head) : one(kinds[kind].onlyMean ? 0 : head));
    }
    return matrices.get(name);
  };
  /** Returns 1 for each pair of a query and a key that the layer masks; null if none is known. */
  const hidden = (kind, layer) => {
    const { masks } = kinds[kind];
    if (!masks) return null;
    const [, queries, keys] = masks.hidden.shape;
    const start = masks.layers[layer] * queries * keys;
    return masks.hidden.data.subarray(start, start + queries * keys);
  };
  return { kinds, attention, hidden };
}

function capturedVectors(data) {
  const { vectors } = data.captured;
  const part = (array, state, position) => {
    const [, num, dim] = array.shape;
    const start = (state * num + vectors.positions.indexOf(position)) * dim;
    return array.data.subarray(start, start + dim);
  };
  const states = vectors ? vectors.stream.shape[0] : 0;
  return {
    vectorPositions: () => vectors?.positions ?? [],
    vectors: (layer, position) => ({
      input: part(vectors.stream, layer, position),
      added: vectors.attention ? part(vectors.attention, layer, position) : null,
    }),
    spreads: (position) =>
      Array.from({ length: states }, (_, state) => deviationOf(part(vectors.stream, state, position))),
    norm: (layer) => {
      if (!data.norms?.scale) return null;
      const row = ({ shape, data: x }) => x.subarray(layer * shape[1], (layer + 1) * shape[1]);
      return { scale: row(data.norms.scale), bias: data.norms.bias && row(data.norms.bias) };
    },
  };
}

/** Returns the weights of a head, each row divided by its sum. */
function capturedHead(weights, layer, head) {
  const [, heads, rows, columns] = weights.shape;
  const start = (layer * heads + head) * rows * columns;
  const values = Float32Array.from(weights.data.subarray(start, start + rows * columns));
  for (let row = 0; row < rows; row++) {
    const part = values.subarray(row * columns, (row + 1) * columns);
    const sum = part.reduce((a, b) => a + b, 0);
    if (sum > 0) for (let i = 0; i < columns; i++) part[i] /= sum;
  }
  return { rows, columns, values };
}
