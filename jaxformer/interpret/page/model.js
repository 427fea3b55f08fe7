// The forward pass of a decoder, as `jaxformer/functional/model.py` computes it.
//
// A run holds every value that the views show. It is never changed after `forward` has returned it.

import { GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, linear, normalizeRows } from "./maths.js";
import { softCap, tableProducts } from "./maths.js";
import { attendRows, normalizeHeads, rotateRows } from "./heads.js";

const ROWS_AT_ONCE = 16;

/** Returns the model: its config, and its weights by layer. */
export function createModel(config, weights) {
  const layers = Array.from({ length: config.num_layers }, (_, i) => layerWeights(weights, i));
  const tree = treeOf(weights, (array) => array.data, (name) => !name.startsWith("blocks/"));
  return { config, layers, ...tree, group: config.num_heads / config.num_kv_heads };
}

function layerWeights(weights, layer) {
  const slice = ({ shape, data }) => {
    const size = shape.slice(1).reduce((a, b) => a * b, 1);
    return data.subarray(layer * size, (layer + 1) * size);
  };
  const kernels = (name) => name.startsWith("blocks/");
  const tree = treeOf(weights, slice, kernels).blocks;
  for (const part of [tree.attention, tree.feedforward]) {
    for (const [name, map] of Object.entries(part)) {
      const shape = map.kernel && weights[pathOf(tree, part, name)].shape;
      if (shape) [map.inputs, map.outputs] = shape.slice(-2);
    }
  }
  return tree;
}

const pathOf = (tree, part, name) =>
  `blocks/${part === tree.attention ? "attention" : "feedforward"}/${name}/kernel`;

function treeOf(weights, read, wanted) {
  const tree = {};
  for (const [path, array] of Object.entries(weights)) {
    if (!wanted(path)) continue;
    const names = path.split("/");
    let at = tree;
    for (const name of names.slice(0, -1)) at = at[name] ??= {};
    at[names.at(-1)] = read(array);
  }
  return tree;
}

/**
 * Computes a run in small steps: it yields often, so that the page stays responsive.
 *
 * `strengths` has a factor for the output of each head. `known` is {run, layer} or {run, position}:
 * an earlier run that is the same before that layer, or before that position.
 */
export function* forward(model, tokens, strengths, known = null) {
  const { config } = model;
  const run = emptyRun(model, tokens, strengths);
  const layer = known?.layer ?? 0;
  const from = known?.position === undefined ? 0 : firstChanged(config, known.position);
  if (known) copyRun(model, known.run, run, layer, from);
  if (layer === 0) embedRows(model, run, from);
  for (let i = layer; i < config.num_layers; i++) yield* runLayer(model, run, i, from);
  return run;
}

const firstChanged = (config, position) => (position < config.prefix ? 0 : position);

function emptyRun(model, tokens, strengths) {
  const { num_layers, num_heads, num_kv_heads, head_dim, embed_dim } = model.config;
  const rows = (dim) => new Float32Array(tokens.length * dim);
  const layers = Array.from({ length: num_layers }, () => ({
    query: rows(num_heads * head_dim),
    key: rows(num_kv_heads * head_dim),
    value: rows(num_kv_heads * head_dim),
    heads: rows(num_heads * head_dim),
    attention: rows(embed_dim),
    feedforward: rows(embed_dim),
  }));
  const states = Array.from({ length: num_layers + 1 }, () => rows(embed_dim));
  return { tokens, strengths, length: tokens.length, layers, states, logits: new Map() };
}

function copyRun(model, old, run, layer, from) {
  const dim = model.config.embed_dim;
  for (let i = 0; i <= model.config.num_layers; i++) {
    if (i < layer) run.layers[i] = old.layers[i];
    if (i <= layer && layer > 0) run.states[i] = old.states[i];
    else run.states[i].set(old.states[i].subarray(0, from * dim));
  }
  for (let i = layer; i < model.config.num_layers; i++) {
    for (const [name, rows] of Object.entries(run.layers[i])) {
      rows.set(old.layers[i][name].subarray(0, from * (rows.length / run.length)));
    }
  }
}

function embedRows(model, run, from) {
  const { config, embedding } = model;
  const dim = config.embed_dim;
  const scale = config.scale_embeddings ? Math.sqrt(dim) : 1;
  for (let row = from; row < run.length; row++) {
    for (let i = 0; i < dim; i++) {
      run.states[0][row * dim + i] =
        embedding.tokens[run.tokens[row] * dim + i] * scale + positionFeature(model, row, i);
    }
  }
  if (!config.embedding_norm) return;
  const num = run.length - from;
  run.states[0].set(normalizeRows(run.states[0], from, num, model.embedding_norm, config), from * dim);
}

export function positionFeature(model, row, i) {
  const { positions, position_offset, embed_dim } = model.config;
  if (positions === "learned") {
    return model.embedding.positions[(row + position_offset) * embed_dim + i];
  }
  if (!positions.startsWith("sinusoidal")) return 0;
  const half = embed_dim / 2;
  const halves = positions === "sinusoidal_halves";
  const pair = halves ? i % half : Math.floor(i / 2);
  const angle = row / 10000 ** ((2 * pair) / embed_dim);
  const isSine = halves ? i < half : i % 2 === 0;
  return isSine ? Math.sin(angle) : Math.cos(angle);
}

