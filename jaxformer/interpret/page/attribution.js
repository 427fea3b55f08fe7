// Direct attribution of a logit: how much each part of the model adds to it.

import { tokenVector } from "./head.js";

/** Returns why the logit is not the sum of the parts' contributions, or null if it is the sum. */
export function attributionReason(model) {
  const { config } = model;
  if (!config.num_heads) return "the model has no heads";
  if (config.transform) return "a nonlinear layer precedes the output head";
  if (config.norm_position !== "pre") return `norm_position is "${config.norm_position}"`;
  if (!config.residual) return "the model has no residual stream";
  return null;
}

/**
 * Returns {heads: [layers][heads], cross: [layers][heads] if the model has cross-attention,
 * feedforward: [layers], embedding, rest, logit}.
 *
 * With its statistics fixed at their values for this position, the final norm is a linear map. The
 * logit of a token (before a cap) is therefore the sum of the contributions. `rest` is the
 * contribution of all biases.
 */
export function attributeLogit(model, run, position, token) {
  const { config } = model;
  const { direction, constant, centres } = logitDirection(model, run, position, token);
  const dim = config.embed_dim;
  const share = (rows, start) => {
    let sum = 0, mean = 0;
    for (let i = 0; i < dim; i++) mean += rows[start + i] / dim;
    for (let i = 0; i < dim; i++) sum += (rows[start + i] - (centres ? mean : 0)) * direction[i];
    return sum;
  };
  const byHead = (rows, part) => model.layers.map((weights, layer) =>
    Array.from({ length: config.num_heads }, (_, head) =>
      share(headOutput(model, run.layers[layer][rows], weights[part], head, position), 0)));
  const heads = byHead("heads", "attention");
  const cross = run.memory ? byHead("crossHeads", "cross_attention") : [];
  const ofPart = (name) => run.layers.map((layer) => share(layer[name], position * dim));
  const feedforward = ofPart("feedforward");
  const attention = [...ofPart("attention"), ...(run.memory ? ofPart("cross") : [])];
  const embedding = share(run.states[0], position * dim);
  const total = (x) => x.reduce((a, b) => a + b, 0);
  const rest = constant + total(attention) - total(heads.flat()) - total(cross.flat());
  const logit = embedding + total(feedforward) + total(attention) + constant;
  return { heads, ...(run.memory && { cross }), feedforward, embedding, rest, logit };
}

/** Returns the vector and the constant with which the logit is vector · (centred state) + constant. */
function logitDirection(model, run, position, token) {
  const { config } = model;
  const dim = config.embed_dim;
  const x = run.states[config.num_layers].subarray(position * dim, (position + 1) * dim);
  const centres = config.norm === "layer";
  let mean = 0, square = 0;
  for (const value of x) mean += centres ? value / dim : 0;
  for (const value of x) square += (value - mean) ** 2 / dim;
  const hasNorm = config.norm !== "none";
  const factor = hasNorm ? 1 / Math.sqrt(square + config.norm_epsilon) : 1;
  const offset = config.norm === "rms_one_plus" ? 1 : 0;
  const scale = config.output_scale ?? 1;
  const direction = new Float64Array(dim);
  const kernel = model.head?.kernel;
  const tied = kernel ? null : tokenVector(model.embedding, token, dim);
  let constant = model.head?.bias ? model.head.bias[token] : 0;
  for (let i = 0; i < dim; i++) {
    const column = tied ? tied[i] : kernel[i * config.vocab_size + token];
    const gain = hasNorm ? factor * (offset + model.final_norm.scale[i]) : 1;
    direction[i] = scale * column * gain;
    if (centres && model.final_norm.bias) constant += scale * column * model.final_norm.bias[i];
  }
  return { direction, constant, centres };
}

/** Computes one head's part of the attention's output at a position, without the bias. */
function headOutput(model, rows, weights, head, position) {
  const { num_heads, head_dim, embed_dim } = model.config;
  const { kernel } = weights.output;
  const out = new Float64Array(embed_dim);
  const start = (position * num_heads + head) * head_dim;
  for (let i = 0; i < head_dim; i++) {
    const value = rows[start + i];
    const row = (head * head_dim + i) * embed_dim;
    for (let o = 0; o < embed_dim; o++) out[o] += value * kernel[row + o];
  }
  return out;
}
