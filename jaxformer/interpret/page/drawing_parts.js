// The parts of the drawing of a model, in the order in which a token passes them.
//
// A row is {kind, …}: "heading" {text}, "box" {box}, "pair" {boxes}, "stack" {box, layers}, "sum",
// "state" {state}, "open" {text} and "close" around the layer that is drawn in full, "encoded" at the
// end of the encoder. A box is {id, title, sub, parameters, opens, about}, and `opens` are the tabs
// with the part, the best first: [[view, selector]].

import { norms, partText, positionText, sublayerText } from "./drawing_texts.js";

const SUBLAYERS = ["recurrent", "convolution", "attention", "short_convolution", "gated_delta", "cross_attention", "feedforward"];
const BEFORE_LAYERS = ["embedding.tokens", "embedding.positions", "embedding_norm", "relative_bias"];
const AFTER_LAYERS = ["final_norm", "transform", "transform_norm", "pooler", "head"];

/** Returns the rows of a model with its layer `layer` drawn in full. */
export function drawingRows(drawing, layer, token) {
  const { facts, decoder, encoder } = drawing;
  const rows = [];
  if (encoder) {
    rows.push({ kind: "heading", text: "Encoder: reads the source" });
    rows.push(...sideRows({ facts: encoderFacts(facts), side: encoder, prefix: "encoder.", layer, token: null }), { kind: "encoded" });
    rows.push({ kind: "heading", text: "Decoder: writes the target" });
  }
  return [...rows, ...sideRows({ facts, side: decoder, prefix: "", layer, token })];
}

/** Returns the facts of the encoder, which may have its own sizes. */
function encoderFacts(facts) {
  const own = {
    vocab_size: facts.source_vocab_size, max_length: facts.max_source_length, bidirectional: true,
    num_heads: facts.num_encoder_heads, num_kv_heads: facts.num_encoder_heads, mlp_dim: facts.encoder_mlp_dim, isEncoder: true,
  };
  return { ...facts, ...Object.fromEntries(Object.entries(own).filter(([, value]) => value !== undefined)) };
}

function sideRows({ facts, side, prefix, layer, token }) {
  const { outside, layers } = side;
  const opened = Math.min(layer, layers.length - 1);
  const one = (name, parameters) => ({ kind: "box", box: namedBox({ facts, prefix, name, parameters }) });
  const rows = [];
  if (token) rows.push({ kind: "box", box: textBox(facts, token) });
  rows.push(...boxesBefore({ facts, outside, prefix }), { kind: "state", state: 0, prefix });
  if (opened > 0) rows.push(stackRow(layers, 0, opened, prefix), { kind: "state", state: opened, prefix });
  rows.push({ kind: "open", prefix, text: `Layer ${opened}, one of ${layers.length}` });
  rows.push(...layerRows({ facts, parts: layers[opened], layer: opened, prefix }), { kind: "close" });
  const isLast = opened === layers.length - 1;
  const ends = AFTER_LAYERS.some((name) => name in outside) || token;
  if (!isLast || ends) rows.push({ kind: "state", state: opened + 1, prefix });
  if (!isLast) rows.push(stackRow(layers, opened + 1, layers.length, prefix));
  if (!isLast && ends) rows.push({ kind: "state", state: layers.length, prefix });
  rows.push(...AFTER_LAYERS.filter((name) => name in outside && name !== "head").map((name) => one(name, outside[name])));
  if (token) rows.push(one("head", outside.head ?? 0));
  const drawn = [...BEFORE_LAYERS, ...AFTER_LAYERS];
  for (const [name, number] of Object.entries(outside)) if (!drawn.includes(name)) rows.push(one(name, number));
  if (token) rows.push({ kind: "box", box: predictionBox(facts, token) });
  return rows;
}

function boxesBefore({ facts, outside, prefix }) {
  const sums = { ...outside };
  if (facts.positions && facts.positions !== "none") {
    const name = facts.positions === "relative" ? "relative_bias" : "embedding.positions";
    sums[name] ??= 0;
  }
  if (!("embedding.tokens" in sums) && !facts.source_features) sums["embedding.tokens"] = 0;
  return BEFORE_LAYERS.filter((name) => name in sums)
    .map((name) => ({ kind: "box", box: namedBox({ facts, prefix, name, parameters: sums[name] }) }));
}

function namedBox({ facts, prefix, name, parameters, layer = null }) {
  const id = `${prefix}${name}${layer === null ? "" : `.${layer}`}`;
  const text = name === "embedding.positions" || name === "relative_bias" ? positionText(facts) : partText(name, facts);
  if (facts.isEncoder && name === "embedding.tokens" && parameters === 0) text.sub = "the same table as the decoder's";
  return { id, part: name, parameters, opens: opensOf(name, prefix), ...text };
}

