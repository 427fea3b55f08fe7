// The steps of the guided tour, with the numbers of the page's model and of the selected token.
//
// A step is {id, title, view, parts, text, prepare}. `view` is a tab, or null for the text above the
// tabs. `parts(store)` returns selectors of the parts that the step may mark, the best first.
// `text(store)` returns null if the step does not apply to the model. `prepare(store)` selects the head
// that the step explains.

import { percent } from "./dom.js";
import { shownNumber } from "./formula.js";
import { attentionSteps, featureTokens, largestWeight, mlpSteps, runsDecoder, streamLengths } from "./inside_values.js";
import { largestIndices } from "./maths.js";
import { nextTokens } from "./sampling.js";

const quoted = (store, id) => `‘${store.name(id)}’`;
const selectedName = (store) => `token ${store.selection.position}, ${quoted(store, store.tokens[store.selection.position])},`;
const sentence = (text) => text[0].toUpperCase() + text.slice(1);
const counted = (x) => x.toLocaleString("en");

const TOUR_STEPS = [
  { id: "text", title: "The text as tokens", view: null, parts: () => [".text-column:last-child .strip"], text: tokensText },
  { id: "embedding", title: "A token becomes numbers", view: "model", parts: () => ["[data-id='embedding.tokens']"], text: embeddingText },
  { id: "layers", title: "The layers", view: "model", parts: () => [".layer-frame.decoder", ".layer-name"], text: layersText },
  { id: "attention", title: "Attention: tokens read tokens", view: "attention", parts: () => ["#view-attention .heat"], text: attentionTourText, prepare: selectStrongest },
  { id: "scores", title: "How a head chooses", view: "inside", parts: (store) => [`#inside-attention [data-key="${strongestHead(store).key}"]`], text: scoresText, prepare: selectStrongest },
  { id: "mlp", title: "The MLP: each token alone", view: "inside", parts: () => ["#inside-mlp [data-feature]"], text: mlpTourText },
  { id: "stream", title: "The vector grows", view: "inside", parts: () => ["#inside-stream", "#inside-stream .lengths"], text: streamText },
  { id: "lens", title: "The prediction forms", view: "lens", parts: () => ["#view-lens .lens-detail", "#view-lens .lens-detail tr:last-child"], text: lensText },
  { id: "prediction", title: "The prediction", view: null, parts: () => [".prediction"], text: predictionText },
  { id: "change", title: "Change the model", view: "attention", parts: () => ["#view-attention .strength"], text: changeText },
  { id: "decoding", title: "One token at a time", view: "decoding", parts: () => ["#view-decoding .buttons"], text: decodingText },
];

/** Returns the steps that apply to the page's model. */
export function tourSteps(store) {
  return TOUR_STEPS.filter(({ view, text }) => store.navigation.title([view]) !== null && text(store) !== null);
}

function tokensText(store) {
  const { tokens, data: { drawing }, selection: { position } } = store;
  return `The model reads the text as ${counted(tokens.length)} tokens: words, parts of words, or signs. It knows ${counted(drawing.facts.vocab_size)} tokens. ` +
    `${sentence(selectedName(store))} is selected. It is number ${counted(tokens[position])} of the vocabulary.`;
}

function embeddingText(store) {
  const { facts } = store.data.drawing;
  if (facts.source_features) return null;
  const added = { learned: "A second learned vector, for its position, is added.", sinusoidal: "Sines and cosines of its position are added." };
  added.sinusoidal_halves = added.sinusoidal;
  return `${sentence(selectedName(store))} becomes a vector of ${counted(facts.embed_dim)} numbers: one row of a table with ${counted(facts.vocab_size)} rows. ${added[facts.positions] ?? ""}`.trim();
}

function layersText({ data: { drawing } }) {
  const { layers } = drawing.decoder;
  const inLayers = layers.flatMap(Object.values).reduce((a, b) => a + b, 0);
  const where = drawing.encoder ? " of the decoder" : "";
  const passes = layers.length === 1 ? `The vector passes one layer${where}` : `The vector passes ${layers.length} layers${where}, one after another`;
  return `${passes}. The dashed frame shows ${layers.length === 1 ? "it" : "one of them"}. ${layers.length === 1 ? "It holds" : "They hold"} ${counted(inLayers)} of the model's ${counted(drawing.total)} parameters, the numbers that training adjusts.`;
}

