// Recurrent layers, h_t = f(h_{t−1}, x_t), as `jaxformer/functional/layers/recurrent.py`.

import { linear } from "./maths.js";
import { embedRows } from "./model.js";

const logistic = (x) => 1 / (1 + Math.exp(-x));

/** The parts that a cell computes at each step, in the order of its gates. */
export const CELL_PARTS = {
  rnn: ["hidden"],
  lstm: ["input", "forget", "candidate", "output", "cell", "hidden"],
};

/**
 * Runs a stack of recurrent layers over the tokens; it yields often.
 *
 * `known` is {run, position}: an earlier run with equal tokens before that position. `initial` has
 * the state {hidden, cell} of each layer before the first token; by default, all states are zero.
 */
export function* runRecurrent(model, tokens, known = null, initial = null) {
  const { config } = model;
  const from = known?.position ?? 0;
  const size = config.hidden_dim;
  const run = { tokens, length: tokens.length, initial, layers: [], states: [], logits: new Map() };
  run.states.push(new Float32Array(tokens.length * config.embed_dim));
  embedRows(model, run, 0);
  for (let index = 0; index < config.num_layers; index++) {
    const layer = Object.fromEntries(
      CELL_PARTS[config.cell].map((name) => [name, new Float32Array(tokens.length * size)]));
    for (const [name, rows] of Object.entries(layer)) {
      if (known) rows.set(known.run.layers[index][name].subarray(0, from * size));
    }
    yield* runLayerInTime(model, run, index, layer, from);
    run.layers.push(layer);
    run.states.push(layer.hidden);
  }
  return run;
}

function* runLayerInTime(model, run, index, layer, from) {
  const { config } = model;
  const size = config.hidden_dim;
  const weights = model.layers[index].recurrent;
  if (from === run.length) return;
  const read = linear(run.states[index], from, run.length - from, weights.input);
  yield;
  const width = weights.input.outputs;
  let { hidden, cell } = run.initial?.[index] ?? zeroState(size);
  if (from > 0) [hidden, cell] = [stateRow(layer.hidden, from - 1, size), stateRow(layer.cell, from - 1, size)];
  for (let t = from; t < run.length; t++) {
    const gates = linear(hidden, 0, 1, weights.state);
    const at = (t - from) * width;
    for (let i = 0; i < width; i++) gates[i] += read[at + i];
    if (config.cell === "rnn") layer.hidden.set(gates.map(Math.tanh), t * size);
    else lstmStep(layer, gates, cell, t, size);
    [hidden, cell] = [stateRow(layer.hidden, t, size), stateRow(layer.cell, t, size)];
    yield;
  }
}

export const zeroState = (size) => ({ hidden: new Float32Array(size), cell: new Float32Array(size) });
export const stateRow = (rows, t, size) => rows?.subarray(t * size, (t + 1) * size);

/** Computes c_t = f c_{t−1} + i g and h_t = o tanh(c_t). */
function lstmStep(layer, gates, before, t, size) {
  for (let u = 0; u < size; u++) {
    const at = t * size + u;
    const i = layer.input[at] = logistic(gates[u]);
    const f = layer.forget[at] = logistic(gates[size + u]);
    const g = layer.candidate[at] = Math.tanh(gates[2 * size + u]);
    const o = layer.output[at] = logistic(gates[3 * size + u]);
    const c = layer.cell[at] = f * before[u] + i * g;
    layer.hidden[at] = o * Math.tanh(c);
  }
}
