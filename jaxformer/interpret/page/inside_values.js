// The numbers inside one layer, for one token: attention, feed-forward, residual stream, positions.

import { headProducts } from "./head.js";
import { attentionRow, scoreBias, visibleKeys } from "./heads.js";
import { largestIndices, linear, softCap, withoutBias } from "./maths.js";
import { addResidual, hiddenFeatures, normBefore, positionFeature } from "./model.js";

/**
 * Returns every number of one query of a head: {query, scale, keys, largest, total, output}.
 *
 * An entry of `keys` is {position, key, value, product, scaled, capped, bias, score, hidden, share,
 * weight}. `hidden` is "later" or "window" if the query cannot see the key, else null. `share` is
 * exp(score − largest), and `total` is the sum of all shares. `output` does not contain the head's
 * strength.
 */
export function attentionSteps(model, run, layer, head, position) {
  const { config } = model;
  const rows = run.layers[layer];
  const keyHead = Math.floor(head / model.group);
  const query = headRow(config, rows.query, config.num_heads, position, head);
  const scale = config.attention_scale ?? 1 / Math.sqrt(config.head_dim);
  const [first, end] = visibleKeys(config, layer, position, run.length);
  const keys = Array.from({ length: run.length }, (_, j) => {
    const key = headRow(config, rows.key, config.num_kv_heads, j, keyHead);
    const value = headRow(config, rows.value, config.num_kv_heads, j, keyHead);
    const product = dotProduct(query, key);
    const capped = softCap(scale * product, config.attention_softcap);
    const bias = scoreBias(config, head, position, j);
    const hidden = j < first ? "window" : j >= end ? "later" : null;
    return { position: j, key, value, product, scaled: scale * product, capped, bias, score: capped + bias, hidden };
  });
  const largest = keys.reduce((most, { score, hidden }) => (hidden ? most : Math.max(most, score)), -Infinity);
  for (const key of keys) key.share = key.hidden ? 0 : Math.exp(key.score - largest);
  const total = keys.reduce((sum, { share }) => sum + share, 0);
  const output = new Float64Array(config.head_dim);
  for (const key of keys) {
    key.weight = key.share / total;
    for (let i = 0; i < output.length; i++) output[i] += key.weight * key.value[i];
  }
  return { query, scale, keys, largest, total, output, keyHead };
}

/** Returns {layer, head, key, weight}: the largest weight of a query on another token, or on itself if it is the first. */
export function largestWeight(model, run, position) {
  const { num_layers, num_heads } = model.config;
  const best = { weight: -1 };
  const row = new Float64Array(run.length);
  for (let layer = 0; layer < num_layers; layer++) {
    for (let head = 0; head < num_heads; head++) {
      const [first, num] = attentionRow(model, run, layer, head, position, row);
      for (let j = 0; j < num; j++) {
        const key = first + j;
        const isOther = key !== position || num === 1;
        if (isOther && row[j] > best.weight) Object.assign(best, { layer, head, key, weight: row[j] });
      }
    }
  }
  return best;
}

/** Whether the page runs a decoder. The functions of this module need the values of its run. */
export const runsDecoder = ({ values, data }) => values.live && data.kind === "decoder";

function headRow(config, rows, numHeads, position, head) {
  const start = (position * numHeads + head) * config.head_dim;
  return rows.subarray(start, start + config.head_dim);
}

function dotProduct(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

export const vectorLength = (x) => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));

/** Returns what one head adds to the attention's output at a position: its output through W_O. */
export function headAddition(model, run, layer, head, position) {
  const { num_heads, head_dim } = model.config;
  const { output } = model.layers[layer].attention;
  const width = num_heads * head_dim, start = head * head_dim;
  const alone = new Float32Array(width);
  const heads = run.layers[layer].heads.subarray(position * width, (position + 1) * width);
  alone.set(heads.subarray(start, start + head_dim), start);
  return linear(alone, 0, 1, withoutBias(output));
}

/**
 * Returns the feed-forward layer's numbers at a position: {input, hidden, output, before, after}.
 *
 * `before` is the residual stream to which the output is added, `after` is the layer's result.
 */
