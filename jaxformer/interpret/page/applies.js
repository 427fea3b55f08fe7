// The views that do not apply to a model, and why.

import { attributionReason } from "./attribution.js";

const KIND_NAMES = {
  decoder: "a decoder",
  encoder: "an encoder",
  "encoder-decoder": "an encoder-decoder",
  convolutional: "a convolutional network",
  "recurrent-encoder-decoder": "a recurrent encoder-decoder",
};

/** Returns the kind of the model with an article, such as "an LSTM". */
export function kindName({ kind, config }) {
  if (kind === "recurrent") return config.cell === "rnn" ? "an RNN" : "an LSTM";
  return KIND_NAMES[kind] ?? `a model of type ${kind}`;
}

// For the id of a view: a function that returns why the view does not apply, or null.
const REASONS = {
  attention: ({ data, values }) => (values.kinds.length ? null : `${kindName(data)} has no attention heads`),
  lens: ({ data, values }) =>
    values.numStates ? null : `${kindName(data)} has no residual stream that the output head could read after each layer`,
  norm: ({ data, values }) => {
    const { norm } = data.config;
    if (norm === "none") return "this model was built without norms";
    if (norm === undefined) return `${kindName(data)} has no LayerNorm`;
    if (norm === "dynamic_tanh") return "this model uses dynamic_tanh, which has no mean and no variance";
    const places = values.vectorPositions();
    if (places !== null && places.length === 0) return `the page has no residual stream of ${kindName(data)}`;
    return null;
  },
  decoding: ({ data }) =>
    data.config.bidirectional ? `${kindName(data)} reads the whole text in one pass and generates nothing` : null,
  heads: ({ data, values }) => {
    if (!values.kinds.length) return `${kindName(data)} has no attention heads`;
    const computes = values.live && attributionReason(values.model) === null;
    return data.atlas || data.attribution || computes ? null
      : "the page has neither scores of this model's heads nor the contributions to its logits";
  },
};
const TITLES = { attention: "Attention", lens: "Layers", norm: "LayerNorm", decoding: "Decoding", heads: "Heads" };

/** Returns why a view does not apply to this model; null if it applies. */
export const whyNot = (store, id) => REASONS[id]?.(store) ?? null;

/** Returns a sentence for each reason for which this page leaves out views. */
export function missingText(store) {
  const titles = new Map();
  for (const id of Object.keys(REASONS)) {
    const reason = whyNot(store, id);
    if (reason) titles.set(reason, [...(titles.get(reason) ?? []), `No ${TITLES[id]} tab`]);
  }
  return [...titles].map(([reason, names]) => `${names.join(" and ").replaceAll("and No", "and no")}: ${reason}.`).join(" ");
}
