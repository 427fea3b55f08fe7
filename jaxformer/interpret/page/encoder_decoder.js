// The values of an encoder–decoder: the encoder reads the source, the decoder attends to it.

import { combineHeads } from "./live.js";
import { sourceWeights } from "./cross_attention.js";
import { headWeights, hiddenKeys } from "./heads.js";
import { linear } from "./maths.js";
import { createModel, finishRow, forward } from "./model.js";
import { addLogits, addStream, matrixCache } from "./readings.js";
import { addRuns, changedStrength, knownForSource } from "./runs.js";
import { shareTokens } from "./weights.js";

/** Returns {encoder, decoder}: two stacks, which may share their token vectors. */
export function createPair(config, weights) {
  const decoder = createModel(config, weights);
  const encoder = createModel(config.encoder, weights, "encoder/");
  encoder.embedding ??= {};
  if (config.shares_table) shareTokens(decoder.embedding, encoder.embedding);
  return { encoder, decoder };
}

/** Returns the keys and the values that each decoder layer reads from the encoder's output. */
export function* encodeMemory({ encoder, decoder }, encoded) {
  const { length } = encoded;
  const dim = encoder.config.embed_dim;
  const rows = new Float32Array(length * dim);
  for (let row = 0; row < length; row++) {
    rows.set(finishRow(encoder, encoded, encoder.config.num_layers, row), row * dim);
    yield;
  }
  const memory = { length, rows, keys: [], values: [] };
  for (const { cross_attention: maps } of decoder.layers) {
    memory.keys.push(linear(rows, 0, length, maps.key));
    memory.values.push(linear(rows, 0, length, maps.value));
    yield;
  }
  return memory;
}

/** Returns the values; `strengths` lists the heads of decoder, cross-attention and encoder. */
export function encoderDecoderValues(data) {
  const { config } = data;
  const pair = createPair(config, data.weights);
  const own = config.num_layers * config.num_heads;
  const size = 2 * own + config.encoder.num_layers * config.encoder.num_heads;
  const values = {
    live: true, model: pair.decoder, encoder: pair.encoder, run: null, baseline: null,
    strengths: new Float64Array(size).fill(1), kinds: attentionKinds(config, own),
  };
  const matrices = matrixCache((kind, layer, head) => {
    const one = (h) => pairWeights(pair, values.run, kind, layer, h);
    return typeof head === "number" ? one(head) : combineHeads(values.kinds[kind].numHeads, one, head);
  });
  values.attention = matrices.read;
  values.hidden = (kind, layer) => {
    if (kind === 1) return null; // each target token sees the whole source
    const own = kind === 0;
    return hiddenKeys(own ? config : config.encoder, layer, own ? values.run.length : values.run.encoded.length);
  };
  addLogits(values, pair.decoder);
  const forgetLenses = addStream(values, pair.decoder, { added: "attention", norm: "attention_norm" });
  const ones = new Float64Array(size).fill(1);
  addRuns(values, {
    *compute(tokens, known, source) {
      const same = knownForSource(known, source);
      const encoded = same ? same.run.encoded : yield* forward(pair.encoder, source, ones.subarray(2 * own));
      const memory = same ? same.run.memory : yield* encodeMemory(pair, encoded);
      const run = yield* forward(pair.decoder, tokens, ones.subarray(0, 2 * own), same, memory);
      return Object.assign(run, { encoded });
    },
    *ablate(baseline, strengths) {
      const inEncoder = strengths.subarray(2 * own), inDecoder = strengths.subarray(0, 2 * own);
      let { encoded, memory } = baseline, known = null;
      const first = changedStrength(inEncoder);
      if (first >= 0) {
        const layer = Math.floor(first / config.encoder.num_heads);
        encoded = yield* forward(pair.encoder, encoded.tokens, inEncoder, { run: encoded, layer });
        memory = yield* encodeMemory(pair, encoded);
      } else {
        known = { run: baseline, layer: firstLayer(inDecoder, config) };
      }
      const run = yield* forward(pair.decoder, baseline.tokens, inDecoder, known, memory);
      return Object.assign(run, { encoded });
    },
    forget: () => { matrices.forget(); forgetLenses(); },
  });
  return values;
}

/** Returns the first layer with a changed head, of self-attention or of cross-attention. */
function firstLayer(strengths, { num_layers, num_heads }) {
  const layers = [...strengths.keys()].filter((i) => strengths[i] !== 1)
    .map((i) => Math.floor(i / num_heads) % num_layers);
  return Math.min(...layers);
}

function attentionKinds(config, own) {
  const kind = (label, queries, keys, { num_layers, num_heads }, offset) => ({
    label, queries, keys, offset, numLayers: num_layers, numHeads: num_heads,
    layers: [...Array(num_layers).keys()],
  });
  return [
    kind("Self-attention", "tokens", "tokens", config, 0),
    kind("Cross-attention to the source", "tokens", "source", config, own),
    kind("Self-attention of the encoder", "source", "source", config.encoder, 2 * own),
  ];
}

function pairWeights({ encoder, decoder }, run, kind, layer, head) {
  if (kind === 1) return sourceWeights(decoder, run, layer, head);
  return kind === 0 ? headWeights(decoder, run, layer, head) : headWeights(encoder, run.encoded, layer, head);
}