export function mlpSteps(model, run, layer, position) {
  const { config } = model;
  const weights = model.layers[layer];
  const row = (rows) => rows.slice(position * config.embed_dim, (position + 1) * config.embed_dim);
  const state = run.states[layer], rows = run.layers[layer];
  const before = addResidual(model, weights, "attention", state, rows.attention, position, 1);
  const name = config.parallel_block === "shared_norm" ? "attention" : "feedforward";
  const input = normBefore(model, layer, name, config.parallel_block === "none" ? before : row(state), 0, 1);
  const hidden = hiddenFeatures(config, weights.feedforward, input, 1);
  return { input, hidden, output: row(rows.feedforward), before, after: row(run.states[layer + 1]) };
}

/**
 * Returns the tokens whose logits a hidden feature raises most; `sign` is the sign of its value.
 *
 * The feature's output vector passes the scales of the layer's output norm and of the final norm,
 * and then the output head. The effects through later layers are not included.
 */
export function featureTokens(model, layer, feature, sign, num = 5) {
  const { config } = model;
  const weights = model.layers[layer];
  const { down } = weights.feedforward;
  const alone = new Float32Array(down.inputs);
  alone[feature] = sign;
  let direction = linear(alone, 0, 1, withoutBias(down));
  const norm = { sandwich: "feedforward_output_norm", post: "feedforward_norm", post_sublayer: "feedforward_norm" };
  direction = scaledByNorm(config, weights[norm[config.norm_position]], direction);
  direction = scaledByNorm(config, model.final_norm, direction);
  return largestIndices(headProducts(model, direction), num);
}

/** Applies the linear part of a norm: centring and the scale γ, without the standard deviation. */
function scaledByNorm(config, weights, x) {
  if (!weights?.scale || config.norm === "none") return x;
  const mean = config.norm === "layer" ? x.reduce((a, b) => a + b, 0) / x.length : 0;
  const offset = config.norm === "rms_one_plus" ? 1 : 0;
  return x.map((value, i) => (value - mean) * (offset + weights.scale[i]));
}

/** Returns the lengths of the residual stream's states and of the sub-layers' outputs. */
export function streamLengths(model, run, position) {
  const dim = model.config.embed_dim;
  const length = (rows) => vectorLength(rows.subarray(position * dim, (position + 1) * dim));
  return {
    states: run.states.map(length),
    attention: run.layers.map((layer) => length(layer.attention)),
    feedforward: run.layers.map((layer) => length(layer.feedforward)),
  };
}

/**
 * Returns how a layer receives the position, as {kind, …}; null for a layer without positions.
 *
 * "added": `values` is added to the token vector. "rotary": `pairs` are [{frequency, angle}].
 * "alibi": `slope` of the head. "relative": `biases` are [{distance, bias}] of the head.
 */
export function positionSteps(model, layer, head, position) {
  const { config } = model;
  if (config.positions === "learned" || config.positions.startsWith("sinusoidal")) {
    const values = Float32Array.from({ length: config.embed_dim }, (_, i) => positionFeature(model, position, i));
    return { kind: "added", values };
  }
  const { rotary } = config.layers[layer];
  if (rotary) {
    const pairs = rotary.frequencies.map((frequency) => ({ frequency, angle: frequency * position }));
    return { kind: "rotary", pairs, factor: rotary.factor, interleaved: rotary.interleaved };
  }
  if (config.slopes) return { kind: "alibi", slope: config.slopes[head] };
  if (!config.relative) return null;
  const biases = Array.from({ length: Math.min(position, config.relative.distance) + 1 }, (_, distance) =>
    ({ distance, bias: scoreBias(config, head, position, position - distance) }));
  return { kind: "relative", biases };
}

/** Returns all numbers of a layer, a head and a position, for scripts and tests. */
export function insideNumbers({ values: { model, run } }, layer, head, position) {
  return {
    attention: attentionSteps(model, run, layer, head, position),
    added: headAddition(model, run, layer, head, position),
    mlp: mlpSteps(model, run, layer, position),
    lengths: streamLengths(model, run, position),
    positions: positionSteps(model, layer, head, position),
    featureTokens: (feature, sign, num) => featureTokens(model, layer, feature, sign, num),
  };
}