/** Returns {layer, head, key, weight}: the largest weight of the selected token on another token. */
function strongestHead(store) {
  const { values, selection: { position } } = store;
  if (runsDecoder(store)) return largestWeight(values.model, values.run, position);
  const [kind] = values.kinds;
  if (!kind || kind.queries !== "tokens") return null;
  const best = { weight: -1 };
  for (let layer = 0; layer < kind.numLayers; layer++) {
    for (const head of kind.onlyMean ? ["mean"] : Array(kind.numHeads).keys()) {
      const { columns, values: weights } = values.attention(0, layer, head);
      for (let key = 0; key < columns; key++) {
        if (kind.keys === "tokens" && key === position && position > 0) continue;
        const weight = weights[position * columns + key];
        if (weight > best.weight) Object.assign(best, { layer, head, key, weight });
      }
    }
  }
  return best;
}

function selectStrongest(store) {
  const { layer, head } = strongestHead(store);
  store.select({ kind: 0, layer, head });
}

function attentionTourText(store) {
  const best = strongestHead(store);
  if (!best) return null;
  const [kind] = store.values.kinds;
  const id = (kind.keys === "source" ? store.source : store.tokens)[best.key];
  const who = best.head === "mean" ? `the heads of layer ${kind.layers[best.layer]} put, on average,` : `head ${best.head} of layer ${kind.layers[best.layer]} puts`;
  return `In attention, a token gathers information from other tokens. For ${selectedName(store)} ${who} ${percent(best.weight)} of its weight on token ${best.key}, ${quoted(store, id)}. ` +
    "Each row of the map is a token that reads, each column a token that is read.";
}

function scoresText(store) {
  const { values, selection: { position } } = store;
  if (!runsDecoder(store)) return null;
  const { layer, head, key } = strongestHead(store);
  const { keys, scale } = attentionSteps(values.model, values.run, layer, head, position);
  const { product, score, weight } = keys[key];
  return `The head compares the query of the selected token with the key of each token that it can see. For token ${key}, ${quoted(store, store.tokens[key])}, ` +
    `query times key is ${shownNumber(product, 2)}. Times ${shownNumber(scale, 3)}${scoreChanges(values.model.config)}, the score is ${shownNumber(score, 2)}. Softmax turns it into ${percent(weight)} of the weight.`;
}

function scoreChanges(config) {
  const cap = config.attention_softcap === null ? "" : ", capped";
  return `${cap}${config.slopes || config.relative ? ", plus a bias for the distance" : ""}`;
}

function mlpTourText(store) {
  if (!runsDecoder(store)) return null;
  const { values: { model, run }, selection: { layer, position } } = store;
  const { hidden } = mlpSteps(model, run, layer, position);
  const [feature] = largestIndices(hidden.map(Math.abs), 1);
  const value = hidden[feature];
  const raised = model.config.output_activation ? "" : ` It makes ${quoted(store, featureTokens(model, layer, feature, Math.sign(value) || 1, 1)[0])} more likely than any other token.`;
  return `Then a feed-forward layer, also called MLP, works on each token alone. Of its ${counted(hidden.length)} hidden features in layer ${layer}, number ${feature} is the most active here: ${shownNumber(value, 2)}.${raised}`;
}

function streamText(store) {
  if (!runsDecoder(store)) return null;
  const { values: { model, run }, selection: { position } } = store;
  const { states } = streamLengths(model, run, position);
  const does = model.config.residual ? "Each layer adds its output to the token's vector" : "Each layer replaces the token's vector";
  return `${does}. The length of the vector is ${shownNumber(states[0], 2)} after the embedding and ${shownNumber(states.at(-1), 2)} after the last layer.`;
}

function lensText(store) {
  const { values, selection: { position } } = store;
  if (!values.numStates) return null;
  const said = (state) => { const [{ id, share }] = values.lens(state, position); return `${quoted(store, id)} with ${percent(share)}`; };
  return `What would the model predict if it stopped early? After the embedding, the best token is ${said(0)}. After the last of its ${values.numStates - 1} layers it is ${said(values.numStates - 1)}.`;
}

function predictionText(store) {
  const { values, data, selection: { position } } = store;
  const [first, second] = nextTokens(values.distribution(position), 1, 1);
  const what = data.config.bidirectional ? `For the place of ${selectedName(store)} the model predicts` : `After ${selectedName(store)} the most probable next token is`;
  return `${what} ${quoted(store, first.id)} with ${percent(first.share)}. The second is ${quoted(store, second.id)} with ${percent(second.share)}. The probabilities of all ${counted(data.drawing.facts.vocab_size)} tokens sum to 100%.`;
}

function changeText(store) {
  if (!runsDecoder(store)) return null;
  const { selection: { layer, head } } = store;
  const which = typeof head === "number" ? `head ${head} of layer ${layer}` : "one of the heads";
  return `Now try it: switch off ${which}, or replace a token of the text. The page runs the model again and shows how the prediction changes.`;
}

function decodingText({ values, data }) {
  if (values.live || data.config.bidirectional) return null;
  return "The model writes a text one token at a time. Each step reads the last token and predicts the next one. Go through the steps of this text.";
}