function* runLayer(model, run, index, from) {
  const { config } = model;
  const weights = model.layers[index];
  const layer = run.layers[index];
  const x = run.states[index];
  const dim = config.embed_dim;
  for (const [first, num] of rowChunks(from, run.length)) {
    const normed = normBefore(model, index, "attention", x, first, num);
    for (const name of ["query", "key", "value"]) {
      const rows = linear(normed, 0, num, weights.attention[name]);
      if (name !== "value") {
        normalizeHeads(config, weights.attention[`${name}_norm`], rows, num);
        rotateRows(config, config.layers[index].rotary, rows, first, num);
      }
      layer[name].set(rows, first * (rows.length / num));
    }
    yield;
  }
  for (const [first, num] of rowChunks(from, run.length)) {
    attendRows(model, run, index, first, num);
    layer.attention.set(linear(layer.heads, first, num, weights.attention.output), first * dim);
    const h = addResidual(model, weights, "attention", x, layer.attention, first, num);
    const name = config.parallel_block === "shared_norm" ? "attention" : "feedforward";
    const input = config.parallel_block === "none" ? h : x.slice(first * dim, (first + num) * dim);
    const normed = normBefore(model, index, name, input, 0, num);
    layer.feedforward.set(feedForward(config, weights.feedforward, normed, num), first * dim);
    const y = addResidual(model, weights, "feedforward", h, layer.feedforward, first, num, 0);
    run.states[index + 1].set(y, first * dim);
    yield;
  }
}

function* rowChunks(from, length) {
  for (let first = from; first < length; first += ROWS_AT_ONCE) {
    yield [first, Math.min(ROWS_AT_ONCE, length - first)];
  }
}

export function normBefore(model, index, name, x, first, num) {
  const { config } = model;
  const dim = config.embed_dim;
  const isBefore = config.norm_position === "pre" || config.norm_position === "sandwich";
  const isOff = name === "attention" && !config.layers[index].first_attention_norm;
  if (!isBefore || isOff) return x.slice(first * dim, (first + num) * dim);
  return normalizeRows(x, first, num, model.layers[index][`${name}_norm`], config);
}

/** Adds rows of a sub-layer's output y to rows of x, with the norms of the config. */
export function addResidual(model, weights, name, x, y, first, num, xFirst = first) {
  const { config } = model;
  const dim = config.embed_dim;
  let sum = y.slice(first * dim, (first + num) * dim);
  if (config.norm_position === "post_sublayer" || config.norm_position === "sandwich") {
    const norm = config.norm_position === "sandwich" ? `${name}_output_norm` : `${name}_norm`;
    sum = normalizeRows(sum, 0, num, weights[norm], config);
  }
  if (config.residual) {
    for (let i = 0; i < sum.length; i++) sum[i] += x[xFirst * dim + i];
  }
  if (config.norm_position !== "post") return sum;
  return normalizeRows(sum, 0, num, weights[`${name}_norm`], config);
}

function feedForward(config, weights, x, num) {
  const y = linear(hiddenFeatures(config, weights, x, num), 0, num, weights.down);
  return config.output_activation ? y.map(activationOf(config)) : y;
}

const activationOf = ({ activation }) => GATED_ACTIVATIONS[activation] ?? PLAIN_ACTIVATIONS[activation];

/** Returns the features between the two projections of a feed-forward layer. */
export function hiddenFeatures(config, weights, x, num) {
  const hidden = linear(x, 0, num, weights.up);
  const activation = activationOf(config);
  const gates = config.activation in GATED_ACTIVATIONS ? linear(x, 0, num, weights.gate) : null;
  for (let i = 0; i < hidden.length; i++) {
    hidden[i] = gates ? activation(gates[i]) * hidden[i] : activation(hidden[i]);
  }
  return hidden;
}

/** Computes the logits if the model continued with its final norm after the state `index`. */
export function stateLogits(model, run, index, position) {
  const { config } = model;
  let x = run.states[index].slice(position * config.embed_dim, (position + 1) * config.embed_dim);
  if (model.final_norm) x = normalizeRows(x, 0, 1, model.final_norm, config);
  if (config.output_scale !== null) x = x.map((value) => value * config.output_scale);
  const bias = model.head?.bias;
  return headProducts(model, x).map((y, i) => softCap(bias ? y + bias[i] : y, config.logits_softcap));
}

/** Returns the products of a vector with the output vectors of all tokens. */
export function headProducts(model, x) {
  const { config, head, embedding } = model;
  return head?.kernel
    ? linear(x, 0, 1, { kernel: head.kernel, inputs: x.length, outputs: config.vocab_size })
    : tableProducts(embedding.tokens, x, config.embed_dim);
}

/** Returns the logits of a position, computed once for each run. */
export function runLogits(model, run, position) {
  if (!run.logits.has(position)) {
    run.logits.set(position, stateLogits(model, run, model.config.num_layers, position));
  }
  return run.logits.get(position);
}
