// Attention of single heads: rotation, norms of queries and keys, scores and weights.

import { normalizeRows, softCap } from "./maths.js";

/** Normalizes queries or keys in place, over each head or over all heads together. */
export function normalizeHeads(config, weights, rows, num) {
  if (config.query_key_norm === "none") return;
  const dim = config.query_key_norm === "head" ? config.head_dim : rows.length / num;
  rows.set(normalizeRows(rows, 0, rows.length / dim, weights ?? {}, config, dim));
}

/** Rotates queries or keys in place by their positions, `first` and the following ones. */
export function rotateRows(config, rotary, rows, first, num) {
  if (!rotary) return;
  const { frequencies, factor, interleaved } = rotary;
  const pairs = frequencies.length;
  const width = rows.length / num;
  for (let row = 0; row < num; row++) {
    for (let pair = 0; pair < pairs; pair++) {
      const angle = Math.fround(Math.fround(frequencies[pair]) * (first + row));
      const cosine = factor * Math.cos(angle), sine = factor * Math.sin(angle);
      for (let head = 0; head < width; head += config.head_dim) {
        const start = row * width + head;
        const left = start + (interleaved ? 2 * pair : pair);
        const right = start + (interleaved ? 2 * pair + 1 : pair + pairs);
        const a = rows[left], b = rows[right];
        rows[left] = a * cosine - b * sine;
        rows[right] = b * cosine + a * sine;
      }
    }
  }
}

/** Returns the index of the first visible key of a query, and the index after the last one. */
export function visibleKeys(config, layer, query, length) {
  const window = config.layers[layer].window;
  if (config.bidirectional) { // the window of an encoder counts the tokens of one side
    return window === null ? [0, length] : [Math.max(0, query - window), Math.min(length, query + window + 1)];
  }
  const first = window === null ? 0 : Math.max(0, query - window + 1);
  return [first, Math.min(length, Math.max(query + 1, config.prefix))];
}

/** Returns 1 for each pair of a query and a key that the layer masks; null if it masks none. */
export function hiddenKeys(config, layer, length) {
  const hidden = new Uint8Array(length * length).fill(1);
  for (let query = 0; query < length; query++) {
    const [first, end] = visibleKeys(config, layer, query, length);
    hidden.fill(0, query * length + first, query * length + end);
  }
  return hidden.includes(1) ? hidden : null;
}

/** Writes the attention weights of a query to `out`, from index 0; returns [first key, number]. */
export function attentionRow(model, run, layer, head, query, out) {
  const { config } = model;
  const { query: queries, key: keys } = run.layers[layer];
  const dim = config.head_dim;
  const keyWidth = config.num_kv_heads * dim;
  const q = query * config.num_heads * dim + head * dim;
  const k = Math.floor(head / model.group) * dim;
  const scale = config.attention_scale ?? 1 / Math.sqrt(dim);
  const [first, end] = visibleKeys(config, layer, query, run.length);
  let largest = -Infinity;
  for (let j = first; j < end; j++) {
    let sum = 0;
    const at = j * keyWidth + k;
    for (let i = 0; i < dim; i++) sum += queries[q + i] * keys[at + i];
    const score = softCap(scale * sum, config.attention_softcap) + scoreBias(config, head, query, j);
    out[j - first] = score;
    if (score > largest) largest = score;
  }
  let total = 0;
  for (let j = 0; j < end - first; j++) total += out[j] = Math.exp(out[j] - largest);
  for (let j = 0; j < end - first; j++) out[j] /= total;
  return [first, end - first];
}

/** Returns the position bias of a score, with ALiBi or relative positions. */
export function scoreBias(config, head, query, key) {
  if (config.slopes) return -config.slopes[head] * Math.abs(query - key);
  if (!config.relative) return 0;
  const { distance, bias } = config.relative;
  const offset = Math.max(-distance, Math.min(distance, key - query));
  return bias[offset + distance][head];
}

/** Computes the outputs of all heads of a layer for some rows, times their strengths. */
export function attendRows(model, run, layer, first, num) {
  const { num_heads, num_kv_heads, head_dim } = model.config;
  const { value, heads } = run.layers[layer];
  const weights = new Float64Array(run.length);
  const sums = new Float64Array(head_dim);
  for (let query = first; query < first + num; query++) {
    for (let head = 0; head < num_heads; head++) {
      const [start, count] = attentionRow(model, run, layer, head, query, weights);
      const column = Math.floor(head / model.group) * head_dim;
      sums.fill(0);
      for (let j = 0; j < count; j++) {
        const at = (start + j) * num_kv_heads * head_dim + column;
        for (let i = 0; i < head_dim; i++) sums[i] += weights[j] * value[at + i];
      }
      const strength = run.strengths[layer * num_heads + head];
      const to = (query * num_heads + head) * head_dim;
      for (let i = 0; i < head_dim; i++) heads[to + i] = strength * sums[i];
    }
  }
}

/** Returns the attention weights of a head as {rows, columns, values}. */
export function headWeights(model, run, layer, head) {
  const size = run.length;
  const values = new Float32Array(size * size);
  const row = new Float64Array(size);
  for (let query = 0; query < size; query++) {
    const [first, count] = attentionRow(model, run, layer, head, query, row);
    for (let j = 0; j < count; j++) values[query * size + first + j] = row[j];
  }
  return { rows: size, columns: size, values };
}
