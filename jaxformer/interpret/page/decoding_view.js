// Decoding step by step: the cache, and the distribution of the next token.

import { whyNot } from "./applies.js";
import { barList, button, card, el, note, percent, slider, svg } from "./dom.js";
import { disableFor, reasonNote } from "./reasons.js";
import { drawToken, nextTokens } from "./sampling.js";

const NUM_BARS = 12;

/** Returns the view, or null if the model does not generate text. */
export function decodingView(store) {
  const { values, data } = store;
  if (whyNot(store, "decoding")) return null;
  const view = { id: "decoding", title: "Decoding", temperature: 1, topK: 0, topP: 1 };
  const show = () => view.update("own");
  const temperature = slider({
    label: "Temperature", min: 0, max: 2, step: 0.05, value: 1,
    format: (x) => (x === 0 ? "0 (greedy)" : x.toFixed(2)), onInput: (x) => { view.temperature = x; show(); },
  });
  const topK = slider({
    label: "Top-k", min: 0, max: Math.min(100, data.config.vocab_size), step: 1, value: 0,
    format: (x) => (x === 0 ? "off" : String(x)), onInput: (x) => { view.topK = x; show(); },
  });
  const topP = slider({
    label: "Top-p", min: 0.05, max: 1, step: 0.01, value: 1, format: (x) => x.toFixed(2), onInput: (x) => { view.topP = x; show(); },
  });
  const tokensOf = () => nextTokens(values.distribution(view.position()), view.temperature, view.topP, view.topK);
  const reads = store.tokens.length;
  view.read = reads; // the number of tokens in the cache, for captured values
  view.position = () => (values.live ? store.tokens.length : view.read) - 1;
  const append = (choose) => () => store.edit((tokens) =>
    ({ tokens: [...tokens, choose(tokensOf())], first: tokens.length, select: tokens.length }));
  const removeLast = () => store.edit((tokens) =>
    ({ tokens: tokens.slice(0, -1), first: tokens.length - 1, select: tokens.length - 2 }));
  const buttons = values.live
    ? [
        button("Append the best token", append((best) => best[0].id)),
        button("Sample a token", append((best) => drawToken(best, Math.random()))),
        button("Remove the last token", removeLast),
      ]
    : [
        button("Previous step", () => { view.read = Math.max(1, view.read - 1); show(); }),
        button("Next step", () => { view.read = Math.min(reads, view.read + 1); show(); }),
      ];
  const reasons = reasonNote(buttons);
  const text = el("p", { class: "decoded token" });
  const cache = el("div", {});
  const bars = el("div", {});
  const facts = el("p", { class: "note", "aria-live": "polite" });
  const stores = data.config.num_kv_heads ? "adds a key and a value to each layer's cache" : "updates the state of each layer";
  const stepNote = note(values.live
    ? `Each step reads one token, ${stores}, and predicts the next token.`
    : "This page shows captured values, so the steps follow the given text.");
  view.element = el("div", { class: "columns narrow" }, [
    card("Step", [text, el("div", { class: "buttons" }, buttons), reasons.element, stepNote, el("h3", { text: "Cache" }), cache]),
    card("Next token", [temperature.element, topK.element, topP.element, facts, bars]),
  ]);

  view.update = (what) => {
    if (what === "strengths" || what === "busy") return;
    const read = view.position() + 1;
    const tokens = tokensOf();
    const shown = store.tokens.slice(Math.max(0, read - 40), read).map((id) => store.name(id));
    text.textContent = `${read > 40 ? "… " : ""}${shown.join(" ")}`;
    cache.replaceChildren(data.kind === "convolutional"
      ? note("A convolutional network stores the last inputs of each layer, as many as its kernel reads.")
      : cachePicture(data.config, read));
    const kept = tokens.filter((token) => token.kept).length;
    const size = data.config.vocab_size;
    const whole = kept === tokens.length && tokens.length < size ? `More than ${kept}` : kept.toLocaleString("en");
    const entropy = `${tokens.length < size ? "at least " : ""}${entropyOf(tokens).toFixed(2)} bits`;
    facts.textContent = `${whole} of ${size.toLocaleString("en")} tokens can be sampled. Entropy: ${entropy}.`;
    bars.replaceChildren(barList(tokens.slice(0, NUM_BARS).map(({ id, share, kept: isKept }) =>
      ({ text: store.name(id), share, quiet: !isKept, shown: isKept ? percent(share) : "dropped" })), "The most probable next tokens"));
    if (values.live) {
      const { max_length } = data.config;
      const full = store.tokens.length >= max_length ? `the text is full: it has ${max_length} tokens, and this model takes at most ${max_length}.` : null;
      disableFor(buttons[0], full);
      disableFor(buttons[1], full);
      disableFor(buttons[2], store.tokens.length < 2 ? "the text needs a token." : null);
    } else {
      disableFor(buttons[0], view.read <= 1 ? "this is the first token." : null);
      disableFor(buttons[1], view.read >= reads ? "this is the last token of the text." : null);
    }
    reasons.update();
  };
  return view;
}

function entropyOf(tokens) {
  return tokens.reduce((sum, { share }) => (share > 0 ? sum - share * Math.log2(share) : sum), 0);
}

/** Returns a picture of the cache: a row for each layer, a cell for each slot. */
function cachePicture(config, read) {
  const layers = config.num_layers;
  if (config.dilations) return note(`This convolutional model stores the last inputs that each kernel reads: ${config.dilations.map((d) => d * (config.kernel_size - 1)).join(", ")} in layers 0 to ${layers - 1}.`);
  if (!config.num_kv_heads) return note(`This recurrent model stores one state of fixed size for each of its ${layers} layers.`);
  const slots = config.max_length, width = 300, high = Math.min(14, 150 / layers);
  const filled = (read / slots) * width;
  const rows = Array.from({ length: layers }, (_, layer) => [
    svg("rect", { class: "slots", x: 30, width, y: layer * (high + 4), height: high, rx: 2 }),
    svg("rect", { class: "fill-after", x: 30, width: filled, y: layer * (high + 4), height: high, rx: 2 }),
    svg("text", { x: 0, y: layer * (high + 4) + high - 2, text: `L${layer}` }),
  ]).flat();
  const numbers = 2 * config.num_kv_heads * config.head_dim * layers;
  const label = `${read} of ${slots} slots filled. Each slot holds ${numbers.toLocaleString("en")} numbers: a key and a value of ` +
    `${config.num_kv_heads} heads in ${layers} layers.`;
  return el("div", {}, [
    svg("svg", { class: "cache", viewBox: `0 -2 ${width + 36} ${layers * (high + 4) + 4}`, role: "img", "aria-label": label }, rows),
    note(label),
  ]);
}
