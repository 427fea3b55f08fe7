// The forward pass of a stack of Transformer blocks, as `jaxformer/functional/model.py` computes it.
//
// A run has every value that the views show. Nothing changes a run after `forward` has returned it.

import { GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, linear, normalizeRows } from "./maths.js";
import { attendRows, normalizeHeads, rotateRows } from "./heads.js";
import { attendSource } from "./cross_attention.js";
import { headLogits, tokenVector, transformed } from "./head.js";
import { weightTrees } from "./weights.js";

// Rows that are computed before the browser may redraw. Rows of a wide model take longer.
const rowsAtOnce = ({ embed_dim }) => (embed_dim > 256 ? 8 : 16);

/** Returns the model: its config, and the weights whose paths begin with `prefix`, by layer. */
export function createModel(config, weights, prefix = "") {
  const trees = weightTrees(weights, config.num_layers, prefix);
  return { config, ...trees, group: config.num_heads / config.num_kv_heads };
}

/**
 * Computes a run in small steps: it yields often, so that the page stays responsive.
 *
 * `strengths` has a factor for the output of each head. `known` is {run, layer} or {run, position}:
 * an earlier run with equal values before that layer, or before that position. `memory` is the
 * encoded source of a model with cross-attention (see `encoder_decoder.js`).
 */
export function* forward(model, tokens, strengths, known = null, memory = null) {
  const { config } = model;
  const run = emptyRun(model, tokens, strengths, memory);
  const layer = known?.layer ?? 0;
  const from = known?.position === undefined ? 0 : firstChanged(config, known.position);
  if (known) copyRun(model, known.run, run, layer, from);
  if (layer === 0) embedRows(model, run, from);
  for (let i = layer; i < config.num_layers; i++) yield* runLayer(model, run, i, from);
  return run;
}

const firstChanged = (config, position) =>
  config.bidirectional || position < config.prefix ? 0 : position;

function emptyRun(model, tokens, strengths, memory) {
  const { num_layers, num_heads, num_kv_heads, head_dim, embed_dim } = model.config;
  const rows = (dim) => new Float32Array(tokens.length * dim);
  const layers = Array.from({ length: num_layers }, () => ({
    query: rows(num_heads * head_dim),
    key: rows(num_kv_heads * head_dim),
    value: rows(num_kv_heads * head_dim),
    heads: rows(num_heads * head_dim),
    attention: rows(embed_dim),
    feedforward: rows(embed_dim),
    ...(memory && { crossQuery: rows(num_heads * head_dim), crossHeads: rows(num_heads * head_dim), cross: rows(embed_dim) }),
  }));
  const states = Array.from({ length: num_layers + 1 }, () => rows(embed_dim));
  return { tokens, strengths, memory, length: tokens.length, layers, states, logits: new Map() };
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

/** Writes the vectors of the tokens from row `from` on to the first state of a run. */
export function embedRows(model, run, from) {
  const { config, embedding } = model;
  const dim = config.embed_dim;
  const scale = config.scale_embeddings ? Math.sqrt(dim) : 1;
  const type = embedding.token_types; // the vectors of the types, of which all tokens have the first
  for (let row = from; row < run.length; row++) {
    const vector = tokenVector(embedding, run.tokens[row], dim);
    for (let i = 0; i < dim; i++) {
      run.states[0][row * dim + i] =
        vector[i] * scale + positionFeature(model, row, i) + (type ? type[i] : 0);
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
  for (const [first, num] of rowChunks(config, from, run.length)) {
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
  for (const [first, num] of rowChunks(config, from, run.length)) {
    attendRows(model, run, index, first, num);
    layer.attention.set(linear(layer.heads, first, num, weights.attention.output), first * dim);
    const h = addResidual(model, weights, "attention", x, layer.attention, first, num);
    const c = run.memory ? addCross(model, run, index, h, first, num) : h;
    const name = config.parallel_block === "shared_norm" ? "attention" : "feedforward";
    const input = config.parallel_block === "none" ? c : x.slice(first * dim, (first + num) * dim);
    const normed = normBefore(model, index, name, input, 0, num);
    layer.feedforward.set(feedForward(config, weights.feedforward, normed, num), first * dim);
    const y = addResidual(model, weights, "feedforward", c, layer.feedforward, first, num, 0);
    run.states[index + 1].set(y, first * dim);
    yield;
  }
}

/** Adds the cross-attention of a layer to the rows h, which start at position `first`. */
function addCross(model, run, index, h, first, num) {
  const weights = model.layers[index], layer = run.layers[index];
  const normed = normBefore(model, index, "cross_attention", h, 0, num);
  const query = linear(normed, 0, num, weights.cross_attention.query);
  layer.crossQuery.set(query, first * (query.length / num));
  attendSource(model, run, index, first, num);
  const output = linear(layer.crossHeads, first, num, weights.cross_attention.output);
  layer.cross.set(output, first * model.config.embed_dim);
  return addResidual(model, weights, "cross_attention", h, layer.cross, first, num, 0);
}

function* rowChunks(config, from, length) {
  for (let first = from; first < length; first += rowsAtOnce(config)) {
    yield [first, Math.min(rowsAtOnce(config), length - first)];
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
  return headLogits(model, finishRow(model, run, index, position));
}

/** Computes the input of the head from a state: the final norm, the scale and BERT's last layer. */
export function finishRow(model, run, index, position) {
  const { config } = model;
  const dim = run.states[index].length / run.length;
  let x = run.states[index].slice(position * dim, (position + 1) * dim);
  if (model.final_norm) x = normalizeRows(x, 0, 1, model.final_norm, config);
  if (config.output_scale !== null) x = x.map((value) => value * config.output_scale);
  return config.transform ? transformed(model, x) : x;
}

/** Returns the logits of a position, computed once for each run. */
export function runLogits(model, run, position) {
  if (!run.logits.has(position)) {
    run.logits.set(position, stateLogits(model, run, run.states.length - 1, position));
  }
  return run.logits.get(position);
}
