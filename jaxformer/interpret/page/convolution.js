// A model of causal convolutions, x + act(Convolution(Norm(x))), as `layers/convolution.py`.

import { PLAIN_ACTIVATIONS, linear, normalizeRows } from "./maths.js";
import { createModel, embedRows } from "./model.js";
import { addLogits, addStream } from "./readings.js";

const CONVOLVED_ROWS = 16; // rows that are computed in one step

/**
 * Runs a stack of convolutions.
 *
 * `known` is {run, position}: an earlier run with equal tokens before that position.
 */
export function* runConvolutions(model, tokens, known = null) {
  const { config } = model;
  const dim = config.embed_dim, from = known?.position ?? 0;
  const rows = () => new Float32Array(tokens.length * dim);
  const layers = Array.from({ length: config.num_layers }, () => ({ convolution: rows() }));
  const states = Array.from({ length: config.num_layers + 1 }, rows);
  const run = { tokens, length: tokens.length, layers, states, logits: new Map() };
  const copy = (to, old) => to.set(old.subarray(0, from * dim));
  if (known) states.forEach((state, i) => copy(state, known.run.states[i]));
  if (known) layers.forEach((layer, i) => copy(layer.convolution, known.run.layers[i].convolution));
  embedRows(model, run, from);
  for (let index = 0; index < config.num_layers; index++) {
    for (let first = from; first < tokens.length; first += CONVOLVED_ROWS) {
      convolveRows(model, run, index, first, Math.min(CONVOLVED_ROWS, tokens.length - first));
      yield;
    }
  }
  return run;
}

/** Returns the positions that the kernel of a layer reads, relative to its output. */
export function kernelOffsets({ kernel_size, dilations }, layer) {
  return Array.from({ length: kernel_size }, (_, k) => dilations[layer] * (k + 1 - kernel_size));
}

function convolveRows(model, run, index, first, num) {
  const { config } = model;
  const dim = config.embed_dim;
  const weights = model.layers[index];
  const x = run.states[index];
  const offsets = kernelOffsets(config, index);
  const begin = Math.max(0, first + offsets[0]);
  const normed = normalizeRows(x, begin, first + num - begin, weights.convolution_norm, config);
  const read = new Float32Array(num * offsets.length * dim); // zeros before the first token
  for (let row = 0; row < num; row++) {
    offsets.forEach((offset, k) => {
      const at = first + row + offset - begin;
      if (first + row + offset < 0) return;
      read.set(normed.subarray(at * dim, (at + 1) * dim), (row * offsets.length + k) * dim);
    });
  }
  const activation = PLAIN_ACTIVATIONS[config.activation];
  const y = linear(read, 0, num, weights.convolution).map(activation);
  run.layers[index].convolution.set(y, first * dim);
  if (config.residual) for (let i = 0; i < y.length; i++) y[i] += x[first * dim + i];
  run.states[index + 1].set(y, first * dim);
}

/** Returns the values of a convolutional model; `live.js` has the same functions. */
export function convolutionValues(data) {
  const model = createModel(data.config, data.weights);
  const values = { live: true, model, run: null, baseline: null, strengths: new Float64Array(0), kinds: [] };
  addLogits(values, model);
  const forget = addStream(values, model, { added: "convolution", norm: "convolution_norm" });
  values.begin = function* (tokens, position) {
    const run = yield* runConvolutions(model, tokens, values.run && { run: values.run, position });
    Object.assign(values, { run, baseline: run });
    forget();
  };
  values.beginAgain = function* () {};
  return values;
}
