// The values of recurrent models: language models, and encoder–decoders with attention.

import { timeGradients } from "./gradients.js";
import { sourceAttention } from "./luong.js";
import { createModel } from "./model.js";
import { addLogits, addNoStream } from "./readings.js";
import { runRecurrent, stateRow } from "./recurrent.js";
import { addRuns, knownForSource } from "./runs.js";
import { shareTokens } from "./weights.js";

/** Returns the values of an RNN or an LSTM; `live.js` has the same functions. */
export function recurrentValues(data) {
  const model = createModel(data.config, data.weights);
  const values = emptyValues(model, []);
  values.recurrent = model;
  values.gradients = (position, token) => timeGradients(model, values.run, position, token);
  values.begin = function* (tokens, position) {
    const run = yield* runRecurrent(model, tokens, values.run && { run: values.run, position });
    Object.assign(values, { run, baseline: run });
  };
  return values;
}

/** Returns the values of an RNN or LSTM encoder–decoder. */
export function recurrentPairValues(data) {
  const { config } = data;
  const model = createModel(config, data.weights);
  const encoder = createModel(config.encoder, data.weights, "encoder/");
  encoder.embedding ??= {};
  if (config.shares_table) shareTokens(model.embedding, encoder.embedding);
  const about = { label: "Cross-attention to the source", queries: "tokens", keys: "source" };
  const last = config.num_layers - 1;
  const kinds = config.attends ? [{ ...about, numLayers: 1, numHeads: 1, layers: [last] }] : [];
  const values = Object.assign(emptyValues(model, kinds), { encoder, recurrent: model });
  values.strengths = new Float64Array(kinds.length).fill(1);
  addRuns(values, {
    *compute(tokens, known, source) {
      const same = knownForSource(known, source);
      const encoded = same ? same.run.encoded : yield* runRecurrent(encoder, source);
      const states = yield* runRecurrent(model, tokens, same, lastStates(encoded, config.hidden_dim));
      states.encoded = encoded;
      return config.attends ? { ...(yield* sourceAttention(model, states, 1)), unattended: states } : states;
    },
    ablate: (baseline, [strength]) => sourceAttention(model, baseline.unattended, strength),
    forget: () => {},
  });
  values.attention = () => ({ rows: values.run.length, columns: values.run.encoded.length, values: values.run.weights });
  return values;
}

function emptyValues(model, kinds) {
  const values = { live: true, model, run: null, baseline: null, kinds, strengths: new Float64Array(0) };
  values.beginAgain = function* () {};
  addLogits(values, model);
  addNoStream(values);
  return values;
}

/** Returns the state of each layer after the last source token. */
function lastStates({ layers, length }, size) {
  return layers.map((layer) => ({
    hidden: stateRow(layer.hidden, length - 1, size), cell: stateRow(layer.cell, length - 1, size),
  }));
}
