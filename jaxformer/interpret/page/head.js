// The input and the output of a model: the vector of a token, and the logits of a vector.

import { GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, linear, normalizeRows } from "./maths.js";
import { softCap, tableProducts, transposedProduct, withoutBias } from "./maths.js";

/** Returns the vector of a token. */
export function tokenVector(embedding, token, dim) {
  const { codes, scales } = embedding.tokens_codes ?? { codes: embedding.tokens };
  const row = Float32Array.from(codes.subarray(token * dim, (token + 1) * dim));
  return scales ? row.map((code) => code * scales[token]) : row;
}

/** Returns the products of a vector with the output vectors of all tokens. */
export function headProducts({ head, embedding }, x) {
  return head?.inputs ? linear(x, 0, 1, withoutBias(head)) : tiedProducts(embedding, x);
}

/** Computes the logits of a vector that has passed the final norm. */
export function headLogits(model, x) {
  const { head, config } = model;
  const products = headProducts(model, x);
  if (head?.bias) for (let i = 0; i < products.length; i++) products[i] += head.bias[i];
  const cap = config.logits_softcap;
  return cap === null ? products : products.map((y) => softCap(y, cap));
}

function tiedProducts(embedding, x) {
  const { codes, scales } = embedding.tokens_codes ?? { codes: embedding.tokens };
  return tableProducts(codes, x, x.length, scales);
}

/** Computes BERT's layer before the head, Norm(act(W x + b)). */
export function transformed(model, x) {
  const { config, transform, transform_norm: weights } = model;
  const activation = GATED_ACTIVATIONS[config.activation] ?? PLAIN_ACTIVATIONS[config.activation];
  return normalizeRows(linear(x, 0, 1, transform).map(activation), 0, 1, weights, config);
}

/** Returns the gradient at the head's input for the gradient `y` at the logits. */
export function headGradient(model, y) {
  const { head, embedding, config } = model;
  const dim = config.hidden_dim ?? config.embed_dim;
  const out = new Float64Array(dim);
  if (head?.inputs) return transposedProduct(head, y);
  const { codes, scales } = embedding.tokens_codes ?? { codes: embedding.tokens };
  for (let token = 0, at = 0; token < y.length; token++, at += dim) {
    const factor = scales ? y[token] * scales[token] : y[token];
    for (let i = 0; i < dim; i++) out[i] += factor * codes[at + i];
  }
  return out;
}