/** Returns the tabs that show a part, the best first. */
function opensOf(name, prefix) {
  const isOwn = prefix === "";
  if (name === "embedding.positions" || name === "relative_bias") return isOwn ? [["inside", "#inside-positions"], ["lens"]] : [];
  if (name.endsWith("attention")) return [["attention"]];
  if (name === "head") return [["decoding"], ["lens"]];
  if (name.endsWith("_norm") && SUBLAYERS.some((sublayer) => name.startsWith(sublayer))) return [["norm"]];
  if (!isOwn || name === "pooler") return [];
  return name === "feedforward" ? [["inside", "#inside-mlp"], ["lens"]] : [["lens"]];
}

const textBox = (facts, { position, name, id }) => ({
  id: "text", part: "text", parameters: 0, opens: [[null, ".strips .strip"]],
  title: `Token ${position}: ‘${name}’`, sub: `number ${id} of a vocabulary of ${facts.vocab_size.toLocaleString("en")}`,
  about: "A tokenizer splits the text into tokens: words, parts of words, or signs. Each token has a number in the vocabulary. Select another token in the text above.",
});

const predictionBox = (facts, { best, share }) => ({
  id: "prediction", part: "prediction", parameters: 0, opens: [["decoding"], ["lens"]],
  title: `${facts.bidirectional ? "Prediction" : "Next token"}: ‘${best}’`, sub: `probability ${share}`,
  about: "Softmax turns the logits into probabilities, which sum to 100%. The drawing names the most probable token.",
});

function stackRow(layers, first, end, prefix) {
  const size = layers.slice(first, end).reduce((sum, parts) => sum + sumOfParts(parts), 0);
  const num = end - first, opened = first === 0 ? end : first - 1;
  const isAlike = layers.slice(first, end).every((parts) => JSON.stringify(parts) === JSON.stringify(layers[opened]));
  const how = `${isAlike ? "built" : num === 1 ? "not built" : "not all"} like layer ${opened}`;
  const box = {
    id: `${prefix}layers.${first}`, part: "layers", parameters: size, opens: [], layer: first === 0 ? end - 1 : first,
    title: num === 1 ? `Layer ${first}` : `Layers ${first} to ${end - 1}`,
    sub: num === 1 ? how : `${num} layers, ${how}`,
    about: `Each layer has its own weights. Select this part to open layer ${first === 0 ? end - 1 : first}.`,
  };
  return { kind: "stack", box, layers: num };
}

const sumOfParts = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

/** Returns the rows of one layer: its sub-layers with their norms and sums. */
function layerRows({ facts, parts, layer, prefix }) {
  const present = SUBLAYERS.filter((name) => name in parts);
  const unknown = Object.keys(parts).filter((name) => !SUBLAYERS.includes(name) && !name.endsWith("_norm"));
  const box = (name) => {
    const text = name.endsWith("_norm") ? normText(name, facts, layer) : sublayerText(name, facts, layer);
    return { ...namedBox({ facts, prefix, name, parameters: parts[name], layer }), ...text };
  };
  const rows = facts.parallel_block && facts.parallel_block !== "none"
    ? parallelRows(parts, box, facts)
    : [...present, ...unknown].flatMap((name) => sequentialRows(name, parts, box, facts));
  return rows;
}

function sequentialRows(name, parts, box, facts) {
  const place = facts.norm_position ?? "pre";
  const norm = (which) => (which in parts ? [{ kind: "box", box: box(which) }] : []);
  const own = `${name}_norm`;
  return [
    { kind: "branch" },
    ...(place === "pre" || place === "sandwich" ? norm(own) : []),
    { kind: "box", box: box(name) },
    ...(place === "sandwich" ? norm(`${name}_output_norm`) : place === "post_sublayer" ? norm(own) : []),
    ...(facts.residual ? [{ kind: "sum" }] : []),
    ...(place === "post" ? norm(own) : []),
  ];
}

/** Returns the rows of a layer in which attention and feed-forward read the same state. */
function parallelRows(parts, box, facts) {
  const both = (names) => {
    const found = names.filter((name) => name in parts);
    return found.length === 2 ? [{ kind: "pair", boxes: found.map(box) }] : found.map((name) => ({ kind: "box", box: box(name) }));
  };
  const before = both(["attention_norm", "feedforward_norm"]);
  const after = both(["attention_output_norm", "feedforward_output_norm"]);
  const isAfter = facts.norm_position === "post_sublayer" || facts.norm_position === "post";
  const main = both(["attention", "feedforward"]);
  return [{ kind: "branch" }, ...(isAfter ? [...main, ...before] : [...before, ...main]), ...after, ...(facts.residual ? [{ kind: "sum" }] : [])];
}

function normText(name, facts, layer) {
  const isOff = name === "attention_norm" && layer === 0 && facts.first_attention_norm === false;
  return { title: norms[facts.norm] ?? "Norm", sub: isOff ? "not applied in layer 0" : "one scale for each number", about: partText("norm", facts).about };
}
